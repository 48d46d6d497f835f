//! Rotary embedding of a two-dimensional grid, on halves of a head.
//!
//! With head width `hd`, `rd = hd / 2`, the patch at row `y` and column `x` has `rd` angles:
//!
//! ```text
//! inv[i]   = theta^-(2 i / rd)                    i < rd / 2
//! angle    = [y * inv[0], y * inv[1], .., x * inv[0], x * inv[1], ..]
//! lo'[i]   = lo[i] * cos[i] - hi[i] * sin[i]      lo = first rd values of the head
//! hi'[i]   = hi[i] * cos[i] + lo[i] * sin[i]      hi = last rd values
//! ```
//!
//! in f32 with one rounding. The text model rotates neighbouring pairs instead.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu, upload};
use half::bf16;
use rayon::prelude::*;

use super::dense_bf16;

/// Rotary frequencies of one head width.
#[derive(Debug, Clone)]
pub struct Rope2d {
    inv: Vec<f32>,
}

/// Cosines and sines of one grid, or of several end to end.
#[derive(Debug, Clone)]
pub struct Rope2dTable {
    /// `[n_h * n_w, head_dim / 2]` f32.
    pub cos: Vec<f32>,
    /// Same shape as `cos`.
    pub sin: Vec<f32>,
    angles: usize,
    /// Both where they are used, off the CPU.
    placed: Option<(Tensor, Tensor)>,
}

impl Rope2d {
    /// Frequencies for heads of `head_dim` values.
    ///
    /// # Errors
    /// `head_dim` is not a positive multiple of 4.
    pub fn new(head_dim: usize, theta: f64) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(4) {
            return Err(Error::shape(
                "rope_2d",
                format!("expected a head of a multiple of 4 values, found {head_dim}"),
            ));
        }
        let rd = head_dim / 2;
        // Exponent in f32, as the reference's arange divided by rd.
        let exponent = |i: usize| (2 * i) as f32 / rd as f32;
        let inv = (0..rd / 2)
            .map(|i| 1.0 / (theta as f32).powf(exponent(i)))
            .collect();
        Ok(Self { inv })
    }

    /// The table of a grid of `n_h` by `n_w` patches, row-major.
    pub fn table(&self, n_h: usize, n_w: usize) -> Rope2dTable {
        self.tables(&[(n_h, n_w)])
    }

    /// The tables of several grids (rows, columns), one after the other.
    pub fn tables(&self, grids: &[(usize, usize)]) -> Rope2dTable {
        let half = self.inv.len();
        // An angle belongs to a row or a column: as many sines as places along a side are enough.
        let side = grids.iter().map(|(h, w)| *h.max(w)).max().unwrap_or(0);
        let angles = (0..side).flat_map(|at| self.inv.iter().map(move |inv| at as f32 * inv));
        let (cosines, sines): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos(), a.sin())).unzip();
        let patches: usize = grids.iter().map(|(h, w)| h * w).sum();
        let of = |turns: &[f32]| {
            let mut all = Vec::with_capacity(patches * 2 * half);
            for (n_h, n_w) in grids {
                for y in 0..*n_h {
                    for x in 0..*n_w {
                        all.extend_from_slice(&turns[y * half..(y + 1) * half]);
                        all.extend_from_slice(&turns[x * half..(x + 1) * half]);
                    }
                }
            }
            all
        };
        Rope2dTable {
            cos: of(&cosines),
            sin: of(&sines),
            angles: 2 * half,
            placed: None,
        }
    }
}

impl Rope2dTable {
    /// Patches of the grid.
    pub fn patches(&self) -> usize {
        self.cos.len() / self.angles
    }

    /// Angles a patch, half the head width.
    pub fn angles(&self) -> usize {
        self.angles
    }

    /// The same table, to be used on `device` many times.
    ///
    /// # Errors
    /// The device refuses the copy.
    pub fn on(mut self, device: &Device) -> Result<Self> {
        self.placed = match device {
            Device::Cpu => None,
            _ => Some(self.copied(device)?),
        };
        Ok(self)
    }

    /// Cosines and sines as tensors.
    fn copied(&self, device: &Device) -> Result<(Tensor, Tensor)> {
        let copy = |values: &[f32]| upload(values.to_vec(), (self.patches(), self.angles), device);
        Ok((copy(&self.cos)?, copy(&self.sin)?))
    }

    fn patch(&self, i: usize) -> (&[f32], &[f32]) {
        let range = i * self.angles..(i + 1) * self.angles;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Rotates the first `rotated` heads of every patch; the others pass through.
///
/// `xs: [n, H, hd]` bf16 → same shape. Queries, keys and values of a block lie in one tensor of `3 H`
/// heads of which the first `2 H` turn.
///
/// # Errors
/// Another dtype, rank, number of patches or head width; more rotated heads than heads.
pub fn apply_rope_2d(xs: &Tensor, table: &Rope2dTable, rotated: usize) -> Result<Tensor> {
    let xs = dense_bf16(xs, "rope_2d")?;
    let fits = match *xs.dims() {
        [n, heads, hd] => n == table.patches() && hd == table.angles * 2 && rotated <= heads,
        _ => false,
    };
    if !fits {
        return Err(Error::shape(
            "rope_2d",
            format!(
                "expected [{}, at least {rotated}, {}], found {:?}",
                table.patches(),
                table.angles * 2,
                xs.shape()
            ),
        ));
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        let placed = match &table.placed {
            Some((cos, sin)) if cos.device().same_device(xs.device()) => (cos.clone(), sin.clone()),
            _ => table.copied(xs.device())?,
        };
        return crate::cuda::vit_rope(&xs, (&placed.0, &placed.1), rotated);
    }
    Ok(xs.apply_op1_no_bwd(&ApplyRope2d { table, rotated })?)
}

/// One head in place: `head: [2 * angles]`.
pub fn apply_rope_2d_ref(head: &mut [bf16], cos: &[f32], sin: &[f32]) {
    let (lo, hi) = head.split_at_mut(cos.len());
    for i in 0..cos.len() {
        let (a, b) = (lo[i].to_f32(), hi[i].to_f32());
        lo[i] = bf16::from_f32(a * cos[i] - b * sin[i]);
        hi[i] = bf16::from_f32(b * cos[i] + a * sin[i]);
    }
}

struct ApplyRope2d<'a> {
    table: &'a Rope2dTable,
    rotated: usize,
}

impl CustomOp1 for ApplyRope2d<'_> {
    fn name(&self) -> &'static str {
        "rope_2d"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let mut out = cpu::contiguous::<bf16>(s, l, "rope_2d")?.to_vec();
        let (_, heads, hd) = l.shape().dims3()?;
        let turn = |(i, patch): (usize, &mut [bf16])| {
            let (cos, sin) = self.table.patch(i);
            for head in patch.chunks_exact_mut(hd).take(self.rotated) {
                apply_rope_2d_ref(head, cos, sin);
            }
        };
        // An empty grid or no heads at all leaves nothing to turn.
        let row = (heads * hd).max(1);
        if cpu::should_parallelise(out.len() * 4) {
            out.par_chunks_mut(row).enumerate().for_each(turn);
        } else {
            out.chunks_mut(row).enumerate().for_each(turn);
        }
        Ok((CpuStorage::BF16(out), l.shape().clone()))
    }
}
