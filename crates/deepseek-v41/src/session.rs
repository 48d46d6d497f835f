//! A text that goes on: one sequence with its caches.

use std::{ops::ControlFlow, path::Path};

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{
    Chunk, DraftRequest, ForwardBatch, ForwardOutput, ImageSpan, Limits, LogitRows, ModelState,
    SequenceId,
};

use crate::{DeepSeekV41, GenerateOptions, Generation, Prompt};

/// One sequence and its caches. Generating appends to it, so a conversation goes on without reading
/// its history again.
#[derive(Debug)]
pub struct Session<'m> {
    pub(crate) model: &'m DeepSeekV41,
    pub(crate) state: ModelState,
    pub(crate) seq: SequenceId,
    /// Tokens that belong to the text and have not been run: a sampled token is run only when
    /// something follows it.
    pub(crate) pending: Vec<u32>,
    /// `[n, ..]` hidden states of the last `n` tokens run, which the draft head has not seen.
    pub(crate) unseen: Option<Tensor>,
}

impl<'m> Session<'m> {
    /// An empty sequence of at most `limits.max_len` tokens.
    ///
    /// # Errors
    /// Limits that the model cannot have.
    pub(crate) fn new(model: &'m DeepSeekV41, limits: Limits) -> Result<Self> {
        let mut state = ModelState::new(model.config(), limits, model.transformer().device())?;
        let seq = state.create()?;
        Ok(Self {
            model,
            state,
            seq,
            pending: Vec::new(),
            unseen: None,
        })
    }

    /// Writes the text and its caches to a file, from which [`Session::restore`] goes on: at release
    /// shapes about 3 MB, and under 1 KB a token.
    ///
    /// # Errors
    /// As [`ModelState::save`].
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        // Hidden states have no place in the file: the draft head takes them in before.
        if let (true, Some(hidden)) = (self.can_draft()?, self.unseen.take()) {
            let request = DraftRequest {
                seq: self.seq,
                committed: hidden.dims()[0],
                next: None,
            };
            let head = self.model.draft_head()?;
            head.draft(&[request], &hidden, &mut self.state, &mut |_, _, _| Ok(0))?;
        }
        self.state
            .save(self.seq, &self.pending, self.model.transformer(), path)
    }

    /// Goes on with a text that [`Session::save`] wrote, exactly as the session that wrote it would.
    ///
    /// # Errors
    /// As [`ModelState::restore`], each kind of wrong file with its own
    /// [`SavedStateError`](deepseek_v41_core::SavedStateError); limits that the model cannot have.
    pub fn restore(model: &'m DeepSeekV41, limits: Limits, path: impl AsRef<Path>) -> Result<Self> {
        let transformer = model.transformer();
        let mut state = ModelState::new(model.config(), limits, transformer.device())?;
        let restored = state.restore(transformer, path)?;
        let (seq, pending) = (restored.seq, restored.pending);
        Ok(Self {
            model,
            state,
            seq,
            pending,
            unseen: None,
        })
    }

    /// The model it belongs to.
    pub fn model(&self) -> &'m DeepSeekV41 {
        self.model
    }

    /// Every token of the text so far.
    ///
    /// # Errors
    /// None in a session that is in use.
    pub fn token_ids(&self) -> Result<Vec<u32>> {
        let mut ids = self.state.token_ids(self.seq)?.to_vec();
        ids.extend(&self.pending);
        Ok(ids)
    }

    /// Tokens of the text so far.
    ///
    /// # Errors
    /// As [`Session::token_ids`].
    pub fn len(&self) -> Result<usize> {
        Ok(self.state.len(self.seq)? + self.pending.len())
    }

    /// Whether nothing has been said yet.
    ///
    /// # Errors
    /// As [`Session::token_ids`].
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Continues the text with `prompt` and then with what the model says.
    ///
    /// Dropping the generation at any point leaves the session usable: its text then ends with the
    /// last token that was handed out.
    ///
    /// # Errors
    /// A prompt that cannot be encoded or does not fit, or options without a meaning.
    pub fn generate<'s>(
        &'s mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<Generation<'s, 'm>> {
        Generation::borrowed(self, prompt.into(), options)
    }

    /// Takes the text back to its first `len` tokens. Within the caches' slack this costs nothing;
    /// further back the remaining tokens are run again.
    ///
    /// # Errors
    /// [`Error::Value`] for a length past the end; [`Error::Unsupported`] when tokens that came from
    /// a picture would have to be run again.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let run = self.state.len(self.seq)?;
        if len >= run {
            if len - run > self.pending.len() {
                let found = run + self.pending.len();
                let reason = format!("{len} is past the end of a text of {found} tokens");
                return Err(Error::value("length", reason));
            }
            self.pending.truncate(len - run);
            return Ok(());
        }
        match self.state.truncate(self.seq, len) {
            Err(Error::Capacity { .. }) => {}
            Err(err) => return Err(err),
            Ok(()) => {
                self.pending.clear();
                let seen = self.state.drafted(self.seq)?;
                let unseen = self
                    .unseen
                    .take()
                    .filter(|h| h.dims()[0] + len > run && seen < len);
                self.unseen = unseen.map(|h| h.narrow(0, 0, len - seen)).transpose()?;
                return Ok(());
            }
        }
        if self.state.has_images(self.seq, len)? {
            return Err(Error::Unsupported {
                what: "running tokens of a picture again: start a new session".into(),
            });
        }
        let ids = self.state.token_ids(self.seq)?[..len].to_vec();
        self.state.release(self.seq)?;
        self.seq = self.state.create()?;
        self.unseen = None;
        self.pending = ids;
        Ok(())
    }

    /// Whether the draft head has seen, or can still be shown, every token that was run.
    pub(crate) fn can_draft(&self) -> Result<bool> {
        let unseen = self.unseen.as_ref().map_or(0, |h| h.dims()[0]);
        Ok(self.state.drafted(self.seq)? + unseen == self.state.len(self.seq)?)
    }

    /// The hidden states the draft head has not seen, possibly none.
    pub(crate) fn take_unseen(&mut self) -> Result<Tensor> {
        if let Some(unseen) = self.unseen.take() {
            return Ok(unseen);
        }
        let cfg = self.model.config();
        let width = cfg.dspark_target_layer_ids.len() * cfg.dim;
        let device = self.model.transformer().device();
        Ok(Tensor::zeros((0, width), DType::BF16, device)?)
    }

    /// Runs the last token of the text and guesses after it in one pass.
    pub(crate) fn verify(&mut self, ids: Vec<u32>, want: Want) -> Result<ForwardOutput> {
        let batch = ForwardBatch {
            chunks: vec![Chunk::text(self.seq, ids)],
            logits: LogitRows::All,
            target_hidden: want.hidden,
            best: want.best,
        };
        self.model.transformer().forward(&batch, &mut self.state)
    }

    /// Runs tokens in chunks of at most `chunk`, pictures uncut; returns what the last pass gave, with one
    /// row of logits, or `None` if `after` breaks off before it. `after` is called after every chunk with the
    /// number of tokens run so far and what the pass gave.
    pub(crate) fn run(
        &mut self,
        ids: &[u32],
        images: &[ImageSpan],
        chunk: usize,
        want: Want,
        mut after: impl FnMut(&mut Self, usize, &ForwardOutput) -> Result<ControlFlow<()>>,
    ) -> Result<Option<ForwardOutput>> {
        let mut at = 0;
        loop {
            let end = chunk_end(at, ids.len(), chunk, images);
            let last = end == ids.len();
            let batch = ForwardBatch {
                chunks: vec![Chunk {
                    seq: self.seq,
                    token_ids: ids[at..end].to_vec(),
                    images: spans_within(images, at, end),
                }],
                logits: if last {
                    LogitRows::Last
                } else {
                    LogitRows::None
                },
                target_hidden: want.hidden,
                best: want.best && last,
            };
            let out = self.model.transformer().forward(&batch, &mut self.state)?;
            at = end;
            let flow = after(self, at, &out)?;
            if last {
                let nothing = "has no tokens, so there is nothing to continue";
                return match out.logits.dims()[0] {
                    0 => Err(Error::value("prompt", nothing)),
                    _ => Ok(Some(out)),
                };
            }
            if flow.is_break() {
                return Ok(None);
            }
        }
    }
}

/// What a pass is asked for beside logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    /// What the draft head reads.
    pub(crate) hidden: bool,
    /// The most likely tokens.
    pub(crate) best: bool,
}

/// Where a chunk that begins at `at` ends: after `chunk` tokens, or later if that would cut a span.
pub(crate) fn chunk_end(at: usize, len: usize, chunk: usize, images: &[ImageSpan]) -> usize {
    let end = at.saturating_add(chunk.max(1)).min(len);
    let cut = images.iter().find_map(|span| {
        let stop = span.start + span.rows.dims().first().copied().unwrap_or(0);
        (span.start < end && end < stop).then_some(stop)
    });
    cut.unwrap_or(end).min(len)
}

/// The spans that begin in `at..end`, counted from `at`.
pub(crate) fn spans_within(images: &[ImageSpan], at: usize, end: usize) -> Vec<ImageSpan> {
    let spans = images.iter().filter(|s| (at..end).contains(&s.start));
    spans
        .map(|s| ImageSpan {
            start: s.start - at,
            rows: s.rows.clone(),
        })
        .collect()
}
