//! One answer of a conversation.

use deepseek_recipe::stream::{OutputChunk, PromptUsage};
use deepseek_v41_model::ImageSpan;

use super::{
    Answer, AnswerParser, ChatError, ChatGeneration, Events, Irregularity, record::Record,
};
use crate::{GenerateOptions, Prompt, Session};

/// An answer of a [`ChatSession`](super::ChatSession): an iterator of its chunks. Dropping it ends the
/// turn where it is.
pub struct ChatTurn<'s, 'm> {
    chunks: ChatGeneration<'s, 'm, Events>,
    record: &'s mut Record,
    answer: Answer,
}

impl<'s, 'm> ChatTurn<'s, 'm> {
    /// Lets the model answer to the record, of which the caches hold the first `cached` tokens.
    pub(super) fn begin(
        session: &'s mut Session<'m>,
        record: &'s mut Record,
        cached: usize,
        options: &GenerateOptions,
    ) -> Result<Self, ChatError> {
        let model = session.model();
        let usage = PromptUsage {
            prompt_tokens: record.ids.len(),
            prompt_cache_hit_tokens: session.state.len(session.seq)?.min(cached),
        };
        let images = record.images.iter().filter(|span| span.start >= cached);
        let prompt = Prompt::WithImages {
            ids: record.ids[cached..].to_vec(),
            images: images
                .map(|s| ImageSpan {
                    start: s.start - cached,
                    rows: s.rows.clone(),
                })
                .collect(),
        };
        let parsing = record.parsing_options(options.stop.clone());
        let parser = AnswerParser::new(model.tokenizer(), Events, parsing);
        // The parser looks for them, and only where they count.
        let options = GenerateOptions {
            stop: Vec::new(),
            ..options.clone()
        };
        let chunks = session
            .generate(prompt, &options)
            .map_err(ChatError::from)
            .and_then(|g| ChatGeneration::new(g, &options, model.special_ids().eos, parser, usage));
        match chunks {
            Ok(chunks) => Ok(Self {
                chunks,
                record,
                answer: Answer::default(),
            }),
            Err(err) => {
                record.forget_turn();
                Err(err)
            }
        }
    }

    /// What has been said so far.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// Tokens of the prompt, and how many of them were in the caches.
    pub fn prompt_usage(&self) -> PromptUsage {
        self.chunks.usage
    }

    /// What the format does not allow and was read leniently.
    pub fn irregularities(&self) -> &[Irregularity] {
        self.chunks.irregularities()
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// The first error on the way.
    pub fn finish(mut self) -> Result<Answer, ChatError> {
        for chunk in &mut self {
            chunk?;
        }
        Ok(self.answer.clone())
    }
}

impl Iterator for ChatTurn<'_, '_> {
    type Item = Result<OutputChunk, ChatError>;

    fn next(&mut self) -> Option<Self::Item> {
        let chunk = self.chunks.next()?;
        if let Ok(chunk) = &chunk {
            self.answer.add(chunk);
        }
        Some(chunk)
    }
}

impl Drop for ChatTurn<'_, '_> {
    fn drop(&mut self) {
        // Chunks nobody asked for yet, and text that the parser holds back.
        let waiting = self.chunks.take_chunks();
        self.answer.extend(&waiting);
        if let Ok(rest) = self.chunks.parser.finish(None) {
            self.answer.extend(&rest);
        }
        match self.chunks.generated() {
            [] => self.record.forget_turn(),
            generated => self.record.answered(generated, &self.answer),
        }
    }
}
