//! Quantise and dequantise in one step: the value a cache or an fp8 product would see, kept in bf16.
//!
//! ```text
//! fp8: x = bf16(e4m3(clamp(x / s, -448, 448)) * s)
//! fp4: x = bf16(e2m1(clamp(x / s, -6, 6)) * s)
//! ```
//! with the scales of `act_quant` and `fp4_act_quant`. A group with NaN or an infinity becomes NaN
//! throughout; the other groups do not notice.
//!
//! Reference: the `inplace=True` forms of both functions of `kernel.py`.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{Result, cpu};
use half::bf16;

use super::{
    act_quant::{ActScale, FP8_GROUP, fp8_scale},
    bf16_slice, check_groups, for_pieces,
    fp4_act_quant::{ScaleFormat, fp4_scale},
    group_amax, widest,
};
use crate::formats::{e2m1, e4m3};

/// Rounds to e4m3 and back as window KV rows are: groups of 32, e8m0 scales.
///
/// `xs: [.., D]` bf16 → the same shape and dtype.
///
/// # Errors
/// Another dtype, or `D` not a multiple of 32.
pub fn fake_quant_fp8(xs: &Tensor) -> Result<Tensor> {
    fake_quant_fp8_with(xs, FP8_GROUP, ActScale::E8M0)
}

/// [`fake_quant_fp8`] with any group size and scale format.
///
/// # Errors
/// Another dtype than bf16, or `D` not a multiple of `group`.
pub fn fake_quant_fp8_with(xs: &Tensor, group: usize, format: ActScale) -> Result<Tensor> {
    check_groups("fake_quant_fp8", xs, group)?;
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return match (group, format) {
            (FP8_GROUP, ActScale::E8M0) => crate::cuda::act_quant_values(xs),
            _ => crate::cuda::fake_quant_any(xs, group, format),
        };
    }
    Ok(xs
        .contiguous()?
        .apply_op1_no_bwd(&FakeQuant::Fp8 { group, format })?)
}

/// Rounds to e2m1 and back: compressed KV uses `(16, E4M3)`, index queries and keys `(32, E8M0)`.
///
/// `xs: [.., D]` bf16 → the same shape and dtype.
///
/// # Errors
/// Another dtype, or `D` not a multiple of `group`.
pub fn fake_quant_fp4(xs: &Tensor, group: usize, format: ScaleFormat) -> Result<Tensor> {
    check_groups("fake_quant_fp4", xs, group)?;
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return crate::cuda::fake_quant_fp4(xs, group, format);
    }
    Ok(xs
        .contiguous()?
        .apply_op1_no_bwd(&FakeQuant::Fp4 { group, format })?)
}

enum FakeQuant {
    Fp8 { group: usize, format: ActScale },
    Fp4 { group: usize, format: ScaleFormat },
}

impl CustomOp1 for FakeQuant {
    fn name(&self) -> &'static str {
        match self {
            Self::Fp8 { .. } => "fake_quant_fp8",
            Self::Fp4 { .. } => "fake_quant_fp4",
        }
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = bf16_slice(s, l, self.name())?;
        let mut out = vec![bf16::ZERO; xs.len()];
        let (Self::Fp8 { group, .. } | Self::Fp4 { group, .. }) = *self;
        for_pieces(group, xs, &mut out, |xs, out| {
            out.copy_from_slice(xs);
            match *self {
                Self::Fp8 { group, format } => fp8_slice(out, group, format),
                Self::Fp4 { group, format } => fake_quant_fp4_slice(out, group, format),
            }
        });
        Ok((CpuStorage::BF16(out), l.shape().clone()))
    }
}

/// [`fake_quant_fp8`] in place: any number of rows end to end. A last group shorter than 32 is a
/// group of its own.
pub fn fake_quant_fp8_slice(xs: &mut [bf16]) {
    fp8_slice(xs, FP8_GROUP, ActScale::E8M0);
}

fn fp8_slice(xs: &mut [bf16], group: usize, format: ActScale) {
    widest!(fp8_body(xs: &mut [bf16], group: usize, format: ActScale));
}

#[inline(always)]
fn fp8_body(xs: &mut [bf16], group: usize, format: ActScale) {
    for xs in xs.chunks_mut(group) {
        let scale = fp8_scale(group_amax(xs), format);
        for x in xs {
            let v = (cpu::widen(*x) / scale).clamp(-e4m3::MAX, e4m3::MAX);
            *x = cpu::round_bf16(e4m3::round_finite(v) * scale);
        }
    }
}

/// [`fake_quant_fp4`] in place: any number of rows end to end. A last group shorter than `group` is
/// a group of its own.
pub fn fake_quant_fp4_slice(xs: &mut [bf16], group: usize, format: ScaleFormat) {
    widest!(fp4_body(xs: &mut [bf16], group: usize, format: ScaleFormat));
}

#[inline(always)]
fn fp4_body(xs: &mut [bf16], group: usize, format: ScaleFormat) {
    for xs in xs.chunks_mut(group.max(1)) {
        let scale = fp4_scale(group_amax(xs), format);
        for x in xs {
            let v = (cpu::widen(*x) / scale).clamp(-e2m1::MAX, e2m1::MAX);
            *x = cpu::round_bf16(e2m1::round(v) * scale);
        }
    }
}
