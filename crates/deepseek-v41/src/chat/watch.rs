//! What the prompt library's parser lets pass in silence.

use deepseek_recipe::stream::ParsingOptions;
use deepseek_recipe_core::special_tokens::SpecialToken;
use deepseek_v41_core::Result;

use super::ChatError;
use crate::Tokenizer;

/// Something in an answer that the format does not allow and that was read leniently. The official
/// parser refuses such answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Irregularity {
    /// The reasoning was never closed; all of the text, up to tool calls, counts as reasoning.
    UnclosedThinking,
    /// `</think>` outside of reasoning; left out.
    OrphanThinkingEnd,
    /// Another control token; its name is part of the text.
    ControlToken(u32),
}

/// Looks at the ids on their way to the parser.
#[derive(Debug)]
pub(super) struct Watch {
    dsml: Option<u32>,
    think_end: Option<u32>,
    /// Control tokens that content may have: those of grounding.
    allowed: Vec<u32>,
    parses_calls: bool,
    in_reasoning: bool,
    /// The last id was the tag token: the next one tells the form.
    in_tag: bool,
    /// Whether tags have a space (V4.1) or none (V4); known from the first one on.
    spaced: Option<bool>,
    pub(super) found: Vec<Irregularity>,
    bytes: Vec<u8>,
}

impl Watch {
    pub(super) fn new(tokenizer: &Tokenizer, options: &ParsingOptions) -> Self {
        let id = |token| tokenizer.token_id(options.special_tokens.token(token));
        use SpecialToken::{Box, BoxEnd, Point, PointEnd, Polygon, PolygonEnd, Ref, RefEnd};
        let grounding = [
            Ref, RefEnd, Box, BoxEnd, Point, PointEnd, Polygon, PolygonEnd,
        ];
        let starts_in_reasoning = options
            .thinking_initial_stage
            .is_some_and(|stage| stage.starts_in_reasoning());
        Self {
            dsml: id(SpecialToken::Dsml),
            think_end: id(SpecialToken::ThinkingEnd),
            allowed: grounding.into_iter().filter_map(id).collect(),
            parses_calls: options.parse_tool_calls,
            in_reasoning: starts_in_reasoning && !options.starts_in_tool_calls,
            in_tag: false,
            // The prompt has then opened the block, with V4.1's tag.
            spaced: options.starts_in_tool_calls.then_some(true),
            found: Vec::new(),
            bytes: Vec::new(),
        }
    }

    /// # Errors
    /// [`ChatError::MixedTags`]; an id that is no token.
    pub(super) fn see(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<(), ChatError> {
        if std::mem::take(&mut self.in_tag) {
            self.bytes.clear();
            tokenizer.token_bytes(id, &mut self.bytes)?;
            let spaced = self.bytes.first() == Some(&b' ');
            if *self.spaced.get_or_insert(spaced) != spaced {
                return Err(ChatError::MixedTags);
            }
        }
        if !tokenizer.is_added(id) {
            return Ok(());
        }
        if self.dsml == Some(id) && self.parses_calls {
            self.in_tag = true;
            if std::mem::take(&mut self.in_reasoning) {
                self.found.push(Irregularity::UnclosedThinking);
            }
        } else if self.think_end == Some(id) {
            if !std::mem::take(&mut self.in_reasoning) {
                self.found.push(Irregularity::OrphanThinkingEnd);
            }
        } else if !self.allowed.contains(&id) {
            self.found.push(Irregularity::ControlToken(id));
        }
        Ok(())
    }

    /// The model stopped of its own accord.
    pub(super) fn stopped(&mut self) {
        if std::mem::take(&mut self.in_reasoning) {
            self.found.push(Irregularity::UnclosedThinking);
        }
    }
}
