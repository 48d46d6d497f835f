//! From raw mixes to coefficients: two sigmoids and a doubly stochastic matrix.
//!
//! With `C` copies a token has `(2+C)C` mixes `m`, ordered pre | post | comb:
//!
//! ```text
//! pre[i]     = sigmoid(m[i] * scale[0] + base[i]) + eps
//! post[i]    = 2 * sigmoid(m[C+i] * scale[1] + base[C+i])
//! comb[j][k] = softmax over k of (m[2C+jC+k] * scale[2] + base[2C+jC+k]), + eps
//! ```
//!
//! then Sinkhorn: columns of `comb` are divided by their sum + eps, and `iters - 1` times rows, then
//! columns again. It ends on columns, so columns are the sums that are 1 (up to eps); the rows of a
//! matrix that has not converged may still be off. Input and output are f32, everything between f64.
//!
//! # Degenerate logits
//! * Finite values of any size: `exp` of a difference underflows to 0, the `+ eps` keeps every
//!   denominator positive, the result is finite and non-negative.
//! * One `-inf` in a row of `comb`: that entry starts at eps. In `pre`: eps, in `post`: 0.
//! * A row of `comb` that is all `-inf`, any `+inf` in `comb`, or a NaN: the softmax of such a row is
//!   NaN, as in the reference, and so is that token's `comb`. Other tokens are untouched.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};

use super::expect;
use super::rows::for_each_token;
use crate::Mix;

/// Settings of the Sinkhorn split.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SinkhornParams {
    /// Copies of the stream, `C`.
    pub hc_mult: usize,
    /// Rounds of normalisation; 0 leaves the softmax as it is.
    pub iters: usize,
    /// Added to `pre`, to the softmax and to every denominator after it.
    pub eps: f32,
}

impl SinkhornParams {
    /// `(2+C)C`, the number of coefficients a token gets.
    pub fn width(&self) -> usize {
        (2 + self.hc_mult) * self.hc_mult
    }
}

/// `mixes: [T, (2+C)C]`, `scale: [3]`, `base: [(2+C)C]`, all f32 → the coefficients of each token.
///
/// # Errors
/// Another shape or dtype, or `hc_mult == 0`.
///
/// Reference: `kernel.hc_split_sinkhorn`.
pub fn split_sinkhorn(
    mixes: &Tensor,
    scale: &Tensor,
    base: &Tensor,
    p: SinkhornParams,
) -> Result<Mix> {
    const OP: &str = "split_sinkhorn";
    let &[t, _] = mixes.dims() else {
        return Err(Error::shape(
            OP,
            format!("expected [T, mixes], found {:?}", mixes.dims()),
        ));
    };
    if p.hc_mult == 0 {
        return Err(Error::shape(OP, "expected at least 1 copy, found 0"));
    }
    expect(OP, "mixes", mixes, &[t, p.width()], DType::F32)?;
    expect(OP, "scale", scale, &[3], DType::F32)?;
    expect(OP, "base", base, &[p.width()], DType::F32)?;
    #[cfg(feature = "cuda")]
    if mixes.device().is_cuda() {
        let (scale, base) = (scale.contiguous()?, base.contiguous()?);
        let packed = crate::cuda::split_sinkhorn(&mixes.contiguous()?, &scale, &base, p)?;
        return Mix::unpack(&packed, p.hc_mult);
    }
    let packed = mixes.contiguous()?.apply_op3_no_bwd(
        &scale.contiguous()?,
        &base.contiguous()?,
        &SplitSinkhorn(p),
    )?;
    Mix::unpack(&packed, p.hc_mult)
}

/// One token: `mixes`, `base`, `out: [(2+C)C]`, `scale: [3]`; `out` is pre | post | comb.
///
/// f64 inside, one rounding at the end. The coefficients multiply every element of the stream before
/// it is rounded to bf16, so an ulp here shows as flipped roundings there; in f64 the result is the
/// f32 nearest to the formula's, which any careful f32 evaluation is near.
pub fn split_sinkhorn_ref(
    mixes: &[f32],
    scale: &[f32],
    base: &[f32],
    p: SinkhornParams,
    out: &mut [f32],
) {
    let mut comb = vec![0f64; p.hc_mult * p.hc_mult];
    gates_and_softmax(mixes, scale, base, p, out, &mut comb);
    let (c, eps) = (p.hc_mult, f64::from(p.eps));
    for i in 0..p.iters {
        if i > 0 {
            for row in comb.chunks_exact_mut(c) {
                let sum = row.iter().fold(0.0, |s, v| s + v) + eps;
                row.iter_mut().for_each(|v| *v /= sum);
            }
        }
        for k in 0..c {
            let mut sum = 0f64;
            for j in 0..c {
                sum += comb[j * c + k];
            }
            sum += eps;
            for j in 0..c {
                comb[j * c + k] /= sum;
            }
        }
    }
    out[2 * c..]
        .iter_mut()
        .zip(&comb)
        .for_each(|(o, v)| *o = *v as f32);
}

/// `pre` and `post` into `out`, and into `comb` the softmax over each row plus eps.
fn gates_and_softmax(
    mixes: &[f32],
    scale: &[f32],
    base: &[f32],
    p: SinkhornParams,
    out: &mut [f32],
    comb: &mut [f64],
) {
    let c = p.hc_mult;
    let logit =
        |i: usize, group: usize| f64::from(mixes[i]) * f64::from(scale[group]) + f64::from(base[i]);
    for i in 0..c {
        out[i] = (sigmoid(logit(i, 0)) + f64::from(p.eps)) as f32;
        out[c + i] = (2.0 * sigmoid(logit(c + i, 1))) as f32;
    }
    for (j, row) in comb.chunks_exact_mut(c).enumerate() {
        for (k, v) in row.iter_mut().enumerate() {
            *v = logit(2 * c + j * c + k, 2);
        }
        softmax(row);
        row.iter_mut().for_each(|v| *v += f64::from(p.eps));
    }
}

/// Writes the coefficients of one token, as [`split_sinkhorn_ref`] and with the same bits.
pub(super) fn split_token(
    mixes: &[f32],
    scale: &[f32],
    base: &[f32],
    p: SinkhornParams,
    out: &mut [f32],
) {
    if p.hc_mult != 4 {
        return split_sinkhorn_ref(mixes, scale, base, p, out);
    }
    // The released number of copies: the reference's first part, then the iterations in registers.
    let mut rows = [[0f64; 4]; 4];
    gates_and_softmax(mixes, scale, base, p, out, rows.as_flattened_mut());
    let eps = f64::from(p.eps);
    for i in 0..p.iters {
        if i > 0 {
            for row in &mut rows {
                let sum = (((row[0] + row[1]) + row[2]) + row[3]) + eps;
                *row = row.map(|v| v / sum);
            }
        }
        let [a, b, c, d] = rows;
        let sums: [f64; 4] = std::array::from_fn(|k| (((a[k] + b[k]) + c[k]) + d[k]) + eps);
        for row in &mut rows {
            *row = std::array::from_fn(|k| row[k] / sums[k]);
        }
    }
    out[8..]
        .iter_mut()
        .zip(rows.as_flattened())
        .for_each(|(o, v)| *o = *v as f32);
}

/// Max-subtracted softmax in place.
fn softmax(row: &mut [f64]) {
    // A NaN must survive, which `f64::max` would drop.
    let max = row.iter().fold(
        f64::NEG_INFINITY,
        |m, &v| if v > m || v.is_nan() { v } else { m },
    );
    row.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum = row.iter().fold(0.0, |s, v| s + v);
    row.iter_mut().for_each(|v| *v /= sum);
}

/// Overflow of `exp` gives an infinite denominator and so the right limit, 0.
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Operations of one token, roughly: what decides whether threads are worth waking.
pub(super) fn work(p: SinkhornParams) -> usize {
    p.width().saturating_mul(16 + 4 * p.iters)
}

struct SplitSinkhorn(SinkhornParams);

impl CustomOp3 for SplitSinkhorn {
    fn name(&self) -> &'static str {
        "split_sinkhorn"
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
        let mixes = cpu::contiguous::<f32>(s1, l1, "split_sinkhorn")?;
        let scale = cpu::contiguous::<f32>(s2, l2, "split_sinkhorn")?;
        let base = cpu::contiguous::<f32>(s3, l3, "split_sinkhorn")?;
        let width = self.0.width();
        let mut out = vec![0f32; mixes.len()];
        for_each_token(&mut out, width, work(self.0), |t, out| {
            split_token(&mixes[t * width..(t + 1) * width], scale, base, self.0, out);
        });
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_copies_are_the_reference_bit_for_bit() {
        for iters in [0, 1, 2, 20] {
            let p = SinkhornParams {
                hc_mult: 4,
                iters,
                eps: 1e-6,
            };
            let m: Vec<f32> = (0..24)
                .map(|i| ((i * 37) % 23) as f32 / 3.0 - 4.0)
                .collect();
            let base: Vec<f32> = (0..24).map(|i| i as f32 / 50.0).collect();
            let (mut slow, mut fast) = ([0f32; 24], [0f32; 24]);
            split_sinkhorn_ref(&m, &[0.7, 1.3, 2.0], &base, p, &mut slow);
            split_token(&m, &[0.7, 1.3, 2.0], &base, p, &mut fast);
            assert_eq!(
                slow.map(f32::to_bits),
                fast.map(f32::to_bits),
                "iters {iters}"
            );
        }
    }
}
