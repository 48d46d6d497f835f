//! One pass over the stream between two sublayers.

use candle_core::{CudaDevice, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, Ptr, kernels, multiprocessors,
        ops::{device, supported},
    },
};
use half::bf16;

use super::{
    FUSED_COPIES, FUSED_WIDTH,
    weights::{PIECES, on_device},
};
use crate::{MixWeights, SinkhornParams};

/// Tokens up to which a step is one launch.
pub(super) const ONE_LAUNCH: usize = 4;
/// Tokens up to which each block takes eight; above, the mixes go through the tensor core.
const FEW: usize = 16;

/// Slices of `dim` of the step for many tokens: as few as give every multiprocessor a block of 64 tokens.
fn slices_of_many(dev: &CudaDevice, t: usize, dim: usize) -> Result<usize> {
    let tiles = dim.div_ceil(64);
    let per = (tiles * t.div_ceil(64)).div_ceil(multiprocessors(dev)?);
    Ok(tiles.div_ceil(per.clamp(1, tiles)))
}

/// What one pass over the stream gives.
pub(crate) struct Step {
    /// The new stream; `None` if there was nothing to add.
    pub(crate) stream: Option<Tensor>,
    /// `[T, 24]` f32: pre | post | comb.
    pub(crate) coef: Tensor,
    /// `[T, dim]`, collapsed and normed, if that was asked for.
    pub(crate) normed: Option<Tensor>,
}

/// A sublayer's output on its way into the stream it started from.
pub(crate) struct Open<'a> {
    /// `[T, dim]` bf16.
    pub(crate) y: &'a Tensor,
    /// `[T, 24]` f32, of that sublayer.
    pub(crate) coef: &'a Tensor,
}

/// Whether [`step`] serves streams of `copies` copies of width `dim`.
pub(crate) fn fuses(copies: usize, dim: usize) -> bool {
    copies == FUSED_COPIES && dim.is_multiple_of(32)
}

/// Ends the sublayer `open`, derives the coefficients of the resulting stream and, with `collapse`
/// (the mix carried into the next sublayer, `[T, C]` of any row stride, and its norm), also that
/// sublayer's normed input: one pass over the stream.
pub(crate) fn step(
    stream: &Tensor,
    open: Option<Open<'_>>,
    collapse: Option<(&Tensor, &Tensor)>,
    weights: &MixWeights,
    p: SinkhornParams,
    norm_eps: f32,
) -> Result<Step> {
    const OP: &str = "hc_step";
    let dev = device(stream)?;
    let w = on_device(weights)?;
    let (t, c, dim) = stream.dims3()?;
    supported(c == FUSED_COPIES, OP, c, "4 copies")?;
    let many = w.pieces.as_ref().filter(|_| t > FEW);
    let handed = w.handed.as_ref().filter(|_| t <= ONE_LAUNCH);
    let slices = match (handed, many) {
        (Some(_), _) => dim.div_ceil(64),
        (None, Some(_)) => slices_of_many(dev, t, dim)?,
        (None, None) => dim.div_ceil(128),
    };
    let coef = Out::<f32>::new(dev, t * FUSED_WIDTH)?;
    let (mut y, mut part) = (None, None);
    if handed.is_none() {
        part = Some(Out::<f32>::new(dev, t * slices * 32)?);
        y = collapse
            .map(|_| Out::<bf16>::new(dev, t * dim))
            .transpose()?;
    }
    let normed = collapse
        .map(|_| Out::<bf16>::new(dev, t * dim))
        .transpose()?;
    let next = open
        .as_ref()
        .map(|_| Out::<bf16>::new(dev, t * c * dim))
        .transpose()?;

    let residual = Held::new(stream, OP);
    let (func, scale, base) = (
        Held::new(&w.func, OP),
        Held::new(&w.scale, OP),
        Held::new(&w.base, OP),
    );
    let (y_at, part_at) = match handed {
        Some(handed) => (
            Some(Held::new(&handed.y, OP).ptr::<bf16>()?),
            Some(Held::new(&handed.part, OP).ptr::<f32>()?),
        ),
        None => (y.as_ref().map(Out::ptr), part.as_ref().map(Out::ptr)),
    };
    let (mut x, mut post, mut comb) = (Ptr::NULL, Ptr::NULL, Ptr::NULL);
    if let Some(open) = &open {
        x = Held::new(open.y, OP).ptr::<bf16>()?;
        let own = Held::new(open.coef, OP).ptr::<f32>()?;
        post = own.offset(4 * FUSED_COPIES);
        comb = own.offset(8 * FUSED_COPIES);
    }
    let (mut pre, mut norm) = (Ptr::NULL, Ptr::NULL);
    let mut copied = None;
    if let Some((carried, weight)) = collapse {
        // All three mixes share one row stride, that of packed coefficients.
        let carried = match carried.stride() {
            [FUSED_WIDTH, 1] => carried.clone(),
            _ => carried.pad_with_zeros(1, 0, FUSED_WIDTH - FUSED_COPIES)?,
        };
        pre = Held::new(copied.insert(carried), OP).start::<f32>()?;
        norm = Held::new(weight, OP).ptr::<bf16>()?;
    }
    match (handed, many) {
        (Some(_), _) => {
            let launch = Launch::new(dev, kernels::HC_FEW, "hc_step_few")
                .ptr(x)
                .ptr(residual.ptr::<bf16>()?)
                .ptr(post)
                .ptr(comb)
                .ptr(pre)
                .ptr(func.ptr::<f32>()?)
                .ptr(scale.ptr::<f32>()?)
                .ptr(base.ptr::<f32>()?)
                .ptr(norm)
                .maybe(next.as_ref().map(Out::ptr))
                .ptr(coef.ptr())
                .maybe(normed.as_ref().map(Out::ptr))
                .ptr(Ptr::NULL)
                .ptr(Ptr::NULL)
                .ptr(Ptr::NULL)
                .maybe(y_at)
                .maybe(part_at)
                .int(dim)
                .int(FUSED_WIDTH)
                .int(p.iters)
                .f32(p.eps)
                .f32(norm_eps);
            // Blocks of the norm, of 1024 columns at once.
            let norms = dim.div_ceil(1024).min(8);
            // SAFETY: stream and output are [T, 4, dim], coefficients [T, 24], in rows of 96 bytes; what is
            // handed on is zero, as every launch leaves it, and launches are ordered by the stream.
            unsafe { launch.launch((slices + 1 + norms, t, 1), 128, 0)? };
        }
        (None, Some(pieces)) => {
            let launch = Launch::new(dev, kernels::HC_MANY, "hc_many")
                .ptr(x)
                .ptr(residual.ptr::<bf16>()?)
                .ptr(post)
                .ptr(comb)
                .ptr(pre)
                .ptr(Held::new(pieces, OP).ptr::<bf16>()?)
                .maybe(next.as_ref().map(Out::ptr))
                .maybe(y_at)
                .maybe(part_at)
                .int(t)
                .int(dim)
                .int(FUSED_WIDTH);
            // SAFETY: as above, with `part` [T, slices, 32] of whole tiles of 64 columns, and 64 tokens a block.
            unsafe { launch.launch((slices, t.div_ceil(64), 1), 512, 3 * 40_960 + 4 * PIECES)? };
        }
        (None, None) => {
            let launch = Launch::new(dev, kernels::HC_STEP, "hc_step")
                .ptr(x)
                .ptr(residual.ptr::<bf16>()?)
                .ptr(post)
                .ptr(comb)
                .ptr(pre)
                .ptr(func.ptr::<f32>()?)
                .maybe(next.as_ref().map(Out::ptr))
                .maybe(y_at)
                .maybe(part_at)
                .int(t)
                .int(dim)
                .int(8)
                .int(FUSED_WIDTH);
            // SAFETY: as above, with 128 columns of eight tokens a block.
            unsafe { launch.launch((slices, t.div_ceil(8), 1), 256, 0)? };
        }
    }
    let step = |coef: Out<f32>, normed: Option<Out<bf16>>| -> Result<Step> {
        Ok(Step {
            stream: next.map(|next| next.into_tensor((t, c, dim))).transpose()?,
            coef: coef.into_tensor((t, FUSED_WIDTH))?,
            normed: normed
                .map(|normed| normed.into_tensor((t, dim)))
                .transpose()?,
        })
    };
    if handed.is_some() {
        return step(coef, normed);
    }
    let finish = Launch::new(dev, kernels::HC_STEP, "hc_finish")
        .maybe(part_at)
        .maybe(y_at)
        .ptr(scale.ptr::<f32>()?)
        .ptr(base.ptr::<f32>()?)
        .ptr(norm)
        .ptr(coef.ptr())
        .maybe(normed.as_ref().map(Out::ptr))
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .int(slices)
        .int(dim)
        .int(p.iters)
        .f32(p.eps)
        .f32(norm_eps);
    // SAFETY: as above; one block a token.
    unsafe { finish.launch((t, 1, 1), 128, 0)? };
    step(coef, normed)
}
