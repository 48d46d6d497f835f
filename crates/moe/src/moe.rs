use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Comm, Error, Result, VarBuilder, cpu};
use deepseek_v41_quant::WeightFormat;
use half::bf16;

use crate::gate::{Routes, check_experts};
use crate::ops::with_slice;
use crate::{Expert, Experts, Gate, MoeConfig, Routing};

/// A mixture-of-experts layer: `k` routed experts a token, and one every token goes through.
///
/// ```text
/// out = bf16( sum over the token's experts, ascending, of expert_j(x, weight_j)   f32
///             + shared(x) )
/// ```
///
/// Ranks hold contiguous ranges of the routed experts and sum their f32 parts; gate and shared
/// expert are replicated.
#[derive(Debug, Clone)]
pub struct Moe {
    gate: Gate,
    experts: Experts,
    shared: Expert,
    comm: Arc<dyn Comm>,
    n_routed: usize,
    /// Whether routed and shared experts take the same values for an input: fp8 and fp4 quantise
    /// activations alike.
    same_values: bool,
}

impl Moe {
    /// Loads `gate.*`, this rank's `experts.J.*` and `shared_experts.*` under `vb`.
    ///
    /// # Errors
    /// Settings without meaning, experts that do not divide over the ranks, a weight that is missing
    /// or of another shape or dtype, or a device without kernels in this build.
    pub fn new(cfg: &MoeConfig, comm: Arc<dyn Comm>, vb: VarBuilder) -> Result<Self> {
        let gate = Gate::new(cfg, vb.pp("gate"))?;
        let (rank, ranks) = (comm.rank(), comm.world_size());
        if !cfg.n_routed.is_multiple_of(ranks) {
            let reason = format!("{} experts do not divide over {ranks} ranks", cfg.n_routed);
            return Err(Error::config("n_routed_experts", reason));
        }
        let local = cfg.n_routed / ranks;
        let shared = Expert::new(cfg, cfg.shared_format, vb.pp("shared_experts"))?;
        #[cfg(feature = "cuda")]
        let shared = shared.join()?;
        Ok(Self {
            gate,
            experts: Experts::new(cfg, rank * local..(rank + 1) * local, vb.pp("experts"))?,
            shared,
            comm,
            n_routed: cfg.n_routed,
            same_values: quantises(cfg.expert_format) == quantises(cfg.shared_format),
        })
    }

    /// The gate, for routing apart from the experts.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// This rank's routed experts.
    pub fn experts(&self) -> &Experts {
        &self.experts
    }

    /// The expert every token goes through.
    pub fn shared(&self) -> &Expert {
        &self.shared
    }

    /// `xs: [T, dim]` bf16, `image_mask: [T]` u8 (not 0 inside an image span) → `[T, dim]` bf16.
    ///
    /// # Errors
    /// Shapes or dtypes that do not fit, or a token whose gate logits have no answer (NaN, `+inf`).
    ///
    /// Reference: `MoE.forward`.
    pub fn forward(&self, xs: &Tensor, image_mask: Option<&Tensor>) -> Result<Tensor> {
        let t = self.gate.tokens("moe", xs)?;
        #[cfg(feature = "cuda")]
        if xs.device().is_cuda() {
            return self.forward_routed(xs, &self.gate.forward(xs, image_mask)?);
        }
        with_slice("moe", xs, |xs: &[bf16]| {
            let routes = self.gate.route_tensor(xs, t, image_mask)?;
            self.run(xs, t, &routes)
        })
    }

    /// [`Moe::forward`] with the gate's answer given: `routing.experts` and `weights: [T, k]`, any
    /// `k`.
    ///
    /// # Errors
    /// Shapes or dtypes that do not fit, an expert that does not exist or is listed twice for a
    /// token.
    pub fn forward_routed(&self, xs: &Tensor, routing: &Routing) -> Result<Tensor> {
        let t = self.gate.tokens("moe", xs)?;
        let (experts, weights) = (&routing.experts, &routing.weights);
        let fits =
            experts.dims() == weights.dims() && matches!(experts.dims(), [rows, _] if *rows == t);
        if !fits || experts.dtype() != DType::U32 || weights.dtype() != DType::F32 {
            return Err(Error::shape(
                "moe",
                format!(
                    "expected experts [{t}, k] u32 and weights alike f32, found {:?} {:?} and {:?} {:?}",
                    experts.dims(),
                    experts.dtype(),
                    weights.dims(),
                    weights.dtype()
                ),
            ));
        }
        #[cfg(feature = "cuda")]
        if xs.device().is_cuda() {
            let Self {
                experts,
                shared,
                same_values,
                comm,
                ..
            } = self;
            return crate::cuda::moe(xs, routing, experts.device(), shared, *same_values, &**comm);
        }
        let k = experts.dims()[1];
        let routes = Routes {
            experts: with_slice("moe", experts, |e: &[u32]| Ok(e.to_vec()))?,
            weights: with_slice("moe", weights, |w: &[f32]| Ok(w.to_vec()))?,
            k,
        };
        check_experts(&routes.experts, self.n_routed)?;
        for (token, row) in routes.experts.chunks_exact(k.max(1)).enumerate() {
            if let Some(e) =
                (1..row.len()).find_map(|i| row[..i].contains(&row[i]).then_some(row[i]))
            {
                return Err(Error::value(
                    "routed expert",
                    format!("token {token} lists {e} twice"),
                ));
            }
        }
        with_slice("moe", xs, |xs: &[bf16]| self.run(xs, t, &routes))
    }

    fn run(&self, xs: &[bf16], t: usize, routes: &Routes) -> Result<Tensor> {
        let shape = (t, self.gate.dim());
        let mut sum = vec![0f32; xs.len()];
        let mut out = vec![bf16::ZERO; xs.len()];
        cpu::with_scratch(xs.len(), |values| {
            self.shared.input_values(xs, values);
            if self.same_values {
                let beside = Some((&self.shared, &mut out[..]));
                return self.experts.forward(values, routes, beside, &mut sum);
            }
            self.shared.forward_values(values, None, &mut out)?;
            self.experts.input_values(xs, values);
            self.experts.forward(values, routes, None, &mut sum)
        })?;
        if self.comm.world_size() > 1 {
            // f32 over the ranks, so that their number adds no rounding to bf16.
            let part = Tensor::from_vec(sum, shape, &Device::Cpu)?;
            let whole = self.comm.all_reduce_sum(&part)?;
            sum = with_slice("moe", &whole, |s: &[f32]| Ok(s.to_vec()))?;
        }
        for (o, s) in out.iter_mut().zip(&sum) {
            *o = cpu::round_bf16(s + cpu::widen(*o));
        }
        Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
    }
}

fn quantises(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Fp8 | WeightFormat::Fp4)
}
