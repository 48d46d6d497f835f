//! Streaming generation.

use std::ops::ControlFlow;

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{ImageSpan, Limits};

use crate::{
    DeepSeekV41, Event, GenerateOptions, Prompt, Session, Speculation,
    continuation::{Continuation, Verified},
    prompt::check_image_tokens,
    sampling::{Rows, Sampler},
    session::Want,
    speculative::{DraftHead, Proposal, ProposeContext, Proposer, SpeculationStats},
};

/// A text being continued: an iterator of [`Event`]s. Work is done in `next`, so dropping it cancels; while a
/// long prompt is run within the first `next`, [`Generation::on_prefill`] can.
///
/// After an error the iterator ends.
pub struct Generation<'s, 'm> {
    session: Held<'s, 'm>,
    text: Continuation,
    /// The prompt, until it has been run.
    prompt: Option<(Vec<u32>, Vec<ImageSpan>)>,
    on_prefill: Option<Box<OnPrefill<'s>>>,
    proposer: Option<Box<dyn Proposer + 'm>>,
    /// What went wrong, until it has been handed out behind the events before it.
    error: Option<Error>,
    failed: bool,
}

/// What [`Generation::on_prefill`] takes.
type OnPrefill<'s> = dyn FnMut(usize, usize) -> ControlFlow<()> + Send + 's;

enum Held<'s, 'm> {
    Owned(Box<Session<'m>>),
    Borrowed(&'s mut Session<'m>),
}

impl<'m> Held<'_, 'm> {
    fn get(&mut self) -> &mut Session<'m> {
        match self {
            Self::Owned(session) => session,
            Self::Borrowed(session) => session,
        }
    }
}

impl DeepSeekV41 {
    /// Continues `prompt`.
    ///
    /// # Errors
    /// A prompt that cannot be encoded, is empty or longer than the model's context, or options
    /// without a meaning. What goes wrong later arrives as an item of the iterator.
    pub fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<Generation<'_, '_>> {
        let special = self.special_ids();
        let (ids, images) = prompt.into().into_ids(self.tokenizer(), special, true)?;
        let max = self.config().max_position_embeddings;
        let wanted = ids.len().saturating_add(options.max_tokens).max(1);
        let limits = Limits {
            max_len: wanted.min(max),
            ..Limits::default()
        };
        let session = Session::new(self, limits)?;
        Generation::new(Held::Owned(Box::new(session)), ids, images, options)
    }

    /// An empty session for texts of at most `limits.max_len` tokens.
    ///
    /// # Errors
    /// Limits that the model cannot have.
    pub fn session(&self, limits: Limits) -> Result<Session<'_>> {
        Session::new(self, limits)
    }
}

impl<'s, 'm> Generation<'s, 'm> {
    pub(crate) fn borrowed(
        session: &'s mut Session<'m>,
        prompt: Prompt,
        options: &GenerateOptions,
    ) -> Result<Self> {
        let model = session.model;
        let at_start = session.is_empty()?;
        let (ids, images) = prompt.into_ids(model.tokenizer(), model.special_ids(), at_start)?;
        Self::new(Held::Borrowed(session), ids, images, options)
    }

    fn new(
        mut session: Held<'s, 'm>,
        ids: Vec<u32>,
        mut images: Vec<ImageSpan>,
        options: &GenerateOptions,
    ) -> Result<Self> {
        let held = session.get();
        let model = held.model;
        check_image_tokens(model.config(), &ids, &images)?;
        if ids.is_empty() && held.pending.is_empty() {
            // Logits are not kept: the last token is run once more to choose what follows it.
            let text = held.token_ids()?;
            if let Some((last, rest)) = text.split_last() {
                held.truncate(rest.len())?;
                held.pending.push(*last);
            }
        }
        let before = held.state.token_ids(held.seq)?.to_vec();
        // What was handed out but not run yet comes first, and moves the pictures along.
        let mut run = held.pending.clone();
        images.iter_mut().for_each(|span| span.start += run.len());
        run.extend(ids);
        let prompt_ids: Vec<u32> = before.iter().chain(&run).copied().collect();
        let available = held.state.limits().max_len;
        if prompt_ids.len() > available {
            return Err(Error::Capacity {
                what: "context length in tokens",
                needed: prompt_ids.len(),
                available,
            });
        }
        if run.is_empty() {
            return Err(Error::value(
                "prompt",
                "has no tokens, so there is nothing to continue",
            ));
        }
        let text = Continuation::new(model, options, prompt_ids, run.len(), available)?;
        let proposer: Option<Box<dyn Proposer + 'm>> = match &options.speculation {
            Speculation::Off => None,
            Speculation::PromptLookup(lookup) => Some(Box::new(*lookup)),
            Speculation::DraftHead(length) => {
                if !before.is_empty() && !held.can_draft()? {
                    return Err(Error::Unsupported {
                        what: "drafting after tokens that were run without the draft head: use it \
                               from the session's start"
                            .into(),
                    });
                }
                let head = model.draft_head()?;
                Some(Box::new(DraftHead::new(
                    head,
                    length.clone(),
                    &options.sampling,
                )?))
            }
        };
        Ok(Self {
            session,
            text,
            prompt: Some((run, images)),
            on_prefill: None,
            proposer,
            error: None,
            failed: false,
        })
    }

    /// Calls `report(done, total)`, in tokens, after every piece of the prompt that has been run
    /// ([`GenerateOptions::prefill_chunk`]). [`ControlFlow::Break`] before the last one ends the generation
    /// with [`FinishReason::Cancelled`](crate::FinishReason::Cancelled).
    #[must_use]
    pub fn on_prefill(
        mut self,
        report: impl FnMut(usize, usize) -> ControlFlow<()> + Send + 's,
    ) -> Self {
        self.on_prefill = Some(Box::new(report));
        self
    }

    /// The sampler, to add hooks to it.
    pub fn sampler(&mut self) -> &mut Sampler {
        &mut self.text.sampler
    }

    /// Tokens chosen so far.
    pub fn generated(&self) -> &[u32] {
        self.text.generated()
    }

    /// Only the text, piece by piece.
    pub fn text(self) -> impl Iterator<Item = Result<String>> + use<'s, 'm> {
        self.filter_map(|event| match event {
            Ok(Event::Text(text)) => Some(Ok(text)),
            Ok(_) => None,
            Err(err) => Some(Err(err)),
        })
    }

    /// Guesses by `proposer` instead of those of the options.
    ///
    /// The proposer sees only tokens from here on, so set it before the first event.
    #[must_use]
    pub fn with_proposer(mut self, proposer: impl Proposer + 'm) -> Self {
        self.proposer = Some(Box::new(proposer));
        self
    }

    /// How well guesses did so far.
    pub fn speculation(&self) -> &SpeculationStats {
        self.text.stats()
    }

    fn step(&mut self) -> Result<()> {
        self.text.end_if_nothing_is_wanted();
        if self.text.is_finished() {
            return Ok(());
        }
        match self.prompt.take() {
            Some((ids, images)) => {
                let Some(rows) = self.run_prompt(&ids, &images)? else {
                    self.text.cancel();
                    return Ok(());
                };
                let mut verified = Verified::default();
                let done = self.text.verify(&Proposal::default(), &rows, &mut verified);
                self.session.get().pending.extend(verified.next);
                done
            }
            None => self.round(),
        }
    }

    /// What follows the prompt; `None` if the callback ended it before.
    fn run_prompt(&mut self, ids: &[u32], images: &[ImageSpan]) -> Result<Option<Rows>> {
        let (session, chunk) = (self.session.get(), self.text.options.prefill_chunk);
        let total = ids.len();
        let report = &mut self.on_prefill;
        let (proposer, sampler) = (&mut self.proposer, &mut self.text.sampler);
        let want = Want {
            hidden: proposer.as_ref().is_some_and(|p| p.needs_hidden()),
            best: sampler.chosen_on(session.model.transformer().device()),
        };
        if let (true, Some(proposer), Some(unseen)) =
            (want.hidden, proposer.as_mut(), session.unseen.take())
        {
            proposer.propose(ProposeContext {
                seq: session.seq,
                state: &mut session.state,
                text: ids,
                next: None,
                hidden: Some(&unseen),
                sampler: &mut *sampler,
                max: 0,
            })?;
        }
        // From here on the caches hold them, or the sequence is broken.
        session.pending.clear();
        let out = session.run(ids, images, chunk, want, |session, done, out| {
            if let Some(proposer) = proposer {
                let ctx = ProposeContext {
                    seq: session.seq,
                    state: &mut session.state,
                    text: &ids[..done],
                    next: None,
                    hidden: out.target_hidden.as_ref(),
                    sampler: &mut *sampler,
                    max: 0,
                };
                proposer.propose(ctx)?;
            }
            Ok(match report {
                Some(report) => report(done, total),
                None => ControlFlow::Continue(()),
            })
        })?;
        out.map(|out| Rows::of(&out, 0, 1, sampler)).transpose()
    }

    /// One pass: the last token, and guesses after it.
    fn round(&mut self) -> Result<()> {
        let proposal = self.propose()?;
        let session = self.session.get();
        let start = session.state.len(session.seq)?;
        let run = session.pending.len();
        let ids = [&session.pending[..], &proposal.tokens].concat();
        let device = session.model.transformer().device();
        let want = Want {
            hidden: self.proposer.as_ref().is_some_and(|p| p.needs_hidden()),
            best: self.text.sampler.chosen_on(device),
        };
        let out = session.verify(ids, want)?;
        session.pending.clear();
        let (first, n) = (run - 1, proposal.tokens.len() + 1);
        let rows = Rows::of(&out, first, n, &mut self.text.sampler)?;
        let mut verified = Verified::default();
        let done = self.text.verify(&proposal, &rows, &mut verified);
        // The text is now its last run token, the drafts that stood, and perhaps one not run yet: also
        // when something went wrong behind them.
        let session = self.session.get();
        let end = start + run + verified.kept;
        if end < session.state.len(session.seq)? {
            session.state.truncate(session.seq, end)?;
        }
        session.pending.extend(verified.next);
        // Kept in the session, so that another generation can draft on.
        let kept = |h: Tensor| h.narrow(0, 0, run + verified.kept);
        session.unseen = out.target_hidden.map(kept).transpose()?;
        done
    }

    fn propose(&mut self) -> Result<Proposal> {
        let Some(proposer) = &mut self.proposer else {
            return Ok(Proposal::default());
        };
        let session = self.session.get();
        let max = self.text.max_drafts(session.state.limits().max_rollback);
        let text = session.token_ids()?;
        let hidden = match proposer.needs_hidden() {
            true => Some(session.take_unseen()?),
            false => None,
        };
        let ctx = ProposeContext {
            seq: session.seq,
            state: &mut session.state,
            text: &text,
            next: text.last().copied(),
            hidden: hidden.as_ref(),
            sampler: &mut self.text.sampler,
            max,
        };
        let mut proposal = proposer.propose(ctx)?;
        proposal.tokens.truncate(max);
        Ok(proposal)
    }
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.text.has_events() && !self.text.is_finished() && !self.failed {
            if let Err(err) = self.step() {
                (self.error, self.failed) = (Some(err), true);
            }
        }
        let event = self.text.next_event().map(Ok);
        event.or_else(|| self.error.take().map(Err))
    }
}

impl Drop for Generation<'_, '_> {
    /// The text ends with the last token that was handed out: a pass may have accepted more.
    fn drop(&mut self) {
        let unseen = self.text.unseen_tokens();
        if unseen > 0
            && let Held::Borrowed(session) = &mut self.session
        {
            // They came in one pass and so lie within the slack. Without it they would stay, which is
            // what the model said, too.
            if let Ok(len) = session.len() {
                session.truncate(len.saturating_sub(unseen)).ok();
            }
        }
    }
}
