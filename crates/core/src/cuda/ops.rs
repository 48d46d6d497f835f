//! Launches of the kernels that several crates use. Shapes are checked by the public functions above them.

use candle_core::{D, Device, Tensor};
use half::bf16;

use super::{Held, Launch, Out, Ptr, kernels};
use crate::{Error, Result};

/// The CUDA device of `tensor`.
///
/// # Errors
/// It is elsewhere.
pub fn device(tensor: &Tensor) -> Result<&candle_core::CudaDevice> {
    match tensor.device() {
        Device::Cuda(dev) => Ok(dev),
        _ => Err(Error::shape("cuda", "a tensor is not on the GPU")),
    }
}

/// Refuses a size the kernel of `op` is not made for.
///
/// # Errors
/// [`Error::Unsupported`] when `fits` is false.
pub fn supported(fits: bool, op: &str, found: impl std::fmt::Display, rule: &str) -> Result<()> {
    match fits {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: format!("{op} on CUDA with {found}: the kernel takes {rule}; use the CPU"),
        }),
    }
}

/// `xs: [.., dim]` bf16, `weight: [dim]` bf16 → [`rms_norm`](crate::rms_norm()) of each row.
///
/// # Errors
/// A width the kernel is not made for, or a failed launch.
pub fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    const OP: &str = "rms_norm";
    let dev = device(xs)?;
    let dim = xs.dim(D::Minus1)?;
    supported(
        dim.is_multiple_of(32) && dim <= 16_384,
        OP,
        dim,
        "multiples of 32 up to 16384",
    )?;
    let rows = xs.elem_count() / dim.max(1);
    let xs = xs.contiguous()?;
    let out = Out::<bf16>::new(dev, xs.elem_count())?;
    let (x, w) = (Held::new(&xs, OP), Held::new(weight, OP));
    let launch = Launch::new(dev, kernels::RMS_NORM, "rms_norm")
        .ptr(x.ptr::<bf16>()?)
        .ptr(w.ptr::<bf16>()?)
        .ptr(out.ptr())
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .int(dim)
        .long(dim)
        .f32(eps);
    let block = (dim / 8).next_multiple_of(32).min(1024);
    // SAFETY: `rows` rows of `dim` in and out, `dim` weights; one block a row.
    unsafe { launch.launch((rows, 1, 1), block, 0)? };
    out.into_tensor(xs.shape())
}

/// What rows are rounded to, and what packed ones hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// bf16 alone.
    Plain = 0,
    /// e4m3, groups of 32.
    Fp8 = 1,
    /// e2m1, groups of 32, power-of-two scales.
    Fp4E8m0 = 2,
    /// e2m1, groups of 16, e4m3 scales.
    Fp4E4m3 = 3,
}

/// Norm, rotation of the last columns and rounding of every row, each step optional but the rotation.
///
/// `xs: [T, D]` or `[T, H, D]` bf16, `norm`: `[D]` bf16 and its constant, `cos`, `sin: [T, rope / 2]` f32.
///
/// # Errors
/// A width the kernel is not made for, or a failed launch.
pub fn norm_rope_quant(
    xs: &Tensor,
    norm: Option<(&Tensor, f32)>,
    (cos, sin): (&Tensor, &Tensor),
    kind: RowKind,
    inverse: bool,
) -> Result<Tensor> {
    const OP: &str = "norm_rope_quant";
    let dev = device(xs)?;
    let d = xs.dim(D::Minus1)?;
    let t = xs.dims()[0];
    supported(
        d.is_multiple_of(if kind == RowKind::Plain { 2 } else { 32 }) && d <= 512,
        OP,
        d,
        "even row widths up to 512, to be rounded of multiples of 32",
    )?;
    let xs = xs.contiguous()?;
    let heads = xs.elem_count() / (t * d).max(1);
    let out = Out::<bf16>::new(dev, xs.elem_count())?;
    let (x, c, s) = (Held::new(&xs, OP), Held::new(cos, OP), Held::new(sin, OP));
    let weight = norm.map(|(w, eps)| (Held::new(w, OP), eps));
    let launch = Launch::new(dev, kernels::NORM_ROPE_QUANT, "norm_rope_quant")
        .ptr(x.ptr::<bf16>()?)
        .maybe(weight.as_ref().map(|(w, _)| w.ptr::<bf16>()).transpose()?)
        .ptr(c.ptr::<f32>()?)
        .ptr(s.ptr::<f32>()?)
        .ptr(Ptr::NULL)
        .ptr(out.ptr())
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .int(t)
        .int(heads)
        .int(d)
        .int(2 * cos.dim(1)?)
        .f32(norm.map_or(0.0, |(_, eps)| eps))
        .int(kind as usize)
        .int(usize::from(inverse));
    // SAFETY: T * heads rows of D in and out, T rows of cosines and sines; a warp a row, four to a block.
    unsafe { launch.launch(((t * heads).div_ceil(4), 1, 1), 128, 0)? };
    out.into_tensor(xs.shape())
}

/// `bf16(x * factor)` for each element of `xs` bf16, the product in f32.
///
/// # Errors
/// A failed launch.
pub fn scale_bf16(xs: &Tensor, factor: f32) -> Result<Tensor> {
    const OP: &str = "scale_bf16";
    let xs = xs.contiguous()?;
    let n = xs.elem_count();
    let out = Out::<bf16>::new(device(&xs)?, n)?;
    let launch = Launch::new(device(&xs)?, kernels::SCALE_BF16, "scale_bf16")
        .ptr(Held::new(&xs, OP).ptr::<bf16>()?)
        .ptr(out.ptr())
        .long(n)
        .f32(factor);
    // SAFETY: n elements in and out, a thread each.
    unsafe { launch.launch((n.div_ceil(128), 1, 1), 128, 0)? };
    out.into_tensor(xs.shape())
}

/// Rows `ids: [T]` u32 of `table: [rows, dim]` bf16 → `[T, copies, dim]` bf16, each row `copies` times.
///
/// An id past the table gives zeros: ids are checked where they come from.
///
/// # Errors
/// A width the kernel is not made for, or a failed launch.
pub fn embedding(ids: &Tensor, table: &Tensor, copies: usize) -> Result<Tensor> {
    const OP: &str = "embedding";
    let dev = device(ids)?;
    let (rows, dim) = table.dims2()?;
    let t = ids.elem_count();
    supported(dim.is_multiple_of(8), OP, dim, "widths of multiples of 8")?;
    let out = Out::<bf16>::new(dev, t * copies * dim)?;
    let (i, w) = (Held::new(ids, OP), Held::new(table, OP));
    let launch = Launch::new(dev, kernels::EMBEDDING, "embedding")
        .ptr(i.ptr::<u32>()?)
        .ptr(w.ptr::<bf16>()?)
        .ptr(out.ptr())
        .int(dim)
        .int(copies)
        .u32(0)
        .u32(rows as u32);
    // SAFETY: T ids, a table of `rows` rows of `dim`, T * copies rows out; one block an id.
    unsafe { launch.launch((t, 1, 1), 256, 0)? };
    out.into_tensor((t, copies, dim))
}

/// `logits: [R, vocab]` f32, neither 0, rows of any distance → [`argmax`](crate::argmax()) of each row, after
/// `bias: [R, vocab]` f32 was added. `work: [R, 2]` i64 is zero, and left so.
///
/// # Errors
/// More rows than a grid has, or a failed launch.
pub fn argmax(logits: &Tensor, bias: Option<&Tensor>, work: &Tensor) -> Result<Tensor> {
    const OP: &str = "argmax";
    let dev = device(logits)?;
    let (rows, vocab) = logits.dims2()?;
    let logits = match logits.stride() {
        [_, 1] => logits.clone(),
        _ => logits.contiguous()?,
    };
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let out = Out::<u32>::new(dev, rows)?;
    let launch = Launch::new(dev, kernels::ARGMAX, "argmax")
        .ptr(Held::new(&logits, OP).start::<f32>()?)
        .maybe(
            bias.as_ref()
                .map(|bias| Held::new(bias, OP).ptr::<f32>())
                .transpose()?,
        )
        .ptr(out.ptr())
        .ptr(Held::new(work, OP).ptr::<i64>()?)
        .int(vocab)
        .long(logits.stride()[0]);
    let parts = (vocab / 2048).clamp(1, 64);
    // SAFETY: R rows of the vocabulary in, of each operand, R codes out, two zeroed words a row; the last block of
    // a row writes its code.
    unsafe { launch.launch((parts, rows, 1), 256, 0)? };
    out.into_tensor(rows)
}
