//! Tokenizer, incremental text and the compressed token map.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use deepseek_v41::{AddedTokens, Error, SpecialTokens, Tokenizer, compressed_token_map, token_map};
use deepseek_v41_testing::{Golden, golden_dir};
use proptest::prelude::*;

fn tiny_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tiny-a/data")
}

fn tiny() -> Tokenizer {
    Tokenizer::from_dir(tiny_dir()).unwrap()
}

fn small() -> Tokenizer {
    Tokenizer::from_bytes(std::fs::read(golden_dir().join("tokenizer_small.json")).unwrap())
        .unwrap()
}

/// A token whose bytes are exactly these.
fn byte_token(tokenizer: &Tokenizer, byte: u8) -> u32 {
    let bytes = |id| {
        let mut out = Vec::new();
        tokenizer.token_bytes(id, &mut out).unwrap();
        out
    };
    (0..tokenizer.vocab_size() as u32)
        .find(|&id| bytes(id) == [byte])
        .unwrap()
}

#[test]
fn golden_token_map() {
    let golden = Golden::open("ops_token_map");
    let ids: Vec<i64> = compressed_token_map(&small())
        .unwrap()
        .into_iter()
        .map(i64::from)
        .collect();
    assert_eq!(ids, golden.i64("token_map.table"));
    let size = golden.i64("token_map.size")[0] as usize;
    let map = token_map(&small(), size, 2).unwrap();
    assert_eq!(map.compressed_vocab_size() as usize, size);
    assert!(matches!(
        token_map(&small(), size + 1, 2),
        Err(Error::Config { .. })
    ));
}

#[test]
fn tiny_token_map_has_the_configured_size() {
    let map = token_map(&tiny(), 3377, 2).unwrap();
    assert_eq!((map.len(), map.pad()), (4096, 2));
    let id = |token: &str| map.compress(tiny().token_id(token).unwrap()).unwrap();
    // `Ġ` is a space in the vocabulary's spelling.
    assert!(id("Ġthe") == id("ĠThe") && id("Ġthe") == id("The"));
    assert!(id("a") == id("ĠA") && id("a") != id("Ġthe") && id("Ġ") != id("a"));
}

#[test]
fn text_survives_the_round_trip() {
    for tokenizer in [tiny(), small()] {
        for text in [
            "Once upon a time",
            "",
            " \n\t x",
            "Grüße, 世界 🦀 — “ok”",
            "<|>\u{0}\u{7f}\u{a0}\u{ad}",
        ] {
            for added in [AddedTokens::Recognise, AddedTokens::AsText] {
                let ids = tokenizer.encode(text, added).unwrap();
                assert_eq!(tokenizer.decode(&ids, SpecialTokens::Keep).unwrap(), text);
            }
        }
    }
}

/// A user who types control tokens gets text, flagged special or not.
#[test]
fn added_tokens_are_recognised_only_on_request() {
    let tokenizer = tiny();
    let text = "<｜begin▁of▁sentence｜>hi<｜Assistant｜><think>";
    let control = [0, 4089, 4090];
    let ids = tokenizer.encode(text, AddedTokens::Recognise).unwrap();
    assert_eq!(
        (ids[0], ids[ids.len() - 2], ids[ids.len() - 1]),
        (0, 4089, 4090)
    );
    let plain = tokenizer.encode(text, AddedTokens::AsText).unwrap();
    assert!(plain.iter().all(|id| !control.contains(id)) && plain.len() > ids.len());
    assert_eq!(tokenizer.decode(&plain, SpecialTokens::Skip).unwrap(), text);
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Keep).unwrap(), text);
    assert_eq!(
        tokenizer.decode(&ids, SpecialTokens::Skip).unwrap(),
        "hi<｜Assistant｜><think>"
    );
    assert!(
        tokenizer.is_special(0) && !tokenizer.is_special(4089) && !tokenizer.is_special(9_999_999)
    );
    assert_eq!(tokenizer.token_id("<｜User｜>"), Some(4088));
    assert_eq!(tokenizer.token(4088).as_deref(), Some("<｜User｜>"));
}

#[test]
fn a_character_is_held_back_until_it_is_whole() {
    let tokenizer = small();
    let mut stream = tokenizer.text_stream(SpecialTokens::Keep);
    let mut pieces = Vec::new();
    for byte in "aé世🦀".bytes() {
        pieces.push(stream.push(byte_token(&tokenizer, byte)).unwrap());
    }
    assert_eq!(pieces, ["a", "", "é", "", "", "世", "", "", "", "🦀"]);
    assert_eq!(stream.finish(), "");
    // Cut off in the middle, and continued by something else.
    for byte in [0xf0, 0x9f] {
        assert_eq!(stream.push(byte_token(&tokenizer, byte)).unwrap(), "");
    }
    assert_eq!(stream.pending(), [0xf0, 0x9f]);
    assert_eq!(stream.clone().finish(), "\u{fffd}");
    assert_eq!(
        stream.push(byte_token(&tokenizer, b'x')).unwrap(),
        "\u{fffd}x"
    );
    // A byte that starts nothing is known to be invalid at once.
    assert_eq!(
        stream.push(byte_token(&tokenizer, 0xff)).unwrap(),
        "\u{fffd}"
    );
    assert_eq!(stream.finish(), "");
}

#[test]
fn ids_that_are_no_tokens_are_an_error() {
    let tokenizer = small();
    assert!(matches!(
        tokenizer.decode(&[1, 330], SpecialTokens::Keep),
        Err(Error::Value { .. })
    ));
    let mut stream = tokenizer.text_stream(SpecialTokens::Skip);
    assert!(stream.push(u32::MAX).is_err());
    assert_eq!(stream.push(byte_token(&tokenizer, b'k')).unwrap(), "k");
}

#[test]
fn files_that_are_no_tokenizers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        Tokenizer::from_dir(dir.path()),
        Err(Error::Io { .. })
    ));
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert!(matches!(
        Tokenizer::from_dir(dir.path()),
        Err(Error::Checkpoint { .. })
    ));
    for json in ["", "[1, 2", "{\"version\": \"1.0\"}"] {
        assert!(matches!(
            Tokenizer::from_bytes(json),
            Err(Error::Value { .. })
        ));
    }
    let json = std::fs::read_to_string(golden_dir().join("tokenizer_small.json")).unwrap();
    let at = json.find("\"decoder\"").unwrap();
    let end = at + json[at..].find('}').unwrap() + 1;
    let other = format!(
        "{}\"decoder\": {{\"type\": \"Fuse\"}}{}",
        &json[..at],
        &json[end..]
    );
    assert!(matches!(
        Tokenizer::from_bytes(other),
        Err(Error::Unsupported { .. })
    ));
    // Truncation left in the file does not cut prompts.
    let cut = "{\"direction\": \"Right\", \"max_length\": 2, \"strategy\": \"LongestFirst\", \"stride\": 0}";
    let truncating = json.replacen("\"truncation\": null", &format!("\"truncation\": {cut}"), 1);
    assert_ne!(truncating, json);
    let ids = Tokenizer::from_bytes(truncating)
        .unwrap()
        .encode("a b c d e f", AddedTokens::AsText);
    assert!(ids.unwrap().len() > 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn pieces_put_together_are_the_whole_text(ids in prop::collection::vec(0u32..330, 0..60), skip: bool) {
        let tokenizer = small();
        let special = if skip { SpecialTokens::Skip } else { SpecialTokens::Keep };
        let mut stream = tokenizer.text_stream(special);
        let mut text = String::new();
        for &id in &ids {
            text += &stream.push(id).unwrap();
            prop_assert!(stream.pending().len() < 4);
        }
        text += &stream.finish();
        prop_assert_eq!(&text, &tokenizer.inner().decode(&ids, skip).unwrap());
        prop_assert_eq!(&text, &tokenizer.decode(&ids, special).unwrap());
    }

    #[test]
    fn any_text_survives_in_pieces(text in any::<String>()) {
        let tokenizer = small();
        let ids = tokenizer.encode(&text, AddedTokens::AsText).unwrap();
        let mut stream = tokenizer.text_stream(SpecialTokens::Keep);
        let pieces: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        prop_assert_eq!(pieces + &stream.finish(), text);
    }
}
