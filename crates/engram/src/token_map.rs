//! From token ids to the compressed ids that n-grams are hashed over.

use deepseek_v41_core::{Error, Result};

/// Token id → compressed id, in which tokens that normalise alike (`" The"`, `"the"`, `"THE"`) are
/// one.
///
/// How the map follows from a tokenizer is not this crate's business; it arrives ready-made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMap {
    ids: Vec<u32>,
    compressed_vocab_size: u32,
    pad: u32,
}

impl TokenMap {
    /// `ids[token]` is the compressed id; `pad_id` is a token id.
    ///
    /// # Errors
    /// `Error::Config` when the map does not have exactly `expected_size` compressed ids (its largest
    /// plus one): the multipliers were derived from that size, so a tokenizer that gives another
    /// one would hash every n-gram to the wrong rows. Also when `pad_id` is not in the map.
    pub fn new(ids: Vec<u32>, expected_size: usize, pad_id: u32) -> Result<Self> {
        let found = ids.iter().max().map_or(0, |&max| max as usize + 1);
        if found != expected_size || found > i32::MAX as usize {
            return Err(Error::config(
                "engram_compressed_vocab_size",
                format!(
                    "the token map has {found} compressed ids, the config says {expected_size}"
                ),
            ));
        }
        let Some(&pad) = ids.get(pad_id as usize) else {
            return Err(Error::config(
                "engram_pad_id",
                format!("token {pad_id} is outside the map of {} tokens", ids.len()),
            ));
        };
        Ok(Self {
            ids,
            compressed_vocab_size: found as u32,
            pad,
        })
    }

    /// Compressed id of a token.
    ///
    /// # Errors
    /// `Error::Value` for a token outside the map.
    #[inline]
    pub fn compress(&self, token: u32) -> Result<u32> {
        self.ids.get(token as usize).copied().ok_or_else(|| {
            Error::value(
                format!("token id {token}"),
                format!("outside the token map of {} tokens", self.ids.len()),
            )
        })
    }

    /// Compressed id of the pad token.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// Compressed ids in use.
    pub fn compressed_vocab_size(&self) -> u32 {
        self.compressed_vocab_size
    }

    /// Tokens in the map.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the map is empty (it never is: a pad token exists).
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The whole map, by token id.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}
