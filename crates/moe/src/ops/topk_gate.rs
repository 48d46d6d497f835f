//! From gate logits to the experts of a token and their weights.
//!
//! ```text
//! scores  = score_func(logits / gate_temp)
//! experts = the k largest of scores + bias, larger first, the lower index among equals
//! weights = scores[experts]                           the bias selects, it never weighs
//! weights = weights / (sum + 1e-20)                   if norm_topk_prob and k > 1
//! weights = weights * route_scale
//! ```
//!
//! All f32, with the correctly rounded `exp` of the standard library: a route can hang on one ulp.
//!
//! # Degenerate logits
//! * NaN or `+inf`: a typed error that names token and expert. No weight could be meant.
//! * `-inf`, or too small for `exp`: score 0. Where all selected scores are 0 the weights are 0
//!   (`0 / 1e-20`), not NaN. Softmax over nothing but `-inf` has no answer: an error.
//! * Sums above f32 cannot occur: scores are at most 1, or the root of a finite f32.

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result};

use super::with_slice;
use crate::{Routing, ScoreFunc};

/// Keeps the weights of a token whose scores are all 0 at 0. Not the norms' eps.
const SUM_EPS: f32 = 1e-20;
/// Above it softplus is the identity, as in torch.
const SOFTPLUS_THRESHOLD: f32 = 20.0;

/// Settings of the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateParams {
    /// Experts a token is sent to, `k`.
    pub n_activated: usize,
    /// From logits to scores.
    pub score_func: ScoreFunc,
    /// Logits are divided by it.
    pub gate_temp: f32,
    /// Whether a token's weights are divided by their sum (only when it has several).
    pub norm_topk_prob: bool,
    /// Factor on every weight.
    pub route_scale: f32,
}

impl GateParams {
    /// Refuses settings that do not fit `n_routed` experts or have no meaning.
    ///
    /// # Errors
    /// No activated expert or more than there are; a temperature that is not positive and finite; a
    /// scale that is not finite.
    pub fn validate(&self, n_routed: usize) -> Result<()> {
        if self.n_activated == 0 || self.n_activated > n_routed {
            let reason = format!("expected 1..={n_routed}, found {}", self.n_activated);
            return Err(Error::config("n_activated_experts", reason));
        }
        if !self.gate_temp.is_finite() || self.gate_temp <= 0.0 {
            let reason = format!("expected a positive temperature, found {}", self.gate_temp);
            return Err(Error::config("gate_temp", reason));
        }
        if !self.route_scale.is_finite() {
            let reason = format!("expected a finite factor, found {}", self.route_scale);
            return Err(Error::config("route_scale", reason));
        }
        Ok(())
    }
}

/// `logits: [T, E]` f32, `bias: [E]` f32 → routing.
///
/// # Errors
/// Shapes or dtypes that do not fit, settings that do not fit `E`, a NaN in the bias, or logits
/// without an answer (see the module).
///
/// Reference: `Gate.forward` after the projection.
pub fn topk_gate(logits: &Tensor, bias: &Tensor, p: GateParams) -> Result<Routing> {
    const OP: &str = "topk_gate";
    let (&[t, e], &[biases]) = (logits.dims(), bias.dims()) else {
        let found = format!("{:?} and {:?}", logits.dims(), bias.dims());
        return Err(Error::shape(
            OP,
            format!("expected [T, E] and [E], found {found}"),
        ));
    };
    if e != biases {
        return Err(Error::shape(
            OP,
            format!("{e} logits a token, {biases} biases"),
        ));
    }
    p.validate(e)?;
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        return crate::cuda::topk_gate(logits, &bias.contiguous()?, None, None, None, p);
    }
    let mut scores = with_slice(OP, logits, |logits: &[f32]| Ok(logits.to_vec()))?;
    let k = p.n_activated;
    let (mut experts, mut weights) = (vec![0u32; t * k], vec![0f32; t * k]);
    with_slice(OP, bias, |bias: &[f32]| {
        if let Some(i) = bias.iter().position(|b| b.is_nan()) {
            return Err(Error::value("gate bias", format!("expert {i}: NaN")));
        }
        let outs = experts.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (token, (scores, (experts, weights))) in
            scores.chunks_exact_mut(e).zip(outs).enumerate()
        {
            topk_gate_ref(scores, bias, p, experts, weights).map_err(|err| at_token(err, token))?;
        }
        Ok(())
    })?;
    Routing::new(t, k, experts, weights)
}

/// One token: `logits: [E]`, replaced by their scores, `bias: [E]` → `experts`, `weights: [k]`.
///
/// # Errors
/// Logits without an answer (see the module).
pub fn topk_gate_ref(
    logits: &mut [f32],
    bias: &[f32],
    p: GateParams,
    experts: &mut [u32],
    weights: &mut [f32],
) -> Result<()> {
    scores_ref(logits, p)?;
    select_ref(logits, bias, experts);
    route_weights_ref(logits, experts, p, weights);
    Ok(())
}

/// Adds the token to an error about one token's logits.
pub(crate) fn at_token(err: Error, token: usize) -> Error {
    match err {
        Error::Value { what, reason } => Error::Value {
            what,
            reason: format!("token {token}, {reason}"),
        },
        err => err,
    }
}

/// Logits of one token to scores, in place.
///
/// # Errors
/// A NaN or `+inf` logit; softmax without a finite logit.
pub fn scores_ref(xs: &mut [f32], p: GateParams) -> Result<()> {
    for (e, x) in xs.iter_mut().enumerate() {
        *x /= p.gate_temp;
        if x.is_nan() || *x == f32::INFINITY {
            return Err(Error::value("gate logits", format!("expert {e}: {x}")));
        }
    }
    match p.score_func {
        ScoreFunc::Softmax => {
            let max = xs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if max == f32::NEG_INFINITY {
                return Err(Error::value(
                    "gate logits",
                    "softmax without a finite logit",
                ));
            }
            let mut sum = 0f32;
            for x in xs.iter_mut() {
                *x = (*x - max).exp();
                sum += *x;
            }
            xs.iter_mut().for_each(|x| *x /= sum);
        }
        ScoreFunc::Sigmoid => xs.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        ScoreFunc::SqrtSoftplus => xs.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
    }
    Ok(())
}

/// `ln(1 + exp(x))` that neither loses small arguments (`ln_1p`) nor overflows (the threshold).
fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_THRESHOLD {
        x
    } else {
        x.exp().ln_1p()
    }
}

/// The `out.len()` largest of `scores + bias`: larger first, the lower index among equals.
///
/// Both must be free of NaN, and `out` no longer than they are.
pub fn select_ref(scores: &[f32], bias: &[f32], out: &mut [u32]) {
    let key = |e: u32| scores[e as usize] + bias[e as usize];
    let mut found = 0;
    for e in 0..scores.len() as u32 {
        let value = key(e);
        if found == out.len() {
            if value <= key(out[found - 1]) {
                continue;
            }
            found -= 1;
        }
        // Experts ascend, so one that only equals an earlier one stays behind it.
        let mut at = found;
        while at > 0 && key(out[at - 1]) < value {
            out[at] = out[at - 1];
            at -= 1;
        }
        out[at] = e;
        found += 1;
    }
}

/// Weights of the given experts from one token's scores. The sum runs in the order of `experts`.
pub fn route_weights_ref(scores: &[f32], experts: &[u32], p: GateParams, out: &mut [f32]) {
    for (w, e) in out.iter_mut().zip(experts) {
        *w = scores[*e as usize];
    }
    if p.norm_topk_prob && experts.len() > 1 {
        let sum = out.iter().fold(0f32, |s, w| s + w) + SUM_EPS;
        out.iter_mut().for_each(|w| *w /= sum);
    }
    out.iter_mut().for_each(|w| *w *= p.route_scale);
}
