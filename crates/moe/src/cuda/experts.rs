//! A rank's routed experts, and their products on any device.

use candle_core::{CudaDevice, DType, Device, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cuda::{
        Held, Launch, Out, Ptr, is_hopper, kernels,
        ops::{device, supported},
    },
};
use deepseek_v41_quant::{
    Linear, WeightFormat,
    cuda::{self as quant, Activation},
};
use half::bf16;

use super::hopper::{MANY, ONE_COUNTERS};
use crate::{Expert, Routing};

/// Pairs that one block of the experts' kernels takes.
const TILE: usize = 8;

/// A rank's routed experts on the device: each weight of all of them end to end, as stored.
#[derive(Debug, Clone)]
pub(crate) struct DeviceExperts {
    pub(super) w: [Tensor; 3],
    pub(super) s: Option<[Tensor; 3]>,
    pub(super) format: WeightFormat,
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) dim: usize,
    pub(super) inter: usize,
    /// [`ONE_COUNTERS`] u32 of the kernel for one token, which starts from zeros and then keeps it.
    pub(super) counter: Tensor,
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
            counter: Tensor::zeros(ONE_COUNTERS, DType::U32, device)?,
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
    pub(super) fn run(
        &self,
        xs: &Activation,
        routing: &Routing,
        limit: f32,
    ) -> Result<(Out<bf16>, Out<i32>)> {
        let values = &xs.exact()?;
        let dev = device(values)?;
        let (t, _) = routing.experts.dims2()?;
        let hopper = self.format == WeightFormat::Fp4 && is_hopper(dev)?;
        match hopper && t > MANY {
            true => self.many(dev, values, routing, limit),
            false => self.any(dev, values, routing, limit),
        }
    }

    /// Sorts the pairs by expert and cuts each expert's run, which begins at a multiple of `align`, into
    /// tiles of at most `tile`.
    pub(super) fn group(
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
        let shared = (4 * (17 * n + 1)).max(4 * pairs.min(512));
        // SAFETY: `pairs` experts in, `places` out; at most `max_tiles` tiles whatever the routing.
        unsafe { launch.launch((1, 1, 1), 512, shared)? };
        Ok(grouped)
    }

    pub(super) fn weight(&self, i: usize) -> Result<Ptr<'_>> {
        Held::new(&self.w[i], "experts").ptr::<u8>()
    }

    /// Null for formats without scales.
    pub(super) fn scale(&self, i: usize) -> Result<Ptr<'_>> {
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
}

/// (token, slot) pairs by expert, on the device.
pub(super) struct Grouped {
    /// `[places]`: the pair at each place, -1 where there is none.
    pub(super) order: Out<i32>,
    /// `[P]`: the place of each pair, -1 for another rank's.
    pub(super) inverse: Out<i32>,
    pub(super) tiles: Out<i32>,
    pub(super) count: Out<i32>,
    pub(super) places: usize,
    pub(super) max_tiles: usize,
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
