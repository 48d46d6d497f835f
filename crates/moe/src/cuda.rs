//! The operations of this crate on a GPU.
//!
//! Nothing here reads a routing back: a token's experts stay on the device, and the grid of the experts'
//! kernels covers any routing. So the host cannot refuse a bad one: a NaN logit selects as torch's top-k
//! does, and an expert that does not exist is left out.

use candle_core::{CudaDevice, DType, Device, Tensor};
use deepseek_v41_core::{
    Comm, Error, Result,
    cuda::{
        Held, Launch, Out, Ptr, is_hopper, kernels, multiprocessors,
        ops::{device, supported},
    },
};
use deepseek_v41_quant::{
    Linear, WeightFormat,
    cuda::{self as quant, Activation},
};
use half::bf16;

use crate::{Expert, GateParams, Routing, ScoreFunc};

/// Pairs that one block of the experts' kernels takes.
const TILE: usize = 8;

/// Tokens up to which all devices' kernels take the experts.
const MANY: usize = 256;
/// Bytes of the ring of weights in the kernel for one token, and of shared memory that leave room for two
/// blocks a multiprocessor.
const ONE_RING: usize = 4 * 17_408;
const ONE_SHARED: usize = 114_000;

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
            return self.route_one(xs, mask, p);
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
        let logits = Out::<f32>::new(dev, e)?;
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
            .ptr(logits.ptr())
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
        unsafe { launch.launch((e.div_ceil(4), 1, 1), 128, 4 * e)? };
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
    /// `[2 + ceil(dim / 128)]` u32 of the kernels for one token, which start from zeros and then keep it.
    counter: Tensor,
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
        let (dim, inter) = (w1(one).in_dim(), w1(one).out_dim());
        supported(
            dim.is_multiple_of(32) && inter.is_multiple_of(32),
            "experts",
            format!("widths {dim} and {inter}"),
            "multiples of 32",
        )?;
        Ok(Some(Self {
            counter: Tensor::zeros(2 + dim.div_ceil(128), DType::U32, device)?,
            w: all(false)?,
            s: match format {
                WeightFormat::Fp8 | WeightFormat::Fp4 => Some(all(true)?),
                WeightFormat::Bf16 | WeightFormat::F32 => None,
            },
            format,
            first,
            count: experts.len(),
            dim,
            inter,
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

    /// The outputs of every (token, slot) pair and where each went: `y: [places, dim]`, `inverse: [P]`.
    fn run(&self, xs: &Activation, routing: &Routing, limit: f32) -> Result<(Out<bf16>, Out<i32>)> {
        let dev = device(&xs.values)?;
        let (t, _) = routing.experts.dims2()?;
        let hopper = self.format == WeightFormat::Fp4 && is_hopper(dev)?;
        match hopper && t > MANY {
            true => self.many(dev, &xs.values, routing, limit),
            false => self.any(dev, &xs.values, routing, limit),
        }
    }

    /// Sorts the pairs by expert and cuts each expert's run, which begins at a multiple of `align`, into
    /// tiles of at most `tile`.
    fn group(
        &self,
        dev: &CudaDevice,
        routing: &Routing,
        tile: usize,
        align: usize,
    ) -> Result<Grouped> {
        const OP: &str = "group_tokens";
        let n = self.count;
        let pairs = routing.experts.elem_count();
        let places = pairs + pairs.min(n) * (align - 1);
        let max_tiles = pairs.min(n + pairs / tile);
        let grouped = Grouped {
            order: Out::new(dev, places)?,
            inverse: Out::new(dev, pairs)?,
            tiles: Out::new(dev, 4 * max_tiles)?,
            count: Out::new(dev, 1)?,
            places,
            max_tiles,
        };
        let launch = Launch::new(dev, kernels::GROUP_TOKENS, "group_tokens")
            .ptr(Held::new(&routing.experts, OP).ptr::<u32>()?)
            .ptr(grouped.order.ptr())
            .ptr(grouped.inverse.ptr())
            .ptr(grouped.tiles.ptr())
            .ptr(grouped.count.ptr())
            .int(pairs)
            .u32(self.first as u32)
            .int(n)
            .int(tile)
            .int(align);
        let shared = (4 * (17 * n + 1)).max(8 * pairs.min(512));
        // SAFETY: `pairs` experts in, `places` out; at most `max_tiles` tiles whatever the routing.
        unsafe { launch.launch((1, 1, 1), 512, shared)? };
        Ok(grouped)
    }

    fn weight(&self, i: usize) -> Result<Ptr<'_>> {
        Held::new(&self.w[i], "experts").ptr::<u8>()
    }

    /// Null for formats without scales.
    fn scale(&self, i: usize) -> Result<Ptr<'_>> {
        match &self.s {
            Some(s) => Held::new(&s[i], "experts").ptr::<u8>(),
            None => Ok(Ptr::NULL),
        }
    }

    /// Any format, any device, any number of tokens.
    fn any(
        &self,
        dev: &CudaDevice,
        xs: &Tensor,
        routing: &Routing,
        limit: f32,
    ) -> Result<(Out<bf16>, Out<i32>)> {
        const OP: &str = "experts";
        let (dim, inter) = (self.dim, self.inter);
        let g = self.group(dev, routing, TILE, 1)?;
        let [up, down] = self.kernels()?;
        let h = Out::<bf16>::new(dev, g.places * inter)?;
        let y = Out::<bf16>::new(dev, g.places * dim)?;
        let launch = Launch::new(dev, kernels::EXPERTS, up)
            .ptr(Held::new(xs, OP).ptr::<bf16>()?)
            .ptr(g.order.ptr())
            .ptr(g.tiles.ptr())
            .ptr(g.count.ptr())
            .ptr(Held::new(&routing.weights, OP).ptr::<f32>()?)
            .ptr(self.weight(0)?)
            .ptr(self.scale(0)?)
            .ptr(self.weight(2)?)
            .ptr(self.scale(2)?)
            .ptr(h.ptr())
            .int(dim)
            .int(inter)
            .int(routing.experts.dim(1)?)
            .f32(limit);
        // SAFETY: all experts' weights as their format has them, h [places, inter]; 32 units a block.
        unsafe { launch.launch((inter / 32, g.max_tiles, 1), 256, 0)? };
        let launch = Launch::new(dev, kernels::EXPERTS, down)
            .ptr(h.ptr())
            .ptr(g.tiles.ptr())
            .ptr(g.count.ptr())
            .ptr(self.weight(1)?)
            .ptr(self.scale(1)?)
            .ptr(y.ptr())
            .int(dim)
            .int(inter);
        // SAFETY: h [places, inter], y [places, dim]; 32 rows a block.
        unsafe { launch.launch((dim.div_ceil(32), g.max_tiles, 1), 192, 0)? };
        Ok((y, g.inverse))
    }

    /// fp4 on Hopper at the rate of the bf16 tensor core: tokens are first laid out as its shared memory
    /// takes them.
    fn many(
        &self,
        dev: &CudaDevice,
        xs: &Tensor,
        routing: &Routing,
        limit: f32,
    ) -> Result<(Out<bf16>, Out<i32>)> {
        const OP: &str = "experts";
        let (dim, inter) = (self.dim, self.inter);
        let g = self.group(dev, routing, 128, 8)?;
        let (padded, width) = (g.places.next_multiple_of(8), dim.next_multiple_of(128));
        let tiled = Out::<bf16>::new(dev, padded * width)?;
        let launch = Launch::new(dev, kernels::ACT_QUANT, "act_quant_tiled")
            .ptr(Held::new(xs, OP).ptr::<bf16>()?)
            .ptr(g.order.ptr())
            .int(routing.experts.dim(1)?)
            .ptr(tiled.ptr())
            .int(dim)
            .long(dim)
            .long(padded)
            .int(1)
            .int(0);
        // SAFETY: places name pairs of tokens of `xs`, or nothing; a block a place, which it holds.
        unsafe { launch.launch((g.places, 1, 1), 256, 2 * width)? };
        let h = Out::<bf16>::new(dev, padded * inter.next_multiple_of(128))?;
        let y = Out::<bf16>::new(dev, padded * dim)?;
        let sms = multiprocessors(dev)?;
        let shared = 4 * 32_768 + 128 * 272 + 1024;
        let launch = Launch::new(dev, kernels::EXPERTS_MANY_SM90, "experts_many_up")
            .ptr(tiled.ptr())
            .ptr(g.order.ptr())
            .ptr(g.tiles.ptr())
            .ptr(g.count.ptr())
            .ptr(Held::new(&routing.weights, OP).ptr::<f32>()?)
            .ptr(self.weight(0)?)
            .ptr(self.scale(0)?)
            .ptr(self.weight(2)?)
            .ptr(self.scale(2)?)
            .ptr(h.ptr())
            .int(dim)
            .int(inter)
            .long(padded)
            .f32(limit);
        // SAFETY: both tiled matrices have `padded` rows; what places without a pair hold is not used.
        unsafe { launch.launch((sms, 1, 1), 384, shared)? };
        let launch = Launch::new(dev, kernels::EXPERTS_MANY_SM90, "experts_many_down")
            .ptr(h.ptr())
            .ptr(g.tiles.ptr())
            .ptr(g.count.ptr())
            .ptr(self.weight(1)?)
            .ptr(self.scale(1)?)
            .ptr(y.ptr())
            .int(dim)
            .int(inter)
            .long(padded);
        // SAFETY: as above; y [padded, dim].
        unsafe { launch.launch((sms, 1, 1), 384, shared)? };
        Ok((y, g.inverse))
    }

    /// One token on Hopper, all experts here: no grouping, and the shared expert's output added.
    fn one(
        &self,
        dev: &CudaDevice,
        (codes, scales): (&Tensor, &Tensor),
        routing: &Routing,
        common: &Tensor,
        limit: f32,
    ) -> Result<Tensor> {
        const OP: &str = "experts";
        let (dim, inter, n) = (self.dim, self.inter, self.count);
        let k = routing.experts.dim(1)?;
        let chosen = Held::new(&routing.experts, OP).ptr::<u32>()?;
        let hc = Out::<u8>::new(dev, k * inter)?;
        let hs = Out::<u8>::new(dev, k * inter / 32)?;
        let y = Out::<bf16>::new(dev, k * dim)?;
        let out = Out::<bf16>::new(dev, dim)?;
        let launch = Launch::new(dev, kernels::EXPERTS_ONE_SM90, "experts_one")
            .ptr(Held::new(codes, OP).ptr::<u8>()?)
            .ptr(Held::new(scales, OP).ptr::<u8>()?)
            .ptr(chosen)
            .ptr(Held::new(&routing.weights, OP).ptr::<f32>()?)
            .ptr(self.weight(0)?)
            .ptr(self.scale(0)?)
            .ptr(self.weight(2)?)
            .ptr(self.scale(2)?)
            .ptr(self.weight(1)?)
            .ptr(self.scale(1)?)
            .ptr(hc.ptr())
            .ptr(hs.ptr())
            .ptr(y.ptr())
            .ptr(Held::new(common, OP).ptr::<bf16>()?)
            .ptr(out.ptr())
            .ptr(Held::new(&self.counter, OP).ptr::<u32>()?)
            .int(dim)
            .int(inter)
            .int(k)
            .u32(self.first as u32)
            .int(n)
            .f32(limit);
        let grid = (2 * multiprocessors(dev)?, 1, 1);
        // SAFETY: one token's codes and scales, all experts' weights, h [k, inter], y [k, dim], out [dim]; two
        // blocks of this much shared memory fit a multiprocessor. Launches, which leave the counter as they
        // need it, are ordered by the stream.
        unsafe { launch.launch_cooperative(grid, 256, self.one_shared())? };
        out.into_tensor((1, dim))
    }

    /// Whether [`one`](Self::one) takes these widths.
    fn one_fits(&self) -> bool {
        let whole = |width: usize| width.is_multiple_of(256) && width <= 16_384;
        whole(self.dim) && whole(self.inter) && self.one_shared() <= ONE_SHARED && self.count > 0
    }

    fn one_shared(&self) -> usize {
        ONE_RING + self.dim.max(self.inter) / 32 * 36
    }
}

/// (token, slot) pairs by expert, on the device.
struct Grouped {
    /// `[places]`: the pair at each place, -1 where there is none.
    order: Out<i32>,
    /// `[P]`: the place of each pair, -1 for another rank's.
    inverse: Out<i32>,
    tiles: Out<i32>,
    count: Out<i32>,
    places: usize,
    max_tiles: usize,
}

type Bytes<'a> = std::borrow::Cow<'a, [u8]>;

/// Codes (or values) and scales of a layer, as stored; fp8 scales in tiles of 32.
fn stored(linear: &Linear) -> Result<(Bytes<'_>, Bytes<'_>)> {
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
    quant::quantised(
        w2,
        &Activation {
            values: h.into_tensor(gate.shape())?,
            codes,
        },
    )
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
    let ranks = comm.world_size() > 1;
    if let (1, false, WeightFormat::Fp4, Some((codes, scales))) =
        (t, ranks, experts.format, &values.codes)
        && experts.one_fits()
    {
        return experts.one(dev, (codes, scales), &routing, &common, shared.limit());
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
