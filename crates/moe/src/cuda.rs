//! The operations of this crate on a GPU.
//!
//! Nothing here reads a routing back: a token's experts stay on the device, and the grid of the experts'
//! kernels covers any routing. So the host cannot refuse a bad one: a NaN logit selects as torch's top-k
//! does, and an expert that does not exist is left out.

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{
    Comm, Error, Result,
    cuda::{
        Held, Launch, Out, Ptr, kernels,
        ops::{device, supported},
    },
};
use deepseek_v41_quant::{Linear, WeightFormat, cuda as quant};
use half::bf16;

use crate::{Expert, GateParams, Routing, ScoreFunc};

/// Pairs that one block of the experts' kernels takes.
const TILE: usize = 8;

/// The gate's weights on the device.
#[derive(Debug, Clone)]
pub(crate) struct DeviceGate {
    /// `[E, dim]` bf16.
    weight: Tensor,
    /// `[E]` f32.
    bias: Tensor,
    bias_vl: Option<Tensor>,
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
        let logits = quant::wide_product(xs, &self.weight)?;
        let mask = image_mask.filter(|_| self.bias_vl.is_some());
        topk_gate(&logits, &self.bias, self.bias_vl.as_ref(), mask, chosen, p)
    }
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
    supported(
        e <= 1024 && k <= 32,
        OP,
        format!("{k} of {e} experts"),
        "up to 32 of 1024",
    )?;
    let func = match p.score_func {
        ScoreFunc::Softmax => 0,
        ScoreFunc::Sigmoid => 1,
        ScoreFunc::SqrtSoftplus => 2,
    };
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
        .int(func)
        .f32(p.gate_temp)
        .int(usize::from(p.norm_topk_prob))
        .f32(p.route_scale);
    // SAFETY: logits [T, E], biases [E], mask [T], the rest [T, k]; a block a token.
    unsafe { launch.launch((t, 1, 1), 128, 4 * e)? };
    Ok(Routing {
        weights: weights.into_tensor((t, k))?,
        experts: experts.into_tensor((t, k))?,
    })
}

/// A rank's routed experts on the device: each weight of all of them end to end, as stored.
#[derive(Debug, Clone)]
pub(crate) struct DeviceExperts {
    w: [Tensor; 3],
    s: Option<[Tensor; 3]>,
    format: WeightFormat,
    first: usize,
    count: usize,
    dim: usize,
    inter: usize,
}

impl DeviceExperts {
    /// Uploads `experts`, the first of which is number `first`; `None` on the CPU or without any.
    pub(crate) fn new(experts: &[Expert], first: usize, device: &Device) -> Result<Option<Self>> {
        let (Device::Cuda(dev), Some(one)) = (device, experts.first()) else {
            return Ok(None);
        };
        let stack = |part: &dyn Fn(&Expert) -> &Linear, scales: bool| -> Result<Tensor> {
            fn bytes(linear: &Linear, scales: bool) -> Result<Vec<u8>> {
                let (w, s) = stored(linear)?;
                Ok(if scales { s } else { w }.into_owned())
            }
            let each = bytes(part(one), scales)?.len();
            let mut out = Out::<u8>::new(dev, each * experts.len())?;
            for (i, expert) in experts.iter().enumerate() {
                out.write(i * each, &bytes(part(expert), scales)?)?;
            }
            out.into_tensor(each * experts.len())
        };
        let [w1, w2, w3] = Expert::LINEARS;
        let all = |scales| -> Result<[Tensor; 3]> {
            Ok([
                stack(&w1, scales)?,
                stack(&w2, scales)?,
                stack(&w3, scales)?,
            ])
        };
        let format = w1(one).format();
        Ok(Some(Self {
            w: all(false)?,
            s: match format {
                WeightFormat::Fp8 | WeightFormat::Fp4 => Some(all(true)?),
                WeightFormat::Bf16 | WeightFormat::F32 => None,
            },
            format,
            first,
            count: experts.len(),
            dim: w1(one).in_dim(),
            inter: w1(one).out_dim(),
        }))
    }

    fn kernels(&self) -> Result<[&'static str; 2]> {
        match self.format {
            WeightFormat::Fp4 => Ok(["experts_up_fp4", "experts_down_fp4"]),
            WeightFormat::Fp8 => Ok(["experts_up_fp8", "experts_down_fp8"]),
            WeightFormat::Bf16 => Ok(["experts_up_bf16", "experts_down_bf16"]),
            WeightFormat::F32 => Err(Error::config(
                "expert_dtype",
                "experts are bf16, fp8 or fp4",
            )),
        }
    }

    /// The outputs of every (token, slot) pair and where each went: `y: [P, dim]`, `inverse: [P]`.
    ///
    /// `xs: [T, dim]` bf16 holds what the products take: quantised values for fp8 and fp4.
    fn run(&self, xs: &Tensor, routing: &Routing, limit: f32) -> Result<(Out<bf16>, Out<i32>)> {
        const OP: &str = "experts";
        let dev = device(xs)?;
        let (dim, inter, n) = (self.dim, self.inter, self.count);
        let rule = "multiples of 32";
        supported(
            dim.is_multiple_of(32) && inter.is_multiple_of(32),
            OP,
            format!("{dim}, {inter}"),
            rule,
        )?;
        let (t, k) = routing.experts.dims2()?;
        let pairs = t * k;
        let max_tiles = pairs.min(n + pairs / TILE);
        let order = Out::<i32>::new(dev, pairs)?;
        let inverse = Out::<i32>::new(dev, pairs)?;
        let tiles = Out::<i32>::new(dev, 4 * max_tiles)?;
        let count = Out::<i32>::new(dev, 1)?;
        let chosen = Held::new(&routing.experts, OP).ptr::<u32>()?;
        let launch = Launch::new(dev, kernels::GROUP_TOKENS, "group_tokens")
            .ptr(chosen)
            .ptr(order.ptr())
            .ptr(inverse.ptr())
            .ptr(tiles.ptr())
            .ptr(count.ptr())
            .int(pairs)
            .u32(self.first as u32)
            .int(n)
            .int(TILE);
        let shared = (4 * (17 * n + 1)).max(8 * pairs.min(512));
        // SAFETY: `pairs` experts in, as many places out; at most `max_tiles` tiles whatever the routing.
        unsafe { launch.launch((1, 1, 1), 512, shared)? };

        let [up, down] = self.kernels()?;
        let h = Out::<bf16>::new(dev, pairs * inter)?;
        let y = Out::<bf16>::new(dev, pairs * dim)?;
        let weight = |i: usize| Held::new(&self.w[i], OP).ptr::<u8>();
        let scale = |i: usize| {
            self.s
                .as_ref()
                .map(|s| Held::new(&s[i], OP).ptr::<u8>())
                .transpose()
        };
        let launch = Launch::new(dev, kernels::EXPERTS, up)
            .ptr(Held::new(xs, OP).ptr::<bf16>()?)
            .ptr(order.ptr())
            .ptr(tiles.ptr())
            .ptr(count.ptr())
            .ptr(Held::new(&routing.weights, OP).ptr::<f32>()?)
            .ptr(weight(0)?)
            .maybe(scale(0)?)
            .ptr(weight(2)?)
            .maybe(scale(2)?)
            .ptr(h.ptr())
            .int(dim)
            .int(inter)
            .int(k)
            .f32(limit);
        // SAFETY: weights of `n` experts as their format has them, h [pairs, inter]; 32 units a block.
        unsafe { launch.launch((inter / 32, max_tiles, 1), 256, 0)? };
        let launch = Launch::new(dev, kernels::EXPERTS, down)
            .ptr(h.ptr())
            .ptr(tiles.ptr())
            .ptr(count.ptr())
            .ptr(weight(1)?)
            .maybe(scale(1)?)
            .ptr(y.ptr())
            .int(dim)
            .int(inter);
        // SAFETY: h [pairs, inter], y [pairs, dim]; 32 rows a block.
        unsafe { launch.launch((dim.div_ceil(32), max_tiles, 1), 192, 0)? };
        Ok((y, inverse))
    }
}

/// Codes (or values) and scales of a layer, as stored; fp8 scales in tiles of 32.
fn stored(linear: &Linear) -> Result<(std::borrow::Cow<'_, [u8]>, std::borrow::Cow<'_, [u8]>)> {
    use std::borrow::Cow::{Borrowed, Owned};
    match linear {
        Linear::Bf16(w) => Ok((Borrowed(w.bytes()), Borrowed(&[]))),
        Linear::Fp8(w) => Ok((Borrowed(w.codes()), Owned(quant::scales_of_32(w)))),
        Linear::Fp4(w) => Ok((Borrowed(w.packed()), Borrowed(w.scales()))),
        Linear::F32(_) => Err(Error::config(
            "expert_dtype",
            "experts are bf16, fp8 or fp4",
        )),
    }
}

/// What the layer's products take for `xs`.
fn input(format: WeightFormat, xs: &Tensor) -> Result<Tensor> {
    match format {
        WeightFormat::Fp8 | WeightFormat::Fp4 => quant::act_quant_values(xs),
        WeightFormat::Bf16 | WeightFormat::F32 => Ok(xs.contiguous()?),
    }
}

/// One expert over all tokens: `xs: [T, dim]`, prepared by [`input`].
fn expert(expert: &Expert, xs: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu";
    let [w1, w2, w3] = Expert::LINEARS.map(|part| part(expert));
    let (gate, up) = (quant::quantised(w1, xs)?, quant::quantised(w3, xs)?);
    let dev = device(&gate)?;
    let inter = w1.out_dim();
    supported(
        inter.is_multiple_of(32),
        OP,
        inter,
        "widths of multiples of 32",
    )?;
    let units = gate.elem_count() / 8;
    let h = Out::<bf16>::new(dev, gate.elem_count())?;
    let coded = matches!(w2.format(), WeightFormat::Fp8 | WeightFormat::Fp4);
    let (plain, fake) = if coded {
        (Ptr::NULL, h.ptr())
    } else {
        (h.ptr(), Ptr::NULL)
    };
    let launch = Launch::new(dev, kernels::SWIGLU, "swiglu")
        .ptr(Held::new(&gate, OP).ptr::<bf16>()?)
        .ptr(Held::new(&up, OP).ptr::<bf16>()?)
        .ptr(Ptr::NULL)
        .ptr(plain)
        .ptr(fake)
        .ptr(Ptr::NULL)
        .ptr(Ptr::NULL)
        .long(units)
        .int(inter)
        .long(inter)
        .f32(expert.limit());
    // SAFETY: [T, inter] in and out; a thread takes eight elements.
    unsafe { launch.launch((units.div_ceil(256), 1, 1), 256, 0)? };
    quant::quantised(w2, &h.into_tensor(gate.shape())?)
}

/// Routed and shared experts of `xs: [T, dim]`.
pub(crate) fn moe(
    xs: &Tensor,
    routing: &Routing,
    experts: Option<&DeviceExperts>,
    shared: &Expert,
    same_values: bool,
    comm: &dyn Comm,
) -> Result<Tensor> {
    const OP: &str = "moe_combine";
    let dev = device(xs)?;
    let (t, dim) = xs.dims2()?;
    let values = input(Expert::LINEARS[0](shared).format(), xs)?;
    let common = expert(shared, &values)?;
    let k = routing.experts.dim(1)?;
    let Some(experts) = experts.filter(|_| k > 0) else {
        return reduced(None, &common, comm);
    };
    supported(k <= 32, OP, k, "up to 32 experts a token")?;
    let values = if same_values {
        values
    } else {
        input(experts.format, xs)?
    };
    let routing = Routing {
        weights: routing.weights.contiguous()?,
        experts: routing.experts.contiguous()?,
    };
    let (y, inverse) = experts.run(&values, &routing, shared.limit())?;
    let ranks = comm.world_size() > 1;
    let out = (!ranks)
        .then(|| Out::<bf16>::new(dev, t * dim))
        .transpose()?;
    let part = ranks.then(|| Out::<f32>::new(dev, t * dim)).transpose()?;
    let launch = Launch::new(dev, kernels::COMBINE, "moe_combine")
        .ptr(y.ptr())
        .ptr(inverse.ptr())
        .ptr(Held::new(&routing.experts, OP).ptr::<u32>()?)
        .maybe(
            (!ranks)
                .then(|| Held::new(&common, OP).ptr::<bf16>())
                .transpose()?,
        )
        .maybe(out.as_ref().map(Out::ptr))
        .maybe(part.as_ref().map(Out::ptr))
        .int(dim)
        .int(k);
    // SAFETY: y [T * k, dim], one output [T, dim]; a thread takes eight columns of a token.
    unsafe { launch.launch(((dim / 8).div_ceil(128), t, 1), 128, 0)? };
    match (out, part) {
        (Some(out), _) => out.into_tensor((t, dim)),
        (None, part) => {
            let part = part.map(|part| part.into_tensor((t, dim))).transpose()?;
            reduced(part, &common, comm)
        }
    }
}

/// The routed sums of all ranks and the shared expert, rounded once.
fn reduced(part: Option<Tensor>, common: &Tensor, comm: &dyn Comm) -> Result<Tensor> {
    let part = match part {
        Some(part) => part,
        None if comm.world_size() == 1 => return Ok(common.clone()),
        None => common.zeros_like()?.to_dtype(DType::F32)?,
    };
    let whole = comm.all_reduce_sum(&part)?;
    Ok((whole + common.to_dtype(DType::F32)?)?.to_dtype(DType::BF16)?)
}
