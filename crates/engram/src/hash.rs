//! n-gram hashing of flat batches: pure functions of the token ids.
//!
//! Hashing is split in two. What a position looks back on becomes `max_ngram_size` *terms*: that is
//! where chunk borders, sequence starts and image spans matter, and it is done here on the host.
//! Terms become hashes in [`crate::ops::engram_hash`], plain arithmetic of one token alone.

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Error, Result};

use crate::{layout::EngramLayout, ops::engram_hash::hash_terms_into, token_map::TokenMap};

/// Marks a token that takes part in no n-gram (an image position) where compressed ids are stored.
pub const DEAD: i32 = -1;

/// A chunk of one sequence, with the tokens its first positions look back on.
///
/// Masks are 1 inside an image span. The tokens before the chunk are the sequence's own ids, so there
/// is no hash state to keep, roll back or copy when a sequence forks.
#[derive(Debug, Clone, Copy, Default)]
pub struct NgramWindow<'a> {
    /// Token ids just before the chunk, oldest first: at least `min(start, max_ngram_size - 1)`.
    pub history: &'a [u32],
    /// Image mask of `history`; `None` when no token of it is one.
    pub history_image_mask: Option<&'a [u8]>,
    /// Position of the chunk's first token in its sequence.
    pub start: usize,
    /// Token ids of the chunk.
    pub ids: &'a [u32],
    /// Image mask of `ids`; `None` when no token is one.
    pub image_mask: Option<&'a [u8]>,
}

impl NgramWindow<'_> {
    fn check(&self, lookback: usize) -> Result<()> {
        let op = "engram_hash";
        let needed = self.start.min(lookback);
        if self.history.len() < needed {
            return Err(Error::shape(
                op,
                format!(
                    "a chunk at position {} needs the {needed} tokens before it, found {}",
                    self.start,
                    self.history.len()
                ),
            ));
        }
        for (mask, ids, what) in [
            (self.history_image_mask, self.history, "history"),
            (self.image_mask, self.ids, "chunk"),
        ] {
            if mask.is_some_and(|mask| mask.len() != ids.len()) {
                return Err(Error::shape(
                    op,
                    format!("the image mask of the {what} has another length"),
                ));
            }
        }
        Ok(())
    }
}

/// Compressed ids of tokens, [`DEAD`] where the image mask is set.
///
/// # Errors
/// A token outside the map. The ids of image positions are not looked at.
pub fn compress(
    ids: &[u32],
    image_mask: Option<&[u8]>,
    map: &TokenMap,
    out: &mut Vec<i32>,
) -> Result<()> {
    for (i, &id) in ids.iter().enumerate() {
        let dead = image_mask.is_some_and(|mask| mask[i] != 0);
        out.push(if dead { DEAD } else { map.compress(id)? as i32 });
    }
    Ok(())
}

/// Terms of one position: `source(s)` is the compressed id `s` tokens back, or `None` before the
/// start of the sequence.
///
/// Blocking is cumulative: behind a dead token or the start of the sequence every older term is pad
/// too, and a dead token itself (`s = 0`) hashes pad everywhere.
pub(crate) fn push_terms(
    terms: &mut Vec<u32>,
    n: usize,
    pad: u32,
    mut source: impl FnMut(usize) -> Option<i32>,
) {
    let mut blocked = false;
    for s in 0..n {
        let term = if blocked {
            None
        } else {
            source(s).filter(|&id| id != DEAD)
        };
        blocked |= term.is_none();
        terms.push(term.map_or(pad, |id| id as u32));
    }
}

/// The terms of every token of the windows, laid end to end: `[T, max_ngram_size]`, term `s` being the
/// compressed id `s` tokens back or the pad id where the look-back is blocked.
///
/// # Errors
/// Too short a history, masks of another length, tokens outside the map, or a map and a layout of
/// different compressed vocabularies.
pub fn ngram_terms(
    windows: &[NgramWindow<'_>],
    layout: &EngramLayout,
    map: &TokenMap,
) -> Result<Vec<u32>> {
    check_vocab(layout, map)?;
    let (n, lookback) = (layout.max_ngram_size(), layout.lookback());
    let mut terms = Vec::with_capacity(windows.iter().map(|w| w.ids.len()).sum::<usize>() * n);
    let mut sources = Vec::new();
    for window in windows {
        window.check(lookback)?;
        let kept = window.start.min(lookback);
        let skip = window.history.len() - kept;
        sources.clear();
        let history_mask = window.history_image_mask.map(|mask| &mask[skip..]);
        compress(&window.history[skip..], history_mask, map, &mut sources)?;
        compress(window.ids, window.image_mask, map, &mut sources)?;
        for t in 0..window.ids.len() {
            // `kept` is the whole past or longer than any look-back, so running out of it is
            // running out of the sequence.
            push_terms(&mut terms, n, map.pad(), |s| {
                (kept + t).checked_sub(s).map(|i| sources[i])
            });
        }
    }
    Ok(terms)
}

pub(crate) fn check_vocab(layout: &EngramLayout, map: &TokenMap) -> Result<()> {
    let (expected, found) = (layout.compressed_vocab_size(), map.compressed_vocab_size());
    if expected == found {
        return Ok(());
    }
    Err(Error::config(
        "engram_compressed_vocab_size",
        format!("the layout was built for {expected} compressed ids, the token map has {found}"),
    ))
}

/// Table rows of every token, for all Engram layers: `[layers, T, columns]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngramHashes {
    tokens: usize,
    columns: usize,
    rows: Vec<u32>,
}

impl EngramHashes {
    /// Hashes terms `[T, max_ngram_size]`.
    ///
    /// # Errors
    /// `terms` is not a whole number of tokens.
    pub fn from_terms(terms: &[u32], layout: &EngramLayout) -> Result<Self> {
        let mut rows =
            vec![
                0;
                terms.len() / layout.max_ngram_size() * layout.columns() * layout.layers().len()
            ];
        hash_terms_into(terms, layout, &mut rows)?;
        Ok(Self {
            tokens: terms.len() / layout.max_ngram_size(),
            columns: layout.columns(),
            rows,
        })
    }

    /// Tokens hashed.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Hash columns of a layer.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rows of one layer, `[T, columns]`; `layer` counts Engram layers, not backbone layers.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, layer: usize) -> &[u32] {
        let size = self.tokens * self.columns;
        &self.rows[layer * size..(layer + 1) * size]
    }

    /// [`EngramHashes::layer`] as a `[T, columns]` u32 tensor.
    ///
    /// # Errors
    /// The copy to the device failed.
    pub fn tensor(&self, layer: usize, device: &Device) -> Result<Tensor> {
        Ok(Tensor::from_slice(
            self.layer(layer),
            (self.tokens, self.columns),
            device,
        )?)
    }
}

/// Table rows for the n-grams that end at each token of the windows, which are laid end to end.
///
/// Hashing a sequence in one window or in any chunks gives the same rows.
///
/// # Errors
/// See [`ngram_terms`].
///
/// Reference: `NgramHashState.forward`.
pub fn engram_hash(
    windows: &[NgramWindow<'_>],
    layout: &EngramLayout,
    map: &TokenMap,
) -> Result<EngramHashes> {
    EngramHashes::from_terms(&ngram_terms(windows, layout, map)?, layout)
}
