//! A conversation that goes on.

use deepseek_recipe_core::{conversation::Conversation, messages::InputMessage};
use deepseek_v41_core::Error;
use deepseek_v41_model::{ImageSpan, Limits};

use super::{
    ChatError, ChatTemplate, Effort,
    record::{New, Record},
    turn::ChatTurn,
};
use crate::{DeepSeekV41, GenerateOptions, Session};

/// A conversation whose history is in the model's caches: only what is new is run.
///
/// Answers stay the tokens the model chose, not what their text encodes to. In thinking mode without
/// tools the format drops reasoning once it has been answered to; the last answer is then run again
/// without it, and nothing earlier is.
pub struct ChatSession<'m> {
    session: Session<'m>,
    limits: Limits,
    record: Record,
}

impl<'m> ChatSession<'m> {
    /// A conversation of at most `limits.max_len` tokens. `settings` has system messages, tools and
    /// the thinking mode, and usually no turns yet.
    ///
    /// Turns within `limits.max_rollback` tokens of the end are undone at no cost; undoing further back
    /// runs what remains again.
    ///
    /// # Errors
    /// Limits that the model cannot have.
    pub fn new(
        model: &'m DeepSeekV41,
        settings: Conversation,
        limits: Limits,
    ) -> Result<Self, ChatError> {
        let record = Record::new(model.chat_template(), model.special_ids().eos, settings);
        Ok(Self {
            session: model.session(limits)?,
            limits,
            record,
        })
    }

    /// Reasons this thoroughly, which the prompt states at its beginning.
    #[must_use]
    pub fn with_effort(mut self, effort: Effort) -> Self {
        self.record.effort = Some(effort);
        self
    }

    /// Everything said so far.
    pub fn conversation(&self) -> &Conversation {
        &self.record.conversation
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.record.template
    }

    /// The history as tokens: as the next turn will see it.
    pub fn token_ids(&self) -> &[u32] {
        &self.record.ids
    }

    /// Turns so far.
    pub fn turns(&self) -> usize {
        self.record.turns.len()
    }

    /// Says something (a user's message, or the results of all tools called) and lets the model answer.
    /// Stop strings of `options` are looked for in the content alone.
    ///
    /// A turn that is dropped before its first token never happened; one dropped later ends there.
    ///
    /// # Errors
    /// Messages after which the model does not answer; pictures as for
    /// [`ChatPrompt::to_prompt`](super::ChatPrompt::to_prompt); a conversation that no longer fits.
    pub fn send(
        &mut self,
        messages: impl IntoIterator<Item = InputMessage>,
        options: &GenerateOptions,
    ) -> Result<ChatTurn<'_, 'm>, ChatError> {
        let mark = self.record.mark();
        let model = self.session.model();
        let added = self.record.add(model, messages);
        let (new, cached) = match added.and_then(|new| Ok((new, self.rewind()?))) {
            Ok(done) => done,
            Err(err) => {
                self.record.back_to(mark);
                return Err(err);
            }
        };
        let New { ids, images } = new;
        let start = self.record.ids.len();
        self.record.ids.extend(ids);
        let placed = |span: ImageSpan| ImageSpan {
            start: span.start + start,
            ..span
        };
        self.record.images.extend(images.into_iter().map(placed));
        self.record.turns.push(mark);
        ChatTurn::begin(&mut self.session, &mut self.record, cached, options)
    }

    /// Takes the last turn back: what was said and its answer. `false` when there was none.
    ///
    /// # Errors
    /// What the model refuses.
    pub fn undo(&mut self) -> Result<bool, ChatError> {
        if self.record.turns.is_empty() {
            return Ok(false);
        }
        self.record.forget_turn();
        self.rewind()?;
        Ok(true)
    }

    /// Takes the caches back to what they share with the history, and says how many tokens that is.
    fn rewind(&mut self) -> Result<usize, ChatError> {
        let cached = self.session.token_ids()?;
        let pairs = cached.iter().zip(&self.record.ids);
        let common = pairs.take_while(|(a, b)| a == b).count();
        match self.session.truncate(common) {
            Ok(()) => Ok(common),
            // Further back than the caches go, with pictures: the history has what they need.
            Err(Error::Unsupported { .. }) => {
                self.session = self.session.model().session(self.limits)?;
                Ok(0)
            }
            Err(err) => Err(err.into()),
        }
    }
}
