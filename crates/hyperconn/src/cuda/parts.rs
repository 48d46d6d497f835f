//! Collapsing, adding to and widening a stream, each by itself.

use candle_core::Tensor;
use deepseek_v41_core::{
    Error, Result,
    cuda::{
        Held, Launch, Out, Ptr, kernels,
        ops::{device, supported},
    },
};
use half::bf16;

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
