//! The plain average of the copies, which is what a draft head reads of a layer.
//!
//! `out[d] = (sum over c of stream[c][d]) / C`, f32 in ascending `c`, one rounding.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{Result, cpu, cpu::Isa};
use half::bf16;

use super::rows::{BLOCK, Block, blocks, for_each_token, for_isa, round};
use super::stream_dims;

/// `stream: [T, C, dim]` bf16 → `[T, dim]` bf16.
///
/// # Errors
/// Another shape or dtype.
///
/// Reference: `h.mean(dim=2)` in `Transformer.forward` (torch sums bf16 in f32 and rounds once).
pub fn hc_mean(stream: &Tensor) -> Result<Tensor> {
    stream_dims("hc_mean", stream)?;
    #[cfg(feature = "cuda")]
    if stream.device().is_cuda() {
        return crate::cuda::hc_pre(stream, None);
    }
    Ok(stream.contiguous()?.apply_op1_no_bwd(&HcMean)?)
}

/// One token: `stream: [C, dim]` → `out: [dim]`.
pub fn hc_mean_ref(stream: &[bf16], out: &mut [bf16]) {
    let dim = out.len();
    let c = stream.len() / dim;
    for (d, o) in out.iter_mut().enumerate() {
        let sum = (0..c).fold(0f32, |sum, c| sum + cpu::widen(stream[c * dim + d]));
        *o = cpu::round_bf16(sum / c as f32);
    }
}

/// [`hc_mean_ref`] block by block: elements do not depend on each other, so the bits are the same.
#[inline(always)]
fn row_body(stream: &[bf16], out: &mut [bf16]) {
    let dim = out.len();
    let c = (stream.len() / dim) as f32;
    let mut acc: Block = [0.0; BLOCK];
    for (d, n) in blocks(dim) {
        let acc = &mut acc[..n];
        acc.fill(0.0);
        for copy in stream.chunks_exact(dim) {
            for (a, x) in acc.iter_mut().zip(&copy[d..][..n]) {
                *a += cpu::widen(*x);
            }
        }
        acc.iter_mut().for_each(|a| *a /= c);
        round(acc, &mut out[d..][..n]);
    }
}

for_isa!(fn row(stream: &[bf16], out: &mut [bf16]) = row_body);

struct HcMean;

impl CustomOp1 for HcMean {
    fn name(&self) -> &'static str {
        "hc_mean"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, c, dim) = l.shape().dims3()?;
        let stream = cpu::contiguous::<bf16>(s, l, "hc_mean")?;
        let isa = Isa::detect();
        let mut out = vec![bf16::ZERO; t * dim];
        for_each_token(&mut out, dim, c * dim, |t, out| {
            row(isa, &stream[t * c * dim..(t + 1) * c * dim], out);
        });
        Ok((CpuStorage::BF16(out), (t, dim).into()))
    }
}
