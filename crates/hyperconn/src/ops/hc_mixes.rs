//! All coefficients of a sublayer from the stream itself, as one operation.
//!
//! ```text
//! x     = the token's C copies, flattened to C*dim values, widened to f32
//! raw   = x · fnᵀ                                  [(2+C)C]
//! mixes = raw * rsqrt(mean(x²) + norm_eps)         one statistic for all copies, after the product
//! out   = split_sinkhorn(mixes)
//! ```

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, WeightRows},
};
use half::bf16;
use rayon::prelude::*;

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
const TOKENS_AT_ONCE: usize = 4;

struct HcMixes<'a> {
    weights: &'a MixWeights,
    p: SinkhornParams,
    norm_eps: f32,
}

impl HcMixes<'_> {
    /// `stream: [m, C*dim]` → `out: [m, (2+C)C]`.
    fn tokens(&self, stream: &[bf16], out: &mut [f32]) {
        let (cols, width) = (self.weights.cols(), self.weights.width());
        let m = out.len() / width;
        cpu::with_scratch(stream.len() + out.len(), |scratch| {
            let (xs, mixes) = scratch.split_at_mut(stream.len());
            cpu::widen_slice(stream, xs);
            let mut rstd = [0f64; TOKENS_AT_ONCE];
            for (rstd, x) in rstd.iter_mut().zip(xs.chunks_exact(cols)) {
                let mut lanes = [0f64; LANES];
                accumulate(x, x, &mut lanes);
                let mean = sum_lanes(&lanes) / cols as f64;
                *rstd = 1.0 / (mean + f64::from(self.norm_eps)).sqrt();
            }
            for row in 0..width {
                self.project(row, xs, &rstd[..m], mixes);
            }
            let rows = mixes.chunks_exact(width).zip(out.chunks_exact_mut(width));
            for (mixes, out) in rows {
                split_token(mixes, &self.weights.scale, &self.weights.base, self.p, out);
            }
        });
    }

    /// One mix of every token: `xs: [m, C*dim]`, `rstd: [m]` → column `row` of `mixes: [m, (2+C)C]`.
    ///
    /// In f64, where products of f32 values are exact: the coefficients scale whole rows of the
    /// stream before those are rounded to bf16, so their last bits show in everything after.
    fn project(&self, row: usize, xs: &[f32], rstd: &[f64], mixes: &mut [f32]) {
        let (cols, width) = (self.weights.cols(), self.weights.width());
        let mut lanes = [[0f64; LANES]; TOKENS_AT_ONCE];
        let mut weights = [0f32; STRETCH];
        for k0 in (0..cols).step_by(STRETCH) {
            let weights = &mut weights[..STRETCH.min(cols - k0)];
            self.weights.func.decode(row, k0, weights);
            for (x, lanes) in xs.chunks_exact(cols).zip(&mut lanes) {
                accumulate(&x[k0..k0 + weights.len()], weights, lanes);
            }
        }
        for (t, (lanes, rstd)) in lanes.iter().zip(rstd).enumerate() {
            mixes[t * width + row] = (sum_lanes(lanes) * rstd) as f32;
        }
    }
}

/// Partial sums of a product: element `k` goes to lane `k % LANES`, in ascending order.
const LANES: usize = 8;

/// Columns of a weight row widened at a time: a multiple of [`LANES`] that stays in the first cache.
const STRETCH: usize = 1024;

/// Adds `a[k] * b[k]` to the lanes. Products of two f32 are exact in f64, so a fused multiply-add
/// would give the same bits.
#[inline(always)]
fn accumulate(a: &[f32], b: &[f32], lanes: &mut [f64; LANES]) {
    let (mut a8, mut b8) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in a8.by_ref().zip(b8.by_ref()) {
        for l in 0..LANES {
            lanes[l] += f64::from(a[l]) * f64::from(b[l]);
        }
    }
    for (l, (a, b)) in a8.remainder().iter().zip(b8.remainder()).enumerate() {
        lanes[l] += f64::from(*a) * f64::from(*b);
    }
}

fn sum_lanes(l: &[f64; LANES]) -> f64 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
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
        if t > TOKENS_AT_ONCE && cpu::should_parallelise(2 * t * width * cols) {
            out.par_chunks_mut(outs)
                .zip(stream.par_chunks(xs))
                .for_each(|(out, stream)| self.tokens(stream, out));
        } else {
            for (out, stream) in out.chunks_mut(outs).zip(stream.chunks(xs)) {
                self.tokens(stream, out);
            }
        }
        Ok((CpuStorage::F32(out), (t, width).into()))
    }
}
