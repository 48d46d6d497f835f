//! The operations of this crate on a GPU. Shapes are checked by the public functions that call these.

use candle_core::{D, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, kernels,
        ops::{device, supported},
    },
};
use half::bf16;

/// Queries of one block of the attention kernels.
const QUERIES: usize = 128;
/// The attention kernels by the widest head they take, with the threads of a block.
const ATTENTION: [(usize, &str, usize); 4] = [
    (32, "vit_attention_32", 128),
    (64, "vit_attention_64", 128),
    (96, "vit_attention_96", 256),
    (128, "vit_attention_128", 256),
];
/// Values of a block of the elementwise kernels.
const PIECE: usize = 8 * 256;

/// `qkv: [n, 3, H, hd]`, `starts: [images + 1]` i32, `largest` patches at most in one image.
pub(crate) fn vit_attention(
    qkv: &Tensor,
    starts: &Tensor,
    images: usize,
    largest: usize,
) -> Result<Tensor> {
    const OP: &str = "full_attention";
    let dev = device(qkv)?;
    let (n, _, heads, hd) = qkv.dims4()?;
    let widest = ATTENTION[ATTENTION.len() - 1].0;
    supported(
        hd.is_multiple_of(4) && hd <= widest,
        OP,
        format!("heads of {hd}"),
        "multiples of 4 up to 128",
    )?;
    let (padded, name, threads) = ATTENTION
        .into_iter()
        .find(|(width, ..)| hd <= *width)
        .unwrap_or(ATTENTION[3]);
    let out = Out::<bf16>::new(dev, n * heads * hd)?;
    let (x, s) = (Held::new(qkv, OP), Held::new(starts, OP));
    let launch = Launch::new(dev, kernels::VIT_ATTENTION, name)
        .ptr(x.ptr::<bf16>()?)
        .ptr(s.ptr::<i32>()?)
        .ptr(out.ptr())
        .int(heads)
        .int(hd)
        .f32((hd as f64).sqrt().recip() as f32);
    let grid = (largest.div_ceil(QUERIES), heads, images);
    // SAFETY: n patches of 3 * H heads in, n rows of H heads out, images + 1 starts of which the last is n;
    // two stages of 64 padded rows of keys and values.
    unsafe { launch.launch(grid, threads, 256 * (2 * padded + 16))? };
    out.into_tensor((n, heads * hd))
}

/// `xs: [n, H, hd]`, `cos`, `sin: [n, hd / 2]` f32.
pub(crate) fn vit_rope(
    xs: &Tensor,
    (cos, sin): (&Tensor, &Tensor),
    rotated: usize,
) -> Result<Tensor> {
    const OP: &str = "rope_2d";
    let dev = device(xs)?;
    let (n, heads, hd) = xs.dims3()?;
    let rd = hd / 2;
    let out = Out::<bf16>::new(dev, xs.elem_count())?;
    let (x, c, s) = (Held::new(xs, OP), Held::new(cos, OP), Held::new(sin, OP));
    let units = n * heads * if rd.is_multiple_of(8) { rd / 8 } else { rd / 2 };
    let launch = Launch::new(dev, kernels::VIT_ROPE, "vit_rope")
        .ptr(x.ptr::<bf16>()?)
        .ptr(c.ptr::<f32>()?)
        .ptr(s.ptr::<f32>()?)
        .ptr(out.ptr())
        .long(n)
        .int(heads)
        .int(rd)
        .int(rotated);
    // SAFETY: n patches of H heads of 2 * rd in and out, n rows of rd cosines and sines, rd even.
    unsafe { launch.launch((units.div_ceil(256), 1, 1), 256, 0)? };
    out.into_tensor(xs.shape())
}

/// `xs: [n, 2 * inter]`.
pub(crate) fn vit_swiglu(xs: &Tensor) -> Result<Tensor> {
    let dev = device(xs)?;
    let (n, inter) = (xs.dims()[0], xs.dim(D::Minus1)? / 2);
    let out = Out::<bf16>::new(dev, n * inter)?;
    let x = Held::new(xs, "swiglu");
    let launch = Launch::new(dev, kernels::VIT_ELEMENTWISE, "vit_swiglu")
        .ptr(x.ptr::<bf16>()?)
        .ptr(out.ptr())
        .long(n * inter)
        .int(inter);
    // SAFETY: n rows of 2 * inter in, n of inter out.
    unsafe { launch.launch(((n * inter).div_ceil(PIECE), 1, 1), 256, 0)? };
    out.into_tensor((n, inter))
}

/// Any shape.
pub(crate) fn vit_gelu(xs: &Tensor) -> Result<Tensor> {
    let dev = device(xs)?;
    let n = xs.elem_count();
    let out = Out::<bf16>::new(dev, n)?;
    let x = Held::new(xs, "gelu");
    let launch = Launch::new(dev, kernels::VIT_ELEMENTWISE, "vit_gelu")
        .ptr(x.ptr::<bf16>()?)
        .ptr(out.ptr())
        .long(n);
    // SAFETY: n values in and out.
    unsafe { launch.launch((n.div_ceil(PIECE), 1, 1), 256, 0)? };
    out.into_tensor(xs.shape())
}

/// Two of one shape.
pub(crate) fn vit_add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let dev = device(a)?;
    let n = a.elem_count();
    let out = Out::<bf16>::new(dev, n)?;
    let (x, y) = (Held::new(a, "add"), Held::new(b, "add"));
    let launch = Launch::new(dev, kernels::VIT_ELEMENTWISE, "vit_add")
        .ptr(x.ptr::<bf16>()?)
        .ptr(y.ptr::<bf16>()?)
        .ptr(out.ptr())
        .long(n);
    // SAFETY: n values of each in, n out.
    unsafe { launch.launch((n.div_ceil(PIECE), 1, 1), 256, 0)? };
    out.into_tensor(a.shape())
}

/// `xs: [n_h * n_w, c]`, cells of `r` by `r`.
pub(crate) fn merge_cells(xs: &Tensor, n_h: usize, n_w: usize, r: usize) -> Result<Tensor> {
    const MOST: usize = deepseek_v41_core::cuda::MAX_GRID_YZ;
    let dev = device(xs)?;
    let c = xs.dim(1)?;
    let (cells, width) = (n_h.div_ceil(r) * n_w.div_ceil(r), c * r * r);
    let out = Out::<bf16>::new(dev, cells * width)?;
    let x = Held::new(xs, "merge_cells");
    let launch = Launch::new(dev, kernels::MERGE_CELLS, "merge_cells")
        .ptr(x.ptr::<bf16>()?)
        .ptr(out.ptr())
        .int(n_h)
        .int(n_w)
        .int(c)
        .int(r);
    let grid = (width.div_ceil(256), cells.min(MOST), 1);
    // SAFETY: n_h * n_w rows of c in, one row of c * r * r for each cell out; blocks stride over cells.
    unsafe { launch.launch(grid, 256, 0)? };
    out.into_tensor((cells, width))
}
