//! One request of the engine.

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result};
use deepseek_v41_engram::pcg64::Pcg64;
use deepseek_v41_model::{ImageSpan, SequenceId};

use super::RequestId;
use crate::{
    DeepSeekV41, GenerateOptions, Prompt, Speculation,
    continuation::Continuation,
    prompt::check_image_tokens,
    session::chunk_end,
    speculative::{DraftHead, PromptLookup},
};

/// A request and how far it is.
pub(super) struct Job<'m> {
    pub(super) id: RequestId,
    pub(super) text: Continuation,
    /// The whole text: prompt and what was chosen since.
    pub(super) ids: Vec<u32>,
    pub(super) images: Vec<ImageSpan>,
    pub(super) drafts: Drafts<'m>,
    prompt_len: usize,
    /// Its sequence, while it has a slot.
    pub(super) seq: Option<SequenceId>,
    /// Tokens of the text that are in its caches.
    pub(super) run: usize,
    /// Hidden states of the newest of those that the draft head has not seen.
    pub(super) unseen: Option<Tensor>,
    /// Where to stop and keep a fork.
    pub(super) cut: Option<usize>,
    /// Tokens of the prompt to run in this step.
    pub(super) piece: usize,
    /// It was part of a failed pass and runs in passes of its own until it decodes again.
    pub(super) alone: bool,
    /// Where its random stream was before the pass it is part of.
    pub(super) mark: Option<Pcg64>,
    /// What ended it.
    pub(super) error: Option<Error>,
}

/// Where a request's guesses come from.
pub(super) enum Drafts<'m> {
    None,
    Head(DraftHead<'m>),
    Lookup(PromptLookup),
}

impl<'m> Job<'m> {
    pub(super) fn new(
        model: &'m DeepSeekV41,
        id: RequestId,
        prompt: Prompt,
        options: &GenerateOptions,
        max_len: usize,
    ) -> Result<Self> {
        let (ids, images) = prompt.into_ids(model.tokenizer(), model.special_ids(), true)?;
        check_image_tokens(model.config(), &ids, &images)?;
        if ids.is_empty() {
            return Err(Error::value(
                "prompt",
                "has no tokens, so there is nothing to continue",
            ));
        }
        if ids.len() > max_len {
            return Err(Error::Capacity {
                what: "context length in tokens",
                needed: ids.len(),
                available: max_len,
            });
        }
        let vocab = model.config().vocab_size;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            let reason = format!("outside of the vocabulary of {vocab}");
            return Err(Error::value(format!("token id {id}"), reason));
        }
        let drafts = match &options.speculation {
            Speculation::Off => Drafts::None,
            Speculation::PromptLookup(lookup) => Drafts::Lookup(*lookup),
            Speculation::DraftHead(length) => {
                let head = model.draft_head()?;
                Drafts::Head(DraftHead::new(head, length.clone(), &options.sampling)?)
            }
        };
        let mut text = Continuation::new(model, options, ids.clone(), ids.len(), max_len)?;
        text.end_if_nothing_is_wanted();
        Ok(Self {
            id,
            text,
            prompt_len: ids.len(),
            ids,
            images,
            drafts,
            seq: None,
            run: 0,
            unseen: None,
            cut: None,
            piece: 0,
            alone: false,
            mark: None,
            error: None,
        })
    }

    /// Whether all but its newest token have been run, and that one was chosen by the model.
    pub(super) fn is_decoding(&self) -> bool {
        self.seq.is_some() && self.is_generating() && self.run + 1 == self.ids.len()
    }

    fn is_generating(&self) -> bool {
        self.ids.len() > self.prompt_len
    }

    /// Tokens to run before it decodes. Of a prompt all, since the first token comes out of that pass;
    /// of a text that lost its slot all but the newest, which the next round begins with.
    fn prefill_end(&self) -> usize {
        self.ids.len() - usize::from(self.is_generating())
    }

    /// Whether a pass up to `end` gives the logits of its first token.
    pub(super) fn ends_prompt(&self, end: usize) -> bool {
        !self.is_generating() && end == self.ids.len()
    }

    /// Sets its share of a step in which `room` tokens are left.
    pub(super) fn plan_piece(&mut self, room: usize) {
        self.piece = 0;
        if room > 0 && self.seq.is_some() && !self.is_decoding() {
            let stop = self
                .cut
                .filter(|cut| *cut > self.run)
                .unwrap_or(self.prefill_end());
            self.piece = chunk_end(self.run, stop, room, &self.images) - self.run;
        }
    }

    /// Most drafts that its next pass may hold.
    pub(super) fn most_drafts(&self, max_rollback: usize) -> usize {
        let most = self.text.max_drafts(max_rollback);
        match &self.drafts {
            Drafts::None => 0,
            Drafts::Head(head) => most.min(head.block_size()),
            Drafts::Lookup(lookup) => most.min(lookup.max_tokens),
        }
    }

    /// Takes over what was chosen.
    pub(super) fn extend(&mut self) {
        let known = self.ids.len() - self.prompt_len;
        self.ids.extend(&self.text.generated()[known..]);
    }

    /// Tokens at the beginning that another text has too and from which this one could go on.
    pub(super) fn shared_with(&self, ids: &[u32]) -> usize {
        let same = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        // At least one token has to be run: logits are not kept.
        same.min(self.ids.len() - 1)
    }
}
