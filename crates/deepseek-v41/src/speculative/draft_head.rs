use candle_core::Tensor;
use deepseek_v41_core::{Error, Result, best};
use deepseek_v41_model::{DSpark, DraftRequest, ModelState, SequenceId, most_likely};

use super::{DraftLength, Proposal, ProposeContext, Proposer};
use crate::sampling::{Sampler, SamplingParams, TokenHistory, probs};

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
                format!(
                    "{n} tokens asked of a head that drafts {}",
                    head.block_size()
                ),
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
        Ok(Self {
            head,
            length,
            sampling,
        })
    }

    /// Most tokens it proposes.
    pub(crate) fn block_size(&self) -> usize {
        self.head.block_size()
    }
}

impl Proposer for DraftHead<'_> {
    fn needs_hidden(&self) -> bool {
        true
    }

    fn propose(&mut self, ctx: ProposeContext<'_>) -> Result<Proposal> {
        let hidden = ctx.hidden.ok_or(Error::MissingSource {
            what: "the hidden states to draft from",
        })?;
        let item = DraftItem {
            seq: ctx.seq,
            hidden: hidden.clone(),
            next: ctx.next,
            sampler: ctx.sampler,
            max: ctx.max,
            by: self,
        };
        let proposals = propose_all(self.head, vec![item], ctx.state)?;
        Ok(proposals.into_iter().next().unwrap_or_default())
    }
}

/// One sequence's part in a draft step of several.
pub(crate) struct DraftItem<'a> {
    pub(crate) seq: SequenceId,
    /// `[n, ..]`: its tokens since its last draft step.
    pub(crate) hidden: Tensor,
    /// `None` only shows the head what was run.
    pub(crate) next: Option<u32>,
    pub(crate) sampler: &'a mut Sampler,
    pub(crate) max: usize,
    pub(crate) by: &'a DraftHead<'a>,
}

/// Proposals for several sequences, drafted in one step: each as if it were alone.
pub(crate) fn propose_all(
    head: &DSpark,
    mut items: Vec<DraftItem<'_>>,
    state: &mut ModelState,
) -> Result<Vec<Proposal>> {
    let request = |i: &DraftItem<'_>| DraftRequest {
        seq: i.seq,
        committed: i.hidden.dims()[0],
        next: i.next,
    };
    let requests: Vec<_> = items.iter().map(request).collect();
    let new: Vec<_> = items
        .iter()
        .map(|i| &i.hidden)
        .filter(|h| h.dims()[0] > 0)
        .collect();
    let hidden = match (&new[..], &items[..]) {
        ([], [any, ..]) => any.hidden.clone(),
        ([one], _) => (*one).clone(),
        (several, _) => Tensor::cat(several, 0)?,
    };
    let greedy = items.iter().all(|i| i.by.sampling.temperature == 0.0);
    let mut drawn: Vec<Vec<Vec<f32>>> = vec![Vec::new(); items.len()];
    let mut choose = |item: usize, _: usize, logits: &[f32]| {
        let DraftItem { by, sampler, .. } = &mut items[item];
        if by.sampling.temperature == 0.0 {
            return most_likely(best(logits));
        }
        let probs = probs(logits, &by.sampling, TokenHistory::default())?;
        let token = sampler.draw(&probs)?;
        drawn[item].push(probs);
        Ok(token)
    };
    let drafts = match greedy {
        true => head.draft_best(&requests, &hidden, state)?,
        false => head.draft(&requests, &hidden, state, &mut choose)?,
    };
    let proposals = drafts
        .into_iter()
        .zip(drawn)
        .zip(&items)
        .map(|((draft, probs), item)| {
            let Some(draft) = draft else {
                return Proposal::default();
            };
            let n = item.by.length.choose(&draft.confidence).min(item.max);
            let mut proposal = Proposal {
                tokens: draft.tokens,
                probs,
                confidence: draft.confidence,
            };
            proposal.tokens.truncate(n);
            proposal.probs.truncate(n);
            proposal.confidence.truncate(n);
            proposal
        });
    Ok(proposals.collect())
}
