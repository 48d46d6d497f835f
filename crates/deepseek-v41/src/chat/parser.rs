//! Generated ids → reasoning, content and tool calls, as they come.

use std::{
    pin::Pin,
    sync::mpsc::{self, TryRecvError},
    task::{Context, Poll, Waker},
};

use deepseek_recipe::stream::{
    ChunkGenerator, InferenceChunk, InferenceFinishReason, InferenceTokenLogprob, OutputChunk,
    ParsingOptions, PromptUsage, StreamError, StreamProcessor,
};
use futures_core::Stream;

use super::{ChatError, Irregularity, watch::Watch};
use crate::{Sampled, Tokenizer};

/// Takes generated ids and gives the chunks of `G`: a protocol's, or plain [`OutputChunk`]s with
/// [`Events`].
///
/// Ids may come in any portions; a tag, a character or a stop sequence that is not whole yet is held
/// back, and nothing given out is ever taken back.
///
/// The prompt library's parser is a stream that waits for its input. Here it is asked again after every
/// portion, on the caller's thread and without a runtime; so a generator must not wait for anything else.
pub struct AnswerParser<G: ChunkGenerator> {
    tokenizer: Tokenizer,
    watch: Watch,
    input: Option<mpsc::Sender<InferenceChunk>>,
    output: Pin<Box<dyn Stream<Item = Result<G::Chunk, StreamError>> + Send>>,
    ended: bool,
}

/// Gives [`OutputChunk`]s as they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct Events;

impl ChunkGenerator for Events {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

/// What has been put in and not been read yet.
struct Queue(mpsc::Receiver<InferenceChunk>);

impl Stream for Queue {
    type Item = InferenceChunk;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<InferenceChunk>> {
        match self.0.try_recv() {
            Ok(chunk) => Poll::Ready(Some(chunk)),
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Disconnected) => Poll::Ready(None),
        }
    }
}

impl<G: ChunkGenerator> AnswerParser<G>
where
    G::Chunk: Send,
{
    /// A parser for one answer.
    pub fn new(tokenizer: &Tokenizer, generator: G, options: ParsingOptions) -> Self {
        let (input, queue) = mpsc::channel();
        let watch = Watch::new(tokenizer, &options);
        let processor = StreamProcessor::new(generator, options).with_tokenizer(tokenizer.clone());
        let output = Box::pin(processor.into_protocol_stream(Queue(queue)));
        Self {
            tokenizer: tokenizer.clone(),
            watch,
            input: Some(input),
            output,
            ended: false,
        }
    }

    /// Tells how long the prompt was, before the first id.
    ///
    /// # Errors
    /// None in practice.
    pub fn begin(&mut self, prompt_usage: PromptUsage) -> Result<Vec<G::Chunk>, ChatError> {
        self.feed(InferenceChunk::Ready {
            system_fingerprint: None,
            prompt_usage,
        })
    }

    /// More generated ids, without the one that ended the text.
    ///
    /// # Errors
    /// [`ChatError::MixedTags`], and ids that are no tokens. The parser has ended then.
    pub fn push(&mut self, ids: &[u32]) -> Result<Vec<G::Chunk>, ChatError> {
        self.push_with(ids, None)
    }

    /// [`AnswerParser::push`] with its log-probability, if there is one.
    ///
    /// # Errors
    /// As [`AnswerParser::push`].
    pub fn push_sampled(&mut self, sampled: &Sampled) -> Result<Vec<G::Chunk>, ChatError> {
        let logprobs = sampled.logprob.map(|logprob| {
            let top = sampled.top_logprobs.iter().map(|t| (t.token, t.logprob));
            vec![InferenceTokenLogprob {
                logprob,
                top_logprobs: top.collect(),
            }]
        });
        self.push_with(&[sampled.token], logprobs)
    }

    fn push_with(
        &mut self,
        ids: &[u32],
        logprobs: Option<Vec<InferenceTokenLogprob>>,
    ) -> Result<Vec<G::Chunk>, ChatError> {
        if self.ended {
            return Ok(Vec::new());
        }
        for id in ids {
            if let Err(err) = self.watch.see(&self.tokenizer, *id) {
                self.ended = true;
                return Err(err);
            }
        }
        self.feed(InferenceChunk::Tokens {
            token_ids: ids.to_vec(),
            logprobs,
        })
    }

    /// The end: [`InferenceFinishReason::Stop`] when the model ended the text, `Length` when there was
    /// no room for more, and `None` when it was given up.
    ///
    /// # Errors
    /// Ids held back that are no tokens.
    pub fn finish(
        &mut self,
        reason: Option<InferenceFinishReason>,
    ) -> Result<Vec<G::Chunk>, ChatError> {
        if !self.ended && reason == Some(InferenceFinishReason::Stop) {
            self.watch.stopped();
        }
        let chunks = match reason {
            Some(finish_reason) => self.feed(InferenceChunk::Finish { finish_reason }),
            None => {
                self.input = None;
                self.drain()
            }
        };
        self.ended = true;
        chunks
    }

    /// Whether the answer is over: finished, or at a stop sequence.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// What the format does not allow and was read leniently.
    pub fn irregularities(&self) -> &[Irregularity] {
        &self.watch.found
    }

    fn feed(&mut self, chunk: InferenceChunk) -> Result<Vec<G::Chunk>, ChatError> {
        if self.ended {
            return Ok(Vec::new());
        }
        if let Some(input) = &self.input {
            // A stream that has read all it wants has dropped the other end.
            input.send(chunk).ok();
        }
        self.drain()
    }

    fn drain(&mut self) -> Result<Vec<G::Chunk>, ChatError> {
        let mut chunks = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        while !self.ended {
            match self.output.as_mut().poll_next(&mut context) {
                Poll::Ready(Some(Ok(chunk))) => chunks.push(chunk),
                Poll::Ready(Some(Err(err))) => {
                    self.ended = true;
                    return Err(err.into());
                }
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(chunks)
    }
}
