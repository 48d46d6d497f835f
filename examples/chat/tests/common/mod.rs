//! What the tests share.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod requests;

use std::{path::PathBuf, sync::OnceLock};

use deepseek_v41::{
    DeepSeekV41, Tokenizer,
    chat::{
        Answer, ChatTemplate, Irregularity, ParsingOptions, recipe::stream::InferenceFinishReason,
    },
};
use deepseek_v41_examples::fixtures;

/// The embedded model, loaded once.
pub(crate) fn tiny() -> &'static DeepSeekV41 {
    static MODEL: OnceLock<DeepSeekV41> = OnceLock::new();
    MODEL.get_or_init(|| DeepSeekV41::tiny().unwrap())
}

/// A file of `tests/data/tiny`.
pub(crate) fn tiny_data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/tiny")
        .join(name)
}

/// The red circle.
pub(crate) fn picture() -> Vec<u8> {
    std::fs::read(tiny_data("picture.png")).unwrap()
}

/// For each byte the token that is just this byte.
pub(crate) fn byte_tokens(tokenizer: &Tokenizer) -> Vec<u32> {
    let mut table = vec![None; 256];
    for id in (0..tokenizer.vocab_size() as u32).filter(|id| !tokenizer.is_added(*id)) {
        let mut bytes = Vec::new();
        tokenizer.token_bytes(id, &mut bytes).unwrap();
        if let [byte] = bytes[..] {
            table[usize::from(byte)].get_or_insert(id);
        }
    }
    table
        .into_iter()
        .map(|id| id.expect("byte-level: every byte is a token"))
        .collect()
}

/// Ids of a text in the smallest pieces: control tokens whole, all else byte by byte.
pub(crate) fn bytewise(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let table = byte_tokens(tokenizer);
    let whole = tokenizer
        .encode(text, deepseek_v41::AddedTokens::Recognise)
        .unwrap();
    let mut ids = Vec::new();
    for id in whole {
        if tokenizer.is_added(id) {
            ids.push(id);
        } else {
            let mut bytes = Vec::new();
            tokenizer.token_bytes(id, &mut bytes).unwrap();
            ids.extend(bytes.iter().map(|b| table[usize::from(*b)]));
        }
    }
    ids
}

/// How answers of a conversation with tools are read.
pub(crate) fn parsing(template: &ChatTemplate, thinking: bool) -> ParsingOptions {
    fixtures::parsing(template, thinking)
}

/// Parses ids handed in in the given portions.
pub(crate) fn parse<'a>(
    tokenizer: &Tokenizer,
    options: &ParsingOptions,
    portions: impl IntoIterator<Item = &'a [u32]>,
    reason: Option<InferenceFinishReason>,
) -> (Answer, Vec<Irregularity>) {
    fixtures::parse(tokenizer, options, portions, reason).unwrap()
}
