#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

/// The first shard, a complete safetensors file. A `static`, so that a program holds it once.
pub static SHARD: &[u8] = include_bytes!("../data/model-00001-of-00002.safetensors");

/// What the shard is called in messages about it.
pub const SHARD_NAME: &str = "model-00001-of-00002.safetensors";

/// The model's configuration, in the keys of the official inference code.
pub const CONFIG: &str = include_str!("../data/config.json");

/// The tokenizer, in the format of the `tokenizers` library.
pub const TOKENIZER: &str = include_str!("../data/tokenizer.json");

/// Ids of the special tokens and suggested sampling settings.
pub const GENERATION_CONFIG: &str = include_str!("../data/generation_config.json");

/// What the model is, how it was made and what it was measured to do, in Markdown.
pub const MODEL_CARD: &str = include_str!("../data/MODEL_CARD.md");
