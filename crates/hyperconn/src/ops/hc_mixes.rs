//! All coefficients of a sublayer from the stream itself, as one operation.
//!
//! ```text
//! x     = the token's C copies, flattened to C*dim values, widened to f32
//! raw   = x · fnᵀ                                  [(2+C)C], f64
//! mixes = raw * rsqrt(mean(x²) + norm_eps)         one statistic for all copies, after the product
//! out   = split_sinkhorn(mixes)
//! ```

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, Isa},
};
use half::bf16;
use rayon::prelude::*;

use super::project::{ROWS, project, rstd};
use super::split_sinkhorn::{SinkhornParams, split_sinkhorn_ref, split_token};
use super::stream_dims;
use crate::{Mix, MixWeights};

/// `stream: [T, C, dim]` bf16 → pre, post and comb of each token.
///
/// A stream of zeros gives the coefficients of `base` alone. A NaN or infinity in a token's stream
/// makes that token's coefficients NaN and leaves the others alone.
///
/// # Errors
/// Another dtype, or a shape that does not fit the weights.
///
/// Reference: `Block.hc_mixes`.
pub fn hc_mixes(
    stream: &Tensor,
    weights: &MixWeights,
    p: SinkhornParams,
    norm_eps: f32,
) -> Result<Mix> {
    let (_, c, dim) = stream_dims("hc_mixes", stream)?;
    if c != p.hc_mult || c * dim != weights.cols() || p.width() != weights.width() {
        return Err(Error::shape(
            "hc_mixes",
            format!(
                "stream {:?} against {} copies and weights [{}, {}]",
                stream.dims(),
                p.hc_mult,
                weights.width(),
                weights.cols()
            ),
        ));
    }
    #[cfg(feature = "cuda")]
    if stream.device().is_cuda() {
        let packed = crate::cuda::mixes(&stream.contiguous()?, weights, p, norm_eps)?;
        return Mix::unpack(&packed, c);
    }
    let packed = stream.contiguous()?.apply_op1_no_bwd(&HcMixes {
        weights,
        p,
        norm_eps,
    })?;
    Mix::unpack(&packed, c)
}

/// One token: `stream: [C*dim]`, `func: [(2+C)C, C*dim]` → `out: [(2+C)C]`, pre | post | comb.
///
/// Sums in f64, so that it is a straighter yardstick than what it measures.
pub fn hc_mixes_ref(
    stream: &[bf16],
    func: &[f32],
    scale: &[f32],
    base: &[f32],
    p: SinkhornParams,
    norm_eps: f32,
    out: &mut [f32],
) {
    let x: Vec<f64> = stream.iter().map(|v| v.to_f64()).collect();
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let rstd = 1.0 / (mean + f64::from(norm_eps)).sqrt();
    let mixes: Vec<f32> = func
        .chunks_exact(x.len())
        .map(|w| {
            (w.iter()
                .zip(&x)
                .map(|(w, x)| f64::from(*w) * x)
                .sum::<f64>()
                * rstd) as f32
        })
        .collect();
    split_sinkhorn_ref(&mixes, scale, base, p, out);
}

/// Tokens whose stream is widened at once: enough to use a weight row several times, few enough
/// that the widened rows (80 KB a token at release shapes) stay in cache.
pub(super) const TOKENS_AT_ONCE: usize = 8;

/// What the coefficients are made with.
#[derive(Clone, Copy)]
pub(crate) struct HcMixes<'a> {
    pub(crate) weights: &'a MixWeights,
    pub(crate) p: SinkhornParams,
    pub(crate) norm_eps: f32,
}

impl HcMixes<'_> {
    /// `stream: [m, C*dim]` → `out: [m, (2+C)C]`, `m` up to [`TOKENS_AT_ONCE`]. `spread` shares the
    /// weight rows among threads.
    pub(super) fn tokens(&self, isa: Isa, spread: bool, stream: &[bf16], out: &mut [f32]) {
        let MixWeights {
            func, base, scale, ..
        } = self.weights;
        let (cols, width) = (self.weights.cols(), self.weights.width());
        let m = out.len() / width;
        cpu::with_scratch(stream.len() + out.len(), |scratch| {
            let (xs, mixes) = scratch.split_at_mut(stream.len());
            cpu::widen_slice(stream, xs);
            let mut all = vec![[[0f64; ROWS]; TOKENS_AT_ONCE]; width.div_ceil(ROWS)];
            let work = if spread { 2 * m * width * cols } else { 0 };
            cpu::for_each_piece(work, &mut all, 1, |group, all| {
                project(isa, func, group * ROWS, xs, &mut all[0][..m]);
            });
            let rows = mixes
                .chunks_exact_mut(width)
                .zip(out.chunks_exact_mut(width));
            for (t, (mixes, out)) in rows.enumerate() {
                let rstd = rstd(isa, &xs[t * cols..(t + 1) * cols], self.norm_eps);
                for (i, mix) in mixes.iter_mut().enumerate() {
                    *mix = (all[i / ROWS][t][i % ROWS] * rstd) as f32;
                }
                split_token(mixes, scale, base, self.p, out);
            }
        });
    }
}

impl CustomOp1 for HcMixes<'_> {
    fn name(&self) -> &'static str {
        "hc_mixes"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let stream = cpu::contiguous::<bf16>(s, l, "hc_mixes")?;
        let (cols, width) = (self.weights.cols(), self.weights.width());
        let t = stream.len() / cols;
        let mut out = vec![0f32; t * width];
        let (xs, outs) = (TOKENS_AT_ONCE * cols, TOKENS_AT_ONCE * width);
        let isa = Isa::detect();
        let spread = cpu::should_parallelise(2 * t * width * cols);
        if spread && t > TOKENS_AT_ONCE {
            out.par_chunks_mut(outs)
                .zip(stream.par_chunks(xs))
                .for_each(|(out, stream)| self.tokens(isa, false, stream, out));
        } else if t > 0 {
            for (out, stream) in out.chunks_mut(outs).zip(stream.chunks(xs)) {
                self.tokens(isa, spread, stream, out);
            }
        }
        Ok((CpuStorage::F32(out), (t, width).into()))
    }
}
