//! Token ids → text, piece by piece.

use deepseek_v41_core::Result;

use crate::tokenizer::{SpecialTokens, Tokenizer};

/// Decodes ids as they are generated.
///
/// A token may end in the middle of a character. Such bytes are held back until the character is
/// whole, so every piece is valid UTF-8, no piece is ever taken back, and the pieces put together are
/// the text of all ids decoded at once. Bytes that can no longer become a character turn into U+FFFD
/// as soon as that is known, one for each maximal invalid sequence, as `String::from_utf8_lossy` does.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    special: SpecialTokens,
    /// The start of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl TextStream {
    pub(crate) fn new(tokenizer: Tokenizer, special: SpecialTokens) -> Self {
        Self {
            tokenizer,
            special,
            pending: Vec::new(),
        }
    }

    /// The text that one more token completes; often empty.
    ///
    /// # Errors
    /// `Error::Value` for an id that is no token; the stream can go on.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let mut text = String::new();
        self.push_into(id, &mut text)?;
        Ok(text)
    }

    /// [`TextStream::push`], appending to `out`.
    ///
    /// # Errors
    /// See [`TextStream::push`].
    pub fn push_into(&mut self, id: u32, out: &mut String) -> Result<()> {
        if self.special == SpecialTokens::Skip && self.tokenizer.is_special(id) {
            return Ok(());
        }
        self.tokenizer.token_bytes(id, &mut self.pending)?;
        let mut rest = &self.pending[..];
        while let Err(e) = std::str::from_utf8(rest) {
            let (valid, bad) = rest.split_at(e.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            rest = bad;
            let Some(len) = e.error_len() else { break };
            out.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[len..];
        }
        if let Ok(whole) = std::str::from_utf8(rest) {
            out.push_str(whole);
            rest = &[];
        }
        self.pending.drain(..self.pending.len() - rest.len());
        Ok(())
    }

    /// What is left at the end: U+FFFD if a character never became whole, and nothing otherwise.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        self.finish_into(&mut text);
        text
    }

    /// [`TextStream::finish`], appending to `out`.
    pub fn finish_into(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Bytes held back.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }
}
