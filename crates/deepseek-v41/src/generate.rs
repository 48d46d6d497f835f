//! Streaming generation.

use std::collections::VecDeque;

use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{ImageSpan, Limits};

use crate::{
    DeepSeekV41, Prompt, Session,
    sampling::{Sampled, Sampler, SamplingParams, TokenHistory},
    speculative::{
        DraftHead, DraftLength, PromptLookup, Proposal, ProposeContext, Proposer, SpeculationStats,
        accept,
    },
    stop::{StopStrings, Stopped},
    text_stream::TextStream,
    tokenizer::SpecialTokens,
};

/// How a text is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the text, besides the end-of-text token.
    pub stop_ids: Vec<u32>,
    /// Go on after the end-of-text token, for measurements.
    pub ignore_eos: bool,
    /// Longest piece of a prompt that is run at a time, in tokens. It bounds memory and how often
    /// progress is reported, and never changes a result.
    pub prefill_chunk: usize,
    /// Whether and how tokens are guessed ahead. Changes the speed and not the distribution; with
    /// temperature 0 not a single token.
    pub speculation: Speculation,
}

/// Where guesses come from.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Speculation {
    /// One token a pass.
    #[default]
    Off,
    /// The checkpoint's draft head.
    DraftHead(DraftLength),
    /// Earlier parts of the text itself.
    PromptLookup(PromptLookup),
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            sampling: SamplingParams::greedy(),
            max_tokens: 256,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            prefill_chunk: 512,
            speculation: Speculation::Off,
        }
    }
}

/// What happens in a generation.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A token was chosen.
    Token(Sampled),
    /// Text is complete: whole characters, and no part of a stop string. Follows the token that
    /// completed it.
    Text(String),
    /// The end; nothing follows.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose the end-of-text token or one of `stop_ids`.
    StopToken(u32),
    /// One of the stop strings occurred.
    StopString(String),
    /// `max_tokens` were generated.
    MaxTokens,
    /// The sequence has no room for another token.
    ContextFull,
}

/// Tokens of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens run before the first one was chosen.
    pub prompt_tokens: usize,
    /// Tokens chosen, a stop token included.
    pub completion_tokens: usize,
}

/// A text being continued: an iterator of [`Event`]s. Work is done in `next`, so dropping it cancels.
///
/// After an error the iterator ends.
pub struct Generation<'s, 'm> {
    session: Held<'s, 'm>,
    sampler: Sampler,
    options: GenerateOptions,
    eos: u32,
    /// The prompt, until it has been run.
    prompt: Option<(Vec<u32>, Vec<ImageSpan>)>,
    /// For the penalties.
    prompt_ids: Vec<u32>,
    generated: Vec<u32>,
    stream: TextStream,
    stops: StopStrings,
    usage: Usage,
    events: VecDeque<Event>,
    finished: bool,
    on_prefill: Option<Box<dyn FnMut(usize, usize) + Send + 's>>,
    proposer: Option<Box<dyn Proposer + 'm>>,
    stats: SpeculationStats,
}

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
        let limits = Limits { max_len: wanted.min(max), ..Limits::default() };
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
        let sampler = Sampler::new(options.sampling.clone())?;
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
            return Err(Error::value("prompt", "has no tokens, so there is nothing to continue"));
        }
        let usage = Usage { prompt_tokens: run.len(), completion_tokens: 0 };
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
                Some(Box::new(DraftHead::new(head, length.clone(), &options.sampling)?))
            }
        };
        Ok(Self {
            session,
            sampler,
            options: options.clone(),
            eos: model.special_ids().eos,
            prompt: Some((run, images)),
            prompt_ids,
            generated: Vec::new(),
            stream: model.tokenizer().text_stream(SpecialTokens::Skip),
            stops: StopStrings::new(options.stop.iter().cloned()),
            usage,
            events: VecDeque::new(),
            finished: false,
            on_prefill: None,
            proposer,
            stats: SpeculationStats::default(),
        })
    }

    /// Calls `report(done, total)` after every piece of the prompt that has been run.
    #[must_use]
    pub fn on_prefill(mut self, report: impl FnMut(usize, usize) + Send + 's) -> Self {
        self.on_prefill = Some(Box::new(report));
        self
    }

    /// The sampler, to add hooks to it.
    pub fn sampler(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Tokens chosen so far.
    pub fn generated(&self) -> &[u32] {
        &self.generated
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
        &self.stats
    }

    fn step(&mut self) -> Result<()> {
        if self.options.max_tokens == 0 {
            self.end(FinishReason::MaxTokens);
            return Ok(());
        }
        match self.prompt.take() {
            Some((ids, images)) => {
                let logits = self.run_prompt(&ids, &images)?;
                let sampled = self.sample(&logits)?;
                self.take(sampled)
            }
            None => self.round(),
        }
    }

    fn sample(&mut self, logits: &[f32]) -> Result<Sampled> {
        let history = TokenHistory { prompt: &self.prompt_ids, generated: &self.generated };
        self.sampler.sample(logits, history)
    }

    fn run_prompt(&mut self, ids: &[u32], images: &[ImageSpan]) -> Result<Vec<f32>> {
        let (session, chunk) = (self.session.get(), self.options.prefill_chunk);
        let total = ids.len();
        let report = &mut self.on_prefill;
        let (proposer, sampler) = (&mut self.proposer, &mut self.sampler);
        let want_hidden = proposer.as_ref().is_some_and(|p| p.needs_hidden());
        if let (true, Some(proposer), Some(unseen)) =
            (want_hidden, proposer.as_mut(), session.unseen.take())
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
        session.run(ids, images, chunk, want_hidden, |session, done, out| {
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
            if let Some(report) = report {
                report(done, total);
            }
            Ok(())
        })
    }

    /// One pass: the last token, and guesses after it.
    fn round(&mut self) -> Result<()> {
        let proposal = self.propose()?;
        let session = self.session.get();
        let start = session.state.len(session.seq)?;
        let mut ids = std::mem::take(&mut session.pending);
        let run = ids.len();
        ids.extend(&proposal.tokens);
        let want_hidden = self.proposer.as_ref().is_some_and(|p| p.needs_hidden());
        let out = session.verify(ids, want_hidden)?;
        let rows = out.logits.narrow(0, run - 1, proposal.tokens.len() + 1)?.to_vec2::<f32>()?;
        let kept = match self.sampler.params().temperature == 0.0 {
            true => self.keep_greedy(&proposal.tokens, &rows)?,
            false => self.keep_sampled(&proposal, &rows)?,
        };
        self.stats.record(proposal.tokens.len(), kept);
        // The text is now its last run token, the drafts that stood, and perhaps one not run yet.
        let end = start + run + kept;
        let session = self.session.get();
        if end < session.state.len(session.seq)? {
            session.state.truncate(session.seq, end)?;
        }
        // Kept in the session, so that another generation can draft on.
        session.unseen = out.target_hidden.map(|h| h.narrow(0, 0, run + kept)).transpose()?;
        Ok(())
    }

    fn propose(&mut self) -> Result<Proposal> {
        let Some(proposer) = &mut self.proposer else { return Ok(Proposal::default()) };
        let session = self.session.get();
        let len = session.len()?;
        let limits = session.state.limits();
        // A pass gives one token more than it is given, and what is guessed must fit the caches and
        // be possible to take back.
        let left = self.options.max_tokens.saturating_sub(self.generated.len() + 1);
        let room = limits.max_len.saturating_sub(len);
        let max = left.min(room).min(limits.max_rollback);
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
            sampler: &mut self.sampler,
            max,
        };
        let mut proposal = proposer.propose(ctx)?;
        proposal.tokens.truncate(max);
        Ok(proposal)
    }

    /// Takes the target's own tokens as long as they are the drafts. Returns how many drafts are part
    /// of the text.
    fn keep_greedy(&mut self, drafts: &[u32], rows: &[Vec<f32>]) -> Result<usize> {
        for (j, row) in rows.iter().enumerate() {
            let sampled = self.sample(row)?;
            let stands = drafts.get(j) == Some(&sampled.token);
            self.take_verified(sampled, stands)?;
            if !stands {
                return Ok(j);
            }
            if self.finished {
                return Ok(j + 1);
            }
        }
        Ok(drafts.len())
    }

    /// As [`Generation::keep_greedy`], for tokens that are drawn.
    fn keep_sampled(&mut self, proposal: &Proposal, rows: &[Vec<f32>]) -> Result<usize> {
        let drafts = &proposal.tokens;
        if drafts.is_empty() {
            let sampled = self.sample(&rows[0])?;
            self.take(sampled)?;
            return Ok(0);
        }
        let uniforms: Vec<f64> = drafts.iter().map(|_| self.sampler.uniform()).collect();
        let mut uniforms = uniforms.into_iter();
        let mut generated = self.generated.clone();
        let (sampler, prompt) = (&mut self.sampler, &self.prompt_ids);
        let vocab = rows[0].len();
        let one_hot: Vec<Vec<f32>> = match proposal.probs.is_empty() {
            true => drafts.iter().map(|d| one_hot(vocab, *d)).collect(),
            false => Vec::new(),
        };
        let accepted = accept(
            drafts,
            |j| Ok(proposal.probs.get(j).or(one_hot.get(j)).map_or(&[][..], Vec::as_slice)),
            |j| {
                if let Some(j) = j.checked_sub(1) {
                    generated.push(drafts[j]);
                }
                sampler.probs(&rows[j], TokenHistory { prompt, generated: &generated })
            },
            || uniforms.next().unwrap_or(0.0),
        )?;
        for (j, &draft) in drafts[..accepted.kept].iter().enumerate() {
            let sampled = self.sampler.report(&rows[j], draft);
            self.take_verified(sampled, true)?;
            if self.finished {
                return Ok(j + 1);
            }
        }
        let token = self.sampler.draw(&accepted.next)?;
        let sampled = self.sampler.report(&rows[accepted.kept], token);
        self.take(sampled)?;
        Ok(accepted.kept)
    }

    /// [`Generation::take`] for a token that may already have been run.
    fn take_verified(&mut self, sampled: Sampled, was_run: bool) -> Result<()> {
        self.take(sampled)?;
        if was_run {
            self.session.get().pending.clear();
        }
        Ok(())
    }

    fn take(&mut self, sampled: Sampled) -> Result<()> {
        let id = sampled.token;
        let session = self.session.get();
        session.pending.push(id);
        self.generated.push(id);
        let len = self.prompt_ids.len() + self.generated.len();
        let full = len >= session.state.limits().max_len;
        self.usage.completion_tokens += 1;
        self.events.push_back(Event::Token(sampled));
        let is_stop = id == self.eos && !self.options.ignore_eos;
        if is_stop || self.options.stop_ids.contains(&id) {
            self.end(FinishReason::StopToken(id));
            return Ok(());
        }
        let text = self.stream.push(id)?;
        match self.stops.push(&text) {
            Stopped::Yes { text, stop } => {
                self.show(text);
                self.done(FinishReason::StopString(stop));
                return Ok(());
            }
            Stopped::No(text) => self.show(text),
        }
        if self.usage.completion_tokens >= self.options.max_tokens {
            self.end(FinishReason::MaxTokens);
        } else if full {
            self.end(FinishReason::ContextFull);
        }
        Ok(())
    }

    /// Ends the text with everything that was held back.
    fn end(&mut self, reason: FinishReason) {
        let rest = self.stream.finish();
        match self.stops.push(&rest) {
            Stopped::Yes { text, .. } => self.show(text),
            Stopped::No(text) => {
                let rest = text + &self.stops.finish();
                self.show(rest);
            }
        }
        self.done(reason);
    }

    fn done(&mut self, reason: FinishReason) {
        self.events.push_back(Event::Done { reason, usage: self.usage });
        self.finished = true;
    }

    fn show(&mut self, text: String) {
        if !text.is_empty() {
            self.events.push_back(Event::Text(text));
        }
    }
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.events.is_empty() && !self.finished {
            if let Err(err) = self.step() {
                self.finished = true;
                return Some(Err(err));
            }
        }
        self.events.pop_front().map(Ok)
    }
}

fn one_hot(vocab: usize, token: u32) -> Vec<f32> {
    let mut row = vec![0.0; vocab];
    if let Some(p) = row.get_mut(token as usize) {
        *p = 1.0;
    }
    row
}
