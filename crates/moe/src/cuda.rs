//! The operations of this crate on a GPU.
//!
//! Nothing here reads a routing back: a token's experts stay on the device, and the grid of the experts'
//! kernels covers any routing. So the host cannot refuse a bad one: a NaN logit selects as torch's top-k
//! does, and an expert that does not exist is left out.

mod experts;
mod gate;
mod hopper;

use candle_core::{DType, Tensor};
use deepseek_v41_core::{
    Comm, Result,
    cuda::{
        Held, Launch, Out, Ptr, join, kernels,
        ops::{device, supported},
    },
};
use deepseek_v41_quant::{
    WeightFormat,
    cuda::{self as quant, Activation},
};
use half::bf16;

pub(crate) use self::{
    experts::DeviceExperts,
    gate::{DeviceGate, topk_gate},
};
use crate::{Expert, Routing};

/// What the layer's products take for `xs`.
fn input(format: WeightFormat, xs: &Tensor) -> Result<Activation> {
    match format {
        WeightFormat::Fp8 | WeightFormat::Fp4 => Activation::new(xs),
        WeightFormat::Bf16 | WeightFormat::F32 => Ok(Activation::plain(xs.contiguous()?)),
    }
}

/// One expert over all tokens: `xs: [T, dim]`, prepared by [`input`].
fn expert(expert: &Expert, xs: &Activation) -> Result<Tensor> {
    const OP: &str = "swiglu";
    let [w1, w2, w3] = Expert::LINEARS.map(|part| part(expert));
    let both = match expert.joined() {
        Some(joined) => joined.forward(xs)?,
        None => None,
    };
    let (gate, up) = match both.as_deref() {
        Some([gate, up]) => (gate.clone(), up.clone()),
        _ => (quant::quantised(w1, xs)?, quant::quantised(w3, xs)?),
    };
    if let Some(y) = quant::swiglu_product(&gate, &up, w2, expert.limit())? {
        return Ok(y);
    }
    let dev = device(&gate)?;
    let inter = w1.out_dim();
    supported(
        inter.is_multiple_of(32),
        OP,
        inter,
        "widths of multiples of 32",
    )?;
    let units = gate.elem_count() / 8;
    let n = gate.elem_count();
    let h = Out::<bf16>::new(dev, n)?;
    let coded = matches!(w2.format(), WeightFormat::Fp8 | WeightFormat::Fp4);
    let (plain, fake) = if coded {
        (Ptr::NULL, h.ptr())
    } else {
        (h.ptr(), Ptr::NULL)
    };
    let wanted = coded && Activation::takes_codes(dev, n / inter)?;
    let codes = wanted.then(|| Out::<u8>::new(dev, n)).transpose()?;
    let scales = wanted.then(|| Out::<u8>::new(dev, n / 32)).transpose()?;
    let launch = Launch::new(dev, kernels::SWIGLU, "swiglu")
        .ptr(Held::new(&gate, OP).ptr::<bf16>()?)
        .ptr(Held::new(&up, OP).ptr::<bf16>()?)
        .ptr(Ptr::NULL)
        .ptr(plain)
        .ptr(fake)
        .maybe(codes.as_ref().map(Out::ptr))
        .maybe(scales.as_ref().map(Out::ptr))
        .long(units)
        .int(inter)
        .long(inter)
        .f32(expert.limit());
    // SAFETY: [T, inter] in and out, a scale for 32; a thread takes eight elements.
    unsafe { launch.launch((units.div_ceil(256), 1, 1), 256, 0)? };
    let codes = match (codes, scales) {
        (Some(codes), Some(scales)) => Some((
            codes.into_tensor(gate.shape())?,
            scales.into_tensor((n / inter, inter / 32))?,
        )),
        _ => None,
    };
    let values = h.into_tensor(gate.shape())?;
    quant::quantised(w2, &Activation::coded(values, codes))
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
    // The gate may have run beside it.
    join()?;
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
    let ranks = comm.world_size() > 1;
    if let (1, false, WeightFormat::Fp4, Some(xs)) = (t, ranks, experts.format, values.raw())
        && experts.one_fits(k)
    {
        return experts.one(dev, xs, &routing, &common, shared.limit());
    }
    let (y, inverse) = experts.run(&values, &routing, shared.limit())?;
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
