//! Streaming generation.

use std::collections::VecDeque;

use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{ImageSpan, Limits};

use crate::{
    DeepSeekV41, Prompt, Session,
    sampling::{Sampled, Sampler, SamplingParams, TokenHistory},
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

    fn step(&mut self) -> Result<()> {
        if self.options.max_tokens == 0 {
            self.end(FinishReason::MaxTokens);
            return Ok(());
        }
        let logits = self.advance()?;
        let history = TokenHistory { prompt: &self.prompt_ids, generated: &self.generated };
        let sampled = self.sampler.sample(&logits, history)?;
        self.take(sampled)
    }

    /// Runs what has not been run: the prompt at first, then the last token.
    fn advance(&mut self) -> Result<Vec<f32>> {
        let session = self.session.get();
        let chunk = self.options.prefill_chunk;
        match self.prompt.take() {
            Some((ids, images)) => {
                let total = ids.len();
                let report = &mut self.on_prefill;
                // From here on the caches hold them, or the sequence is broken.
                session.pending.clear();
                session.run(&ids, &images, chunk, |done| {
                    if let Some(report) = report {
                        report(done, total);
                    }
                })
            }
            None => {
                let pending = std::mem::take(&mut session.pending);
                session.run(&pending, &[], chunk, |_| ())
            }
        }
    }

    fn take(&mut self, sampled: Sampled) -> Result<()> {
        let id = sampled.token;
        let session = self.session.get();
        session.pending.push(id);
        let full = session.len()? >= session.state.limits().max_len;
        self.generated.push(id);
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
