//! Conversations: requests and messages → prompt ids → an answer in pieces.
//!
//! The format itself is DeepSeek's own library, [`recipe`] (API protocols and answers), [`recipe_core`]
//! (messages) and [`recipe_encoding`] (prompts); this module connects it to the model. See
//! `docs/encoding.md` for the format, and for where that library and the official Python differ.
//!
//! * [`ChatTemplate`] turns a [`Conversation`] into ids. What users write is text, whatever it spells.
//! * [`ChatTemplate::prepare`] takes a request of one of three API protocols, and
//!   [`ChatRequest::generate`] answers in that protocol's chunks.
//! * [`AnswerParser`] takes generated ids and tells reasoning, content and tool calls apart.
//! * [`ChatSession`] goes on with a conversation without reading it again.
//!
//! ```no_run
//! use deepseek_v41::{DeepSeekV41, GenerateOptions};
//! use deepseek_v41::chat::{ChatSession, Conversation, OutputChunk, user};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let model = DeepSeekV41::load("a/checkpoint/directory")?;
//! let settings = Conversation { thinking_mode: false, ..Conversation::default() };
//! let mut chat = ChatSession::new(&model, settings, Default::default())?;
//! for chunk in chat.send([user("What is a lantern?")], &GenerateOptions::default())? {
//!     if let OutputChunk::Content { content, .. } = chunk? {
//!         print!("{content}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod answer;
mod effort;
mod error;
mod generation;
mod parser;
mod pictures;
mod record;
mod request;
mod session;
mod template;
mod turn;
mod watch;

pub use answer::{Answer, CalledTool};
pub use deepseek_recipe as recipe;
pub use deepseek_recipe::stream::{OutputChunk, ParsingOptions};
pub use deepseek_recipe_core as recipe_core;
pub use deepseek_recipe_core::{conversation::Conversation, messages::InputMessage};
pub use deepseek_recipe_encoding as recipe_encoding;
pub use effort::{Effort, EffortNames};
pub use error::ChatError;
pub use generation::ChatGeneration;
pub use parser::{AnswerParser, Events};
pub use request::{ChatRequest, Controls};
pub use session::ChatSession;
pub use template::{ChatPrompt, ChatTemplate};
pub use turn::ChatTurn;
pub use watch::Irregularity;

use deepseek_recipe_core::{multimodal::ImageSource, prompt::Prompt, special_tokens::SpecialToken};

/// A user's message.
pub fn user(text: impl Into<String>) -> InputMessage {
    InputMessage::User {
        content: Prompt::plain(text),
        image_sources: Vec::new(),
    }
}

/// A system message.
pub fn system(text: impl Into<String>) -> InputMessage {
    InputMessage::System {
        content: Prompt::plain(text),
        image_sources: Vec::new(),
        tools: None,
    }
}

impl ChatTemplate {
    /// A user's message with encoded pictures in front of the text.
    pub fn user_with_images(
        &self,
        images: impl IntoIterator<Item = Vec<u8>>,
        text: impl Into<String>,
    ) -> InputMessage {
        let image_sources: Vec<ImageSource> = images
            .into_iter()
            .map(|data| ImageSource::Bytes {
                data,
                detail: Default::default(),
                path: String::new(),
            })
            .collect();
        let image = Prompt::special(self.spelling(SpecialToken::Image));
        let mut blocks = vec![image; image_sources.len()];
        blocks.push(Prompt::plain(text));
        InputMessage::User {
            content: Prompt::join(&blocks, "\n\n"),
            image_sources,
        }
    }
}
