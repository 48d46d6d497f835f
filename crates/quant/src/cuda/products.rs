//! Launches of the products, by storage and by the number of tokens.

use candle_core::{
    DType, Tensor,
    cuda_backend::{
        CudaDType,
        cudarc::driver::{DeviceRepr, ValidAsZeroBits},
    },
};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, Ptr,
        kernels::{self, Module},
        multiprocessors,
        ops::device,
    },
};
use half::bf16;

use super::DeviceCodes;

/// The kernels of one storage, by tokens and by row tiles of a block.
pub(super) struct Family {
    module: Module,
    names: [&'static str; 5],
}

macro_rules! family {
    ($module:ident, $stem:literal) => {
        Family {
            module: kernels::$module,
            names: [
                concat!($stem, "_m8_t1"),
                concat!($stem, "_m8_t2"),
                concat!($stem, "_m16_t1"),
                concat!($stem, "_m16_t2"),
                concat!($stem, "_m32_t2"),
            ],
        }
    };
}

pub(super) const FP8: Family = family!(FP8_LINEAR, "fp8_linear");

pub(super) const FP4: Family = family!(FP4_LINEAR, "fp4_linear");

const BF16: Family = family!(BF16_LINEAR, "bf16_linear");

const BF16_F32: Family = family!(BF16_LINEAR, "bf16_linear_f32");

/// Sizes of a product: `x [m, groups * k]`, `w [groups, n, k]` → `y [m, groups * n]`.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) groups: usize,
}

/// `xs` times weights in the storage of `family`, to elements `T`, on any device.
///
/// # Safety
/// The pointers hold what [`Sizes`] says, in that storage; scales where it has them.
unsafe fn product<T: CudaDType + DeviceRepr + ValidAsZeroBits + 'static>(
    xs: &Tensor,
    family: &Family,
    w: Ptr<'_>,
    s: Ptr<'_>,
    (n, k, groups): (usize, usize, usize),
) -> Result<Tensor> {
    const OP: &str = "linear";
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let m = xs.elem_count() / (groups * k).max(1);
    let y = Out::<T>::new(dev, m * groups * n)?;
    // More row tiles leave fewer warps to split a long K.
    let wide = usize::from(k <= 2048);
    let (name, tokens, tiles) = match m {
        0..=8 => (family.names[wide], 8, 1 + wide),
        9..=16 => (family.names[2 + wide], 16, 1 + wide),
        _ => (family.names[4], 32, 2),
    };
    let launch = Launch::new(dev, family.module, name)
        .ptr(Held::new(&xs, OP).ptr::<bf16>()?)
        .ptr(w)
        .ptr(s)
        .ptr(y.ptr())
        .int(m)
        .int(n)
        .int(k);
    let grid = (n.div_ceil(16 * tiles), m.div_ceil(tokens), groups);
    // SAFETY: the caller's promise about the weight; x is [m, groups * k], the output [m, groups * n]; the grid
    // covers N in row tiles and M in tokens.
    unsafe { launch.launch(grid, 256, 0)? };
    y.into_tensor(out_shape(&xs, groups * n))
}

/// From this many tokens on cuBLAS multiplies bf16 weights, and a Hopper kernel fp8 ones.
pub(super) const MANY: usize = 64;

/// Tokens `[m, width]` bf16 as `fp8_many` takes them, laid out as its shared memory has them; `quantise`: through
/// `act_quant` on the way.
pub(super) fn tiled(values: &Tensor, quantise: bool) -> Result<Tensor> {
    const OP: &str = "act_quant_tiled";
    let values = values.contiguous()?;
    let dev = device(&values)?;
    let k = values.dims().last().copied().unwrap_or(0);
    let m = values.elem_count() / k.max(1);
    let (width, padded) = (k.next_multiple_of(64), m.next_multiple_of(8));
    let out = Out::<bf16>::new(dev, padded * width)?;
    let launch = Launch::new(dev, kernels::ACT_QUANT, "act_quant_tiled")
        .ptr(Held::new(&values, OP).ptr::<bf16>()?)
        .ptr(Ptr::NULL)
        .int(1)
        .ptr(out.ptr())
        .int(k)
        .long(k)
        .long(padded)
        .int(0)
        .int(usize::from(quantise));
    // SAFETY: m rows of k in, as many of `padded` rows of `width` out; a block a row, which it holds.
    unsafe { launch.launch((m, 1, 1), 256, 2 * width)? };
    out.into_tensor((padded, width))
}

/// The widest row that [`tiled`] holds in shared memory.
pub(super) const MOST_TILED: usize = 98_304;

/// fp8 weights and many tokens, at the rate of Hopper's bf16 tensor core. `tokens` is what [`tiled`] gives of `m` rows of
/// `groups * k` columns.
pub(super) fn many_product(tokens: &Tensor, w: &DeviceCodes, sizes: Sizes) -> Result<Tensor> {
    const OP: &str = "linear";
    let dev = device(tokens)?;
    let Sizes { m, n, k, groups } = sizes;
    let sms = multiprocessors(dev)?;
    let rows = groups * n;
    let tiles = |tokens: usize| rows.div_ceil(128) * m.div_ceil(tokens);
    // A tile takes as long as the products of 300 tokens more would (300 to 500, by `bench .. many` of
    // `kernels/tests_cuda`): widening its weights is the same for all widths. That times rounds of tiles is what it all takes.
    let takes = |tokens: usize| tiles(tokens).div_ceil(sms) * (tokens + 300);
    let forms = [
        ("fp8_many_256", 256),
        ("fp8_many_192", 192),
        ("fp8_many_128", 128),
    ];
    let (name, wide) = forms
        .into_iter()
        .min_by_key(|(_, tokens)| takes(*tokens))
        .unwrap_or(forms[0]);
    let y = Out::<bf16>::new(dev, m * rows)?;
    let launch = Launch::new(dev, kernels::FP8_MANY_SM90, name)
        .ptr(Held::new(tokens, OP).ptr::<bf16>()?)
        .ptr(Held::new(&w.codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&w.scales, OP).ptr::<u8>()?)
        .ptr(y.ptr())
        .int(m)
        .int(rows)
        .int(k)
        .int(n)
        .long(tokens.dims()[0]);
    let shared = 4 * wide * 128 + 2 * wide * 144 + 1024;
    // SAFETY: weights [groups, n, k] with their scales, groups of whole tiles; the output [m, groups * n]; what the
    // padding rows hold stays in columns that are not stored.
    unsafe { launch.launch((sms.min(tiles(wide)), 1, 1), 384, shared)? };
    y.into_tensor((m, rows))
}

pub(super) fn out_shape(xs: &Tensor, n: usize) -> Vec<usize> {
    let mut dims = xs.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = n;
    }
    dims
}

pub(super) fn coded_product(
    xs: &Tensor,
    family: &Family,
    w: &DeviceCodes,
    (n, k, groups): (usize, usize, usize),
) -> Result<Tensor> {
    let (c, s) = (
        Held::new(&w.codes, "linear").ptr::<u8>()?,
        Held::new(&w.scales, "linear").ptr::<u8>()?,
    );
    // SAFETY: the weight was checked against its shape when it was made.
    unsafe { product::<bf16>(xs, family, c, s, (n, k, groups)) }
}

pub(super) fn bf16_product(xs: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (n, k) = w.dims2()?;
    let m = xs.elem_count() / k.max(1);
    if m >= MANY || !k.is_multiple_of(32) {
        return Ok(xs
            .reshape((m, k))?
            .matmul(&w.t()?)?
            .reshape(out_shape(xs, n))?);
    }
    bf16_groups(xs, w, n, k, 1)
}

pub(super) fn bf16_groups(
    xs: &Tensor,
    w: &Tensor,
    n: usize,
    k: usize,
    groups: usize,
) -> Result<Tensor> {
    let w = Held::new(w, "linear").ptr::<bf16>()?;
    // SAFETY: `w` is [groups * n, k].
    unsafe { product::<bf16>(xs, &BF16, w, Ptr::NULL, (n, k, groups)) }
}

/// `xs: [.., k]` bf16 or f32, `w: [n, k]` bf16 or f32 → `[.., n]` f32. The kernel takes bf16 on both sides, whose products are exact in f32; anything else goes
/// through cuBLAS in f32.
///
/// # Errors
/// Shapes that do not fit, or a failed launch.
pub fn wide_product(xs: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (n, k) = w.dims2()?;
    let m = xs.elem_count() / k.max(1);
    if xs.dtype() != DType::BF16 || w.dtype() != DType::BF16 || !k.is_multiple_of(32) {
        let (x, w) = (xs.to_dtype(DType::F32)?, w.to_dtype(DType::F32)?);
        return Ok(x
            .reshape((m, k))?
            .matmul(&w.t()?)?
            .reshape(out_shape(xs, n))?);
    }
    let w = Held::new(w, "linear").ptr::<bf16>()?;
    // SAFETY: `w` is [n, k].
    unsafe { product::<f32>(xs, &BF16_F32, w, Ptr::NULL, (n, k, 1)) }
}
