//! Coefficients of a stream, and their Sinkhorn iterations.

use candle_core::{D, DType, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{Held, Launch, Out, kernels, ops::device},
};

use super::{FUSED_COPIES, FUSED_WIDTH, step, weights::on_device};
use crate::{MixWeights, SinkhornParams};

/// The packed coefficients `[T, (2+C)C]` of `stream: [T, C, dim]`.
pub(crate) fn mixes(
    stream: &Tensor,
    weights: &MixWeights,
    p: SinkhornParams,
    norm_eps: f32,
) -> Result<Tensor> {
    let (t, c, dim) = stream.dims3()?;
    if c == FUSED_COPIES {
        return Ok(step(stream, None, None, weights, p, norm_eps)?.coef);
    }
    // Other numbers of copies, which no released model has: candle's own operations, in f64 as on the CPU.
    let w = on_device(weights)?;
    let x = stream
        .reshape((t, c * dim))?
        .to_dtype(DType::F32)?
        .to_dtype(DType::F64)?;
    let rstd = (x.sqr()?.mean_keepdim(1)? + f64::from(norm_eps))?
        .sqrt()?
        .recip()?;
    let func = w.func.to_dtype(DType::F64)?;
    let mixes = x.matmul(&func.t()?)?.broadcast_mul(&rstd)?;
    // Mixes are f32 before they become coefficients.
    sinkhorn(&mixes.to_dtype(DType::F32)?, &w.scale, &w.base, p)
}

/// [`split_sinkhorn`](crate::split_sinkhorn()), packed.
pub(crate) fn split_sinkhorn(
    mixes: &Tensor,
    scale: &Tensor,
    base: &Tensor,
    p: SinkhornParams,
) -> Result<Tensor> {
    const OP: &str = "split_sinkhorn";
    if p.hc_mult != FUSED_COPIES {
        return sinkhorn(mixes, scale, base, p);
    }
    let dev = device(mixes)?;
    let t = mixes.dim(0)?;
    let out = Out::<f32>::new(dev, t * FUSED_WIDTH)?;
    let launch = Launch::new(dev, kernels::SPLIT_SINKHORN, "split_sinkhorn")
        .ptr(Held::new(mixes, OP).ptr::<f32>()?)
        .ptr(Held::new(scale, OP).ptr::<f32>()?)
        .ptr(Held::new(base, OP).ptr::<f32>()?)
        .ptr(out.ptr())
        .int(t)
        .int(p.iters)
        .f32(p.eps);
    // SAFETY: T rows of 24 in and out, a warp a row.
    unsafe { launch.launch((t.div_ceil(4), 1, 1), 128, 0)? };
    out.into_tensor((t, FUSED_WIDTH))
}

fn sinkhorn(mixes: &Tensor, scale: &Tensor, base: &Tensor, p: SinkhornParams) -> Result<Tensor> {
    let (c, eps) = (p.hc_mult, f64::from(p.eps));
    let t = mixes.dim(0)?;
    let wide = |x: &Tensor| x.to_dtype(DType::F64);
    let (mixes, scale, base) = (&wide(mixes)?, &wide(scale)?, &wide(base)?);
    let part = |i: usize, start: usize, len: usize| -> Result<Tensor> {
        let m = mixes
            .narrow(1, start, len)?
            .broadcast_mul(&scale.narrow(0, i, 1)?)?;
        Ok(m.broadcast_add(&base.narrow(0, start, len)?)?)
    };
    let sigmoid = |x: Tensor| -> Result<Tensor> { Ok((x.neg()?.exp()? + 1.0)?.recip()?) };
    let pre = (sigmoid(part(0, 0, c)?)? + eps)?;
    let post = (sigmoid(part(1, c, c)?)? * 2.0)?;
    let comb = part(2, 2 * c, c * c)?.reshape((t, c, c))?;
    let comb = comb.broadcast_sub(&comb.max_keepdim(D::Minus1)?)?.exp()?;
    let mut comb = (comb.broadcast_div(&comb.sum_keepdim(D::Minus1)?)? + eps)?;
    for i in 0..p.iters {
        if i > 0 {
            comb = comb.broadcast_div(&(comb.sum_keepdim(2)? + eps)?)?;
        }
        comb = comb.broadcast_div(&(comb.sum_keepdim(1)? + eps)?)?;
    }
    let all = Tensor::cat(&[&pre, &post, &comb.reshape((t, c * c))?], 1)?;
    Ok(all.to_dtype(DType::F32)?)
}
