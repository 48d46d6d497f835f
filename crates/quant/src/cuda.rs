//! The operations of this crate on a GPU.
//!
//! Weights are uploaded once, as stored; a product widens them in registers. Activations of a quantised
//! product go through [`act_quant_values`] first, whose result is exact in bf16.

mod few;
mod products;
mod quantise;

use candle_core::{CudaDevice, D, DType, Device, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::WeightRows,
    cuda::{
        Held, Launch, Out, bytes_to_device, fits_bf16, is_hopper, kernels,
        ops::{device, supported},
    },
};
use half::bf16;

pub(crate) use self::few::few_product;
pub use self::{
    few::FewPlan,
    products::wide_product,
    quantise::{
        act_quant_any, act_quant_codes, act_quant_values, fake_quant_any, fake_quant_fp4, fp4_codes,
    },
};
use self::{
    few::{FEW, few_plain_product, few_swiglu_product},
    products::{
        FP4, FP8, MANY, MOST_TILED, Sizes, bf16_groups, bf16_product, coded_product, many_product,
        out_shape, tiled,
    },
    quantise::{groups_of, quantise},
};
use crate::{
    GroupedLinear, Linear, WideRows,
    ops::{act_quant::QuantizedActivation, fp8_gemm::Quantised},
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

/// What quantised products take: layers that share an input share it.
#[derive(Debug, Clone)]
pub struct Activation {
    /// `[T, k]` bf16.
    values: Tensor,
    form: Form,
}

#[derive(Debug, Clone)]
enum Form {
    /// The input of a layer that is not quantised, or exact values of codes.
    Exact,
    /// Values of these e4m3 codes `[T, k]` and e8m0 scales `[T, k/32]`, for few tokens on Hopper.
    Coded(Tensor, Tensor),
    /// One token on Hopper, not quantised yet: its products do that as they read it.
    Raw,
    /// Not quantised, and what `fp8_many` takes for it, for many tokens on Hopper.
    Tiled(Tensor),
}

impl Activation {
    /// `xs: [T, k]` bf16 for quantised products.
    ///
    /// # Errors
    /// `k` is not a multiple of 32, or a failed launch.
    pub fn new(xs: &Tensor) -> Result<Self> {
        let xs = xs.contiguous()?;
        let dev = device(&xs)?;
        let k = xs.dim(D::Minus1)?;
        let rule = "input widths of multiples of 32";
        supported(k.is_multiple_of(32), "linear", k, rule)?;
        let tokens = xs.elem_count() / k.max(1);
        if !Self::takes_codes(dev, tokens)? {
            if !Self::takes_tiles(dev, tokens, k)? {
                return Ok(Self::plain(act_quant_values(&xs)?));
            }
            let form = Form::Tiled(tiled(&xs, true)?);
            return Ok(Self { values: xs, form });
        }
        if tokens == 1 {
            return Ok(Self {
                values: xs,
                form: Form::Raw,
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
        Ok(Self::coded(values.into_tensor(xs.shape())?, Some(codes)))
    }

    /// The input as it is, for layers that do not quantise.
    pub fn plain(values: Tensor) -> Self {
        Self::coded(values, None)
    }

    /// The values of codes and, for few tokens on Hopper, these with their scales.
    pub fn coded(values: Tensor, codes: Option<(Tensor, Tensor)>) -> Self {
        let form = match codes {
            Some((codes, scales)) => Form::Coded(codes, scales),
            None => Form::Exact,
        };
        Self { values, form }
    }

    /// Tokens and columns.
    ///
    /// # Errors
    /// Not a matrix.
    pub fn dims2(&self) -> Result<(usize, usize)> {
        Ok(self.values.dims2()?)
    }

    /// `[T, k]` bf16 for layers that do not quantise: the input, or the values of its codes.
    ///
    /// # Errors
    /// A failed launch.
    pub fn exact(&self) -> Result<Tensor> {
        match self.form {
            Form::Raw | Form::Tiled(_) => act_quant_values(&self.values),
            Form::Exact | Form::Coded(..) => Ok(self.values.clone()),
        }
    }

    /// A token that is not quantised yet.
    pub fn raw(&self) -> Option<&Tensor> {
        matches!(self.form, Form::Raw).then_some(&self.values)
    }

    /// Whether products of `tokens` tokens of `width` columns want them laid out for `fp8_many` on this device.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn takes_tiles(dev: &CudaDevice, tokens: usize, width: usize) -> Result<bool> {
        Ok(tokens >= MANY && width <= MOST_TILED && is_hopper(dev)?)
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
    match linear {
        Linear::Fp8(w) => {
            let w = w.device().ok_or_else(missing)?;
            let m = xs.values.elem_count() / k.max(1);
            if let Some(y) = few_product(xs, w, (m, n, k))? {
                return Ok(y);
            }
            let groups = 1;
            if !n.is_multiple_of(8) {
                return coded_product(&xs.exact()?, &FP8, w, (n, k, groups));
            }
            let tokens = match &xs.form {
                Form::Tiled(tokens) => tokens.clone(),
                _ if Activation::takes_tiles(device(&xs.values)?, m, k)? => {
                    tiled(&xs.exact()?, false)?
                }
                _ => return coded_product(&xs.exact()?, &FP8, w, (n, k, groups)),
            };
            let y = many_product(&tokens, w, Sizes { m, n, k, groups })?;
            Ok(y.reshape(out_shape(&xs.values, n))?)
        }
        Linear::Fp4(w) => {
            let w = w.device().ok_or_else(missing)?;
            coded_product(&xs.exact()?, &FP4, w, (n, k, 1))
        }
        Linear::Bf16(_) | Linear::F32(_) => linear_of(linear, &xs.exact()?),
    }
}

/// `linear(act_quant(swiglu(gate, up)))` of one token on Hopper in one launch; `None` elsewhere.
///
/// `gate`, `up: [1, k]` bf16, `limit` as the kernels of experts take it.
///
/// # Errors
/// A layer loaded on the CPU, shapes that do not fit, or a failed launch.
pub fn swiglu_product(
    gate: &Tensor,
    up: &Tensor,
    linear: &Linear,
    limit: f32,
) -> Result<Option<Tensor>> {
    let Linear::Fp8(w) = linear else {
        return Ok(None);
    };
    let (n, k) = (linear.out_dim(), linear.in_dim());
    if gate.dims() != [1, k] || up.dims() != [1, k] {
        return Ok(None);
    }
    if !Activation::takes_codes(device(gate)?, 1)? {
        return Ok(None);
    }
    few_swiglu_product(gate, up, w.device().ok_or_else(missing)?, (n, k), limit).map(Some)
}

fn linear_of(l: &Linear, xs: &Tensor) -> Result<Tensor> {
    linear(l, xs)
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
            let w = w.device().ok_or_else(missing)?;
            let m = xs.elem_count() / (groups * k).max(1);
            let (dev, sizes) = (device(xs)?, Sizes { m, n, k, groups });
            if Activation::takes_codes(dev, m)? {
                return few_plain_product(xs, w, sizes);
            }
            let whole_tiles = n.is_multiple_of(128) && k.is_multiple_of(64);
            if whole_tiles && Activation::takes_tiles(dev, m, groups * k)? {
                let y = many_product(&tiled(&xs.reshape((m, groups * k))?, false)?, w, sizes)?;
                return Ok(y.reshape(out_shape(xs, groups * n))?);
            }
            coded_product(xs, &FP8, w, (n, k, groups))
        }
        Linear::F32(_) | Linear::Fp4(_) => {
            Err(Error::shape("grouped linear", "weights are bf16 or fp8"))
        }
    }
}
