//! One text being continued, apart from its caches: how its tokens are chosen, how they become text,
//! and when it ends. What runs the model, alone or for many texts, is above it.

use std::collections::VecDeque;

use deepseek_v41_core::Result;

use crate::{
    DeepSeekV41, Event, FinishReason, GenerateOptions, Usage,
    sampling::{Rows, Sampled, Sampler, TokenHistory},
    speculative::{Proposal, SpeculationStats, accept},
    stop::{StopStrings, Stopped},
    text_stream::TextStream,
    tokenizer::SpecialTokens,
};

/// See the module.
pub(crate) struct Continuation {
    pub(crate) sampler: Sampler,
    pub(crate) options: GenerateOptions,
    eos: u32,
    /// The longest the text may become, in tokens.
    max_len: usize,
    /// All tokens before the first one chosen, for the penalties.
    prompt_ids: Vec<u32>,
    generated: Vec<u32>,
    stream: TextStream,
    stops: StopStrings,
    usage: Usage,
    events: VecDeque<Event>,
    finished: bool,
    stats: SpeculationStats,
}

/// What a pass over the last token of a text and drafts after it came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Verified {
    /// Drafts that are part of the text now; the caches keep them.
    pub(crate) kept: usize,
    /// The token after them, which has not been run.
    pub(crate) next: Option<u32>,
}

impl Continuation {
    /// `prompt_ids` is the whole text so far, of which `prompt_tokens` have yet to be run.
    ///
    /// # Errors
    /// Sampling parameters without a meaning.
    pub(crate) fn new(
        model: &DeepSeekV41,
        options: &GenerateOptions,
        prompt_ids: Vec<u32>,
        prompt_tokens: usize,
        max_len: usize,
    ) -> Result<Self> {
        Ok(Self {
            sampler: Sampler::new(options.sampling.clone())?,
            options: options.clone(),
            eos: model.special_ids().eos,
            max_len,
            prompt_ids,
            generated: Vec::new(),
            stream: model.tokenizer().text_stream(SpecialTokens::Skip),
            stops: StopStrings::new(options.stop.iter().cloned()),
            usage: Usage {
                prompt_tokens,
                completion_tokens: 0,
            },
            events: VecDeque::new(),
            finished: false,
            stats: SpeculationStats::default(),
        })
    }

    /// Tokens chosen so far.
    pub(crate) fn generated(&self) -> &[u32] {
        &self.generated
    }

    pub(crate) fn stats(&self) -> &SpeculationStats {
        &self.stats
    }

    /// Whether nothing more will be chosen; events may still be waiting.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Chosen tokens among the events nobody has seen yet.
    pub(crate) fn unseen_tokens(&self) -> usize {
        self.events
            .iter()
            .filter(|e| matches!(e, Event::Token(_)))
            .count()
    }

    /// Most drafts worth verifying: a pass gives one token more than it is given, and what is guessed
    /// must fit the caches and be possible to take back.
    pub(crate) fn max_drafts(&self, max_rollback: usize) -> usize {
        let left = self
            .options
            .max_tokens
            .saturating_sub(self.generated.len() + 1);
        let room = self
            .max_len
            .saturating_sub(self.prompt_ids.len() + self.generated.len());
        left.min(room).min(max_rollback)
    }

    /// Ends it before anything is chosen if nothing is wanted.
    pub(crate) fn end_if_nothing_is_wanted(&mut self) {
        if self.options.max_tokens == 0 && !self.finished {
            self.end(FinishReason::MaxTokens);
        }
    }

    /// Ends it before its prompt is run whole.
    pub(crate) fn cancel(&mut self) {
        if !self.finished {
            self.end(FinishReason::Cancelled);
        }
    }

    /// Chooses tokens from what follows the last token that stands and each draft behind it: row `j` is
    /// what follows `j` drafts. `verified` says how far it came, also after an error.
    ///
    /// # Errors
    /// Logits from which nothing can be chosen, a hook's error, an id that is no token.
    pub(crate) fn verify(
        &mut self,
        proposal: &Proposal,
        rows: &Rows,
        verified: &mut Verified,
    ) -> Result<()> {
        let drafts = proposal.tokens.len();
        let after_prompt = self.generated.is_empty();
        let greedy = self.sampler.params().temperature == 0.0;
        let done = match rows {
            Rows::Logits(rows) if !greedy && drafts > 0 => {
                self.keep_accepted(proposal, rows, verified)
            }
            rows => self.keep_equal(&proposal.tokens, rows, verified),
        };
        if !after_prompt {
            self.stats.record(drafts, verified.kept);
        }
        done
    }

    /// Takes the target's own tokens as long as they are the drafts.
    fn keep_equal(&mut self, drafts: &[u32], rows: &Rows, verified: &mut Verified) -> Result<()> {
        let len = match rows {
            Rows::Logits(rows) => rows.len(),
            Rows::Chosen(tokens) => tokens.len(),
        };
        for j in 0..len {
            let sampled = match rows {
                Rows::Chosen(tokens) => Sampled::plain(tokens[j]),
                Rows::Logits(rows) => {
                    let history = TokenHistory {
                        prompt: &self.prompt_ids,
                        generated: &self.generated,
                    };
                    self.sampler.sample(&rows[j], history)?
                }
            };
            if drafts.get(j) != Some(&sampled.token) {
                verified.next = Some(sampled.token);
                return self.take(sampled);
            }
            verified.kept = j + 1;
            self.take(sampled)?;
            if self.finished {
                break;
            }
        }
        Ok(())
    }

    /// Takes drafts by the rule that leaves the distribution of the text unchanged.
    fn keep_accepted(
        &mut self,
        proposal: &Proposal,
        rows: &[Vec<f32>],
        verified: &mut Verified,
    ) -> Result<()> {
        let drafts = &proposal.tokens;
        let uniforms: Vec<f64> = drafts.iter().map(|_| self.sampler.uniform()).collect();
        let mut uniforms = uniforms.into_iter();
        let mut generated = self.generated.clone();
        let (sampler, prompt) = (&mut self.sampler, &self.prompt_ids);
        let vocab = rows.first().map_or(0, Vec::len);
        let one_hot: Vec<Vec<f32>> = match proposal.probs.is_empty() {
            true => drafts.iter().map(|d| one_hot(vocab, *d)).collect(),
            false => Vec::new(),
        };
        let accepted = accept(
            drafts,
            |j| {
                Ok(proposal
                    .probs
                    .get(j)
                    .or(one_hot.get(j))
                    .map_or(&[][..], Vec::as_slice))
            },
            |j| {
                if let Some(j) = j.checked_sub(1) {
                    generated.push(drafts[j]);
                }
                sampler.probs(
                    &rows[j],
                    TokenHistory {
                        prompt,
                        generated: &generated,
                    },
                )
            },
            || uniforms.next().unwrap_or(0.0),
        )?;
        for (j, &draft) in drafts[..accepted.kept].iter().enumerate() {
            verified.kept = j + 1;
            self.take(self.sampler.report(&rows[j], draft))?;
            if self.finished {
                return Ok(());
            }
        }
        let token = self.sampler.draw(&accepted.next)?;
        verified.next = Some(token);
        self.take(self.sampler.report(&rows[accepted.kept], token))
    }

    /// The text goes on with this token.
    fn take(&mut self, sampled: Sampled) -> Result<()> {
        let id = sampled.token;
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
        } else if self.prompt_ids.len() + self.generated.len() >= self.max_len {
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
        self.events.push_back(Event::Done {
            reason,
            usage: self.usage,
        });
        self.finished = true;
    }

    fn show(&mut self, text: String) {
        if !text.is_empty() {
            self.events.push_back(Event::Text(text));
        }
    }
}

fn one_hot(vocab: usize, token: u32) -> Vec<f32> {
    let mut row = vec![0.0; vocab];
    if let Some(p) = row.get_mut(token as usize) {
        *p = 1.0;
    }
    row
}
