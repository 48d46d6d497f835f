//! The weights of the mixes on the device.

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::WeightRows,
    cuda::{Held, Launch, Out, kernels, ops::device},
};
use half::bf16;

use super::{FUSED_COPIES, FUSED_WIDTH, fuses, step::ONE_LAUNCH};
use crate::MixWeights;

/// The weights of one site's mixes on the device, f32 each.
#[derive(Debug, Clone)]
pub(crate) struct DeviceMix {
    /// `[(2+C)C, C*dim]`
    pub(super) func: Tensor,
    /// `func` as three bf16 pieces that add up to it, laid out for many tokens.
    pub(super) pieces: Option<Tensor>,
    /// What a step of few tokens hands from block to block, for streams that [`step`] serves.
    pub(super) handed: Option<Handed>,
    /// `[3]`
    pub(super) scale: Tensor,
    /// `[(2+C)C]`
    pub(super) base: Tensor,
}

/// Memory that is zero between launches: a value that is not says itself that it has come.
#[derive(Debug, Clone)]
pub(super) struct Handed {
    /// `[ONE_LAUNCH, dim]` bf16
    pub(super) y: Tensor,
    /// `[ONE_LAUNCH, slices, 40]` f32, slices of 64 columns
    pub(super) part: Tensor,
}

impl Handed {
    fn new(dim: usize, device: &Device) -> Result<Self> {
        let part = (ONE_LAUNCH, dim.div_ceil(64), 40);
        Ok(Self {
            y: Tensor::zeros((ONE_LAUNCH, dim), DType::BF16, device)?,
            part: Tensor::zeros(part, DType::F32, device)?,
        })
    }
}

impl DeviceMix {
    /// Uploads `weights`; `None` on the CPU.
    pub(crate) fn new(weights: &MixWeights, device: &Device) -> Result<Option<Self>> {
        if !device.is_cuda() {
            return Ok(None);
        }
        let shape = [weights.func.rows(), weights.func.cols()];
        let func = Tensor::from_raw_buffer(weights.func.bytes(), DType::F32, &shape, device)?;
        let dim = shape[1] / FUSED_COPIES;
        let fused = shape[0] == FUSED_WIDTH && fuses(FUSED_COPIES, dim);
        Ok(Some(Self {
            pieces: fused.then(|| split_fn(&func)).transpose()?,
            handed: fused.then(|| Handed::new(dim, device)).transpose()?,
            func,
            scale: Tensor::from_slice(&weights.scale, 3, device)?,
            base: Tensor::from_slice(&weights.base, weights.base.len(), device)?,
        }))
    }
}

/// Values of the pieces of 64 columns.
pub(super) const PIECES: usize = 4 * 72 * 64;

/// `fn` as three bf16 pieces.
fn split_fn(func: &Tensor) -> Result<Tensor> {
    let dev = device(func)?;
    let dim = func.dim(1)? / FUSED_COPIES;
    let n = dim.div_ceil(64) * PIECES;
    let pieces = Out::<bf16>::new(dev, n)?;
    let launch = Launch::new(dev, kernels::HC_MANY, "hc_split_fn")
        .ptr(Held::new(func, "hc_split_fn").ptr::<f32>()?)
        .ptr(pieces.ptr())
        .int(dim)
        .long(n);
    // SAFETY: `fn` is [24, 4 * dim]; a thread a value of the output.
    unsafe { launch.launch((n.div_ceil(256), 1, 1), 256, 0)? };
    pieces.into_tensor(n)
}

pub(super) fn on_device(weights: &MixWeights) -> Result<&DeviceMix> {
    weights.device.as_ref().ok_or_else(|| Error::Unsupported {
        what: "hyper-connections loaded on the CPU given a stream on the GPU".into(),
    })
}
