//! The embedded tiny model is the trained one, byte for byte.

use bytes::Bytes;
use deepseek_v41_core::{StoredDtype, Weights};
use deepseek_v41_tiny_a as tiny_a;
use deepseek_v41_tiny_b as tiny_b;

/// Printed by `tests/data/tiny/split.py` for the file the shards were made from.
const DIGEST: u64 = 0x16de_6ec2_b95e_4731;

fn tiny() -> Weights {
    Weights::from_shards(vec![
        (tiny_a::SHARD_NAME.into(), Bytes::from_static(tiny_a::SHARD)),
        (tiny_b::SHARD_NAME.into(), Bytes::from_static(tiny_b::SHARD)),
    ])
    .expect("the embedded shards are valid")
}

fn stored_name(dtype: StoredDtype) -> &'static str {
    match dtype {
        StoredDtype::BF16 => "BF16",
        StoredDtype::F32 => "F32",
        StoredDtype::I8 => "I8",
        StoredDtype::F8_E4M3 => "F8_E4M3",
        StoredDtype::F8_E8M0 => "F8_E8M0",
        other => panic!("the tiny model has no {other:?}"),
    }
}

#[test]
fn the_two_shards_hold_the_trained_tensors() {
    let weights = tiny();
    assert_eq!(weights.iter().count(), 1238);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |bytes: &[u8]| {
        for b in bytes {
            hash = (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
        }
    };
    for tensor in weights.iter() {
        let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
        for text in [
            tensor.name.as_str(),
            stored_name(tensor.dtype),
            &shape.join(","),
        ] {
            eat(text.as_bytes());
            eat(&[0]);
        }
        eat(&tensor.bytes);
    }
    assert_eq!(hash, DIGEST, "found {hash:#x}");
}

#[test]
fn each_shard_fits_a_registry_package() {
    // The limit is on compressed bytes; both shards are under it even uncompressed.
    for shard in [tiny_a::SHARD, tiny_b::SHARD] {
        assert!(shard.len() < 10_000_000, "{} bytes", shard.len());
    }
}

#[test]
fn the_side_files_parse() {
    let config: serde_json::Value = serde_json::from_str(tiny_a::CONFIG).expect("config");
    assert_eq!(config["dim"], 256);
    let tokenizer: serde_json::Value = serde_json::from_str(tiny_a::TOKENIZER).expect("tokenizer");
    assert_eq!(tokenizer["model"]["type"], "BPE");
    let sampling: serde_json::Value =
        serde_json::from_str(tiny_a::GENERATION_CONFIG).expect("generation config");
    assert_eq!(sampling["eos_token_id"], 1);
    assert!(tiny_a::MODEL_CARD.starts_with("# A tiny DeepSeek-V4.1"));
}
