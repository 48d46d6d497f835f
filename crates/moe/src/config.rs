use deepseek_v41_core::{Error, Result};
use deepseek_v41_quant::WeightFormat;

use crate::GateParams;

/// How gate logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreFunc {
    /// `exp(x - max) / sum`, over all experts.
    Softmax,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `sqrt(softplus(x))`, softplus with torch's threshold: `x` itself above 20. The released one.
    SqrtSoftplus,
}

/// Settings of one MoE layer, already resolved for this layer (draft layers have other expert
/// counts).
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Width of the model.
    pub dim: usize,
    /// Width inside an expert.
    pub inter_dim: usize,
    /// Experts, `E`.
    pub n_routed: usize,
    /// Experts a token is sent to, `k`.
    pub n_activated: usize,
    /// From logits to scores.
    pub score_func: ScoreFunc,
    /// Logits are divided by it.
    pub gate_temp: f32,
    /// Whether a token's weights are divided by their sum (only when it has several).
    pub norm_topk_prob: bool,
    /// Factor on every routing weight.
    pub route_scale: f32,
    /// Clamp inside the experts, 0 for none.
    pub swiglu_limit: f32,
    /// Storage of the routed experts.
    pub expert_format: WeightFormat,
    /// Storage of the shared expert.
    pub shared_format: WeightFormat,
    /// Whether the checkpoint has a second bias, for tokens inside an image.
    pub bias_vl: bool,
}

impl MoeConfig {
    /// Refuses settings the maths has no meaning for.
    ///
    /// # Errors
    /// A zero size, f32 experts, more activated experts than there are, a temperature that is not positive, a
    /// scale or limit that is not finite or a negative limit.
    pub fn validate(&self) -> Result<()> {
        for (field, size) in [
            ("dim", self.dim),
            ("moe_inter_dim", self.inter_dim),
            ("n_routed_experts", self.n_routed),
            ("n_activated_experts", self.n_activated),
        ] {
            if size == 0 {
                return Err(Error::config(field, "expected at least 1, found 0"));
            }
        }
        if u32::try_from(self.n_routed).is_err() {
            return Err(Error::config(
                "n_routed_experts",
                "expected an index that fits 32 bits",
            ));
        }
        self.gate().validate(self.n_routed)?;
        for format in [self.expert_format, self.shared_format] {
            if format == WeightFormat::F32 {
                return Err(Error::config(
                    "expert_dtype",
                    "experts are bf16, fp8 or fp4, found f32",
                ));
            }
        }
        if !self.swiglu_limit.is_finite() || self.swiglu_limit < 0.0 {
            let found = self.swiglu_limit;
            return Err(Error::config(
                "swiglu_limit",
                format!("expected 0 or more, found {found}"),
            ));
        }
        Ok(())
    }

    /// The part of the settings the gate needs.
    pub fn gate(&self) -> GateParams {
        GateParams {
            n_activated: self.n_activated,
            score_func: self.score_func,
            gate_temp: self.gate_temp,
            norm_topk_prob: self.norm_topk_prob,
            route_scale: self.route_scale,
        }
    }
}
