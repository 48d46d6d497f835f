//! Opening a model.

use std::path::Path;

use candle_core::Device;
use deepseek_v41_core::{Error, LoadPolicy, Result, Weights};
use deepseek_v41_model::{Config, DSpark, IndexKeys, Transformer, refuse_unexpected};
use serde_json::Value;

use crate::{token_map::token_map, tokenizer::Tokenizer};

/// A model with its tokenizer, ready to generate.
///
/// Immutable and `Send + Sync`: one value serves any number of generations at a time, each with a
/// state of its own.
#[derive(Debug)]
pub struct DeepSeekV41 {
    transformer: Transformer,
    draft_head: Option<DSpark>,
    tokenizer: Tokenizer,
    special: SpecialIds,
    #[cfg(feature = "vision")]
    pub(crate) vision: Option<crate::Vision>,
}

/// How to open a checkpoint.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Where the weights go.
    pub device: Device,
    /// How the files come into memory. With [`LoadPolicy::Mmap`] (the default) the files must not
    /// change while the model is in use.
    pub policy: LoadPolicy,
    /// Leave at the default except to compare with the official decode loop.
    pub index_keys: IndexKeys,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            policy: LoadPolicy::default(),
            index_keys: IndexKeys::default(),
        }
    }
}

/// Ids with a meaning of their own, from `generation_config.json` or the published config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begins every prompt (`bos_token_id`; 0 where it is not given).
    pub bos: u32,
    /// Ends a text (`eos_token_id`; 1 where it is not given).
    pub eos: u32,
}

impl SpecialIds {
    /// Reads them from a JSON object. An id outside of the vocabulary would fail with the first prompt, or
    /// never end a text.
    fn from_json(text: &str, vocab_size: usize) -> Result<Self> {
        let file = "generation_config.json";
        let root: Value =
            serde_json::from_str(text).map_err(|e| Error::config(file, e.to_string()))?;
        if !root.is_object() {
            return Err(Error::config(file, "expected an object at the top"));
        }
        let id = |field: &str, default: u32| {
            let found = match &root[field] {
                Value::Null => Value::from(default),
                given => given.clone(),
            };
            let id = found.as_u64().filter(|id| *id < vocab_size as u64);
            let id = id.and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| {
                Error::config(
                    field,
                    format!("expected an id below {vocab_size}, found {found}"),
                )
            })
        };
        Ok(Self {
            bos: id("bos_token_id", 0)?,
            eos: id("eos_token_id", 1)?,
        })
    }
}

impl DeepSeekV41 {
    /// Opens a checkpoint directory: `config.json` (either dialect), safetensors shards and
    /// `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Config`], [`Error::Checkpoint`] or [`Error::Weight`], each naming what
    /// is wrong: a tensor that is missing, left over, or of another shape or dtype; a tokenizer whose
    /// compressed vocabulary is not the configured one.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(dir, &LoadOptions::default())
    }

    /// [`DeepSeekV41::load`] with options.
    ///
    /// # Errors
    /// As [`DeepSeekV41::load`].
    pub fn load_with(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let dir = dir.as_ref();
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path).map_err(|e| Error::io(path, e))
        };
        let config = read("config.json")?;
        // The release publishes none; its ids are in the config.
        let special = match dir.join("generation_config.json").is_file() {
            true => read("generation_config.json")?,
            false => config.clone(),
        };
        let weights = Weights::open(dir, options.policy)?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        Self::from_parts(&config, &special, tokenizer, &weights, options)
    }

    /// The small trained model that ships with this crate: 14 million parameters, every part of the
    /// architecture, a toy world of stories and facts.
    ///
    /// # Errors
    /// None on an unmodified build.
    #[cfg(feature = "tiny")]
    pub fn tiny() -> Result<Self> {
        Self::tiny_with(&LoadOptions::default())
    }

    /// [`DeepSeekV41::tiny`] with options; the load policy has no meaning here.
    ///
    /// # Errors
    /// The device refuses the weights.
    #[cfg(feature = "tiny")]
    pub fn tiny_with(options: &LoadOptions) -> Result<Self> {
        use deepseek_v41_tiny_a as a;
        use deepseek_v41_tiny_b as b;
        let shard = |name: &str, bytes| (name.to_owned(), bytes::Bytes::from_static(bytes));
        let weights = Weights::from_shards(vec![
            shard(a::SHARD_NAME, a::SHARD),
            shard(b::SHARD_NAME, b::SHARD),
        ])?;
        let tokenizer = Tokenizer::from_bytes(a::TOKENIZER.as_bytes())?;
        Self::from_parts(
            a::CONFIG,
            a::GENERATION_CONFIG,
            tokenizer,
            &weights,
            options,
        )
    }

    fn from_parts(
        config: &str,
        special: &str,
        tokenizer: Tokenizer,
        weights: &Weights,
        options: &LoadOptions,
    ) -> Result<Self> {
        let mut cfg = Config::from_json(config)?;
        cfg.index_keys = options.index_keys;
        let special = SpecialIds::from_json(special, cfg.vocab_size)?;
        let map = cfg
            .engram()
            .map(|e| token_map(&tokenizer, e.compressed_vocab_size, e.pad_id))
            .transpose()?;
        let transformer = Transformer::new(&cfg, map, weights.var_builder(&options.device))?;
        // A checkpoint may come without its draft layers; one with some of them is incomplete.
        let drafts =
            cfg.dspark_block_size > 0 && weights.iter().any(|t| t.name.starts_with("mtp."));
        let draft_head = match drafts {
            true => Some(DSpark::new(
                &transformer,
                weights.var_builder(&options.device),
            )?),
            false => None,
        };
        #[cfg(feature = "vision")]
        let vision = crate::Vision::load(&cfg, weights, &options.device)?;
        refuse_unexpected(weights)?;
        Ok(Self {
            transformer,
            draft_head,
            tokenizer,
            special,
            #[cfg(feature = "vision")]
            vision,
        })
    }

    /// The backbone.
    pub fn transformer(&self) -> &Transformer {
        &self.transformer
    }

    /// The draft head.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the checkpoint has none.
    pub fn draft_head(&self) -> Result<&DSpark> {
        self.draft_head.as_ref().ok_or_else(|| Error::Unsupported {
            what: "drafting with a checkpoint that has no draft head".into(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        self.transformer.config()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Ids of the tokens that begin and end a text.
    pub fn special_ids(&self) -> SpecialIds {
        self.special
    }
}
