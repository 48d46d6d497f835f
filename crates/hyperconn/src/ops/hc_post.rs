//! Spreads a sublayer's output over the copies and mixes the residual in.
//!
//! `out[k][d] = post[k] * y[d] + (sum over j of comb[j][k] * residual[j][d])`
//!
//! The sum contracts over the *first* index of `comb`: row `j` says where copy `j` goes. It runs in
//! f32 in ascending `j`, the output's share is added after it, and each element is rounded once.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor};
use deepseek_v41_core::{Result, cpu, cpu::Isa};
use half::bf16;

use super::rows::{BLOCK, Block, add_scaled, blocks, for_each_token, for_isa};
use super::{expect, stream_dims};

/// `y: [T, dim]` bf16, `residual: [T, C, dim]` bf16, `post: [T, C]` f32, `comb: [T, C, C]` f32 →
/// the new stream `[T, C, dim]` bf16.
///
/// # Errors
/// Another dtype, or sizes that differ between the four.
///
/// Reference: `Block.hc_post`.
pub fn hc_post(y: &Tensor, residual: &Tensor, post: &Tensor, comb: &Tensor) -> Result<Tensor> {
    let (t, c, dim) = stream_dims("hc_post", residual)?;
    expect("hc_post", "y", y, &[t, dim], DType::BF16)?;
    expect("hc_post", "post", post, &[t, c], DType::F32)?;
    expect("hc_post", "comb", comb, &[t, c, c], DType::F32)?;
    #[cfg(feature = "cuda")]
    if residual.device().is_cuda() {
        return crate::cuda::hc_post(y, residual, post, comb);
    }
    let op = HcPost {
        comb: comb.contiguous()?,
    };
    Ok(residual
        .contiguous()?
        .apply_op3_no_bwd(&y.contiguous()?, &post.contiguous()?, &op)?)
}

/// One token: `y: [dim]`, `residual: [C, dim]`, `post: [C]`, `comb: [C, C]` → `out: [C, dim]`.
pub fn hc_post_ref(y: &[bf16], residual: &[bf16], post: &[f32], comb: &[f32], out: &mut [bf16]) {
    let (c, dim) = (post.len(), y.len());
    for k in 0..c {
        for d in 0..dim {
            let mut mixed = 0f32;
            for j in 0..c {
                mixed += comb[j * c + k] * cpu::widen(residual[j * dim + d]);
            }
            out[k * dim + d] = cpu::round_bf16(post[k] * cpu::widen(y[d]) + mixed);
        }
    }
}

/// [`hc_post_ref`] block by block: elements do not depend on each other, so the bits are the same.
#[inline(always)]
fn row_body(y: &[bf16], residual: &[bf16], post: &[f32], comb: &[f32], out: &mut [bf16]) {
    let (c, dim) = (post.len(), y.len());
    if let (Ok(post), Ok(comb)) = (<&[f32; 4]>::try_from(post), <&[f32; 16]>::try_from(comb)) {
        return four_copies(y, residual, post, comb, out);
    }
    let mut mixed: Block = [0.0; BLOCK];
    for (d, n) in blocks(dim) {
        let (mixed, y) = (&mut mixed[..n], &y[d..][..n]);
        for (k, &post) in post.iter().enumerate() {
            mixed.fill(0.0);
            for j in 0..c {
                add_scaled(mixed, comb[j * c + k], &residual[j * dim + d..][..n]);
            }
            let out = &mut out[k * dim + d..][..n];
            for ((o, y), mixed) in out.iter_mut().zip(y).zip(mixed.iter()) {
                *o = cpu::round_bf16(post * cpu::widen(*y) + mixed);
            }
        }
    }
}

/// [`row_body`] for the released number of copies: each element is widened once and not once for every
/// copy it goes to, and its sum stays in a register.
#[inline(always)]
fn four_copies(y: &[bf16], residual: &[bf16], post: &[f32; 4], comb: &[f32; 16], out: &mut [bf16]) {
    let dim = y.len();
    let mut wide: [Block; 5] = [[0.0; BLOCK]; 5];
    for (d, n) in blocks(dim) {
        for (j, wide) in wide.iter_mut().enumerate() {
            let from = if j < 4 { &residual[j * dim..] } else { y };
            for (wide, x) in wide.iter_mut().zip(&from[d..][..n]) {
                *wide = cpu::widen(*x);
            }
        }
        let [r0, r1, r2, r3, y] = &wide;
        for k in 0..4 {
            let out = &mut out[k * dim + d..][..n];
            for i in 0..n {
                let mut mixed = 0f32;
                mixed += comb[k] * r0[i];
                mixed += comb[4 + k] * r1[i];
                mixed += comb[8 + k] * r2[i];
                mixed += comb[12 + k] * r3[i];
                out[i] = cpu::round_bf16(post[k] * y[i] + mixed);
            }
        }
    }
}

for_isa!(
    pub(super) fn row(
        y: &[bf16],
        residual: &[bf16],
        post: &[f32],
        comb: &[f32],
        out: &mut [bf16],
    ) = row_body
);

struct HcPost {
    comb: Tensor,
}

impl CustomOp3 for HcPost {
    fn name(&self) -> &'static str {
        "hc_post"
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
        let (t, c, dim) = l1.shape().dims3()?;
        let residual = cpu::contiguous::<bf16>(s1, l1, "hc_post")?;
        let y = cpu::contiguous::<bf16>(s2, l2, "hc_post")?;
        let post = cpu::contiguous::<f32>(s3, l3, "hc_post")?;
        let (storage, layout) = self.comb.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("hc_post: comb is on another device than the stream");
        };
        let comb = cpu::contiguous::<f32>(storage, layout, "hc_post")?;
        let isa = Isa::detect();
        let mut out = vec![bf16::ZERO; t * c * dim];
        for_each_token(&mut out, c * dim, 2 * (c + 1) * c * dim, |t, out| {
            row(
                isa,
                &y[t * dim..(t + 1) * dim],
                &residual[t * c * dim..(t + 1) * c * dim],
                &post[t * c..(t + 1) * c],
                &comb[t * c * c..(t + 1) * c * c],
                out,
            );
        });
        Ok((CpuStorage::BF16(out), (t, c, dim).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_reference_bit_for_bit() {
        for (c, dim) in [(1, 1), (2, 15), (3, 256), (4, 256), (4, 257), (5, 700)] {
            let value = |i: usize| ((i * 7919) % 1013) as f32 / 97.0 - 5.0;
            let bf = |n: usize, from: usize| -> Vec<bf16> {
                (0..n).map(|i| bf16::from_f32(value(from + i))).collect()
            };
            let (y, residual) = (bf(dim, 3), bf(c * dim, 11));
            let post: Vec<f32> = (0..c).map(|i| value(i + 5)).collect();
            let comb: Vec<f32> = (0..c * c).map(|i| value(i + 17)).collect();
            let mut slow = vec![bf16::ZERO; c * dim];
            hc_post_ref(&y, &residual, &post, &comb, &mut slow);
            for isa in Isa::available() {
                let mut fast = vec![bf16::ZERO; c * dim];
                row(isa, &y, &residual, &post, &comb, &mut fast);
                assert_eq!(slow, fast, "c {c}, dim {dim}, {isa:?}");
            }
        }
    }
}
