//! Launches of the products, by storage and by the number of tokens.

use candle_core::{
    CudaDevice, DType, Tensor,
    cuda_backend::{
        CudaDType,
        cudarc::driver::{DeviceRepr, ValidAsZeroBits},
    },
};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, Ptr, clusters_at_once,
        kernels::{self, Module},
        multiprocessors,
        ops::device,
    },
};
use half::bf16;

use super::{Activation, DeviceCodes, Form};

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

/// Tokens up to which Hopper's kernels for few tokens take a linear layer, and its activations as codes.
pub(super) const FEW: usize = 16;

/// A form of the kernels for few tokens.
struct Few {
    /// Tokens that it takes.
    tokens: usize,
    /// Kernels of tokens as codes, and as they are.
    names: [&'static str; 2],
    /// Blocks that share a tile, most of them.
    split: usize,
    /// Bytes of the rings of weights.
    ring: usize,
}

const FEW_FORMS: [Few; 3] = [
    Few {
        tokens: 1,
        names: ["fp8_few_m1", "fp8_few_plain_m1"],
        split: 6,
        ring: 4 * 16_384,
    },
    Few {
        tokens: 8,
        names: ["fp8_few_m8", "fp8_few_plain_m8"],
        split: 5,
        ring: 5 * 16_384,
    },
    Few {
        tokens: FEW,
        names: ["fp8_few_m16", "fp8_few_plain_m16"],
        split: 5,
        ring: 5 * 16_384,
    },
];

/// What a kernel for few tokens reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reads {
    Codes,
    /// bf16 values, which it multiplies as they are.
    Plain,
    /// One token of bf16 values, which it quantises.
    Raw,
    /// One token of an expert's gate and up values.
    Swiglu,
}

/// A kernel for few tokens as it is to be launched.
struct FewPlan {
    name: &'static str,
    grid: (usize, usize, usize),
    split: usize,
    shared: usize,
}

impl FewPlan {
    /// For these sizes.
    ///
    /// A tile of 128 rows is shared by as many blocks as all are at work at once: another round of blocks
    /// costs as much as the first. Clusters of six fill a multiprocessor's neighbourhood only where three
    /// blocks share it, clusters of eight pay where there are few tiles.
    fn new(dev: &CudaDevice, sizes: Sizes, reads: Reads) -> Result<Self> {
        let Sizes { m, n, k, groups } = sizes;
        let form = FEW_FORMS
            .iter()
            .find(|form| m <= form.tokens)
            .unwrap_or(&FEW_FORMS[2]);
        let name = match reads {
            Reads::Codes => form.names[0],
            Reads::Plain => form.names[1],
            Reads::Raw => "fp8_few_raw_m1",
            Reads::Swiglu => "fp8_few_swiglu_m1",
        };
        let (tiles, stages) = (n.div_ceil(128), k.div_ceil(128));
        let shared = |split: usize| {
            let groups = 4 * stages.div_ceil(split);
            let token = if reads == Reads::Plain { 68 } else { 36 };
            form.ring + groups * (token * form.tokens + 16) + (48 * form.tokens).max(128)
        };
        let at_once = |split: usize| {
            let block = (256, shared(split));
            clusters_at_once(dev, kernels::FP8_FEW_SM90, name, split, block)
        };
        let mut split = 0;
        if stages >= 8 && 2 * tiles * groups <= at_once(8)? {
            split = 8;
        }
        for fewer in (1..=form.split.min(stages)).rev() {
            if split == 0 && tiles * groups <= at_once(fewer)? {
                split = fewer;
            }
        }
        // More tiles than the device holds: one block each, if there is room for all of its tokens' columns.
        if split == 0 {
            split = 1;
            while split < 8 && at_once(split)? == 0 {
                split += 1;
            }
        }
        Ok(Self {
            name,
            grid: (tiles * split, groups, 1),
            split,
            shared: shared(split),
        })
    }
}

/// fp8 weights and few tokens on Hopper: codes on both sides, widened to f16 on the way to the tensor core,
/// in which their products are exact. `None` for tokens that are neither codes nor one.
pub(crate) fn few_product(
    xs: &Activation,
    w: &DeviceCodes,
    (m, n, k): (usize, usize, usize),
) -> Result<Option<Tensor>> {
    const OP: &str = "linear";
    let values = &xs.values;
    let dev = device(values)?;
    let sizes = Sizes { m, n, k, groups: 1 };
    let y = Out::<bf16>::new(dev, m * n)?;
    let (weight, scales) = (
        Held::new(&w.codes, OP).ptr::<u8>()?,
        Held::new(&w.scales, OP).ptr::<u8>()?,
    );
    match &xs.form {
        Form::Coded(codes, of_codes) if m <= FEW => {
            let few = FewPlan::new(dev, sizes, Reads::Codes)?;
            let launch = Launch::new(dev, kernels::FP8_FEW_SM90, few.name)
                .ptr(Held::new(codes, OP).ptr::<u8>()?)
                .ptr(Held::new(of_codes, OP).ptr::<u8>()?)
                .ptr(weight)
                .ptr(scales)
                .ptr(y.ptr())
                .int(m)
                .int(n)
                .int(k)
                .clusters(few.split);
            // SAFETY: codes [m, k] and weight [n, k] with their scales, the output [m, n]; a cluster of `split`
            // blocks takes 128 rows.
            unsafe { launch.launch(few.grid, 256, few.shared)? };
        }
        Form::Raw if m == 1 => {
            let few = FewPlan::new(dev, sizes, Reads::Raw)?;
            let launch = Launch::new(dev, kernels::FP8_FEW_SM90, few.name)
                .ptr(Held::new(values, OP).ptr::<bf16>()?)
                .ptr(weight)
                .ptr(scales)
                .ptr(y.ptr())
                .int(m)
                .int(n)
                .int(k)
                .clusters(few.split);
            // SAFETY: as above, with a token of k values.
            unsafe { launch.launch(few.grid, 256, few.shared)? };
        }
        _ => return Ok(None),
    }
    y.into_tensor(out_shape(values, n)).map(Some)
}

/// fp8 weights and one token's gate and up values, `[1, k]` bf16 each, on Hopper.
pub(super) fn few_swiglu_product(
    gate: &Tensor,
    up: &Tensor,
    w: &DeviceCodes,
    (n, k): (usize, usize),
    limit: f32,
) -> Result<Tensor> {
    const OP: &str = "swiglu";
    let dev = device(gate)?;
    let (m, groups) = (1, 1);
    let few = FewPlan::new(dev, Sizes { m, n, k, groups }, Reads::Swiglu)?;
    let y = Out::<bf16>::new(dev, n)?;
    let launch = Launch::new(dev, kernels::FP8_FEW_SM90, few.name)
        .ptr(Held::new(gate, OP).ptr::<bf16>()?)
        .ptr(Held::new(up, OP).ptr::<bf16>()?)
        .ptr(Held::new(&w.codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&w.scales, OP).ptr::<u8>()?)
        .ptr(y.ptr())
        .int(m)
        .int(n)
        .int(k)
        .f32(limit)
        .clusters(few.split);
    // SAFETY: gate and up [k], the weight [n, k] with its scales, the output [n].
    unsafe { launch.launch(few.grid, 256, few.shared)? };
    y.into_tensor((1, n))
}

/// fp8 weights and few tokens that are not quantised, on Hopper: `xs: [m, groups * k]`.
pub(super) fn few_plain_product(xs: &Tensor, w: &DeviceCodes, sizes: Sizes) -> Result<Tensor> {
    const OP: &str = "grouped linear";
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let Sizes { m, n, k, groups } = sizes;
    let few = FewPlan::new(dev, sizes, Reads::Plain)?;
    let y = Out::<bf16>::new(dev, m * groups * n)?;
    let launch = Launch::new(dev, kernels::FP8_FEW_SM90, few.name)
        .ptr(Held::new(&xs, OP).ptr::<bf16>()?)
        .ptr(Held::new(&w.codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&w.scales, OP).ptr::<u8>()?)
        .ptr(y.ptr())
        .int(m)
        .int(n)
        .int(k)
        .clusters(few.split);
    // SAFETY: tokens [m, groups * k], weights [groups, n, k] with their scales, the output [m, groups * n].
    unsafe { launch.launch(few.grid, 256, few.shared)? };
    y.into_tensor(out_shape(&xs, groups * n))
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
