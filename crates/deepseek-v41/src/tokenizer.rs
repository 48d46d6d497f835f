//! Text ↔ token ids, from a `tokenizer.json`.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use deepseek_v41_core::{Error, Result};
use tokenizers::{AddedVocabulary, DecoderWrapper};

use crate::text_stream::TextStream;

/// What to do with the names of added tokens (`<｜User｜>`, `<think>`, …) when they occur in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddedTokens {
    /// Each becomes its token: for prompts that a template put together.
    Recognise,
    /// All are text like any other: for what a user typed, which must not be able to end a turn.
    ///
    /// This covers every added token. Many control tokens of the released vocabulary are not
    /// flagged special, so going by that flag would let them through.
    AsText,
}

/// What to do with tokens flagged special when ids become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Write their names.
    Keep,
    /// Leave them out.
    Skip,
}

/// A byte-level BPE tokenizer; cheap to clone.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: tokenizers::Tokenizer,
    /// The same without its added tokens, built when text is first encoded without them.
    plain: OnceLock<tokenizers::Tokenizer>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in a checkpoint directory.
    ///
    /// # Errors
    /// The file cannot be read or is no byte-level tokenizer.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let file = dir.as_ref().join("tokenizer.json");
        let bytes = std::fs::read(&file).map_err(|e| Error::io(&file, e))?;
        Self::from_bytes(&bytes).map_err(|e| match e {
            Error::Value { reason, .. } => Error::checkpoint(&file, reason),
            other => other,
        })
    }

    /// Parses the contents of a `tokenizer.json`, as text or bytes.
    ///
    /// # Errors
    /// `Error::Value` when it is no tokenizer, `Error::Unsupported` when it does not decode byte by byte.
    pub fn from_bytes(json: impl AsRef<[u8]>) -> Result<Self> {
        let invalid = |e: tokenizers::Error| Error::value("tokenizer", e.to_string());
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(invalid)?;
        if !matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(Error::Unsupported {
                what: "a tokenizer whose decoder is not `ByteLevel`".to_owned(),
            });
        }
        // Settings left over from training batches would cut or pad prompts silently.
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        Ok(Self {
            shared: Arc::new(Shared {
                inner,
                plain: OnceLock::new(),
            }),
        })
    }

    /// Token ids of a text. Nothing is put before or after it.
    ///
    /// # Errors
    /// The tokenizer refuses the text; byte-level ones never do.
    pub fn encode(&self, text: &str, added: AddedTokens) -> Result<Vec<u32>> {
        let tokenizer = match added {
            AddedTokens::Recognise => &self.shared.inner,
            AddedTokens::AsText => self.plain(),
        };
        let encoding = tokenizer.encode_fast(text, false);
        Ok(encoding
            .map_err(|e| Error::value("text to encode", e.to_string()))?
            .get_ids()
            .to_vec())
    }

    fn plain(&self) -> &tokenizers::Tokenizer {
        self.shared.plain.get_or_init(|| {
            let mut plain = self.shared.inner.clone();
            plain.with_added_vocabulary(AddedVocabulary::new());
            plain
        })
    }

    /// Text of token ids. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// `Error::Value` for an id that is no token.
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> Result<String> {
        let mut stream = self.text_stream(special);
        let mut text = String::new();
        for &id in ids {
            stream.push_into(id, &mut text)?;
        }
        stream.finish_into(&mut text);
        Ok(text)
    }

    /// Decodes ids as they come.
    pub fn text_stream(&self, special: SpecialTokens) -> TextStream {
        TextStream::new(self.clone(), special)
    }

    /// Id of the token with this exact name.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.shared.inner.token_to_id(token)
    }

    /// Name of a token as the vocabulary spells it (bytes in GPT-2's alphabet).
    pub fn token(&self, id: u32) -> Option<String> {
        self.shared.inner.id_to_token(id)
    }

    /// Whether a token is flagged special.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.shared.inner.get_added_vocabulary();
        added
            .simple_id_to_token(id)
            .is_some_and(|token| added.is_special_token(&token))
    }

    /// Whether a token was added to the vocabulary, as all control tokens are, flagged special or not.
    pub fn is_added(&self, id: u32) -> bool {
        self.shared
            .inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .contains_key(&id)
    }

    /// Tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.shared.inner.get_vocab_size(true)
    }

    /// Appends the bytes a token stands for.
    ///
    /// # Errors
    /// `Error::Value` for an id that is no token.
    pub fn token_bytes(&self, id: u32, out: &mut Vec<u8>) -> Result<()> {
        let token = self.token(id).ok_or_else(|| {
            let size = self.vocab_size();
            Error::value(
                format!("token id {id}"),
                format!("not one of the tokenizer's {size} tokens"),
            )
        })?;
        let start = out.len();
        for c in token.chars() {
            let Some(byte) = byte_of(c) else {
                // One letter outside of the alphabet: the name is an added token's, plain text.
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                break;
            };
            out.push(byte);
        }
        Ok(())
    }

    /// The tokenizer itself.
    pub fn inner(&self) -> &tokenizers::Tokenizer {
        &self.shared.inner
    }
}

/// The byte a letter of GPT-2's alphabet stands for. Printable bytes stand for themselves; the 68
/// others were given the letters from U+0100 on, in order.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        b @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(b as u8),
        k @ 0x100..=0x120 => Some((k - 0x100) as u8),
        k @ 0x121..=0x142 => Some((k - 0x121) as u8 + 0x7f),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x400)
            .filter_map(char::from_u32)
            .filter_map(byte_of)
            .collect();
        bytes.sort_unstable();
        assert!(bytes.iter().copied().eq(0..=255));
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of(' ')),
            (Some(b' '), Some(b'\n'), None)
        );
    }
}
