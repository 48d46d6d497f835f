//! What layers with one input share on a GPU: its quantisation, and one launch for all of their rows.

use candle_core::{D, Tensor};
use deepseek_v41_core::{
    Error, Result, RmsNorm,
    cuda::{
        Held, Launch, Out, kernels,
        ops::{device, rms_norm, supported},
    },
};
use half::bf16;

use crate::{
    Linear,
    cuda::{Activation, DeviceCodes, few_product},
    weight::FP8_TILE,
};

/// fp8 weights of layers with one input, end to end on the device.
#[derive(Debug, Clone)]
pub struct Joined {
    weight: DeviceCodes,
    /// Output features of each.
    rows: Vec<usize>,
    k: usize,
}

impl Joined {
    /// Moves the weights of `layers` to one piece of memory, of which each keeps its part. `None` if they are
    /// not fp8 on a GPU, differ in their input or end inside of a tile.
    ///
    /// # Errors
    /// [`Error::Device`]: the memory is full.
    pub fn new(layers: &mut [&mut Linear]) -> Result<Option<Self>> {
        let (mut codes, mut scales, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let k = layers.first().map_or(0, |layer| layer.in_dim());
        for layer in layers.iter() {
            let Linear::Fp8(own) = &**layer else {
                return Ok(None);
            };
            let (Some(device), n) = (own.device(), layer.out_dim()) else {
                return Ok(None);
            };
            if layer.in_dim() != k || !n.is_multiple_of(FP8_TILE) {
                return Ok(None);
            }
            codes.push(device.codes.clone());
            scales.push(device.scales.clone());
            rows.push(n);
        }
        if rows.is_empty() {
            return Ok(None);
        }
        let weight = DeviceCodes {
            codes: Tensor::cat(&codes, 0)?,
            scales: Tensor::cat(&scales, 0)?,
        };
        let (mut code, mut scale) = (0, 0);
        for (layer, (c, s)) in layers.iter_mut().zip(codes.iter().zip(&scales)) {
            let (codes, scales) = (c.elem_count(), s.elem_count());
            let part = DeviceCodes {
                codes: weight.codes.narrow(0, code, codes)?,
                scales: weight.scales.narrow(0, scale, scales)?,
            };
            (code, scale) = (code + codes, scale + scales);
            if let Linear::Fp8(own) = &**layer {
                **layer = Linear::Fp8(own.clone().with_device(part));
            }
        }
        Ok(Some(Self { weight, rows, k }))
    }

    /// One token: the outputs `[1, n]` of all layers. `None` for other numbers of tokens, whose rows would
    /// not be one piece, and on devices without a kernel for a single token.
    ///
    /// # Errors
    /// An input of another width, or a failed launch.
    pub fn forward(&self, xs: &Activation) -> Result<Option<Vec<Tensor>>> {
        let (m, k) = xs.dims2()?;
        if k != self.k {
            return Err(Error::shape(
                "linear",
                format!("[{m}, {k}] into {}", self.k),
            ));
        }
        if m != 1 {
            return Ok(None);
        }
        let n = self.rows.iter().sum();
        let Some(y) = few_product(xs, &self.weight, (1, n, k))? else {
            return Ok(None);
        };
        let mut at = 0;
        let parts = self.rows.iter().map(|n| {
            at += n;
            Ok(y.narrow(1, at - n, *n)?)
        });
        parts.collect::<Result<_>>().map(Some)
    }
}

/// [`RmsNorm::forward`] of `xs: [T, dim]` bf16 on a GPU and what quantised products take for the result, for few tokens
/// in one launch.
///
/// # Errors
/// A norm that is not on the GPU, a width the kernel is not made for, or a failed launch.
pub fn norm_activation(xs: &Tensor, norm: &RmsNorm) -> Result<(Tensor, Activation)> {
    const OP: &str = "rms_norm";
    let dev = device(xs)?;
    let (t, dim) = xs.dims2()?;
    let Some(weight) = norm.weight_bf16().filter(|w| w.dims() == [dim]) else {
        return Err(Error::shape(
            OP,
            format!("no norm of {dim} columns on the GPU"),
        ));
    };
    supported(
        dim.is_multiple_of(32) && dim <= 16_384,
        OP,
        dim,
        "multiples of 32 up to 16384",
    )?;
    let xs = xs.contiguous()?;
    if Activation::takes_tiles(dev, t, dim)? {
        let y = rms_norm(&xs, weight, norm.eps())?;
        let coded = Activation::new(&y)?;
        return Ok((y, coded));
    }
    let coded = Activation::takes_codes(dev, t)?;
    let y = Out::<bf16>::new(dev, t * dim)?;
    let values = Out::<bf16>::new(dev, t * dim)?;
    let codes = coded.then(|| Out::<u8>::new(dev, t * dim)).transpose()?;
    let scales = coded
        .then(|| Out::<u8>::new(dev, t * dim / 32))
        .transpose()?;
    let launch = Launch::new(dev, kernels::RMS_NORM, "rms_norm")
        .ptr(Held::new(&xs, OP).ptr::<bf16>()?)
        .ptr(Held::new(weight, OP).ptr::<bf16>()?)
        .ptr(y.ptr())
        .ptr(values.ptr())
        .maybe(codes.as_ref().map(Out::ptr))
        .maybe(scales.as_ref().map(Out::ptr))
        .int(dim)
        .long(xs.dim(D::Minus1)?)
        .f32(norm.eps());
    let block = (dim / 8).next_multiple_of(32).min(1024);
    // SAFETY: T rows of `dim` in, as many out and a scale for 32 of them, `dim` weights; one block a row.
    unsafe { launch.launch((t, 1, 1), block, 0)? };
    let codes = match (codes, scales) {
        (Some(codes), Some(scales)) => Some((
            codes.into_tensor((t, dim))?,
            scales.into_tensor((t, dim / 32))?,
        )),
        _ => None,
    };
    let values = values.into_tensor((t, dim))?;
    Ok((y.into_tensor((t, dim))?, Activation::coded(values, codes)))
}
