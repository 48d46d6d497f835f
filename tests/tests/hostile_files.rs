//! Checkpoints that are damaged or lie about themselves: loading one ends in an error that names the file
//! or the field, or in a model that runs. Nothing panics, and no number in a file becomes an allocation
//! without bound.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

use deepseek_v41::{DeepSeekV41, GenerateOptions, LoadOptions, LoadPolicy, Result};
use deepseek_v41_testing::assert_outcome;
use deepseek_v41_tiny_a as tiny_a;
use deepseek_v41_tiny_b as tiny_b;
use serde_json::{Value, json};

fn checkpoint(dir: &Path) {
    for (name, bytes) in [
        ("config.json", tiny_a::CONFIG.as_bytes()),
        (
            "generation_config.json",
            tiny_a::GENERATION_CONFIG.as_bytes(),
        ),
        ("tokenizer.json", tiny_a::TOKENIZER.as_bytes()),
        (tiny_a::SHARD_NAME, tiny_a::SHARD),
        (tiny_b::SHARD_NAME, tiny_b::SHARD),
    ] {
        fs::write(dir.join(name), bytes).unwrap();
    }
}

/// Loads and says a few words.
fn try_out(dir: &Path, policy: LoadPolicy) -> Result<()> {
    let options = LoadOptions {
        policy,
        ..LoadOptions::default()
    };
    let model = DeepSeekV41::load_with(dir, &options)?;
    let few = GenerateOptions {
        max_tokens: 2,
        ..GenerateOptions::default()
    };
    model.generate("Hi", &few)?.try_for_each(|e| e.map(drop))
}

/// Every field of the configuration with values of every kind.
#[test]
fn configurations() {
    let temp = tempfile::tempdir().unwrap();
    checkpoint(temp.path());
    let whole: Value = serde_json::from_str(tiny_a::CONFIG).unwrap();
    let values = [
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(0.5),
        json!(1e300),
        json!("x"),
        json!([]),
        json!([u64::MAX]),
        json!([7, 6, 5]),
        json!(vec![1; 5000]),
    ];
    let mut refused = 0;
    for key in whole.as_object().unwrap().keys() {
        for value in &values {
            let mut config = whole.clone();
            config[key] = value.clone();
            fs::write(temp.path().join("config.json"), config.to_string()).unwrap();
            // What it says is another test's; that it says it is this one's.
            refused += usize::from(try_out(temp.path(), LoadPolicy::Mmap).is_err());
        }
    }
    assert!(refused > 300, "{refused}");
}

#[test]
fn numbers_without_a_meaning_are_named() {
    let temp = tempfile::tempdir().unwrap();
    checkpoint(temp.path());
    let whole: Value = serde_json::from_str(tiny_a::CONFIG).unwrap();
    for (key, value) in [
        ("candidate_topk_blocks", json!(1u64 << 40)),
        ("candidate_block_size", json!(1u64 << 40)),
        ("index_topk", json!(1 << 17)),
        (
            "compress_ratios",
            json!([0, 0, 2, 2, 2, 1u64 << 40, 1, 1, 0, 0]),
        ),
        ("original_seq_len", json!(u64::MAX)),
        ("image_token_id", json!(4096)),
        ("window_size", json!(1u64 << 40)),
    ] {
        let mut config = whole.clone();
        config[key] = value;
        fs::write(temp.path().join("config.json"), config.to_string()).unwrap();
        assert_outcome(key, try_out(temp.path(), LoadPolicy::Mmap), key);
    }
}

#[test]
fn shards_cut_short_or_with_flipped_bits() {
    let temp = tempfile::tempdir().unwrap();
    checkpoint(temp.path());
    let shard = temp.path().join(tiny_a::SHARD_NAME);
    let n = tiny_a::SHARD.len();
    for len in [0, 1, 7, 8, 9, 100, 5000, n / 2, n - 1] {
        fs::write(&shard, &tiny_a::SHARD[..len]).unwrap();
        for policy in [LoadPolicy::Mmap, LoadPolicy::Read] {
            let case = format!("{len} bytes");
            assert_outcome(&case, try_out(temp.path(), policy), tiny_a::SHARD_NAME);
        }
    }
    // The length of the header and its first tensors.
    for at in (0..2000).step_by(150) {
        let mut bytes = tiny_a::SHARD.to_vec();
        bytes[at] ^= 0x15;
        fs::write(&shard, &bytes).unwrap();
        let result = try_out(temp.path(), LoadPolicy::Read);
        assert!(result.is_err(), "bits of byte {at} flipped");
    }
}

#[test]
fn side_files() {
    let temp = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        checkpoint(temp.path());
        fs::write(temp.path().join(name), text).unwrap();
        try_out(temp.path(), LoadPolicy::Mmap)
    };
    let empty = r#"{"model":{"type":"BPE","vocab":{},"merges":[]}}"#;
    for (text, want) in [
        ("", "tokenizer.json"),
        ("{}", "tokenizer.json"),
        ("null", "tokenizer.json"),
        (empty, "ByteLevel"),
        (&tiny_a::TOKENIZER[..900], "tokenizer.json"),
    ] {
        assert_outcome(text, file("tokenizer.json", text), want);
    }
    for (text, want) in [
        ("", "generation_config.json"),
        ("{}", ""),
        (r#"{"eos_token_id": -1}"#, "eos_token_id"),
        (r#"{"eos_token_id": 4096}"#, "eos_token_id"),
        (r#"{"bos_token_id": 99999}"#, "bos_token_id"),
        (r#"{"eos_token_id": [1]}"#, "eos_token_id"),
        ("[]", "generation_config.json"),
    ] {
        assert_outcome(text, file("generation_config.json", text), want);
    }
    for (path, want) in [
        ("/nonexistent", "config.json"),
        ("/dev/null", "config.json"),
    ] {
        assert_outcome(path, try_out(Path::new(path), LoadPolicy::Mmap), want);
    }
}
