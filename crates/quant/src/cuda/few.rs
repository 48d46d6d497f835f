//! Products of few tokens on Hopper, `fp8_few`: codes on both sides, widened to f16 on the way to the tensor core, in which
//! their products are exact.

use candle_core::{CudaDevice, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, clusters_at_once,
        kernels::{self, Module},
        ops::device,
    },
};
use half::bf16;

use super::{
    Activation, DeviceCodes, Form,
    products::{Sizes, out_shape},
};

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
    /// Stages of the rings of weights, for tokens as codes, and as they are.
    stages: [usize; 2],
}

/// Bytes of a stage of a block's rings.
const STAGE: usize = 16_384;

const FEW_FORMS: [Few; 3] = [
    Few {
        tokens: 1,
        names: ["fp8_few_m1", "fp8_few_plain_m1"],
        split: 6,
        stages: [4, 4],
    },
    Few {
        tokens: 8,
        names: ["fp8_few_m8", "fp8_few_plain_m8"],
        split: 5,
        stages: [5, 5],
    },
    Few {
        tokens: FEW,
        names: ["fp8_few_m16", "fp8_few_plain_m16"],
        split: 5,
        stages: [4, 5],
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

/// How a kernel made of `common/few_product.cuh` is to be launched.
#[derive(Debug, Clone, Copy)]
pub struct FewPlan {
    /// Blocks of 256.
    pub grid: (usize, usize, usize),
    /// Blocks of a cluster.
    pub split: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl FewPlan {
    /// One token of bf16 values times a weight `[n, k]`, by kernel `name` of `module`, in which `beside` clusters
    /// more do something else.
    ///
    /// # Errors
    /// The kernel cannot be loaded.
    pub fn one_token(
        dev: &CudaDevice,
        (module, name): (Module, &'static str),
        (n, k): (usize, usize),
        beside: usize,
    ) -> Result<Self> {
        let sizes = Sizes {
            m: 1,
            n,
            k,
            groups: 1,
        };
        Self::of(dev, (module, name), sizes, (&FEW_FORMS[0], false), beside)
    }

    /// A tile of 128 rows is shared by as many blocks as all are at work at once: another round of blocks
    /// costs as much as the first. Clusters of six fill a multiprocessor's neighbourhood only where three
    /// blocks share it, clusters of eight pay where there are few tiles.
    fn of(
        dev: &CudaDevice,
        (module, name): (Module, &'static str),
        Sizes { n, k, groups, .. }: Sizes,
        (form, plain): (&Few, bool),
        beside: usize,
    ) -> Result<Self> {
        let (tiles, stages) = (n.div_ceil(128), k.div_ceil(128));
        let shared = |split: usize| {
            let groups = 4 * stages.div_ceil(split);
            let token = if plain { 68 } else { 36 };
            form.stages[usize::from(plain)] * STAGE
                + groups * (token * form.tokens + 16)
                + (48 * form.tokens).max(128)
        };
        let at_once = |split: usize| {
            let block = (256, shared(split));
            clusters_at_once(dev, module, name, split, block)
        };
        let clusters = tiles * groups + beside;
        let mut split = 0;
        if stages >= 8 && 2 * clusters <= at_once(8)? {
            split = 8;
        }
        for fewer in (1..=form.split.min(stages)).rev() {
            if split == 0 && clusters <= at_once(fewer)? {
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
            grid: ((tiles + beside) * split, groups, 1),
            split,
            shared: shared(split),
        })
    }
}

/// The kernel of `fp8_few` for these sizes, and its launch.
fn plan(dev: &CudaDevice, sizes: Sizes, reads: Reads) -> Result<(&'static str, FewPlan)> {
    let form = FEW_FORMS
        .iter()
        .find(|form| sizes.m <= form.tokens)
        .unwrap_or(&FEW_FORMS[2]);
    let name = match reads {
        Reads::Codes => form.names[0],
        Reads::Plain => form.names[1],
        Reads::Raw => "fp8_few_raw_m1",
        Reads::Swiglu => "fp8_few_swiglu_m1",
    };
    let plain = reads == Reads::Plain;
    let kernel = (kernels::FP8_FEW_SM90, name);
    Ok((name, FewPlan::of(dev, kernel, sizes, (form, plain), 0)?))
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
            let (name, few) = plan(dev, sizes, Reads::Codes)?;
            let launch = Launch::new(dev, kernels::FP8_FEW_SM90, name)
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
            let (name, few) = plan(dev, sizes, Reads::Raw)?;
            let launch = Launch::new(dev, kernels::FP8_FEW_SM90, name)
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
    let (name, few) = plan(dev, Sizes { m, n, k, groups }, Reads::Swiglu)?;
    let y = Out::<bf16>::new(dev, n)?;
    let launch = Launch::new(dev, kernels::FP8_FEW_SM90, name)
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
    let (name, few) = plan(dev, sizes, Reads::Plain)?;
    let y = Out::<bf16>::new(dev, m * groups * n)?;
    let launch = Launch::new(dev, kernels::FP8_FEW_SM90, name)
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
