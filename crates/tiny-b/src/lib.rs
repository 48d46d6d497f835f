#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

/// The second shard, a complete safetensors file. A `static`, so that a program holds it once.
pub static SHARD: &[u8] = include_bytes!("../data/model-00002-of-00002.safetensors");

/// What the shard is called in messages about it.
pub const SHARD_NAME: &str = "model-00002-of-00002.safetensors";
