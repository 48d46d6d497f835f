use std::ops::Range;

use candle_core::Device;
use deepseek_v41_core::{Result, VarBuilder, cpu};
use deepseek_v41_quant::{Linear, WeightFormat};
use half::bf16;

#[cfg(feature = "cuda")]
use crate::cuda::DeviceExperts;
use crate::gate::Routes;
use crate::{MoeConfig, group_tokens, swiglu_ref};
#[cfg(feature = "cuda")]
use deepseek_v41_quant::shared_input::Joined;

/// One SwiGLU feed-forward network.
#[derive(Debug, Clone)]
pub struct Expert {
    w1: Linear,
    w2: Linear,
    w3: Linear,
    limit: f32,
    /// `w1` and `w3`, where a GPU multiplies both at once.
    #[cfg(feature = "cuda")]
    joined: Option<Joined>,
}

impl Expert {
    /// Reads `w1`, `w3: [inter_dim, dim]` and `w2: [dim, inter_dim]` under `vb`, stored as `format`.
    ///
    /// # Errors
    /// A weight is missing or of another shape or dtype.
    pub fn new(cfg: &MoeConfig, format: WeightFormat, vb: VarBuilder) -> Result<Self> {
        let (dim, inter) = (cfg.dim, cfg.inter_dim);
        Ok(Self {
            w1: Linear::new(dim, inter, format, vb.pp("w1"))?,
            w2: Linear::new(inter, dim, format, vb.pp("w2"))?,
            w3: Linear::new(dim, inter, format, vb.pp("w3"))?,
            limit: cfg.swiglu_limit,
            #[cfg(feature = "cuda")]
            joined: None,
        })
    }

    /// The expert with `w1` and `w3` end to end on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn join(mut self) -> Result<Self> {
        self.joined = Joined::new(&mut [&mut self.w1, &mut self.w3])?;
        Ok(self)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn joined(&self) -> Option<&Joined> {
        self.joined.as_ref()
    }

    /// `xs`, `out: [m, dim]`. `weights: [m]` multiply the activations before they are rounded and
    /// enter `w2`; the shared expert has none.
    ///
    /// # Errors
    /// Lengths that do not fit.
    ///
    /// Reference: `Expert.forward`.
    pub fn forward_slice(
        &self,
        xs: &[bf16],
        weights: Option<&[f32]>,
        out: &mut [bf16],
    ) -> Result<()> {
        cpu::with_scratch(xs.len(), |values| {
            self.input_values(xs, values);
            self.forward_values(values, weights, out)
        })
    }

    /// What the products take for `xs`, in f32: made once, then shared by `w1` and `w3`, and by every
    /// expert whose format quantises alike.
    pub(crate) fn input_values(&self, xs: &[bf16], values: &mut [f32]) {
        self.w1.input_values(xs, values);
    }

    /// [`Expert::forward_slice`] from [`Expert::input_values`].
    pub(crate) fn forward_values(
        &self,
        values: &[f32],
        weights: Option<&[f32]>,
        out: &mut [bf16],
    ) -> Result<()> {
        let (dim, inter) = (self.w1.in_dim(), self.w1.out_dim());
        let m = values.len() / dim;
        let mut buffer = vec![bf16::ZERO; 3 * m * inter];
        let (gate, rest) = buffer.split_at_mut(m * inter);
        let (up, act) = rest.split_at_mut(m * inter);
        self.w1.forward_values(values, m, gate)?;
        self.w3.forward_values(values, m, up)?;
        let rows = gate.chunks_exact(inter).zip(up.chunks_exact(inter));
        for (i, ((gate, up), act)) in rows.zip(act.chunks_exact_mut(inter)).enumerate() {
            swiglu_ref(gate, up, self.limit, weights.map(|w| w[i]), act);
        }
        self.w2.forward_slice(act, m, out)
    }

    /// Bytes of the three weights, for bandwidth figures.
    pub fn weight_bytes(&self) -> usize {
        self.w1.weight_bytes() + self.w2.weight_bytes() + self.w3.weight_bytes()
    }

    /// Accessors of `w1`, `w2` and `w3`.
    #[cfg(feature = "cuda")]
    pub(crate) const LINEARS: [fn(&Self) -> &Linear; 3] = [|e| &e.w1, |e| &e.w2, |e| &e.w3];

    #[cfg(feature = "cuda")]
    pub(crate) fn limit(&self) -> f32 {
        self.limit
    }

    /// Operations of one token, for deciding about threads.
    pub(crate) fn work(&self) -> usize {
        6 * self.w1.in_dim() * self.w1.out_dim()
    }
}

/// A rank's part of the routed experts: a contiguous range.
#[derive(Debug, Clone)]
pub struct Experts {
    experts: Vec<Expert>,
    #[cfg(feature = "cuda")]
    device: Option<DeviceExperts>,
    range: Range<usize>,
    dim: usize,
}

/// Up to this many output elements (32 MB of bf16) experts run side by side and are summed after.
/// Beyond it experts have tokens enough to keep threads busy inside each product.
const SIDE_BY_SIDE: usize = 1 << 24;

/// An expert and the (token, slot) pairs it got.
type Group<'a> = (&'a Expert, &'a [u32]);

/// What experts side by side do.
enum Part<'a> {
    Beside(&'a Expert, &'a mut [bf16]),
    Group(&'a Group<'a>),
}

impl Experts {
    /// Reads experts `range` as `J.{w1,w2,w3}` under `vb`.
    ///
    /// # Errors
    /// A weight is missing or of another shape or dtype.
    pub fn new(cfg: &MoeConfig, range: Range<usize>, vb: VarBuilder) -> Result<Self> {
        // A GPU holds all experts of a rank in one piece, not each by itself.
        let host = vb.weights().var_builder(&Device::Cpu);
        let host = if vb.prefix().is_empty() {
            host
        } else {
            host.pp(vb.prefix())
        };
        let load = |j| Expert::new(cfg, cfg.expert_format, host.pp(j));
        let experts: Vec<_> = range.clone().map(load).collect::<Result<_>>()?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            device: DeviceExperts::new(&experts, range.start, vb.device())?,
            experts,
            range,
            dim: cfg.dim,
        })
    }

    /// Its copy on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> Option<&DeviceExperts> {
        self.device.as_ref()
    }

    /// The experts this rank holds.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Expert `j`, if this rank holds it.
    pub fn get(&self, j: usize) -> Option<&Expert> {
        self.experts.get(j.checked_sub(self.range.start)?)
    }

    /// [`Expert::input_values`] of any of them; nothing when the rank has none.
    pub(crate) fn input_values(&self, xs: &[bf16], values: &mut [f32]) {
        if let Some(expert) = self.experts.first() {
            expert.input_values(xs, values);
        }
    }

    /// The routed part of this rank: for each token its experts' bf16 outputs, added in f32 in
    /// ascending order of expert to `sum: [T, dim]`. `values: [T, dim]` is what
    /// [`Expert::input_values`] made of the input. `beside`, an expert for every token that takes the same
    /// values, writes its own output.
    pub(crate) fn forward(
        &self,
        values: &[f32],
        routes: &Routes,
        beside: Option<(&Expert, &mut [bf16])>,
        sum: &mut [f32],
    ) -> Result<()> {
        let groups = group_tokens(&routes.experts, self.range());
        let active: Vec<Group<'_>> = groups
            .active()
            .map(|(j, pairs)| (&self.experts[j - self.range.start], pairs))
            .collect();
        let k = routes.k;
        let tokens = beside.as_ref().map_or(0, |_| values.len() / self.dim);
        let each = beside.as_ref().map(|(expert, _)| *expert);
        let each = each.or(self.experts.first()).map_or(0, Expert::work);
        let work = (groups.len() + tokens).saturating_mul(each);
        // The two ways differ in where a row is computed, not in how, and both sum in ascending order.
        if active.len() > 1
            && groups.len() * self.dim <= SIDE_BY_SIDE
            && cpu::should_parallelise(work)
        {
            // The one with the most tokens first, so that it is not the last to end.
            let part = |part| (part, Vec::new(), Ok(()));
            let mut parts: Vec<(Part<'_>, Vec<bf16>, Result<()>)> = Vec::new();
            parts.extend(beside.map(|(expert, out)| part(Part::Beside(expert, out))));
            parts.extend(active.iter().map(|group| part(Part::Group(group))));
            cpu::for_each_piece(work, &mut parts, 1, |_, parts| {
                for (part, out, done) in parts {
                    *done = match part {
                        Part::Beside(expert, out) => expert.forward_values(values, None, out),
                        Part::Group(group) => self.run(group, values, routes, out),
                    };
                }
            });
            for (part, out, done) in parts {
                done?;
                if let Part::Group((_, pairs)) = part {
                    self.add(pairs, k, &out, sum);
                }
            }
        } else {
            if let Some((expert, out)) = beside {
                expert.forward_values(values, None, out)?;
            }
            let mut out = Vec::new();
            for group in &active {
                self.run(group, values, routes, &mut out)?;
                self.add(group.1, k, &out, sum);
            }
        }
        Ok(())
    }

    /// The outputs of one expert for its pairs: `out: [pairs, dim]`.
    fn run(
        &self,
        (expert, pairs): &Group<'_>,
        values: &[f32],
        routes: &Routes,
        out: &mut Vec<bf16>,
    ) -> Result<()> {
        let dim = self.dim;
        out.clear();
        out.resize(pairs.len() * dim, bf16::ZERO);
        let weights: Vec<f32> = pairs.iter().map(|p| routes.weights[*p as usize]).collect();
        if pairs.len() * dim == values.len() {
            // Every token, once each and ascending: nothing to gather.
            return expert.forward_values(values, Some(&weights), out);
        }
        cpu::with_scratch(pairs.len() * dim, |rows| {
            for (pair, row) in pairs.iter().zip(rows.chunks_exact_mut(dim)) {
                row.copy_from_slice(&values[*pair as usize / routes.k * dim..][..dim]);
            }
            expert.forward_values(rows, Some(&weights), out)
        })
    }

    fn add(&self, pairs: &[u32], k: usize, out: &[bf16], sum: &mut [f32]) {
        for (pair, row) in pairs.iter().zip(out.chunks_exact(self.dim)) {
            let sum = &mut sum[*pair as usize / k * self.dim..][..self.dim];
            sum.iter_mut()
                .zip(row)
                .for_each(|(s, o)| *s += cpu::widen(*o));
        }
    }
}
