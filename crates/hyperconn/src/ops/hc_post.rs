//! Spreads a sublayer's output over the copies and mixes the residual in.
//!
//! `out[k][d] = post[k] * y[d] + (sum over j of comb[j][k] * residual[j][d])`
//!
//! The sum contracts over the *first* index of `comb`: row `j` says where copy `j` goes. It runs in
//! f32 in ascending `j`, the output's share is added after it, and each element is rounded once.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor};
use deepseek_v41_core::{Result, cpu};
use half::bf16;

use super::lanes::{Block, LANES, add_scaled, for_each_token, load, store};
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
    let op = HcPost {
        comb: comb.contiguous()?,
    };
    Ok(residual
        .contiguous()?
        .apply_op3_no_bwd(&y.contiguous()?, &post.contiguous()?, &op)?)
}

/// One token: `y: [dim]`, `residual: [C, dim]`, `post: [C]`, `comb: [C, C]` → `out: [C, dim]`.
pub fn hc_post_ref(y: &[bf16], residual: &[bf16], post: &[f32], comb: &[f32], out: &mut [bf16]) {
    elements(y, residual, post, comb, 0, out);
}

/// The elements from `d0` on of every copy, one by one.
fn elements(
    y: &[bf16],
    residual: &[bf16],
    post: &[f32],
    comb: &[f32],
    d0: usize,
    out: &mut [bf16],
) {
    let (c, dim) = (post.len(), y.len());
    for k in 0..c {
        for d in d0..dim {
            let mut mixed = 0f32;
            for j in 0..c {
                mixed += comb[j * c + k] * residual[j * dim + d].to_f32();
            }
            out[k * dim + d] = cpu::round_bf16(post[k] * y[d].to_f32() + mixed);
        }
    }
}

/// [`hc_post_ref`] in blocks: elements do not depend on each other, so the bits are the same.
/// `copies` is scratch for one block of every copy.
#[inline(always)]
fn row(
    y: &[bf16],
    residual: &[bf16],
    post: &[f32],
    comb: &[f32],
    copies: &mut [Block],
    out: &mut [bf16],
) {
    let (c, dim) = (copies.len(), y.len());
    let whole = dim - dim % LANES;
    for d in (0..whole).step_by(LANES) {
        for j in 0..c {
            copies[j] = load(&residual[j * dim + d..]);
        }
        let y = load(&y[d..]);
        for k in 0..c {
            let mut mixed: Block = [0.0; LANES];
            for j in 0..c {
                add_scaled(&mut mixed, comb[j * c + k], &copies[j]);
            }
            let block: Block = std::array::from_fn(|l| post[k] * y[l] + mixed[l]);
            store(&block, &mut out[k * dim + d..]);
        }
    }
    elements(y, residual, post, comb, whole, out);
}

fn token(y: &[bf16], residual: &[bf16], post: &[f32], comb: &[f32], out: &mut [bf16]) {
    match post.len() {
        // The released number of copies, known to the compiler: the scratch stays in registers.
        4 => row(y, residual, post, comb, &mut [[0.0; LANES]; 4], out),
        c => row(y, residual, post, comb, &mut vec![[0.0; LANES]; c], out),
    }
}

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
        let mut out = vec![bf16::ZERO; t * c * dim];
        for_each_token(&mut out, c * dim, 2 * (c + 1) * c * dim, |t, out| {
            token(
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
        for (c, dim) in [(1, 1), (2, 15), (3, 16), (4, 33), (4, 64), (5, 160)] {
            let value = |i: usize| ((i * 7919) % 1013) as f32 / 97.0 - 5.0;
            let bf = |n: usize, from: usize| -> Vec<bf16> {
                (0..n).map(|i| bf16::from_f32(value(from + i))).collect()
            };
            let (y, residual) = (bf(dim, 3), bf(c * dim, 11));
            let post: Vec<f32> = (0..c).map(|i| value(i + 5)).collect();
            let comb: Vec<f32> = (0..c * c).map(|i| value(i + 17)).collect();
            let (mut slow, mut fast) = (vec![bf16::ZERO; c * dim], vec![bf16::ZERO; c * dim]);
            hc_post_ref(&y, &residual, &post, &comb, &mut slow);
            token(&y, &residual, &post, &comb, &mut fast);
            assert_eq!(slow, fast, "c {c}, dim {dim}");
        }
    }
}
