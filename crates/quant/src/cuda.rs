//! The operations of this crate on a GPU.
//!
//! Weights are uploaded once, as stored; a product widens them in registers. Activations of a quantised
//! product go through [`act_quant_values`] first, whose result is exact in bf16.

use candle_core::{CudaDevice, D, DType, Device, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::WeightRows,
    cuda::{
        Held, Launch, Out, Ptr, bytes_to_device, fits_bf16, is_hopper,
        kernels::{self, Module},
        multiprocessors,
        ops::{device, supported},
    },
};
use half::bf16;

use crate::{
    GroupedLinear, Linear, WideRows,
    ops::{
        act_quant::{ActScale, QuantizedActivation},
        fp4_act_quant::ScaleFormat,
        fp8_gemm::Quantised,
    },
    weight::{FP8_TILE, Fp8Weight},
};

/// Codes and scales of a weight on the device, U8 each.
#[derive(Debug, Clone)]
pub struct DeviceCodes {
    /// As stored.
    pub codes: Tensor,
    /// One byte a group; fp8 in tiles of 32 whatever the file has.
    pub scales: Tensor,
}

impl DeviceCodes {
    /// Uploads both.
    ///
    /// # Errors
    /// [`Error::Device`]: the memory is full.
    pub fn new(codes: &[u8], scales: &[u8], dev: &CudaDevice) -> Result<Self> {
        Ok(Self {
            codes: bytes_to_device(codes, dev)?,
            scales: bytes_to_device(scales, dev)?,
        })
    }
}

/// The layer with its weight on `device`.
pub(crate) fn upload(linear: Linear, device: &Device) -> Result<Linear> {
    let Device::Cuda(dev) = device else {
        return Ok(linear);
    };
    let bf16_tensor = |bytes: &[u8], w: &dyn WeightRows| -> Result<Tensor> {
        Ok(Tensor::from_raw_buffer(
            bytes,
            DType::BF16,
            &[w.rows(), w.cols()],
            device,
        )?)
    };
    Ok(match linear {
        Linear::Bf16(w) => {
            let copy = bf16_tensor(w.bytes(), &w)?;
            Linear::Bf16(w.with_device(Some(copy)))
        }
        Linear::F32(WideRows::Bf16(w)) => {
            let copy = bf16_tensor(w.bytes(), &w)?;
            Linear::F32(WideRows::Bf16(w.with_device(Some(copy))))
        }
        Linear::F32(WideRows::F32(w)) => {
            let values: Vec<f32> = w
                .bytes()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            let narrow = fits_bf16(&values);
            let copy = Tensor::from_vec(values, (w.rows(), w.cols()), &Device::Cpu)?;
            let copy = if narrow {
                copy.to_dtype(DType::BF16)?
            } else {
                copy
            };
            Linear::F32(WideRows::F32(w.with_device(Some(copy.to_device(device)?))))
        }
        Linear::Fp8(w) => {
            let copy = DeviceCodes::new(w.codes(), &scales_of_32(&w), dev)?;
            Linear::Fp8(w.with_device(copy))
        }
        Linear::Fp4(w) => {
            let copy = DeviceCodes::new(w.packed(), w.scales(), dev)?;
            Linear::Fp4(w.with_device(copy))
        }
    })
}

/// The scales in tiles of 32, the only ones kernels know: wider tiles repeat theirs.
pub fn scales_of_32(w: &Fp8Weight) -> Vec<u8> {
    let (tile, per) = (w.tile(), w.cols() / w.tile());
    if tile == FP8_TILE {
        return w.scales().to_vec();
    }
    let (rows, cols) = (w.rows().div_ceil(FP8_TILE), w.cols() / FP8_TILE);
    let mut out = Vec::with_capacity(rows * cols);
    for row in 0..rows {
        let line = &w.scales()[row * FP8_TILE / tile * per..][..per];
        out.extend((0..cols).map(|col| line[col * FP8_TILE / tile]));
    }
    out
}

/// `[.., k]` bf16 → the same shape: the values that the codes and scales of `act_quant` stand for.
///
/// # Errors
/// `k` is not a multiple of 32, or a failed launch.
pub fn act_quant_values(xs: &Tensor) -> Result<Tensor> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let out = Out::<bf16>::new(dev, xs.elem_count())?;
    quantise(dev, &xs, Ptr::NULL, Ptr::NULL, out.ptr())?;
    out.into_tensor(xs.shape())
}

/// `[.., k]` bf16 → e4m3 codes `[.., k]` and e8m0 scales `[.., k/32]`.
///
/// # Errors
/// `k` is not a multiple of 32, or a failed launch.
pub fn act_quant_codes(xs: &Tensor) -> Result<(Tensor, Tensor)> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let codes = Out::<u8>::new(dev, xs.elem_count())?;
    let scales = Out::<u8>::new(dev, xs.elem_count() / 32)?;
    quantise(dev, &xs, codes.ptr(), scales.ptr(), Ptr::NULL)?;
    Ok((
        codes.into_tensor(xs.shape())?,
        scales.into_tensor(groups_of(&xs, 32))?,
    ))
}

fn groups_of(xs: &Tensor, group: usize) -> Vec<usize> {
    let mut dims = xs.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= group;
    }
    dims
}

fn quantise(
    dev: &CudaDevice,
    xs: &Tensor,
    codes: Ptr<'_>,
    scales: Ptr<'_>,
    fake: Ptr<'_>,
) -> Result<()> {
    const OP: &str = "act_quant";
    let k = xs.dim(D::Minus1)?;
    supported(k.is_multiple_of(32), OP, k, "widths of multiples of 32")?;
    let units = xs.elem_count() / 8;
    let launch = Launch::new(dev, kernels::ACT_QUANT, "act_quant")
        .ptr(Held::new(xs, OP).ptr::<bf16>()?)
        .ptr(codes)
        .ptr(scales)
        .ptr(fake)
        .long(units);
    // SAFETY: outputs have an element (a scale: 32) for each input; a thread takes eight of `units`.
    unsafe { launch.launch((units.div_ceil(256), 1, 1), 256, 0) }
}

/// [`act_quant_with`](crate::act_quant_with) in groups of any size.
///
/// # Errors
/// A failed launch.
pub fn act_quant_any(xs: &Tensor, group: usize, format: ActScale) -> Result<(Tensor, Tensor)> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let (n, shape) = (xs.elem_count(), groups_of(&xs, group));
    let codes = Out::<u8>::new(dev, n)?;
    let scales = match format {
        ActScale::E8M0 => {
            let scales = Out::<u8>::new(dev, n / group)?;
            any_group(
                &xs,
                group,
                format,
                [codes.ptr(), scales.ptr(), Ptr::NULL, Ptr::NULL],
            )?;
            scales.into_tensor(shape)?
        }
        ActScale::F32 => {
            let scales = Out::<f32>::new(dev, n / group)?;
            any_group(
                &xs,
                group,
                format,
                [codes.ptr(), Ptr::NULL, scales.ptr(), Ptr::NULL],
            )?;
            scales.into_tensor(shape)?
        }
    };
    Ok((codes.into_tensor(xs.shape())?, scales))
}

/// [`fake_quant_fp8_with`](crate::fake_quant_fp8_with) in groups of any size.
///
/// # Errors
/// A failed launch.
pub fn fake_quant_any(xs: &Tensor, group: usize, format: ActScale) -> Result<Tensor> {
    let xs = xs.contiguous()?;
    let out = Out::<bf16>::new(device(&xs)?, xs.elem_count())?;
    any_group(
        &xs,
        group,
        format,
        [Ptr::NULL, Ptr::NULL, Ptr::NULL, out.ptr()],
    )?;
    out.into_tensor(xs.shape())
}

/// `out`: codes, scales as bytes and as f32, values; null for what is not wanted.
fn any_group(xs: &Tensor, group: usize, format: ActScale, out: [Ptr<'_>; 4]) -> Result<()> {
    let groups = xs.elem_count() / group.max(1);
    let [codes, scales, scales_f32, fake] = out;
    let launch = Launch::new(device(xs)?, kernels::ACT_QUANT_ANY, "act_quant_any")
        .ptr(Held::new(xs, "act_quant").ptr::<bf16>()?)
        .ptr(codes)
        .ptr(scales)
        .ptr(scales_f32)
        .ptr(fake)
        .long(groups)
        .int(group)
        .int(usize::from(format == ActScale::E8M0));
    // SAFETY: outputs have an element (a scale: a group) for each input; a warp a group, four to a block.
    unsafe { launch.launch((groups.div_ceil(4), 1, 1), 128, 0) }
}

/// A product on ready codes, `a: [.., k]` in groups of `group`. A weight that is not on the device is
/// uploaded for it.
pub(crate) fn gemm<W: Quantised>(
    a: &QuantizedActivation,
    group: usize,
    weight: &W,
) -> Result<Tensor> {
    const OP: &str = "quantised gemm";
    let (codes, scales) = (a.data.contiguous()?, a.scale.contiguous()?);
    let dev = device(&codes)?;
    let n = codes.elem_count();
    let values = Out::<bf16>::new(dev, n)?;
    let launch = Launch::new(dev, kernels::ACT_QUANT_ANY, "act_values")
        .ptr(Held::new(&codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&scales, OP).ptr::<u8>()?)
        .ptr(values.ptr())
        .long(n)
        .int(group);
    // SAFETY: n codes and a scale for each `group` of them; a thread a code.
    unsafe { launch.launch((n.div_ceil(256), 1, 1), 256, 0)? };
    let linear = weight.linear();
    let linear = match &linear {
        Linear::Fp8(w) if w.device().is_some() => linear,
        Linear::Fp4(w) if w.device().is_some() => linear,
        _ => upload(linear, codes.device())?,
    };
    let k = linear.in_dim();
    supported(
        k.is_multiple_of(32),
        OP,
        k,
        "input widths of multiples of 32",
    )?;
    quantised(
        &linear,
        &Activation::plain(values.into_tensor(codes.shape())?),
    )
}

/// Rounds to e2m1 and back.
///
/// # Errors
/// A group size other than the two that caches use, or a failed launch.
pub fn fake_quant_fp4(xs: &Tensor, group: usize, format: ScaleFormat) -> Result<Tensor> {
    let xs = xs.contiguous()?;
    let out = Out::<bf16>::new(device(&xs)?, xs.elem_count())?;
    fp4(&xs, group, format, out.ptr(), Ptr::NULL, Ptr::NULL)?;
    out.into_tensor(xs.shape())
}

/// Packed codes `[.., k/2]` and scales `[.., k/group]`.
///
/// # Errors
/// As [`fake_quant_fp4`].
pub fn fp4_codes(xs: &Tensor, group: usize, format: ScaleFormat) -> Result<(Tensor, Tensor)> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let codes = Out::<u8>::new(dev, xs.elem_count() / 2)?;
    let scales = Out::<u8>::new(dev, xs.elem_count() / group)?;
    fp4(&xs, group, format, Ptr::NULL, codes.ptr(), scales.ptr())?;
    Ok((
        codes.into_tensor(groups_of(&xs, 2))?,
        scales.into_tensor(groups_of(&xs, group))?,
    ))
}

fn fp4(
    xs: &Tensor,
    group: usize,
    format: ScaleFormat,
    out: Ptr<'_>,
    codes: Ptr<'_>,
    scales: Ptr<'_>,
) -> Result<()> {
    const OP: &str = "fake_quant_fp4";
    let known = matches!(
        (group, format),
        (32, ScaleFormat::E8M0) | (16, ScaleFormat::E4M3)
    );
    supported(
        known,
        OP,
        group,
        "groups of 32 with e8m0 scales, or of 16 with e4m3 scales",
    )?;
    let n = xs.elem_count();
    let launch = Launch::new(device(xs)?, kernels::FAKE_QUANT_FP4, "fake_quant_fp4")
        .ptr(Held::new(xs, OP).ptr::<bf16>()?)
        .ptr(out)
        .ptr(codes)
        .ptr(scales)
        .long(n)
        .int(group);
    // SAFETY: outputs have an element (two codes a byte, a scale a group) for each input; a thread an
    // element.
    unsafe { launch.launch((n.div_ceil(256), 1, 1), 256, 0) }
}

/// The kernels of one storage, by tokens and by row tiles of a block.
struct Family {
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

const FP8: Family = family!(FP8_LINEAR, "fp8_linear");
const FP4: Family = family!(FP4_LINEAR, "fp4_linear");
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
const MANY: usize = 64;

fn missing() -> Error {
    Error::Unsupported {
        what: "a layer loaded on the CPU given an input on the GPU: load it with the GPU's device"
            .into(),
    }
}

/// [`Linear::forward`] of a checked input.
pub(crate) fn linear(linear: &Linear, xs: &Tensor) -> Result<Tensor> {
    match linear {
        Linear::Bf16(w) => bf16_product(xs, w.device().ok_or_else(missing)?),
        Linear::F32(WideRows::Bf16(w)) => wide_product(xs, w.device().ok_or_else(missing)?),
        Linear::F32(WideRows::F32(w)) => wide_product(xs, w.device().ok_or_else(missing)?),
        Linear::Fp8(_) => quantised(linear, &Activation::new(xs)?),
        Linear::Fp4(_) => quantised(linear, &Activation::plain(act_quant_values(xs)?)),
    }
}

/// Tokens up to which Hopper's kernels for few tokens take a linear layer, and its activations as codes.
const FEW: usize = 16;

/// What quantised products take: layers that share an input share it.
#[derive(Debug, Clone)]
pub struct Activation {
    /// `[T, k]` bf16: the input of a layer that is not quantised, or exact values of the codes.
    pub values: Tensor,
    /// e4m3 codes `[T, k]` and e8m0 scales `[T, k/32]`, for few tokens on Hopper.
    pub codes: Option<(Tensor, Tensor)>,
}

impl Activation {
    /// Quantises `xs: [T, k]` bf16.
    ///
    /// # Errors
    /// `k` is not a multiple of 32, or a failed launch.
    pub fn new(xs: &Tensor) -> Result<Self> {
        let xs = xs.contiguous()?;
        let dev = device(&xs)?;
        let k = xs.dim(D::Minus1)?;
        if !Self::takes_codes(dev, xs.elem_count() / k.max(1))? {
            return Ok(Self {
                values: act_quant_values(&xs)?,
                codes: None,
            });
        }
        let values = Out::<bf16>::new(dev, xs.elem_count())?;
        let codes = Out::<u8>::new(dev, xs.elem_count())?;
        let scales = Out::<u8>::new(dev, xs.elem_count() / 32)?;
        quantise(dev, &xs, codes.ptr(), scales.ptr(), values.ptr())?;
        let codes = (
            codes.into_tensor(xs.shape())?,
            scales.into_tensor(groups_of(&xs, 32))?,
        );
        Ok(Self {
            values: values.into_tensor(xs.shape())?,
            codes: Some(codes),
        })
    }

    /// The input as it is, for layers that do not quantise.
    pub fn plain(values: Tensor) -> Self {
        Self {
            values,
            codes: None,
        }
    }

    /// Whether products of `tokens` tokens want codes on this device.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn takes_codes(dev: &CudaDevice, tokens: usize) -> Result<bool> {
        Ok(tokens <= FEW && is_hopper(dev)?)
    }
}

/// A quantised product.
///
/// # Errors
/// A layer without quantised weights on the device, or a failed launch.
pub fn quantised(linear: &Linear, xs: &Activation) -> Result<Tensor> {
    let (n, k) = (linear.out_dim(), linear.in_dim());
    let values = &xs.values;
    match linear {
        Linear::Fp8(w) => {
            let w = w.device().ok_or_else(missing)?;
            let m = values.elem_count() / k.max(1);
            if let Some((codes, scales)) = xs.codes.as_ref().filter(|_| m <= FEW) {
                return few_product(values, codes, scales, w, (m, n, k));
            }
            match m >= MANY && n.is_multiple_of(8) && is_hopper(device(values)?)? {
                true => many_product(values, w, n, k),
                false => coded_product(values, &FP8, w, n, k, 1),
            }
        }
        Linear::Fp4(w) => coded_product(values, &FP4, w.device().ok_or_else(missing)?, n, k, 1),
        Linear::Bf16(_) | Linear::F32(_) => linear_of(linear, values),
    }
}

const FEW_NAMES: [[&str; 3]; 4] = [
    ["fp8_few_k1_m1", "fp8_few_k1_m8", "fp8_few_k1_m16"],
    ["fp8_few_k2_m1", "fp8_few_k2_m8", "fp8_few_k2_m16"],
    ["fp8_few_k4_m1", "fp8_few_k4_m8", "fp8_few_k4_m16"],
    ["fp8_few_k8_m1", "fp8_few_k8_m8", "fp8_few_k8_m16"],
];

/// fp8 weights and few tokens on Hopper: codes go to the tensor core as they are.
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
fn many_product(values: &Tensor, w: &DeviceCodes, n: usize, k: usize) -> Result<Tensor> {
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

fn linear_of(l: &Linear, xs: &Tensor) -> Result<Tensor> {
    linear(l, xs)
}

fn out_shape(xs: &Tensor, n: usize) -> Vec<usize> {
    let mut dims = xs.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = n;
    }
    dims
}

fn coded_product(
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

fn bf16_product(xs: &Tensor, w: &Tensor) -> Result<Tensor> {
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

fn bf16_groups(xs: &Tensor, w: &Tensor, n: usize, k: usize, groups: usize) -> Result<Tensor> {
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

/// [`GroupedLinear::forward`] of a checked input.
pub(crate) fn grouped(layer: &GroupedLinear, weight: &Linear, xs: &Tensor) -> Result<Tensor> {
    let (groups, k, n) = (layer.groups(), layer.in_per_group(), layer.out_per_group());
    supported(
        k.is_multiple_of(32),
        "grouped linear",
        k,
        "input widths of multiples of 32",
    )?;
    match weight {
        Linear::Bf16(w) => bf16_groups(xs, w.device().ok_or_else(missing)?, n, k, groups),
        Linear::Fp8(w) => {
            // A group's scales then begin at a tile of its own.
            let rule = "groups of multiples of 32 outputs";
            supported(n.is_multiple_of(FP8_TILE), "grouped linear", n, rule)?;
            coded_product(xs, &FP8, w.device().ok_or_else(missing)?, n, k, groups)
        }
        Linear::F32(_) | Linear::Fp4(_) => {
            Err(Error::shape("grouped linear", "weights are bf16 or fp8"))
        }
    }
}
