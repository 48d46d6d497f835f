//! Activations to e2m1, two codes a byte, one scale per group: what the KV and index caches keep.
//!
//! ```text
//! e8m0: s = pow2ceil(max(amax, 6 * 2^-126) * f32(1/6))
//! e4m3: s = e4m3(max(amax, 6 * 2^-9) / 6)
//! q = e2m1(clamp(x / s, -6, 6))
//! ```
//! The e4m3 rule is a true division: a product with the reciprocal moves values across ties. Its
//! scale may round down, so `x / s` can pass 6 and the clamp matters. The floors keep the scale of a
//! zero group above zero: byte 1 (2^-126) and e4m3 code 1 (2^-9), with zero codes. A group with NaN
//! or an infinity has a NaN scale and zero codes.
//!
//! Reference: `kernel.py`, `fp4_act_quant`.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use half::bf16;

use super::{bf16_slice, check_groups, group_amax};
use crate::formats::{e2m1, e4m3, e8m0};

/// How the scale of a group of e2m1 codes is kept: one byte either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// A power of two, as in index queries and keys (groups of 32).
    E8M0,
    /// An e4m3 number, as in compressed KV (groups of 16).
    E4M3,
}

/// Packed e2m1 codes and their scales.
#[derive(Debug, Clone)]
pub struct QuantizedFp4 {
    /// `[.., k/2]` U8: two codes a byte, even column in the low nibble.
    pub data: Tensor,
    /// `[.., k/group]` U8: e8m0 or e4m3 bytes.
    pub scale: Tensor,
}

/// Quantises to packed fp4.
///
/// `xs: [.., k]` bf16 → codes `[.., k/2]`, scales `[.., k/group]`.
///
/// # Errors
/// Another dtype, `k` not a multiple of `group`, or an odd `group`.
pub fn fp4_act_quant(xs: &Tensor, group: usize, format: ScaleFormat) -> Result<QuantizedFp4> {
    check_groups("fp4_act_quant", xs, group)?;
    if !group.is_multiple_of(2) {
        return Err(Error::shape("fp4_act_quant", format!("odd group {group}")));
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        let (data, scale) = crate::cuda::fp4_codes(xs, group, format)?;
        return Ok(QuantizedFp4 { data, scale });
    }
    let xs = xs.contiguous()?;
    Ok(QuantizedFp4 {
        data: xs.apply_op1_no_bwd(&Part {
            group,
            format,
            codes: true,
        })?,
        scale: xs.apply_op1_no_bwd(&Part {
            group,
            format,
            codes: false,
        })?,
    })
}

/// One of the two outputs: they differ in shape, and a custom op has one.
struct Part {
    group: usize,
    format: ScaleFormat,
    codes: bool,
}

impl CustomOp1 for Part {
    fn name(&self) -> &'static str {
        "fp4_act_quant"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = bf16_slice(s, l, self.name())?;
        let per = if self.codes { 2 } else { self.group };
        let mut out = vec![0u8; xs.len() / per];
        for (xs, out) in xs
            .chunks_exact(self.group)
            .zip(out.chunks_exact_mut(self.group / per))
        {
            let scale = fp4_scale(group_amax(xs), self.format);
            if self.codes {
                group_codes(xs, scale, out);
            } else {
                out[0] = scale_byte(scale, self.format);
            }
        }
        let mut dims = l.shape().dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last /= per;
        }
        Ok((CpuStorage::U8(out), Shape::from(dims)))
    }
}

/// Scale of a group from its largest magnitude; NaN for anything but a finite one.
#[inline(always)]
pub fn fp4_scale(amax: f32, format: ScaleFormat) -> f32 {
    const RECIPROCAL: f32 = (1.0f64 / 6.0) as f32;
    const E8M0_FLOOR: f32 = 6.0 * f32::MIN_POSITIVE;
    const E4M3_FLOOR: f32 = 6.0 * e4m3::MIN_POSITIVE;
    if !amax.is_finite() {
        return f32::NAN;
    }
    match format {
        ScaleFormat::E8M0 => e8m0::pow2ceil(amax.max(E8M0_FLOOR) * RECIPROCAL),
        ScaleFormat::E4M3 => e4m3::round_finite((amax.max(E4M3_FLOOR) / e2m1::MAX).min(e4m3::MAX)),
    }
}

/// The stored byte of a scale that [`fp4_scale`] made.
#[inline(always)]
pub(crate) fn scale_byte(scale: f32, format: ScaleFormat) -> u8 {
    match format {
        ScaleFormat::E8M0 => e8m0::exponent_of(scale),
        ScaleFormat::E4M3 => e4m3::encode(scale),
    }
}

#[inline(always)]
fn group_codes(xs: &[bf16], scale: f32, packed: &mut [u8]) {
    if scale.is_nan() {
        packed.fill(0);
        return;
    }
    let code = |x: bf16| e2m1::encode((cpu::widen(x) / scale).clamp(-e2m1::MAX, e2m1::MAX));
    for (byte, pair) in packed.iter_mut().zip(xs.chunks_exact(2)) {
        *byte = e2m1::pack(code(pair[0]), code(pair[1]));
    }
}

/// [`fp4_act_quant`] on a slice: any number of whole groups end to end.
///
/// `packed` has a byte per two elements, `scales` one per group; `group` is even and divides the
/// length (a rest is left out).
pub fn fp4_act_quant_slice(
    xs: &[bf16],
    group: usize,
    format: ScaleFormat,
    packed: &mut [u8],
    scales: &mut [u8],
) {
    debug_assert!(group.is_multiple_of(2) && xs.len().is_multiple_of(group));
    let groups = xs
        .chunks_exact(group)
        .zip(packed.chunks_exact_mut(group / 2))
        .zip(scales);
    for ((xs, packed), byte) in groups {
        let scale = fp4_scale(group_amax(xs), format);
        *byte = scale_byte(scale, format);
        group_codes(xs, scale, packed);
    }
}
