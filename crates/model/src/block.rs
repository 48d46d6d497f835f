//! One backbone layer.

use std::sync::Arc;

use candle_core::Tensor;
use deepseek_v41_attention::{Attention, AttnPlan, LayerCache, RopeTables, SharedAttentionRuntime};
use deepseek_v41_core::{Comm, Error, Result, RmsNorm, VarBuilder};
use deepseek_v41_hyperconn::{Flow, HyperConn, Site};
use deepseek_v41_moe::{Moe, MoeConfig};

use crate::{Config, PlannedLayer, Probe, ProbePoint, probe::shift_selection};

/// What a layer does with its caches.
pub(crate) type Attend<'a> = dyn FnMut(LayerCache<'_>) -> Result<Tensor> + 'a;

/// Calls its argument with a layer's caches.
pub(crate) type Lend<'a> = dyn FnMut(&mut Attend<'_>) -> Result<Tensor> + 'a;

/// Attention and experts, each inside its hyper-connection.
#[derive(Debug)]
pub(crate) struct Block {
    number: usize,
    role: PlannedLayer,
    hc_attn: HyperConn,
    attn_norm: RmsNorm,
    attn: Attention,
    ffn: FeedForward,
}

/// The experts inside their hyper-connection: the half that backbone and draft layers share.
#[derive(Debug)]
pub(crate) struct FeedForward {
    number: usize,
    hc: HyperConn,
    norm: RmsNorm,
    moe: Moe,
}

/// What a block's sublayers share with those of other blocks in one step.
pub(crate) struct Step<'a> {
    pub(crate) plan: &'a AttnPlan,
    pub(crate) ropes: &'a RopeTables,
    pub(crate) image_mask: Option<&'a Tensor>,
    pub(crate) shared: SharedAttentionRuntime,
    pub(crate) probe: &'a mut dyn Probe,
}

impl Block {
    /// Loads layer `number` under `vb`.
    pub(crate) fn new(
        cfg: &Config,
        number: usize,
        role: &PlannedLayer,
        comm: &Arc<dyn Comm>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let hc = cfg.hyperconn();
        Ok(Self {
            number,
            role: role.clone(),
            hc_attn: HyperConn::new(&hc, Site::Attn, vb.clone())?,
            attn_norm: RmsNorm::new(cfg.dim, cfg.norm_eps, vb.pp("attn_norm"))?,
            attn: Attention::new(&cfg.attention(role.role), comm.clone(), vb.pp("attn"))?,
            ffn: FeedForward::new(cfg, &cfg.moe(), number, comm, &vb)?,
        })
    }

    /// Takes the stream `[T, C, dim]`, `T > 0`, through the layer. `lend` lends it its caches.
    pub(crate) fn forward(
        &self,
        flow: &mut Flow,
        lend: &mut Lend<'_>,
        step: &mut Step<'_>,
    ) -> Result<()> {
        let xs = flow.enter(&self.hc_attn, &self.attn_norm)?;
        let ys = self.attend(&xs, lend, step)?;
        step.probe.value(self.number, ProbePoint::Attn, &ys)?;
        flow.leave(ys)?;
        self.ffn.forward(flow, step.image_mask, step.probe)
    }

    fn attend(&self, xs: &Tensor, lend: &mut Lend<'_>, step: &mut Step<'_>) -> Result<Tensor> {
        let (plan, ropes) = (step.plan, step.ropes);
        let mut prepared = Some(self.attn.prepare(xs, ropes)?);
        let shared = &mut step.shared;
        let mut attend = |shared: &mut SharedAttentionRuntime| {
            let o = lend(&mut |cache| match prepared.take() {
                Some(prepared) => self.attn.attend(prepared, plan, ropes, cache, shared),
                None => Err(Error::MissingSource {
                    what: "a layer's queries: it attends once",
                }),
            })?;
            self.attn.output(&o)
        };
        let indexed = self.role.role.indexer().and(self.role.role.ratio());
        let Some(ratio) = indexed else {
            return attend(shared);
        };
        let base = || -> Result<Vec<u32>> {
            let spans = &plan.compress(ratio)?.spans;
            Ok(spans.iter().map(|s| s.base).collect())
        };
        if let Some(positions) = step.probe.replay_selection(self.number) {
            shared.replay = Some(shift_selection(&positions, &base()?, 1)?);
        }
        let ys = attend(shared)?;
        if step.probe.wants_selections()
            && let Some(own) = shared.computed.take()
        {
            step.probe
                .selected(self.number, &shift_selection(&own.0, &base()?, -1)?.0);
        }
        Ok(ys)
    }
}

impl FeedForward {
    /// Loads `hc_ffn_*`, `ffn_norm` and `ffn` under `vb`, a block's own prefix.
    pub(crate) fn new(
        cfg: &Config,
        moe: &MoeConfig,
        number: usize,
        comm: &Arc<dyn Comm>,
        vb: &VarBuilder,
    ) -> Result<Self> {
        Ok(Self {
            number,
            hc: HyperConn::new(&cfg.hyperconn(), Site::Ffn, vb.clone())?,
            norm: RmsNorm::new(cfg.dim, cfg.norm_eps, vb.pp("ffn_norm"))?,
            moe: Moe::new(moe, comm.clone(), vb.pp("ffn"))?,
        })
    }

    /// Takes the stream `[T, C, dim]` through the experts.
    pub(crate) fn forward(
        &self,
        flow: &mut Flow,
        image_mask: Option<&Tensor>,
        probe: &mut dyn Probe,
    ) -> Result<()> {
        let xs = flow.enter(&self.hc, &self.norm)?;
        let ys = self.experts(&xs, image_mask, probe)?;
        probe.value(self.number, ProbePoint::Ffn, &ys)?;
        flow.leave(ys)?;
        if probe.wants_streams() {
            probe.value(self.number, ProbePoint::Stream, flow.stream()?)?;
            if let Some(carried) = flow.carried() {
                probe.value(self.number, ProbePoint::PreMix, carried.tensor())?;
            }
        }
        Ok(())
    }

    fn experts(
        &self,
        xs: &Tensor,
        image_mask: Option<&Tensor>,
        probe: &mut dyn Probe,
    ) -> Result<Tensor> {
        let gate = self.moe.gate();
        let mut routing = gate.forward(xs, image_mask)?;
        probe.routed(self.number, &routing);
        if let Some(experts) = probe.replay_experts(self.number) {
            routing = gate.forward_chosen(xs, &experts)?;
        }
        self.moe.forward_routed(xs, &routing)
    }
}
