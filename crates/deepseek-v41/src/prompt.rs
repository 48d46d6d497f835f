//! What a generation starts from.

use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{Config, ImageSpan};

use crate::{
    load::SpecialIds,
    tokenizer::{AddedTokens, Tokenizer},
};

/// What a generation starts from.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Prompt {
    /// Plain text: begins with the begin-of-text token, and names of control tokens in it stay text.
    Text(String),
    /// A prompt that a template put together: names of control tokens are the tokens, and nothing
    /// is added.
    Rendered(String),
    /// Token ids as they are.
    Ids(Vec<u32>),
    /// Token ids of which some positions come from pictures.
    WithImages {
        /// Ids; those inside spans are the image token's.
        ids: Vec<u32>,
        /// Spans in ascending order.
        images: Vec<ImageSpan>,
    },
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Self::Ids(ids)
    }
}

impl Prompt {
    /// The prompt as ids, with the begin-of-text token only where the text begins (`at_start`).
    pub(crate) fn into_ids(
        self,
        tokenizer: &Tokenizer,
        special: SpecialIds,
        at_start: bool,
    ) -> Result<(Vec<u32>, Vec<ImageSpan>)> {
        let ids = match self {
            Self::Text(text) => {
                let mut ids = if at_start {
                    vec![special.bos]
                } else {
                    Vec::new()
                };
                ids.extend(tokenizer.encode(&text, AddedTokens::AsText)?);
                ids
            }
            Self::Rendered(text) => tokenizer.encode(&text, AddedTokens::Recognise)?,
            Self::Ids(ids) => ids,
            Self::WithImages { ids, images } => return Ok((ids, images)),
        };
        Ok((ids, Vec::new()))
    }
}

/// Refuses pictures that do not lie in the prompt, pictures in the place of text, and image tokens that no
/// picture stands for: the model would take them for a word it has never seen.
pub(crate) fn check_image_tokens(cfg: &Config, ids: &[u32], images: &[ImageSpan]) -> Result<()> {
    let bad = |reason: String| Err(Error::value("prompt", reason));
    let mut inside = vec![false; ids.len()];
    for span in images {
        let rows = span.rows.dims().first().copied().unwrap_or(0);
        let end = span.start.checked_add(rows);
        let Some(places) = end.and_then(|end| inside.get_mut(span.start..end)) else {
            let (start, len) = (span.start, ids.len());
            return bad(format!(
                "a picture of {rows} rows at position {start} of {len} tokens"
            ));
        };
        places.fill(true);
    }
    if !cfg.vision_enabled() {
        return Ok(());
    }
    let pairs = ids.iter().zip(&inside).enumerate();
    for (at, (id, inside)) in pairs {
        match (*id as usize == cfg.image_token_id, *inside) {
            (true, false) => {
                return bad(format!(
                    "an image token at position {at}, and no picture for it"
                ));
            }
            (false, true) => {
                return bad(format!(
                    "a picture at position {at}, where token {id} is text"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}
