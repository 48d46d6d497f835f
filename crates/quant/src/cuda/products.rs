//! Launches of the products, by storage and by the number of tokens.

use candle_core::{CudaDevice, DType, Tensor};
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
struct Sizes {
    m: usize,
    n: usize,
    k: usize,
    groups: usize,
}

/// # Safety
/// The pointers hold what [`Sizes`] says, in the storage of `family`; scales where it has them.
unsafe fn product(
    dev: &CudaDevice,
    family: &Family,
    x: Ptr<'_>,
    w: Ptr<'_>,
    s: Ptr<'_>,
    y: Ptr<'_>,
    Sizes { m, n, k, groups }: Sizes,
) -> Result<()> {
    // More row tiles leave fewer warps to split a long K.
    let wide = usize::from(k <= 2048);
    let (name, tokens, tiles) = match m {
        0..=8 => (family.names[wide], 8, 1 + wide),
        9..=16 => (family.names[2 + wide], 16, 1 + wide),
        _ => (family.names[4], 32, 2),
    };
    let launch = Launch::new(dev, family.module, name)
        .ptr(x)
        .ptr(w)
        .ptr(s)
        .ptr(y)
        .int(m)
        .int(n)
        .int(k);
    let grid = (n.div_ceil(16 * tiles), m.div_ceil(tokens), groups);
    // SAFETY: the caller's promise about sizes; the grid covers N in row tiles and M in tokens.
    unsafe { launch.launch(grid, 256, 0) }
}

/// From this many tokens on cuBLAS multiplies bf16 weights, and a Hopper kernel fp8 ones.
pub(super) const MANY: usize = 64;

/// Tokens up to which Hopper's kernels for few tokens take a linear layer, and its activations as codes.
pub(super) const FEW: usize = 16;

const FEW_NAMES: [[&str; 3]; 4] = [
    ["fp8_few_k1_m1", "fp8_few_k1_m8", "fp8_few_k1_m16"],
    ["fp8_few_k2_m1", "fp8_few_k2_m8", "fp8_few_k2_m16"],
    ["fp8_few_k4_m1", "fp8_few_k4_m8", "fp8_few_k4_m16"],
    ["fp8_few_k8_m1", "fp8_few_k8_m8", "fp8_few_k8_m16"],
];

/// fp8 weights and few tokens on Hopper: codes on both sides, widened to f16 on the way to the tensor core,
/// in which their products are exact.
pub(crate) fn few_product(
    values: &Tensor,
    codes: &Tensor,
    scales: &Tensor,
    w: &DeviceCodes,
    (m, n, k): (usize, usize, usize),
) -> Result<Tensor> {
    const OP: &str = "linear";
    let dev = device(values)?;
    let (slot, tokens) = match m {
        0..=1 => (0, 1),
        2..=8 => (1, 8),
        _ => (2, 16),
    };
    // Enough rows fill the device; fewer are split over K, for many rows of several tokens in fewer parts.
    // 16 tokens of a long K need the split for room.
    let (parts, split) = match n {
        16_384.. if tokens == 16 && k > 4096 => (1, 2),
        16_384.. => (0, 1),
        4096.. if tokens > 1 => (2, 4),
        _ => (3, 8),
    };
    let groups = 4 * k.div_ceil(128).div_ceil(split);
    let y = Out::<bf16>::new(dev, m * n)?;
    let launch = Launch::new(dev, kernels::FP8_FEW_SM90, FEW_NAMES[parts][slot])
        .ptr(Held::new(codes, OP).ptr::<u8>()?)
        .ptr(Held::new(scales, OP).ptr::<u8>()?)
        .ptr(Held::new(&w.codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&w.scales, OP).ptr::<u8>()?)
        .ptr(y.ptr())
        .int(m)
        .int(n)
        .int(k);
    let shared = 4 * 18_432 + groups * (36 * tokens + 16) + (16 * tokens).max(128);
    // SAFETY: codes [m, k] and weight [n, k] with their scales, the output [m, n]; a cluster of `split`
    // blocks takes 128 rows.
    unsafe { launch.launch((n.div_ceil(128) * split, 1, 1), 256, shared)? };
    y.into_tensor(out_shape(values, n))
}

/// fp8 weights and many tokens, at the rate of Hopper's bf16 tensor core: the tokens are first laid out
/// as its shared memory takes them.
pub(super) fn many_product(values: &Tensor, w: &DeviceCodes, n: usize, k: usize) -> Result<Tensor> {
    const OP: &str = "linear";
    let values = values.contiguous()?;
    let dev = device(&values)?;
    let m = values.elem_count() / k;
    let (width, padded) = (k.next_multiple_of(64), m.next_multiple_of(8));
    let tiled = Out::<bf16>::new(dev, padded * width)?;
    let launch = Launch::new(dev, kernels::ACT_QUANT, "act_quant_tiled")
        .ptr(Held::new(&values, OP).ptr::<bf16>()?)
        .ptr(Ptr::NULL)
        .int(1)
        .ptr(tiled.ptr())
        .int(k)
        .long(k)
        .long(padded)
        .int(0)
        .int(0);
    // SAFETY: m rows of k in, as many of `padded` rows of `width` out; a block a row, which it holds.
    unsafe { launch.launch((m, 1, 1), 256, 2 * width)? };
    let sms = multiprocessors(dev)?;
    let tiles = |tokens: usize| n.div_ceil(128) * m.div_ceil(tokens);
    // The widest tile that does not leave more of the last round of blocks idle than a narrower one.
    let forms = [
        ("fp8_many_256", 256),
        ("fp8_many_192", 192),
        ("fp8_many_128", 128),
    ];
    let (name, tokens) = forms
        .into_iter()
        .min_by_key(|(_, tokens)| tiles(*tokens).div_ceil(sms) * tokens)
        .unwrap_or(forms[0]);
    let y = Out::<bf16>::new(dev, m * n)?;
    let launch = Launch::new(dev, kernels::FP8_MANY_SM90, name)
        .ptr(tiled.ptr())
        .ptr(Held::new(&w.codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&w.scales, OP).ptr::<u8>()?)
        .ptr(y.ptr())
        .int(m)
        .int(n)
        .int(k)
        .long(padded);
    let shared = 4 * tokens * 128 + 2 * tokens * 144 + 1024;
    // SAFETY: the weight is [n, k] with its scales, the output [m, n]; what the padding rows hold stays in
    // columns that are not stored.
    unsafe { launch.launch((sms.min(tiles(tokens)), 1, 1), 384, shared)? };
    y.into_tensor(out_shape(&values, n))
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
    n: usize,
    k: usize,
    groups: usize,
) -> Result<Tensor> {
    const OP: &str = "linear";
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let m = xs.elem_count() / (groups * k).max(1);
    let y = Out::<bf16>::new(dev, m * groups * n)?;
    let (x, c, s) = (
        Held::new(&xs, OP),
        Held::new(&w.codes, OP),
        Held::new(&w.scales, OP),
    );
    let sizes = Sizes { m, n, k, groups };
    // SAFETY: the weight was checked against its shape when it was made, the output is [m, groups * n].
    unsafe {
        product(
            dev,
            family,
            x.ptr::<bf16>()?,
            c.ptr::<u8>()?,
            s.ptr::<u8>()?,
            y.ptr(),
            sizes,
        )?
    };
    y.into_tensor(out_shape(&xs, groups * n))
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
    const OP: &str = "linear";
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let m = xs.elem_count() / (groups * k).max(1);
    let y = Out::<bf16>::new(dev, m * groups * n)?;
    let (x, w) = (
        Held::new(&xs, OP).ptr::<bf16>()?,
        Held::new(w, OP).ptr::<bf16>()?,
    );
    // SAFETY: `w` is [groups * n, k], the output [m, groups * n].
    unsafe {
        product(
            dev,
            &BF16,
            x,
            w,
            Ptr::NULL,
            y.ptr(),
            Sizes { m, n, k, groups },
        )?
    };
    y.into_tensor(out_shape(&xs, groups * n))
}

/// `xs: [.., k]` bf16 or f32, `w: [n, k]` bf16 or f32 → `[.., n]` f32. The kernel takes bf16 on both sides, whose products are exact in f32; anything else goes
/// through cuBLAS in f32.
///
/// # Errors
/// Shapes that do not fit, or a failed launch.
pub fn wide_product(xs: &Tensor, w: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear";
    let (n, k) = w.dims2()?;
    let m = xs.elem_count() / k.max(1);
    if xs.dtype() != DType::BF16 || w.dtype() != DType::BF16 || !k.is_multiple_of(32) {
        let (x, w) = (xs.to_dtype(DType::F32)?, w.to_dtype(DType::F32)?);
        return Ok(x
            .reshape((m, k))?
            .matmul(&w.t()?)?
            .reshape(out_shape(xs, n))?);
    }
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let y = Out::<f32>::new(dev, m * n)?;
    let (x, w) = (
        Held::new(&xs, OP).ptr::<bf16>()?,
        Held::new(w, OP).ptr::<bf16>()?,
    );
    // SAFETY: `w` is [n, k], the output [m, n] of f32.
    unsafe {
        product(
            dev,
            &BF16_F32,
            x,
            w,
            Ptr::NULL,
            y.ptr(),
            Sizes { m, n, k, groups: 1 },
        )?
    };
    y.into_tensor(out_shape(&xs, n))
}
