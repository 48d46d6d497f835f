//! Full bidirectional attention within each image.
//!
//! Per head and query:
//!
//! ```text
//! s[j] = (q . k[j]) * head_dim^-0.5         products in one chain, ascending over the head
//! p[j] = exp(s[j] - max s)                  f32
//! out  = bf16(sum_j bf16(p[j]) * v[j] / sum_j p[j])
//! ```
//!
//! The weights are rounded where they meet the values and not where they are summed, as PyTorch's
//! fused attention does it: with that, the smallest golden image is equal to the bit.
//!
//! Scores exist for a tile of queries only, so memory grows with the number of patches and not with
//! its square. A query's result depends on its own scores alone: tiles and threads do not show.
//!
//! On a GPU the maximum is a running one over tiles of 64 keys, so that weights round against another number.

mod cpu;
mod runs;
mod tile;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu::contiguous};
use half::bf16;

pub use self::runs::PatchRuns;
use super::dense_bf16;
use crate::simd::Isa;

/// `qkv: [n, 3, H, hd]` bf16, queries, keys and values after rotation → `[n, H * hd]`.
///
/// Patches see those of their own image: `runs` says which they are.
///
/// # Errors
/// Another dtype or shape, another number of patches than `runs` has; [`Error::Unsupported`] on a GPU for
/// heads the kernel is not made for.
///
/// Reference: `SelfAttention.forward`.
pub fn full_attention(qkv: &Tensor, runs: &PatchRuns) -> Result<Tensor> {
    let qkv = dense_bf16(qkv, "full_attention")?;
    if !matches!(*qkv.dims(), [n, 3, h, hd] if n == runs.patches() && h > 0 && hd > 0) {
        return Err(Error::shape(
            "full_attention",
            format!(
                "expected [{}, 3, H, hd], found {:?}",
                runs.patches(),
                qkv.shape()
            ),
        ));
    }
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() {
        let largest = runs.lens().iter().copied().max().unwrap_or(0);
        let starts = runs.starts(qkv.device())?;
        return crate::cuda::vit_attention(&qkv, &starts, runs.lens().len(), largest);
    }
    Ok(qkv.apply_op1_no_bwd(&FullAttention { runs })?)
}

struct FullAttention<'a> {
    runs: &'a PatchRuns,
}

impl CustomOp1 for FullAttention<'_> {
    fn name(&self) -> &'static str {
        "full_attention"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let qkv = contiguous::<bf16>(s, l, "full_attention")?;
        let (n, _, heads, hd) = l.shape().dims4()?;
        let mut out = vec![bf16::ZERO; n * heads * hd];
        let width = heads * hd;
        let (mut qkv, mut rest) = (qkv, &mut out[..]);
        for len in self.runs.lens() {
            let (own, others) = qkv.split_at(len * 3 * width);
            let (to, behind) = rest.split_at_mut(len * width);
            cpu::attend_all(own, *len, heads, hd, to, Isa::detect());
            (qkv, rest) = (others, behind);
        }
        Ok((CpuStorage::BF16(out), Shape::from((n, heads * hd))))
    }
}

/// One head as straight loops with sums in f64 and no rounding before the end: `q, k, v: [n, hd]` f32 → `out: [n, hd]`.
pub fn full_attention_ref(q: &[f32], k: &[f32], v: &[f32], hd: usize, out: &mut [f32]) {
    let scale = (hd as f64).sqrt().recip();
    let wide = |a: &f32, b: &f32| f64::from(*a) * f64::from(*b);
    for (q, out) in q.chunks_exact(hd).zip(out.chunks_exact_mut(hd)) {
        let scores: Vec<f64> = k
            .chunks_exact(hd)
            .map(|k| q.iter().zip(k).map(|(a, b)| wide(a, b)).sum::<f64>() * scale)
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = p.iter().sum();
        for (i, o) in out.iter_mut().enumerate() {
            let terms = p
                .iter()
                .enumerate()
                .map(|(j, p)| p * f64::from(v[j * hd + i]));
            *o = (terms.sum::<f64>() / sum) as f32;
        }
    }
}
