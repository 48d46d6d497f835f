//! The operations of this crate on a GPU.

use candle_core::{CudaDevice, D, DType, Device, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::WeightRows,
    cuda::{
        Held, Launch, Out, Ptr, kernels, multiprocessors,
        ops::{device, supported},
    },
};
use half::bf16;

use crate::{MixWeights, SinkhornParams};

/// Copies of the stream that the fused kernel is written for.
const FUSED_COPIES: usize = 4;
/// Tokens up to which a step is one launch.
const ONE_LAUNCH: usize = 4;
/// Tokens up to which each block takes eight; above, the mixes go through the tensor core.
const FEW: usize = 16;
/// Coefficients of a token at that number.
pub(crate) const FUSED_WIDTH: usize = (2 + FUSED_COPIES) * FUSED_COPIES;

/// The weights of one site's mixes on the device, f32 each.
#[derive(Debug, Clone)]
pub(crate) struct DeviceMix {
    /// `[(2+C)C, C*dim]`
    func: Tensor,
    /// `func` as three bf16 pieces that add up to it, laid out for many tokens.
    pieces: Option<Tensor>,
    /// What a step of few tokens hands from block to block, for streams that [`step`] serves.
    handed: Option<Handed>,
    /// `[3]`
    scale: Tensor,
    /// `[(2+C)C]`
    base: Tensor,
}

/// Memory that is zero between launches: a value that is not says itself that it has come.
#[derive(Debug, Clone)]
struct Handed {
    /// `[ONE_LAUNCH, dim]` bf16
    y: Tensor,
    /// `[ONE_LAUNCH, slices, 40]` f32, slices of 64 columns
    part: Tensor,
}

impl Handed {
    fn new(dim: usize, device: &Device) -> Result<Self> {
        let part = (ONE_LAUNCH, dim.div_ceil(64), 40);
        Ok(Self {
            y: Tensor::zeros((ONE_LAUNCH, dim), DType::BF16, device)?,
            part: Tensor::zeros(part, DType::F32, device)?,
        })
    }
}

impl DeviceMix {
    /// Uploads `weights`; `None` on the CPU.
    pub(crate) fn new(weights: &MixWeights, device: &Device) -> Result<Option<Self>> {
        if !device.is_cuda() {
            return Ok(None);
        }
        let shape = [weights.func.rows(), weights.func.cols()];
        let func = Tensor::from_raw_buffer(weights.func.bytes(), DType::F32, &shape, device)?;
        let dim = shape[1] / FUSED_COPIES;
        let fused = shape[0] == FUSED_WIDTH && fuses(FUSED_COPIES, dim);
        Ok(Some(Self {
            pieces: fused.then(|| split_fn(&func)).transpose()?,
            handed: fused.then(|| Handed::new(dim, device)).transpose()?,
            func,
            scale: Tensor::from_slice(&weights.scale, 3, device)?,
            base: Tensor::from_slice(&weights.base, weights.base.len(), device)?,
        }))
    }
}

/// Values of the pieces of 64 columns.
const PIECES: usize = 4 * 72 * 64;

/// `fn` as three bf16 pieces.
fn split_fn(func: &Tensor) -> Result<Tensor> {
    let dev = device(func)?;
    let dim = func.dim(1)? / FUSED_COPIES;
    let n = dim.div_ceil(64) * PIECES;
    let pieces = Out::<bf16>::new(dev, n)?;
    let launch = Launch::new(dev, kernels::HC_MANY, "hc_split_fn")
        .ptr(Held::new(func, "hc_split_fn").ptr::<f32>()?)
        .ptr(pieces.ptr())
        .int(dim)
        .long(n);
    // SAFETY: `fn` is [24, 4 * dim]; a thread a value of the output.
    unsafe { launch.launch((n.div_ceil(256), 1, 1), 256, 0)? };
    pieces.into_tensor(n)
}

/// Slices of `dim` of the step for many tokens: as few as give every multiprocessor a block of 64 tokens.
fn slices_of_many(dev: &CudaDevice, t: usize, dim: usize) -> Result<usize> {
    let tiles = dim.div_ceil(64);
    let per = (tiles * t.div_ceil(64)).div_ceil(multiprocessors(dev)?);
    Ok(tiles.div_ceil(per.clamp(1, tiles)))
}

fn on_device(weights: &MixWeights) -> Result<&DeviceMix> {
    weights.device.as_ref().ok_or_else(|| Error::Unsupported {
        what: "hyper-connections loaded on the CPU given a stream on the GPU".into(),
    })
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

/// `stream: [T, C, dim]` bf16 and `pre: [T, C]` f32 (`None`: the mean) → `[T, dim]` bf16.
pub(crate) fn hc_pre(stream: &Tensor, pre: Option<&Tensor>) -> Result<Tensor> {
    const OP: &str = "hc_pre";
    let stream = stream.contiguous()?;
    let dev = device(&stream)?;
    let (t, c, dim) = stream.dims3()?;
    check(OP, c, dim)?;
    // A mix is a tensor of its own or the first columns of packed rows.
    let ld = match pre.map(Tensor::stride) {
        Some([ld, 1]) if t > 1 => *ld,
        Some([_, 1]) | None => c,
        Some(strides) => return Err(Error::shape(OP, format!("a mix of strides {strides:?}"))),
    };
    let y = Out::<bf16>::new(dev, t * dim)?;
    let launch = Launch::new(dev, kernels::HC_PARTS, "hc_pre")
        .ptr(Held::new(&stream, OP).ptr::<bf16>()?)
        .maybe(
            pre.as_ref()
                .map(|pre| Held::new(pre, OP).start::<f32>())
                .transpose()?,
        )
        .ptr(y.ptr())
        .int(c)
        .int(dim)
        .int(ld);
    // SAFETY: [T, C, dim] and T rows of coefficients in, [T, dim] out; a thread takes eight columns of a token.
    unsafe { launch.launch(((dim / 8).div_ceil(128), t, 1), 128, 0)? };
    y.into_tensor((t, dim))
}

/// [`hc_post`](crate::hc_post()) of checked operands.
pub(crate) fn hc_post(
    y: &Tensor,
    residual: &Tensor,
    post: &Tensor,
    comb: &Tensor,
) -> Result<Tensor> {
    let (post, comb) = (post.contiguous()?, comb.contiguous()?);
    let c = residual.dim(1)?;
    let coefficients = (
        Held::new(&post, "hc_post").ptr::<f32>()?,
        Held::new(&comb, "hc_post").ptr::<f32>()?,
    );
    add(y, residual, coefficients, (c, c * c))
}

/// [`hc_post`] with packed coefficients `[T, (2+C)C]`.
pub(crate) fn hc_post_packed(y: &Tensor, residual: &Tensor, coef: &Tensor) -> Result<Tensor> {
    let (t, c, _) = residual.dims3()?;
    let width = (2 + c) * c;
    if coef.dims() != [t, width] {
        let found = coef.shape();
        return Err(Error::shape("hc_post", format!("coefficients {found:?}")));
    }
    let own = Held::new(coef, "hc_post").ptr::<f32>()?;
    let size = size_of::<f32>();
    let coefficients = (own.offset(size * c), own.offset(size * 2 * c));
    add(y, residual, coefficients, (width, width))
}

/// `post` and `comb` with the lengths of their rows.
fn add(
    y: &Tensor,
    residual: &Tensor,
    (post, comb): (Ptr<'_>, Ptr<'_>),
    (ld_post, ld_comb): (usize, usize),
) -> Result<Tensor> {
    const OP: &str = "hc_post";
    let (y, residual) = (y.contiguous()?, residual.contiguous()?);
    let dev = device(&residual)?;
    let (t, c, dim) = residual.dims3()?;
    check(OP, c, dim)?;
    let out = Out::<bf16>::new(dev, t * c * dim)?;
    let launch = Launch::new(dev, kernels::HC_PARTS, "hc_post")
        .ptr(Held::new(&y, OP).ptr::<bf16>()?)
        .ptr(Held::new(&residual, OP).ptr::<bf16>()?)
        .ptr(post)
        .ptr(comb)
        .ptr(out.ptr())
        .int(c)
        .int(dim)
        .int(ld_post)
        .int(ld_comb);
    // SAFETY: y [T, dim], residual and out [T, C, dim], post [T, C], comb [T, C, C].
    unsafe { launch.launch(((dim / 8).div_ceil(128), t, 1), 128, 0)? };
    out.into_tensor((t, c, dim))
}

/// `xs: [T, dim]` → `[T, c, dim]`.
pub(crate) fn hc_expand(xs: &Tensor, c: usize) -> Result<Tensor> {
    let (t, dim) = xs.dims2()?;
    Ok(xs.unsqueeze(1)?.broadcast_as((t, c, dim))?.contiguous()?)
}

fn check(op: &str, c: usize, dim: usize) -> Result<()> {
    supported(c <= 8, op, c, "up to 8 copies")?;
    supported(dim.is_multiple_of(8), op, dim, "widths of multiples of 8")
}
