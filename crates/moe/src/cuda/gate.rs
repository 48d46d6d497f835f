//! The gate.

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, beside, kernels,
        ops::{device, supported},
    },
};
use deepseek_v41_quant::cuda as quant;
use half::bf16;

use crate::{GateParams, Routing, ScoreFunc};

/// The gate's weights on the device.
#[derive(Debug, Clone)]
pub(crate) struct DeviceGate {
    /// `[E, dim]` bf16.
    weight: Tensor,
    /// `[E]` f32.
    bias: Tensor,
    bias_vl: Option<Tensor>,
    /// `[1]` u32, zero between launches.
    counter: Tensor,
    /// `[E]` f32, of one token.
    logits: Tensor,
}

impl DeviceGate {
    /// Uploads; `None` on the CPU.
    pub(crate) fn new(
        weight: &[u8],
        dim: usize,
        bias: &[f32],
        bias_vl: Option<&[f32]>,
        device: &Device,
    ) -> Result<Option<Self>> {
        if !device.is_cuda() {
            return Ok(None);
        }
        let e = bias.len();
        let f32s = |values: &[f32]| Tensor::from_slice(values, e, device);
        Ok(Some(Self {
            weight: Tensor::from_raw_buffer(weight, DType::BF16, &[e, dim], device)?,
            bias: f32s(bias)?,
            counter: Tensor::zeros(1, DType::U32, device)?,
            logits: Tensor::zeros(e, DType::F32, device)?,
            bias_vl: bias_vl.map(f32s).transpose()?,
        }))
    }

    /// Routes `xs: [T, dim]`, by the gate's own choice or by `chosen: [T, k]` u32.
    pub(crate) fn route(
        &self,
        xs: &Tensor,
        image_mask: Option<&Tensor>,
        chosen: Option<&Tensor>,
        p: GateParams,
    ) -> Result<Routing> {
        let mask = image_mask.filter(|_| self.bias_vl.is_some());
        if xs.dim(0)? == 1 && chosen.is_none() {
            // Beside the shared expert: `moe` joins.
            return beside(&[xs], || self.route_one(xs, mask, p));
        }
        let logits = quant::wide_product(xs, &self.weight)?;
        topk_gate(&logits, &self.bias, self.bias_vl.as_ref(), mask, chosen, p)
    }
}

impl DeviceGate {
    /// One token, product and choice in one launch.
    fn route_one(
        &self,
        xs: &Tensor,
        image_mask: Option<&Tensor>,
        p: GateParams,
    ) -> Result<Routing> {
        const OP: &str = "gate_one";
        let dev = device(xs)?;
        let (e, dim) = self.weight.dims2()?;
        let k = p.n_activated;
        check_gate(OP, e, k)?;
        let rule = "widths of multiples of 8";
        supported(dim.is_multiple_of(8), OP, dim, rule)?;
        let (xs, mask) = (
            xs.contiguous()?,
            image_mask.map(Tensor::contiguous).transpose()?,
        );
        let weights = Out::<f32>::new(dev, k)?;
        let experts = Out::<u32>::new(dev, k)?;
        let launch = Launch::new(dev, kernels::TOPK_GATE, "gate_one")
            .ptr(Held::new(&xs, OP).ptr::<bf16>()?)
            .ptr(Held::new(&self.weight, OP).ptr::<bf16>()?)
            .ptr(Held::new(&self.bias, OP).ptr::<f32>()?)
            .maybe(
                self.bias_vl
                    .as_ref()
                    .map(|b| Held::new(b, OP).ptr::<f32>())
                    .transpose()?,
            )
            .maybe(
                mask.as_ref()
                    .map(|m| Held::new(m, OP).ptr::<u8>())
                    .transpose()?,
            )
            .ptr(Held::new(&self.logits, OP).ptr::<f32>()?)
            .ptr(Held::new(&self.counter, OP).ptr::<u32>()?)
            .ptr(weights.ptr())
            .ptr(experts.ptr())
            .int(dim)
            .int(e)
            .int(k)
            .int(func(p.score_func))
            .f32(p.gate_temp)
            .int(usize::from(p.norm_topk_prob))
            .f32(p.route_scale);
        // SAFETY: an input of `dim`, E rows of it, biases [E], the rest [k]; the counter is zero, as every
        // launch leaves it, and launches are ordered by the stream.
        unsafe { launch.launch((e.div_ceil(4), 1, 1), 128, 8 * e)? };
        Ok(Routing {
            weights: weights.into_tensor((1, k))?,
            experts: experts.into_tensor((1, k))?,
        })
    }
}

/// As the kernels of the gate number them.
fn func(score: ScoreFunc) -> usize {
    match score {
        ScoreFunc::Softmax => 0,
        ScoreFunc::Sigmoid => 1,
        ScoreFunc::SqrtSoftplus => 2,
    }
}

fn check_gate(op: &str, e: usize, k: usize) -> Result<()> {
    supported(
        e <= 1024 && k <= 32,
        op,
        format!("{k} of {e} experts"),
        "up to 32 of 1024",
    )
}

/// `logits: [T, E]` f32 → routing; the operands of [`crate::topk_gate`] and those of a whole gate.
pub(crate) fn topk_gate(
    logits: &Tensor,
    bias: &Tensor,
    bias_vl: Option<&Tensor>,
    image_mask: Option<&Tensor>,
    chosen: Option<&Tensor>,
    p: GateParams,
) -> Result<Routing> {
    const OP: &str = "topk_gate";
    let dev = device(logits)?;
    let (t, e) = logits.dims2()?;
    let k = match chosen {
        Some(chosen) => chosen.dim(1)?,
        None => p.n_activated,
    };
    check_gate(OP, e, k)?;
    let weights = Out::<f32>::new(dev, t * k)?;
    let experts = Out::<u32>::new(dev, t * k)?;
    let own = |xs: Option<&Tensor>| xs.map(Tensor::contiguous).transpose();
    let (mask, chosen, logits) = (own(image_mask)?, own(chosen)?, logits.contiguous()?);
    let launch = Launch::new(dev, kernels::TOPK_GATE, "topk_gate")
        .ptr(Held::new(&logits, OP).ptr::<f32>()?)
        .ptr(Held::new(bias, OP).ptr::<f32>()?)
        .maybe(bias_vl.map(|b| Held::new(b, OP).ptr::<f32>()).transpose()?)
        .maybe(
            mask.as_ref()
                .map(|m| Held::new(m, OP).ptr::<u8>())
                .transpose()?,
        )
        .maybe(
            chosen
                .as_ref()
                .map(|c| Held::new(c, OP).ptr::<u32>())
                .transpose()?,
        )
        .ptr(weights.ptr())
        .ptr(experts.ptr())
        .int(t)
        .int(e)
        .int(k)
        .int(func(p.score_func))
        .f32(p.gate_temp)
        .int(usize::from(p.norm_topk_prob))
        .f32(p.route_scale);
    // SAFETY: logits [T, E], biases [E], mask [T], the rest [T, k]; a block a token.
    unsafe { launch.launch((t, 1, 1), 128, 8 * e)? };
    Ok(Routing {
        weights: weights.into_tensor((t, k))?,
        experts: experts.into_tensor((t, k))?,
    })
}
