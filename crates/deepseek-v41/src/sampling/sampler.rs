use std::fmt;

use candle_core::Device;
use deepseek_v41_core::{Error, Result};
use deepseek_v41_engram::pcg64::Pcg64;

use super::{
    SamplingParams, TokenHistory,
    filter::{Candidate, candidates, check, distribution, edit},
};

/// Edits the logits of one sequence before a token is chosen: grammars, banned phrases, forced answers.
pub trait LogitsHook: Send {
    /// Changes `logits: [vocab]` in place; -inf rules a token out. `generated` are the tokens of this
    /// sequence since its prompt.
    ///
    /// # Errors
    /// Whatever makes it impossible to go on; sampling stops with it.
    fn edit(&mut self, generated: &[u32], logits: &mut [f32]) -> Result<()>;
}

impl<F: FnMut(&[u32], &mut [f32]) -> Result<()> + Send> LogitsHook for F {
    fn edit(&mut self, generated: &[u32], logits: &mut [f32]) -> Result<()> {
        self(generated, logits)
    }
}

/// A token and its natural log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Under the model's own distribution.
    pub logprob: f32,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability under the model's own distribution, before bias, penalties, hooks,
    /// temperature and filters; if asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens under the same distribution, best first; as many as asked for.
    pub top_logprobs: Vec<TokenLogprob>,
}

impl Sampled {
    /// A token of which nothing else was asked.
    pub(crate) fn plain(token: u32) -> Self {
        Self {
            token,
            logprob: None,
            top_logprobs: Vec::new(),
        }
    }
}

/// What of a row of logits a sampler has to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Which one is the largest.
    Best,
    /// A token drawn by temperature and filters alone.
    Draw,
    /// All of them.
    Logits,
}

/// Chooses the tokens of one sequence.
///
/// Each sequence has its own: its random numbers then depend on its seed and length alone, and not on
/// what else is in the batch.
pub struct Sampler {
    params: SamplingParams,
    rng: Pcg64,
    hooks: Vec<Box<dyn LogitsHook>>,
    edited: Vec<f32>,
    kept: Vec<Candidate>,
}

impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sampler")
            .field("params", &self.params)
            .field("hooks", &self.hooks.len())
            .finish_non_exhaustive()
    }
}

impl Sampler {
    /// A sampler at the start of its random stream.
    ///
    /// # Errors
    /// `Error::Value` for parameters without a meaning.
    pub fn new(params: SamplingParams) -> Result<Self> {
        params.validate()?;
        let rng = Pcg64::from_seed(params.seed.unwrap_or_else(rand::random));
        Ok(Self {
            params,
            rng,
            hooks: Vec::new(),
            edited: Vec::new(),
            kept: Vec::new(),
        })
    }

    /// Adds a hook behind those already there.
    pub fn add_hook(&mut self, hook: impl LogitsHook + 'static) {
        self.hooks.push(Box::new(hook));
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses a token from `logits: [vocab]`.
    ///
    /// # Errors
    /// `Error::Value` for NaN or +inf logits, for nothing but -inf, or for tokens of the bias or the history
    /// that are not in the vocabulary; a hook's own error.
    pub fn sample(&mut self, logits: &[f32], history: TokenHistory<'_>) -> Result<Sampled> {
        let best = self.prepare(logits, history)?;
        let edited = if self.edits() { &self.edited } else { logits };
        let token = if self.params.temperature == 0.0 {
            best as u32
        } else {
            candidates(edited, best, &self.params, &mut self.kept);
            let kept = self.kept.iter().map(|c| (c.token, c.prob));
            draw(&mut self.rng, kept)?
        };
        Ok(self.report(logits, token))
    }

    /// The distribution the next call of [`Sampler::sample`] draws from, hooks included: `[vocab]`.
    ///
    /// # Errors
    /// See [`Sampler::sample`].
    pub fn probs(&mut self, logits: &[f32], history: TokenHistory<'_>) -> Result<Vec<f32>> {
        let best = self.prepare(logits, history)?;
        let edited = if self.edits() { &self.edited } else { logits };
        Ok(distribution(edited, best, &self.params))
    }

    /// Draws a token from weights, `[vocab]`, that need not sum to 1; those of 0 are never drawn.
    ///
    /// # Errors
    /// `Error::Value` for negative, infinite or NaN weights, or when all are 0.
    pub fn draw(&mut self, weights: &[f32]) -> Result<u32> {
        if let Some((i, w)) = weights
            .iter()
            .enumerate()
            .find(|(_, w)| !(**w >= 0.0 && w.is_finite()))
        {
            return Err(Error::value(
                format!("weight {w} of token {i}"),
                "not a probability",
            ));
        }
        let weights = weights.iter().enumerate().filter(|(_, w)| **w > 0.0);
        draw(&mut self.rng, weights.map(|(i, w)| (i as u32, *w)))
    }

    /// A number in `[0, 1)` from the sequence's random stream.
    pub fn uniform(&mut self) -> f64 {
        self.rng.next_f64()
    }

    /// Where its random stream is.
    pub(crate) fn mark(&self) -> Pcg64 {
        self.rng.clone()
    }

    /// Goes back to where the stream was: what was drawn since did not happen.
    pub(crate) fn rewind(&mut self, mark: Pcg64) {
        self.rng = mark;
    }

    /// What of a row it needs on the host.
    pub(crate) fn needs(&self) -> Needs {
        match self.edits() || self.params.logprobs {
            true => Needs::Logits,
            false if self.params.temperature == 0.0 => Needs::Best,
            false => Needs::Draw,
        }
    }

    /// Whether a pass on `device` is to choose tokens itself, or to prepare for it: off the CPU, where a row of
    /// logits is a copy away.
    pub(crate) fn chosen_on(&self, device: &Device) -> bool {
        self.needs() != Needs::Logits && !device.is_cpu()
    }

    /// How a GPU draws the next token.
    #[cfg(feature = "cuda")]
    pub(crate) fn draw_row(&self) -> deepseek_v41_core::cuda::sample::DrawRow {
        let (state, inc) = self.rng.parts();
        deepseek_v41_core::cuda::sample::DrawRow {
            state,
            inc,
            temperature: self.params.temperature,
            top_k: self.params.top_k,
            top_p: self.params.top_p,
            min_p: self.params.min_p,
        }
    }

    /// Its random stream goes on behind `numbers` that were drawn elsewhere.
    #[cfg(feature = "cuda")]
    pub(crate) fn pass_over(&mut self, numbers: u64) {
        self.rng.advance(numbers);
    }

    fn edits(&self) -> bool {
        self.params.edits_logits() || !self.hooks.is_empty()
    }

    /// Fills `self.edited` if there is anything to edit; the index of the largest logit either way.
    fn prepare(&mut self, logits: &[f32], history: TokenHistory<'_>) -> Result<usize> {
        // Before the edits as well: a mask must not hide that the model produced NaN.
        let best = check(logits)?;
        if !self.edits() {
            return Ok(best);
        }
        self.edited.clear();
        self.edited.extend_from_slice(logits);
        edit(&mut self.edited, &self.params, history)?;
        for hook in &mut self.hooks {
            hook.edit(history.generated, &mut self.edited)?;
        }
        check(&self.edited)
    }

    /// `token` with the log-probabilities asked for under `logits: [vocab]`.
    pub fn report(&self, logits: &[f32], token: u32) -> Sampled {
        if !self.params.logprobs {
            return Sampled::plain(token);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&v| f64::from(v - max).exp()).sum();
        let norm = f64::from(max) + sum.ln();
        let logprob = |token: u32| (f64::from(logits[token as usize]) - norm) as f32;
        let n = self.params.top_logprobs.min(logits.len());
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let descending = |a: &u32, b: &u32| {
            logits[*b as usize]
                .total_cmp(&logits[*a as usize])
                .then(a.cmp(b))
        };
        if n > 0 && n < order.len() {
            order.select_nth_unstable_by(n - 1, descending);
        }
        order.truncate(n);
        order.sort_unstable_by(descending);
        let top_logprobs = order.into_iter().map(|t| TokenLogprob {
            token: t,
            logprob: logprob(t),
        });
        Sampled {
            token,
            logprob: Some(logprob(token)),
            top_logprobs: top_logprobs.collect(),
        }
    }
}

/// `argmax(p / Exp(1))`; the lower token among equals.
fn draw(rng: &mut Pcg64, weights: impl Iterator<Item = (u32, f32)>) -> Result<u32> {
    let mut best: Option<(u32, f64)> = None;
    for (token, p) in weights {
        // 1 - u is in (0, 1], so the draw is finite; a draw of 0 gives an infinite and winning score.
        let exponential = -(1.0 - rng.next_f64()).ln();
        let score = f64::from(p) / exponential;
        if best.is_none_or(|(_, s)| score > s) {
            best = Some((token, score));
        }
    }
    best.map(|(token, _)| token)
        .ok_or_else(|| Error::value("probabilities", "no token has a positive one"))
}
