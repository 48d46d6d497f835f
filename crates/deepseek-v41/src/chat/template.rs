//! Conversations → prompt ids.

use std::ops::Range;

use deepseek_recipe::{
    request::{ConversionOptions, ModelVersion},
    stream::StreamTokenizer,
};
use deepseek_recipe_core::{
    conversation::Conversation,
    multimodal::ImageSource,
    special_tokens::{SpecialToken, SpecialTokens as _, SpecialTokensMap},
};
use deepseek_recipe_encoding::{
    EncodingError, PromptEncoding, RenderedPrompt, TokenizerEncoder, dsv41::DeepseekV41Encoding,
};
use deepseek_v41_core::Error;

use super::{ChatError, Effort, effort::rendered_level};
use crate::{AddedTokens, DeepSeekV41, SpecialTokens, Tokenizer};

/// Renders conversations for one tokenizer; cheap to clone.
#[derive(Clone)]
pub struct ChatTemplate {
    encoding: DeepseekV41Encoding,
    tokenizer: Tokenizer,
    special: SpecialTokensMap,
}

/// A rendered conversation.
#[derive(Debug, Clone)]
pub struct ChatPrompt {
    /// Token ids; one image token a picture.
    pub ids: Vec<u32>,
    /// The prompt as text. It cannot be encoded again without `special`: see [`ChatTemplate`].
    pub text: String,
    /// Bytes of `text` that are control tokens.
    pub special: Vec<Range<usize>>,
    /// Pictures in the order of their tokens.
    pub images: Vec<ImageSource>,
}

impl DeepSeekV41 {
    /// The chat template of this model's tokenizer.
    pub fn chat_template(&self) -> ChatTemplate {
        ChatTemplate::new(self.tokenizer(), self.config().image_token_id as u32)
    }
}

impl ChatTemplate {
    /// `image_token` is the id that stands for a picture: checkpoints spell it in different ways.
    pub fn new(tokenizer: &Tokenizer, image_token: u32) -> Self {
        let mut special = SpecialTokensMap::default();
        if let Some(image) = tokenizer.token(image_token) {
            special.image = image;
        }
        let encoding = DeepseekV41Encoding::new().with_special_tokens(special.clone());
        Self {
            encoding,
            tokenizer: tokenizer.clone(),
            special,
        }
    }

    /// The prompt of a conversation, up to where the model goes on.
    ///
    /// `effort` is stated instead of the conversation's own, which knows four names only; without
    /// thinking neither is.
    ///
    /// # Errors
    /// [`ChatError::Encoding`] for a control token that the tokenizer lacks.
    pub fn render(
        &self,
        conversation: &Conversation,
        effort: Option<Effort>,
    ) -> Result<ChatPrompt, ChatError> {
        let mut prompt = self.render_text(conversation, effort)?;
        prompt.ids = self.encode(&prompt.text, &prompt.special)?;
        Ok(prompt)
    }

    /// [`ChatTemplate::render`] without ids.
    pub(super) fn render_text(
        &self,
        conversation: &Conversation,
        effort: Option<Effort>,
    ) -> Result<ChatPrompt, ChatError> {
        let mut rendered = self.encoding.render_conversation(conversation);
        if let (true, Some(effort)) = (conversation.thinking_mode, effort) {
            state_effort(
                &mut rendered,
                rendered_level(conversation.reasoning_effort),
                effort,
            )?;
        }
        let RenderedPrompt {
            prompt: text,
            special_ranges: special,
            image_sources: images,
        } = rendered;
        Ok(ChatPrompt {
            ids: Vec::new(),
            text,
            special,
            images,
        })
    }

    /// Ids of a rendered text: `special` are control tokens, all else is text.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn encode(&self, text: &str, special: &[Range<usize>]) -> Result<Vec<u32>, ChatError> {
        Ok(self
            .tokenizer
            .encode_ids(text, special)
            .map_err(EncodingError::Encode)?)
    }

    /// How requests are read: `names` are what clients may call the model, besides
    /// `DeepSeek-V4.1-Flash`.
    pub fn conversion_options<S: Into<String>>(
        &self,
        names: impl IntoIterator<Item = S>,
    ) -> ConversionOptions {
        let published = std::iter::once("DeepSeek-V4.1-Flash".to_owned());
        let names = published.chain(names.into_iter().map(Into::into));
        ConversionOptions::new()
            .with_special_tokens(self.special.clone())
            .with_model_versions_by_name(names.map(|name| (name, ModelVersion::DeepseekV41Flash)))
    }

    /// How a control token is written.
    pub fn spelling(&self, token: SpecialToken) -> &str {
        self.special.token(token)
    }

    /// All of them.
    pub fn special_tokens(&self) -> &SpecialTokensMap {
        &self.special
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

impl ChatPrompt {
    /// Where the last `<｜Assistant｜>` begins, in bytes of the text.
    pub(super) fn last_header(&self, assistant: &str) -> Option<usize> {
        let is_header = |r: &&Range<usize>| self.text.get((*r).clone()) == Some(assistant);
        self.special.iter().rev().find(is_header).map(|r| r.start)
    }

    /// Text and control tokens from byte `at` on, which no control token crosses.
    pub(super) fn text_from(&self, at: usize) -> (&str, Vec<Range<usize>>) {
        let later = self.special.iter().filter(|r| r.start >= at);
        (
            &self.text[at..],
            later.map(|r| r.start - at..r.end - at).collect(),
        )
    }
}

/// Puts another number into the effort line, which follows the first two control tokens.
fn state_effort(prompt: &mut RenderedPrompt, stated: u8, effort: Effort) -> Result<(), ChatError> {
    let lead = "Reasoning Effort: ";
    let old = stated.to_string();
    let at = prompt.special_ranges.get(1).map_or(0, |r| r.end) + lead.len();
    let (end, new) = (at + old.len(), effort.to_string());
    if prompt.prompt.get(at - lead.len()..end) != Some(&format!("{lead}{old}")) {
        let what = "another effort than those of this release of the prompt library".to_owned();
        return Err(Error::Unsupported { what }.into());
    }
    prompt.prompt.replace_range(at..end, &new);
    for range in prompt.special_ranges.iter_mut().filter(|r| r.start >= end) {
        *range = range.start - old.len() + new.len()..range.end - old.len() + new.len();
    }
    Ok(())
}

impl TokenizerEncoder for Tokenizer {
    fn encode_ids(&self, text: &str, special: &[Range<usize>]) -> Result<Vec<u32>, String> {
        let plain = |text: &str| match text.is_empty() {
            true => Ok(Vec::new()),
            false => self
                .encode(text, AddedTokens::AsText)
                .map_err(|e| e.to_string()),
        };
        let mut ids = Vec::new();
        let mut at = 0;
        for range in special {
            ids.extend(plain(&text[at..range.start])?);
            let token = &text[range.clone()];
            let id = self.token_id(token).filter(|id| self.is_added(*id));
            ids.push(id.ok_or_else(|| format!("the tokenizer has no control token {token}"))?);
            at = range.end;
        }
        ids.extend(plain(&text[at..])?);
        Ok(ids)
    }
}

impl StreamTokenizer for Tokenizer {
    fn decode_ids(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, String> {
        let special = match skip_special_tokens {
            true => SpecialTokens::Skip,
            false => SpecialTokens::Keep,
        };
        self.decode(ids, special).map_err(|e| e.to_string())
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.token(id)
    }

    fn count_tokens(&self, text: &str) -> Option<usize> {
        self.encode(text, AddedTokens::AsText)
            .ok()
            .map(|ids| ids.len())
    }

    fn is_special_token(&self, id: u32) -> bool {
        self.is_added(id)
    }
}
