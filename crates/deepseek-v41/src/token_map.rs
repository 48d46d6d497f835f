//! The compressed vocabulary of the n-gram hash, from a tokenizer.

use std::collections::HashMap;

use deepseek_v41_core::{Error, Result};
use deepseek_v41_engram::TokenMap;
use tokenizers::{NormalizedString, Normalizer, normalizers::StripAccents};

use crate::tokenizer::Tokenizer;

/// Stands for a text that is exactly one space while the ends are stripped; a private-use letter.
const LONE_SPACE: &str = "\u{e000}";

/// Compressed id of every token: tokens whose texts are equal once case, accents and white space are
/// normalised share one, and ids are given in first-seen order.
///
/// # Errors
/// A token that the tokenizer cannot decode.
///
/// Reference: `build_compressed_token_map`.
pub fn compressed_token_map(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let inner = tokenizer.inner();
    let mut ids: HashMap<String, u32> = HashMap::new();
    (0..tokenizer.vocab_size() as u32)
        .map(|id| {
            // As the reference: a hole in the vocabulary decodes to nothing and shares the empty key.
            let text = inner
                .decode(&[id], false)
                .map_err(|e| Error::value(format!("token id {id}"), e.to_string()))?;
            let key = if text.contains(char::REPLACEMENT_CHARACTER) {
                // Part of a character: there is no text to normalise.
                inner.id_to_token(id).unwrap_or(text)
            } else {
                let normalised = normalise(&text)?;
                if normalised.is_empty() {
                    text
                } else {
                    normalised
                }
            };
            let next = ids.len() as u32;
            Ok(*ids.entry(key).or_insert(next))
        })
        .collect()
}

/// [`compressed_token_map`] checked against what the checkpoint was trained with.
///
/// # Errors
/// `Error::Config` when the compressed vocabulary has another size than the config says: the tokenizer is
/// not the checkpoint's.
pub fn token_map(
    tokenizer: &Tokenizer,
    compressed_vocab_size: usize,
    pad_id: u32,
) -> Result<TokenMap> {
    TokenMap::new(
        compressed_token_map(tokenizer)?,
        compressed_vocab_size,
        pad_id,
    )
}

fn normalise(text: &str) -> Result<String> {
    let mut folded = NormalizedString::from(text);
    folded.nfkc().nfd();
    StripAccents
        .normalize(&mut folded)
        .map_err(|e| Error::value("token text", e.to_string()))?;
    folded.lowercase();
    let collapsed = collapse_white_space(folded.get());
    let marked = if collapsed == " " {
        LONE_SPACE
    } else {
        &collapsed
    };
    Ok(marked.trim().replace(LONE_SPACE, " "))
}

/// Every run of space, tab, carriage return and line feed becomes one space; other white space stays.
fn collapse_white_space(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if !matches!(c, ' ' | '\t' | '\r' | '\n') {
            out.push(c);
        } else if !out.ends_with(' ') {
            out.push(' ');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_folded() -> Result<()> {
        for (text, key) in [
            (" The", "the"),
            ("THE", "the"),
            ("Élan", "elan"),
            ("ﬁ", "fi"),
            ("Ａ", "a"),
            ("a \t\r\n b", "a b"),
            (" ", " "),
            ("\n\t ", " "),
            ("\u{e000}x", " x"),
            // Not in the collapsed class, but white space at an end.
            ("\u{b}x\u{2003}", "x"),
            ("\u{b}", ""),
            ("\u{301}", ""),
            ("İ", "i"),
        ] {
            assert_eq!(normalise(text)?, key, "{text:?}");
        }
        Ok(())
    }
}
