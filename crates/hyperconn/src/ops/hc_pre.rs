//! Collapses the copies of the stream into one sublayer input.
//!
//! `out[d] = sum over c of pre[c] * stream[c][d]`, f32 in ascending `c`, one rounding.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Result, cpu, cpu::Isa};
use half::bf16;

use super::rows::{BLOCK, Block, add_scaled, blocks, for_each_token, for_isa, round};
use super::{expect, stream_dims};
use crate::PreMix;

/// `stream: [T, C, dim]` bf16 and the carried mix `[T, C]` → `[T, dim]` bf16.
///
/// A NaN or infinity in any copy reaches the output even where its weight is 0, as in the reference.
///
/// # Errors
/// Another dtype, or sizes that differ between the two.
///
/// Reference: `Block.hc_pre`.
pub fn hc_pre(stream: &Tensor, pre: &PreMix) -> Result<Tensor> {
    let (t, c, _) = stream_dims("hc_pre", stream)?;
    expect("hc_pre", "pre", pre.tensor(), &[t, c], DType::F32)?;
    #[cfg(feature = "cuda")]
    if stream.device().is_cuda() {
        return crate::cuda::hc_pre(stream, Some(pre.tensor()));
    }
    Ok(stream
        .contiguous()?
        .apply_op2_no_bwd(pre.tensor(), &HcPre)?)
}

/// One token: `stream: [C, dim]`, `pre: [C]` → `out: [dim]`.
pub fn hc_pre_ref(stream: &[bf16], pre: &[f32], out: &mut [bf16]) {
    let dim = out.len();
    for (d, o) in out.iter_mut().enumerate() {
        let mut sum = 0f32;
        for (c, p) in pre.iter().enumerate() {
            sum += p * cpu::widen(stream[c * dim + d]);
        }
        *o = cpu::round_bf16(sum);
    }
}

/// [`hc_pre_ref`] block by block: elements do not depend on each other, so the bits are the same.
#[inline(always)]
fn row_body(stream: &[bf16], pre: &[f32], out: &mut [bf16]) {
    let dim = out.len();
    let mut acc: Block = [0.0; BLOCK];
    for (d, n) in blocks(dim) {
        let acc = &mut acc[..n];
        acc.fill(0.0);
        for (c, &p) in pre.iter().enumerate() {
            add_scaled(acc, p, &stream[c * dim + d..][..n]);
        }
        round(acc, &mut out[d..][..n]);
    }
}

for_isa!(pub(super) fn row(stream: &[bf16], pre: &[f32], out: &mut [bf16]) = row_body);

struct HcPre;

impl CustomOp2 for HcPre {
    fn name(&self) -> &'static str {
        "hc_pre"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, c, dim) = l1.shape().dims3()?;
        let stream = cpu::contiguous::<bf16>(s1, l1, "hc_pre")?;
        let pre = cpu::contiguous::<f32>(s2, l2, "hc_pre")?;
        let isa = Isa::detect();
        let mut out = vec![bf16::ZERO; t * dim];
        for_each_token(&mut out, dim, 2 * c * dim, |t, out| {
            row(
                isa,
                &stream[t * c * dim..(t + 1) * c * dim],
                &pre[t * c..(t + 1) * c],
                out,
            );
        });
        Ok((CpuStorage::BF16(out), (t, dim).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_reference_bit_for_bit() {
        for (c, dim) in [(1, 1), (2, 15), (3, 256), (4, 257), (5, 700)] {
            let stream: Vec<bf16> = (0..c * dim)
                .map(|i| bf16::from_f32(((i * 7919) % 1013) as f32 / 97.0 - 5.0))
                .collect();
            let pre: Vec<f32> = (0..c).map(|i| 0.3 + i as f32 / 7.0).collect();
            let mut slow = vec![bf16::ZERO; dim];
            hc_pre_ref(&stream, &pre, &mut slow);
            for isa in Isa::available() {
                let mut fast = vec![bf16::ZERO; dim];
                row(isa, &stream, &pre, &mut fast);
                assert_eq!(slow, fast, "c {c}, dim {dim}, {isa:?}");
            }
        }
    }
}
