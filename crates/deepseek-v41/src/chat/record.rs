//! What has been said, as messages and as tokens.

use deepseek_recipe::stream::ThinkingInitialStage;
use deepseek_recipe_core::{
    conversation::Conversation,
    messages::{InputMessage, ToolCall},
    special_tokens::SpecialToken,
    tools::ToolChoice,
};
use deepseek_v41_core::Error;
use deepseek_v41_model::ImageSpan;

use super::{Answer, ChatError, ChatTemplate, Effort, ParsingOptions, pictures};
use crate::{AddedTokens, DeepSeekV41, Prompt};

pub(super) struct Record {
    pub(super) template: ChatTemplate,
    eos: u32,
    pub(super) conversation: Conversation,
    pub(super) effort: Option<Effort>,
    /// Tokens of all turns, as the next one will see them.
    pub(super) ids: Vec<u32>,
    pub(super) images: Vec<ImageSpan>,
    /// How long everything was before each turn.
    pub(super) turns: Vec<Mark>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    messages: usize,
    ids: usize,
    images: usize,
    turns: usize,
}

/// What a turn adds; spans count from its first token.
pub(super) struct New {
    pub(super) ids: Vec<u32>,
    pub(super) images: Vec<ImageSpan>,
}

impl Record {
    pub(super) fn new(template: ChatTemplate, eos: u32, conversation: Conversation) -> Self {
        Self {
            template,
            eos,
            conversation,
            effort: None,
            ids: Vec::new(),
            images: Vec::new(),
            turns: Vec::new(),
        }
    }

    pub(super) fn mark(&self) -> Mark {
        Mark {
            messages: self.conversation.messages.len(),
            ids: self.ids.len(),
            images: self.images.len(),
            turns: self.turns.len(),
        }
    }

    pub(super) fn back_to(&mut self, mark: Mark) {
        self.conversation.messages.truncate(mark.messages);
        self.ids.truncate(mark.ids);
        self.images.truncate(mark.images);
        self.turns.truncate(mark.turns);
    }

    /// Takes back the turn that is going on.
    pub(super) fn forget_turn(&mut self) {
        if let Some(mark) = self.turns.last().copied() {
            self.back_to(mark);
        }
    }

    /// Adds messages to the conversation and gives the tokens they add to the prompt.
    pub(super) fn add(
        &mut self,
        model: &DeepSeekV41,
        messages: impl IntoIterator<Item = InputMessage>,
    ) -> Result<New, ChatError> {
        let before = match self.ids.is_empty() {
            true => None,
            false => Some(self.template.render_text(&self.conversation, self.effort)?),
        };
        let known = self.conversation.messages.len();
        self.conversation.messages.extend(messages);
        let added = &self.conversation.messages[known..];
        if added
            .iter()
            .any(|m| matches!(m, InputMessage::Assistant { .. }))
            || added.is_empty()
        {
            let reason = "expected what users or tools say, and not an answer";
            return Err(Error::value("messages", reason).into());
        }
        let whole = self.template.render_text(&self.conversation, self.effort)?;
        let (at, pictures) = match &before {
            None => (0, 0),
            Some(before) => {
                // Rendered alone it ends with a header for the next answer, which is not there yet.
                let assistant = self.template.spelling(SpecialToken::Assistant);
                let at = before.last_header(assistant).unwrap_or(before.text.len());
                if !whole.text.starts_with(&before.text[..at]) {
                    let reason = "they change what was said before";
                    return Err(Error::value("messages", reason).into());
                }
                (at, before.images.len())
            }
        };
        let (text, special) = whole.text_from(at);
        let ids = self.template.encode(text, &special)?;
        match pictures::with_images(model, ids, &whole.images[pictures..])? {
            Prompt::WithImages { ids, images } => Ok(New { ids, images }),
            Prompt::Ids(ids) => Ok(New {
                ids,
                images: Vec::new(),
            }),
            Prompt::Text(_) | Prompt::Rendered(_) => {
                Err(Error::value("prompt", "expected ids").into())
            }
        }
    }

    /// Whether the prompt shows tools, and earlier reasoning then stays.
    fn has_tools(&self) -> bool {
        !self.conversation.tools.is_empty() && self.conversation.tool_choice != ToolChoice::None
    }

    /// How the next answer is read.
    pub(super) fn parsing_options(&self, stop_sequences: Vec<String>) -> ParsingOptions {
        let start = ThinkingInitialStage::ReasoningStart;
        ParsingOptions {
            parse_tool_calls: self.has_tools(),
            starts_in_tool_calls: self.has_tools()
                && self.conversation.tool_choice == ToolChoice::Required,
            thinking_initial_stage: self.conversation.thinking_mode.then_some(start),
            stop_sequences,
            special_tokens: std::sync::Arc::new(self.template.special_tokens().clone()),
            ..ParsingOptions::default()
        }
    }

    /// Ends the turn whose prompt the record ends with.
    pub(super) fn answered(&mut self, generated: &[u32], answer: &Answer) {
        let generated = generated.strip_suffix(&[self.eos]).unwrap_or(generated);
        let thinking = self.conversation.thinking_mode;
        let tokenizer = self.template.tokenizer();
        let think_end = tokenizer.token_id(self.template.spelling(SpecialToken::ThinkingEnd));
        let closed = generated
            .iter()
            .position(|id| thinking && Some(*id) == think_end);
        let (reasoning, rest) = match closed {
            Some(at) => (&generated[..at], &generated[at + 1..]),
            None if thinking && answer.tool_calls.is_empty() => (generated, &[][..]),
            None => (&[][..], generated),
        };
        if thinking && (closed.is_some() || answer.tool_calls.is_empty()) {
            match self.has_tools() {
                true => self.ids.extend(reasoning),
                // The header then says that there was none.
                false => drop(self.ids.pop()),
            }
            self.ids.extend(think_end);
        }
        let shown = match answer.stop_sequence {
            // The stop sequence was generated and is no part of what was said.
            Some(_) => self
                .template
                .tokenizer()
                .encode(&answer.content, AddedTokens::AsText)
                .ok(),
            None => None,
        };
        match shown {
            Some(ids) => self.ids.extend(ids),
            None => self.ids.extend(rest),
        }
        self.ids.push(self.eos);
        let turn = self.turns.len();
        let calls = answer
            .tool_calls
            .iter()
            .enumerate()
            .map(|(i, call)| ToolCall {
                id: format!("call_{turn}_{i}"),
                name: call.name.clone(),
                arguments: call.arguments.clone(),
            });
        self.conversation.messages.push(InputMessage::Assistant {
            content: answer.content.clone(),
            reasoning_content: thinking.then(|| answer.reasoning.clone()),
            tool_calls: (!answer.tool_calls.is_empty()).then(|| calls.collect()),
            prefix: false,
        });
    }
}
