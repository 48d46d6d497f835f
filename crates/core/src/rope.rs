//! Rotary position embedding of the last dimensions of a vector, with YaRN.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Tensor};
use half::bf16;

use crate::{Error, Result, cpu, upload};

/// Frequencies of one rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Rotated dimensions, even (`rope_head_dim`).
    pub dim: usize,
    /// Base of the geometric frequency series (`rope_theta` or `compress_rope_theta`).
    pub theta: f64,
    /// Context length of the original training in tokens; 0 turns YaRN off.
    pub original_seq_len: usize,
    /// YaRN: how much longer the context became (`rope_factor`).
    pub factor: f64,
    /// YaRN: dimensions turning at least this often over the original context stay as they are.
    pub beta_fast: f64,
    /// YaRN: dimensions turning at most this often are divided by `factor`.
    pub beta_slow: f64,
}

/// The frequencies of a [`RopeConfig`].
#[derive(Debug, Clone)]
pub struct Rope {
    freqs: Vec<f32>,
}

/// Cosines and sines of a list of positions, shared by every layer of a step.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// `[T, dim / 2]` f32.
    pub cos: Tensor,
    /// `[T, dim / 2]` f32.
    pub sin: Tensor,
}

impl RopeTable {
    /// The table with both tensors replaced by what `f` makes of them.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            cos: f(&self.cos)?,
            sin: f(&self.sin)?,
        })
    }

    /// The rotations of some of the tokens; shares their memory.
    ///
    /// # Errors
    /// Rows that the table does not have.
    pub fn narrow(&self, rows: &Range<usize>) -> Result<Self> {
        Ok(Self {
            cos: self.cos.narrow(0, rows.start, rows.len())?,
            sin: self.sin.narrow(0, rows.start, rows.len())?,
        })
    }
}

impl Rope {
    /// Computes the frequencies in f32, as the official code does.
    ///
    /// # Errors
    /// `dim` is odd or zero, or a constant is not finite and positive.
    ///
    /// Reference: `precompute_freqs_cis`.
    pub fn new(cfg: &RopeConfig) -> Result<Self> {
        if cfg.dim == 0 || !cfg.dim.is_multiple_of(2) {
            return Err(Error::config(
                "rope_head_dim",
                format!("expected an even number above 0, found {}", cfg.dim),
            ));
        }
        if !(cfg.theta.is_finite() && cfg.theta > 1.0) {
            return Err(Error::config(
                "rope_theta",
                format!("expected a number above 1, found {}", cfg.theta),
            ));
        }
        let dim = cfg.dim as f64;
        let mut freqs: Vec<f32> = (0..cfg.dim)
            .step_by(2)
            .map(|i| 1.0 / (cfg.theta as f32).powf(i as f32 / cfg.dim as f32))
            .collect();
        if cfg.original_seq_len > 0 {
            if !(cfg.factor.is_finite() && cfg.factor > 0.0) {
                return Err(Error::config(
                    "rope_factor",
                    format!("expected a number above 0, found {}", cfg.factor),
                ));
            }
            if !(cfg.beta_fast > 0.0 && cfg.beta_slow > 0.0) {
                return Err(Error::config(
                    "beta_fast",
                    "expected positive beta_fast and beta_slow",
                ));
            }
            // The dimension whose wavelength completes `rotations` turns over the original context.
            let corrected_dim = |rotations: f64| {
                dim * (cfg.original_seq_len as f64 / (rotations * 2.0 * std::f64::consts::PI)).ln()
                    / (2.0 * cfg.theta.ln())
            };
            let low = corrected_dim(cfg.beta_fast).floor().max(0.0);
            let high = corrected_dim(cfg.beta_slow).ceil().min(dim - 1.0);
            let (low, span) = (low as f32, (high - low).max(1e-3) as f32);
            for (i, f) in freqs.iter_mut().enumerate() {
                let smooth = 1.0 - ((i as f32 - low) / span).clamp(0.0, 1.0);
                *f = *f / cfg.factor as f32 * (1.0 - smooth) + *f * smooth;
            }
        }
        Ok(Self { freqs })
    }

    /// Rotated dimensions.
    pub fn dim(&self) -> usize {
        self.freqs.len() * 2
    }

    /// Frequencies in radians a position, `[dim / 2]`.
    pub fn freqs(&self) -> &[f32] {
        &self.freqs
    }

    /// `positions: [T]` (absolute) → a table of `T` rows.
    ///
    /// # Errors
    /// Moving the table to `device` fails.
    pub fn table(&self, positions: &[u32], device: &Device) -> Result<RopeTable> {
        let half = self.freqs.len();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        cos.reserve(positions.len() * half);
        sin.reserve(positions.len() * half);
        for &position in positions {
            for &freq in &self.freqs {
                // The angle is rounded to f32 before the sine, as the official table is: at position
                // 1e6 that moves it by up to 0.03 rad, so computing in f64 throughout would be a
                // better table of another model. The sine of the rounded angle is taken in f64.
                let angle = f64::from(position as f32 * freq);
                let (s, c) = angle.sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        let shape = (positions.len(), half);
        Ok(RopeTable {
            cos: upload(cos, shape, device)?,
            sin: upload(sin, shape, device)?,
        })
    }
}

/// Rotates the last `2 * half` dimensions of each vector, adjacent pairs as complex numbers.
///
/// `xs: [T, D]` or `[T, H, D]` bf16, `table` of `T` rows → same shape. `inverse` conjugates the
/// rotation. f32 inside, one rounding.
///
/// # Errors
/// Shapes that do not fit each other, or another dtype.
///
/// Reference: `apply_rotary_emb`.
pub fn apply_rope(xs: &Tensor, table: &RopeTable, inverse: bool) -> Result<Tensor> {
    let (t, half) = table.cos.dims2()?;
    let ok = xs.dtype() == DType::BF16
        && matches!(xs.rank(), 2 | 3)
        && xs.dims()[0] == t
        && xs.dims().last().is_some_and(|d| *d >= 2 * half);
    if !ok {
        return Err(Error::shape(
            "apply_rope",
            format!(
                "expected [{t}, D] or [{t}, H, D] bf16 with D >= {}, found {:?} {:?}",
                2 * half,
                xs.shape(),
                xs.dtype()
            ),
        ));
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        use crate::cuda::ops::{RowKind, norm_rope_quant};
        return norm_rope_quant(xs, None, (&table.cos, &table.sin), RowKind::Plain, inverse);
    }
    let op = ApplyRope { inverse };
    Ok(xs
        .contiguous()?
        .apply_op3_no_bwd(&table.cos, &table.sin, &op)?)
}

/// One vector in place: `x: [D]`, `cos`, `sin: [half]`; the last `2 * half` elements turn.
pub fn apply_rope_ref(x: &mut [bf16], cos: &[f32], sin: &[f32], inverse: bool) {
    row_body(x, cos, sin, inverse);
}

/// [`apply_rope_ref`], bit for bit, with wider instructions where there are any.
pub fn apply_rope_row(x: &mut [bf16], cos: &[f32], sin: &[f32], inverse: bool) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2(x: &mut [bf16], cos: &[f32], sin: &[f32], inverse: bool) {
        row_body(x, cos, sin, inverse);
    }
    match cpu::Isa::detect() {
        cpu::Isa::Portable => row_body(x, cos, sin, inverse),
        // SAFETY: both variants are only made where the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        cpu::Isa::Avx2 | cpu::Isa::Avx512 => unsafe { avx2(x, cos, sin, inverse) },
    }
}

#[inline(always)]
fn row_body(x: &mut [bf16], cos: &[f32], sin: &[f32], inverse: bool) {
    let sign = if inverse { -1.0 } else { 1.0 };
    let tail = x.len() - 2 * cos.len();
    let (pairs, _) = x[tail..].as_chunks_mut::<2>();
    for (pair, (c, s)) in pairs.iter_mut().zip(cos.iter().zip(sin)) {
        let (re, im, s) = (cpu::widen(pair[0]), cpu::widen(pair[1]), s * sign);
        *pair = [
            cpu::round_bf16(re * c - im * s),
            cpu::round_bf16(re * s + im * c),
        ];
    }
}

struct ApplyRope {
    inverse: bool,
}

impl CustomOp3 for ApplyRope {
    fn name(&self) -> &'static str {
        "apply_rope"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s1, l1, "apply_rope")?;
        let cos = cpu::contiguous::<f32>(s2, l2, "apply_rope")?;
        let sin = cpu::contiguous::<f32>(s3, l3, "apply_rope")?;
        let dims = l1.dims();
        let half = l2.dims()[1];
        let d = dims[dims.len() - 1];
        let heads = if dims.len() == 3 { dims[1] } else { 1 };
        let mut out = xs.to_vec();
        let token = |i: usize, row: &mut [bf16]| {
            let at = i * half..(i + 1) * half;
            for head in row.chunks_exact_mut(d) {
                apply_rope_row(head, &cos[at.clone()], &sin[at.clone()], self.inverse);
            }
        };
        let width = heads * d;
        if width > 0 {
            cpu::for_each_piece(dims[0] * heads * half * 6, &mut out, width, token);
        }
        Ok((CpuStorage::BF16(out), l1.shape().clone()))
    }
}
