use deepseek_v41_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// How tokens are chosen; see the [module documentation](super) for the order of the steps.
///
/// The default draws from the model's own distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Divides the logits. 0 always takes the most probable token.
    pub temperature: f32,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most probable tokens that together reach this probability; in (0, 1], 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the best; in [0, 1], 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of tokens seen in prompt or output and multiplies negative ones; above
    /// 0, 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens generated before.
    pub presence_penalty: f32,
    /// Subtracted from the logits of generated tokens once for every time they occurred.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; -inf forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Makes draws reproducible, across versions as well; random if absent.
    pub seed: Option<u64>,
    /// Report the log-probability of the chosen token.
    pub logprobs: bool,
    /// With `logprobs`, also report this many of the most probable tokens.
    pub top_logprobs: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: false,
            top_logprobs: 0,
        }
    }
}

impl SamplingParams {
    /// Always the most probable token.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }

    /// Refuses values without a meaning.
    ///
    /// # Errors
    /// `Error::Value` naming the parameter.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, name: &str, value: f32, expected: &str| match ok {
            true => Ok(()),
            false => Err(Error::value(name, format!("{value} is not {expected}"))),
        };
        let t = self.temperature;
        check(
            t >= 0.0 && t.is_finite(),
            "temperature",
            t,
            "a finite number of at least 0",
        )?;
        check(
            self.top_p > 0.0 && self.top_p <= 1.0,
            "top_p",
            self.top_p,
            "in (0, 1]",
        )?;
        check(
            (0.0..=1.0).contains(&self.min_p),
            "min_p",
            self.min_p,
            "in [0, 1]",
        )?;
        let r = self.repetition_penalty;
        check(
            r > 0.0 && r.is_finite(),
            "repetition_penalty",
            r,
            "a finite number above 0",
        )?;
        let p = self.presence_penalty;
        check(p.is_finite(), "presence_penalty", p, "finite")?;
        let f = self.frequency_penalty;
        check(f.is_finite(), "frequency_penalty", f, "finite")?;
        for &(token, bias) in &self.logit_bias {
            let name = format!("logit_bias of token {token}");
            check(bias < f32::INFINITY, &name, bias, "finite or -inf")?;
        }
        if self.top_logprobs > 0 && !self.logprobs {
            return Err(Error::value("top_logprobs", "given without logprobs"));
        }
        Ok(())
    }

    /// Whether any step before the temperature changes logits.
    pub(super) fn edits_logits(&self) -> bool {
        !self.logit_bias.is_empty() || self.has_penalties()
    }

    pub(super) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}
