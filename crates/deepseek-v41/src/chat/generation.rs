//! An answer being generated, in the chunks of a protocol.

use std::collections::VecDeque;

use deepseek_recipe::stream::{ChunkGenerator, InferenceFinishReason, PromptUsage};

use super::{AnswerParser, ChatError, Irregularity};
use crate::{Event, FinishReason, GenerateOptions, Generation};

/// An answer being generated: an iterator of the chunks of `G`. Work is done in `next`, so dropping it
/// cancels; after an error it ends.
pub struct ChatGeneration<'s, 'm, G: ChunkGenerator> {
    pub(super) generation: Generation<'s, 'm>,
    pub(super) parser: AnswerParser<G>,
    /// Ids that end the text and are no part of it.
    stops: Vec<u32>,
    chunks: VecDeque<G::Chunk>,
    pub(super) usage: PromptUsage,
}

impl<'s, 'm, G: ChunkGenerator> ChatGeneration<'s, 'm, G>
where
    G::Chunk: Send,
{
    /// Parses what `generation`, begun with `options`, says. Leave stop strings to the parser: it looks
    /// for them in the content alone.
    ///
    /// # Errors
    /// None in practice.
    pub fn new(
        generation: Generation<'s, 'm>,
        options: &GenerateOptions,
        eos: u32,
        mut parser: AnswerParser<G>,
        usage: PromptUsage,
    ) -> Result<Self, ChatError> {
        let mut stops = options.stop_ids.clone();
        stops.extend((!options.ignore_eos).then_some(eos));
        let chunks = parser.begin(usage)?.into();
        Ok(Self {
            generation,
            parser,
            stops,
            chunks,
            usage,
        })
    }

    /// What the format does not allow and was read leniently.
    pub fn irregularities(&self) -> &[Irregularity] {
        self.parser.irregularities()
    }

    /// Ids generated so far, the one that ended the text included.
    pub fn generated(&self) -> &[u32] {
        self.generation.generated()
    }

    /// Chunks that are ready.
    pub(super) fn take_chunks(&mut self) -> Vec<G::Chunk> {
        self.chunks.drain(..).collect()
    }

    fn step(&mut self) -> Result<(), ChatError> {
        let chunks = match self.generation.next().transpose()? {
            Some(Event::Token(sampled)) if self.stops.contains(&sampled.token) => return Ok(()),
            Some(Event::Token(sampled)) => self.parser.push_sampled(&sampled)?,
            Some(Event::Text(_)) => return Ok(()),
            Some(Event::Done { reason, .. }) => self.parser.finish(match reason {
                FinishReason::StopToken(_) | FinishReason::StopString(_) => {
                    Some(InferenceFinishReason::Stop)
                }
                FinishReason::MaxTokens | FinishReason::ContextFull => {
                    Some(InferenceFinishReason::Length)
                }
                FinishReason::Cancelled => None,
            })?,
            None => self.parser.finish(None)?,
        };
        self.chunks.extend(chunks);
        Ok(())
    }
}

impl<G: ChunkGenerator> Iterator for ChatGeneration<'_, '_, G>
where
    G::Chunk: Send,
{
    type Item = Result<G::Chunk, ChatError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.chunks.is_empty() && !self.parser.is_ended() {
            if let Err(err) = self.step() {
                self.parser.finish(None).ok();
                return Some(Err(err));
            }
        }
        self.chunks.pop_front().map(Ok)
    }
}
