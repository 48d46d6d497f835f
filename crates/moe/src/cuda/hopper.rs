//! Products of routed experts that are Hopper's own.

use candle_core::{CudaDevice, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{Held, Launch, Out, kernels, multiprocessors},
};
use half::bf16;

use super::experts::DeviceExperts;
use crate::Routing;

/// Tokens up to which all devices' kernels take the experts.
pub(super) const MANY: usize = 256;

/// Bytes of shared memory that the kernel for one token may ask for, and stages of its ring of weights at most.
const ONE_SHARED: usize = 230_000;

const ONE_STAGES: usize = 8;

/// Words that its blocks wait for each other by: one for each of a token's experts.
pub(super) const ONE_COUNTERS: usize = 32;

impl DeviceExperts {
    /// fp4 on Hopper at the rate of the bf16 tensor core: tokens are first laid out as its shared memory
    /// takes them.
    pub(super) fn many(
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

    /// One token `xs: [1, dim]` on Hopper, all experts here: no grouping, and the shared expert's output added.
    pub(super) fn one(
        &self,
        dev: &CudaDevice,
        xs: &Tensor,
        routing: &Routing,
        common: &Tensor,
        limit: f32,
    ) -> Result<Tensor> {
        const OP: &str = "experts";
        let (dim, inter, n) = (self.dim, self.inter, self.count);
        let k = routing.experts.dim(1)?;
        let chosen = Held::new(&routing.experts, OP).ptr::<u32>()?;
        let h = Out::<bf16>::new(dev, k * inter)?;
        let out = Out::<bf16>::new(dev, dim)?;
        let launch = Launch::new(dev, kernels::EXPERTS_ONE_SM90, "experts_one")
            .ptr(Held::new(xs, OP).ptr::<bf16>()?)
            .ptr(chosen)
            .ptr(Held::new(&routing.weights, OP).ptr::<f32>()?)
            .ptr(self.weight(0)?)
            .ptr(self.scale(0)?)
            .ptr(self.weight(2)?)
            .ptr(self.scale(2)?)
            .ptr(self.weight(1)?)
            .ptr(self.scale(1)?)
            .ptr(h.ptr())
            .ptr(Held::new(common, OP).ptr::<bf16>()?)
            .ptr(out.ptr())
            .ptr(Held::new(&self.counter, OP).ptr::<u32>()?)
            .int(dim)
            .int(inter)
            .int(k)
            .u32(self.first as u32)
            .int(n)
            .f32(limit);
        let grid = (multiprocessors(dev)?, 1, 1);
        // SAFETY: one token, all experts' weights, h [k, inter], out [dim]; a block of this much shared memory
        // fits a multiprocessor. Launches, which leave the counter as they need it, are ordered by the stream.
        unsafe { launch.launch_cooperative(grid, 768, self.one_shared(k))? };
        out.into_tensor((1, dim))
    }

    /// Whether [`one`](Self::one) takes these widths and `k` experts.
    pub(super) fn one_fits(&self, k: usize) -> bool {
        let whole = |width: usize| width > 0 && width.is_multiple_of(256);
        whole(self.dim) && whole(self.inter) && self.count > 0 && self.one_stages(k) >= 2
    }

    /// Codes and scales of 16 rows.
    fn one_stage(&self) -> usize {
        self.dim.max(self.inter) * 17 / 2
    }

    /// What is beside the ring: sums, the token's codes and scales in both halves, and a row of the second's values.
    fn one_beside(&self, k: usize) -> usize {
        ONE_STAGES * 1_280 + (self.dim + k * self.inter) / 8 * 9 + 2 * self.inter
    }

    fn one_stages(&self, k: usize) -> usize {
        let ring = ONE_SHARED.saturating_sub(self.one_beside(k));
        (ring / self.one_stage()).min(ONE_STAGES)
    }

    fn one_shared(&self, k: usize) -> usize {
        self.one_beside(k) + self.one_stages(k) * self.one_stage()
    }
}
