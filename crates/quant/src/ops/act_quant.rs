//! Activations to e4m3 with one scale per group: what an fp8 or fp4 product takes.
//!
//! ```text
//! a = max(max|x|, 1e-4)          s = a * f32(1/448)          e8m0: s = pow2ceil(s)
//! q = e4m3(clamp(x / s, -448, 448))
//! ```
//! The scale is a product with the f32 reciprocal and not a division; `x / s` is a true division. A
//! zero group gives `s = 2^-22` (byte 105) and zero codes, the sign of zero kept. A group with NaN or
//! an infinity gives a NaN scale and NaN codes.
//!
//! Reference: `kernel.py`, `act_quant`.

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Result, cpu};
use half::bf16;

use super::{bf16_slice, check_groups, for_pieces, group_amax, widest};
use crate::formats::{e4m3, e8m0};

/// Columns that share an activation scale wherever the model quantises to fp8.
pub const FP8_GROUP: usize = 32;

/// How the scale of a group of e4m3 codes is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActScale {
    /// The power of two above it: one byte, and every scaling by it is exact.
    #[default]
    E8M0,
    /// As it comes, in f32.
    F32,
}

/// e4m3 activations and their scales.
#[derive(Debug, Clone)]
pub struct QuantizedActivation {
    /// `[.., k]` U8: e4m3 codes.
    pub data: Tensor,
    /// `[.., k/group]`: U8 e8m0 bytes, or F32 for [`ActScale::F32`].
    pub scale: Tensor,
}

/// Quantises activations the way every fp8 and fp4 linear does: groups of 32, e8m0 scales.
///
/// `xs: [.., k]` bf16 → codes `[.., k]`, scales `[.., k/32]`.
///
/// # Errors
/// Another dtype, or `k` not a multiple of 32.
pub fn act_quant(xs: &Tensor) -> Result<QuantizedActivation> {
    act_quant_with(xs, FP8_GROUP, ActScale::E8M0)
}

/// [`act_quant`] with any group size and scale format.
///
/// # Errors
/// Another dtype than bf16, or `k` not a multiple of `group`.
pub fn act_quant_with(xs: &Tensor, group: usize, format: ActScale) -> Result<QuantizedActivation> {
    check_groups("act_quant", xs, group)?;
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        let (data, scale) = match (group, format) {
            (FP8_GROUP, ActScale::E8M0) => crate::cuda::act_quant_codes(xs)?,
            _ => crate::cuda::act_quant_any(xs, group, format)?,
        };
        return Ok(QuantizedActivation { data, scale });
    }
    let xs = xs.contiguous()?;
    Ok(QuantizedActivation {
        data: xs.apply_op1_no_bwd(&Codes { group, format })?,
        scale: xs.apply_op1_no_bwd(&Scales { group, format })?,
    })
}

impl QuantizedActivation {
    /// Columns per scale.
    ///
    /// # Errors
    /// The two tensors do not fit each other.
    pub fn group(&self) -> Result<usize> {
        let (k, n) = (self.data.dim(D::Minus1)?, self.scale.dim(D::Minus1)?);
        let rows = |t: &Tensor| t.elem_count() / t.dim(D::Minus1).unwrap_or(1).max(1);
        if n == 0 || !k.is_multiple_of(n) || rows(&self.data) != rows(&self.scale) {
            return Err(deepseek_v41_core::Error::shape(
                "act_quant",
                format!(
                    "codes {:?} and scales {:?}",
                    self.data.shape(),
                    self.scale.shape()
                ),
            ));
        }
        Ok(k / n)
    }
}

struct Codes {
    group: usize,
    format: ActScale,
}

impl CustomOp1 for Codes {
    fn name(&self) -> &'static str {
        "act_quant"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = bf16_slice(s, l, self.name())?;
        let mut codes = vec![0u8; xs.len()];
        for (xs, codes) in xs.chunks(self.group).zip(codes.chunks_mut(self.group)) {
            group_codes(xs, fp8_scale(group_amax(xs), self.format), codes);
        }
        Ok((CpuStorage::U8(codes), l.shape().clone()))
    }
}

struct Scales {
    group: usize,
    format: ActScale,
}

impl CustomOp1 for Scales {
    fn name(&self) -> &'static str {
        "act_quant"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = bf16_slice(s, l, self.name())?;
        let scales = xs
            .chunks(self.group)
            .map(|g| fp8_scale(group_amax(g), self.format));
        let storage = match self.format {
            ActScale::E8M0 => CpuStorage::U8(scales.map(e8m0::exponent_of).collect()),
            ActScale::F32 => CpuStorage::F32(scales.collect()),
        };
        let mut dims = l.shape().dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last /= self.group;
        }
        Ok((storage, Shape::from(dims)))
    }
}

/// Scale of a group from its largest magnitude; NaN for anything but a finite one.
#[inline(always)]
pub fn fp8_scale(amax: f32, format: ActScale) -> f32 {
    const RECIPROCAL: f32 = (1.0f64 / 448.0) as f32;
    const FLOOR: f32 = 1e-4;
    if !amax.is_finite() {
        return f32::NAN;
    }
    let scale = amax.max(FLOOR) * RECIPROCAL;
    match format {
        ActScale::E8M0 => e8m0::pow2ceil(scale),
        ActScale::F32 => scale,
    }
}

#[inline(always)]
fn group_codes(xs: &[bf16], scale: f32, codes: &mut [u8]) {
    if scale.is_nan() {
        codes.fill(e4m3::NAN);
        return;
    }
    for (code, x) in codes.iter_mut().zip(xs) {
        let v = cpu::widen(*x) / scale;
        *code = e4m3::encode_finite(v.clamp(-e4m3::MAX, e4m3::MAX));
    }
}

/// [`act_quant`] on a slice: any number of rows end to end.
///
/// `codes` is as long as `xs`, `scales` has one byte per 32 of them. A last group shorter than 32 is
/// a group of its own.
pub fn act_quant_slice(xs: &[bf16], codes: &mut [u8], scales: &mut [u8]) {
    debug_assert_eq!(xs.len(), codes.len());
    debug_assert_eq!(scales.len(), xs.len().div_ceil(FP8_GROUP));
    let groups = xs
        .chunks(FP8_GROUP)
        .zip(codes.chunks_mut(FP8_GROUP))
        .zip(scales);
    for ((xs, codes), byte) in groups {
        let scale = fp8_scale(group_amax(xs), ActScale::E8M0);
        *byte = e8m0::exponent_of(scale);
        group_codes(xs, scale, codes);
    }
}

/// The values [`act_quant_slice`] stands for, `q * s` in f32: the form a product takes its
/// activations in. The scaling is exact, except that a group reaching above 2^127 can become infinite.
pub fn act_quant_values(xs: &[bf16], values: &mut [f32]) {
    debug_assert_eq!(xs.len(), values.len());
    for_pieces(
        FP8_GROUP,
        xs,
        values,
        |xs, values| widest!(values_body(xs: &[bf16], values: &mut [f32])),
    );
}

#[inline(always)]
fn values_body(xs: &[bf16], values: &mut [f32]) {
    let ((xs, rest), (values, out)) = (
        xs.as_chunks::<FP8_GROUP>(),
        values.as_chunks_mut::<FP8_GROUP>(),
    );
    for (xs, values) in xs.iter().zip(values) {
        group_values(xs, values);
    }
    group_values(rest, out);
}

#[inline(always)]
fn group_values(xs: &[bf16], values: &mut [f32]) {
    let scale = fp8_scale(group_amax(xs), ActScale::E8M0);
    // A power of two from 2^-22 to 2^120: its inverse is exact, and so dividing is multiplying.
    let inverse = 1.0 / scale;
    for (value, x) in values.iter_mut().zip(xs) {
        let v = (cpu::widen(*x) * inverse).clamp(-e4m3::MAX, e4m3::MAX);
        *value = e4m3::round_finite(v) * scale;
    }
}

/// The definition of [`act_quant_with`], step by step through the codecs.
pub fn act_quant_ref(
    xs: &[bf16],
    group: usize,
    format: ActScale,
    codes: &mut [u8],
    scales: &mut [f32],
) {
    for (g, xs) in xs.chunks(group).enumerate() {
        let finite = xs.iter().all(|x| x.is_finite());
        let amax = xs.iter().fold(0f32, |m, x| m.max(x.to_f32().abs()));
        let scale = if finite {
            fp8_scale(amax, format)
        } else {
            f32::NAN
        };
        scales[g] = scale;
        for (i, x) in xs.iter().enumerate() {
            let v = x.to_f32() / scale;
            codes[g * group + i] = if finite { e4m3::encode(v) } else { e4m3::NAN };
        }
    }
}

/// Whether a tensor can be the codes or e8m0 scales of an activation.
pub(crate) fn is_bytes(t: &Tensor) -> bool {
    t.dtype() == DType::U8
}
