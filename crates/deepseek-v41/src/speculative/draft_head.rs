use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{DSpark, DraftRequest};

use super::{DraftLength, ProposeContext, Proposal, Proposer};
use crate::sampling::{SamplingParams, TokenHistory, probs};

/// Proposals of the checkpoint's own draft head.
#[derive(Debug)]
pub struct DraftHead<'m> {
    head: &'m DSpark,
    length: DraftLength,
    /// Temperature and filters of the sequence; 0 takes the most probable drafts.
    sampling: SamplingParams,
}

impl<'m> DraftHead<'m> {
    /// Drafts with the temperature and filters of `sampling`.
    ///
    /// # Errors
    /// [`Error::Value`] for a length beyond what the head drafts.
    pub fn new(head: &'m DSpark, length: DraftLength, sampling: &SamplingParams) -> Result<Self> {
        if let DraftLength::AtMost(n) = length
            && n > head.block_size()
        {
            return Err(Error::value(
                "draft length",
                format!("{n} tokens asked of a head that drafts {}", head.block_size()),
            ));
        }
        // Penalties and biases look at the text: they shape the target's side alone.
        let sampling = SamplingParams {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            ..SamplingParams::default()
        };
        Ok(Self { head, length, sampling })
    }
}

impl Proposer for DraftHead<'_> {
    fn needs_hidden(&self) -> bool {
        true
    }

    fn propose(&mut self, ctx: ProposeContext<'_>) -> Result<Proposal> {
        let hidden = ctx.hidden.ok_or(Error::MissingSource { what: "the hidden states to draft from" })?;
        let request = DraftRequest { seq: ctx.seq, committed: hidden.dims()[0], next: ctx.next };
        let (greedy, sampling, sampler) = (self.sampling.temperature == 0.0, &self.sampling, ctx.sampler);
        let mut drawn = Vec::new();
        let mut choose = |_: usize, _: usize, logits: &[f32]| {
            if greedy {
                return argmax(logits);
            }
            let probs = probs(logits, sampling, TokenHistory::default())?;
            let token = sampler.draw(&probs)?;
            drawn.push(probs);
            Ok(token)
        };
        let drafts = self.head.draft(&[request], hidden, ctx.state, &mut choose)?;
        let Some(draft) = drafts.into_iter().next().flatten() else {
            return Ok(Proposal::default());
        };
        let n = self.length.choose(&draft.confidence).min(ctx.max);
        let mut proposal =
            Proposal { tokens: draft.tokens, probs: drawn, confidence: draft.confidence };
        proposal.tokens.truncate(n);
        proposal.probs.truncate(n);
        proposal.confidence.truncate(n);
        Ok(proposal)
    }
}

/// The largest logit, the lowest index among equals.
fn argmax(logits: &[f32]) -> Result<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (i, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(Error::value("draft logits", format!("NaN for token {i}")));
        }
        if best.is_none_or(|(_, b)| logit > b) {
            best = Some((i as u32, logit));
        }
    }
    best.map(|(i, _)| i).ok_or_else(|| Error::value("draft logits", "there are none"))
}
