//! Look-back for schedulers that batch chunks without the sequences' histories at hand.
//!
//! Such a scheduler knows a flat batch of tokens and, for each request, either a small window of the
//! ids just before its chunk, or a *slot cache*: one compressed id for each KV slot, found through the
//! request's block table. Everything here ends in the same terms as [`crate::hash::ngram_terms`].
//!
//! The layout of windows and slots follows vLLM's port of the model.

use deepseek_v41_core::{Error, Result};

use crate::{
    hash::{DEAD, check_vocab, compress, push_terms},
    layout::EngramLayout,
    token_map::TokenMap,
};

const OP: &str = "engram look-back";

/// Chunks of several requests laid end to end.
#[derive(Debug, Clone, Copy)]
pub struct FlatBatch<'a> {
    /// Token ids, `[T]`.
    pub ids: &'a [u32],
    /// 1 inside an image span, `[T]`; `None` when no token is.
    pub image_mask: Option<&'a [u8]>,
    /// Position of each token in its sequence, `[T]`; consecutive inside a request.
    pub positions: &'a [u32],
    /// Where each request starts in the batch, and the end of the last: `[requests + 1]`. Padding
    /// requests repeat the last boundary; tokens past it belong to no request and hash as pads.
    pub query_start: &'a [u32],
}

/// The tokens just before each request's chunk, newest first.
#[derive(Debug, Clone, Copy)]
pub struct LookbackWindows<'a> {
    /// Entries kept for each request.
    pub depth: usize,
    /// Token ids, `[requests, depth]`; column 0 is the token before the chunk, negative is unknown.
    pub ids: &'a [i32],
    /// 1 where the entry is an image token, `[requests, depth]`; `None` when none is.
    pub image_mask: Option<&'a [u8]>,
}

/// Where the KV of each request's positions lives.
#[derive(Debug, Clone, Copy)]
pub struct BlockTable<'a> {
    /// Physical block of each logical block, `[requests, max_blocks]`.
    pub blocks: &'a [u32],
    /// Blocks listed for each request.
    pub max_blocks: usize,
    /// Positions in a block.
    pub block_size: usize,
}

impl BlockTable<'_> {
    /// Physical slot of a position: `blocks[position / block_size] * block_size + position % block_size`.
    ///
    /// # Errors
    /// `Error::Value` when the request's table does not reach the position.
    pub fn slot(&self, request: usize, position: usize) -> Result<usize> {
        let outside = || {
            Error::value(
                format!("position {position} of request {request}"),
                format!(
                    "{} blocks of {} are listed for it",
                    self.max_blocks, self.block_size
                ),
            )
        };
        let block = position
            .checked_div(self.block_size)
            .filter(|&b| b < self.max_blocks);
        let entry = request
            .checked_mul(self.max_blocks)
            .zip(block)
            .and_then(|(r, b)| r.checked_add(b));
        let physical = *entry.and_then(|e| self.blocks.get(e)).ok_or_else(outside)?;
        (physical as usize)
            .checked_mul(self.block_size)
            .and_then(|first| first.checked_add(position % self.block_size))
            .ok_or_else(outside)
    }
}

/// The compressed id (or [`DEAD`]) of the token last written to each KV slot.
///
/// Slots belong to a (request, position) pair for as long as its KV does, so prefix sharing and
/// rolled-back drafts need no care here. A slot that was never written holds 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotCache {
    ids: Vec<i32>,
}

impl SlotCache {
    /// A cache of zeros.
    pub fn new(slots: usize) -> Self {
        Self {
            ids: vec![0; slots],
        }
    }

    /// Stores a batch's compressed ids; negative slots (padding) are skipped. Must run before the
    /// look-backs of the same step are read.
    ///
    /// # Errors
    /// Slots and ids of different lengths, or a slot past the end; nothing is written then.
    pub fn write(&mut self, slots: &[i64], compressed: &[i32]) -> Result<()> {
        if slots.len() != compressed.len() {
            let reason = format!("{} slots for {} ids", slots.len(), compressed.len());
            return Err(Error::shape(OP, reason));
        }
        if let Some(slot) = slots
            .iter()
            .find(|&&slot| slot >= 0 && slot as u64 >= self.ids.len() as u64)
        {
            let reason = format!("the cache has {} slots", self.ids.len());
            return Err(Error::value(format!("slot {slot}"), reason));
        }
        for (&slot, &id) in slots.iter().zip(compressed) {
            if slot >= 0 {
                self.ids[slot as usize] = id;
            }
        }
        Ok(())
    }

    /// What a slot holds.
    pub fn get(&self, slot: usize) -> Option<i32> {
        self.ids.get(slot).copied()
    }
}

/// The request a token of the batch belongs to: the last one that starts at or before it, empty ones
/// skipped. `None` past the last boundary.
pub fn request_of(token: usize, query_start: &[u32]) -> Option<usize> {
    let ends = query_start.get(1..)?;
    let request = ends.partition_point(|&end| end as usize <= token);
    (request < ends.len() && query_start[request] as usize <= token).then_some(request)
}

/// Terms `[T, max_ngram_size]` of a flat batch, as [`crate::hash::ngram_terms`] gives them.
///
/// The token `s` back from position `p` comes from the first of these that knows it: the batch, when
/// `p - s` is inside the chunk; the request's look-back window, where its entry is not negative; the
/// slot cache. If none does, the term is pad without blocking older ones.
///
/// # Errors
/// Lengths that do not fit, tokens outside the map, or positions outside the block table.
pub fn lookback_terms(
    batch: &FlatBatch<'_>,
    windows: Option<&LookbackWindows<'_>>,
    slots: Option<(&SlotCache, &BlockTable<'_>)>,
    layout: &EngramLayout,
    map: &TokenMap,
) -> Result<Vec<u32>> {
    check_vocab(layout, map)?;
    check_batch(batch, windows)?;
    let n = layout.max_ngram_size();
    let mut batch_ids = Vec::with_capacity(batch.ids.len());
    compress(batch.ids, batch.image_mask, map, &mut batch_ids)?;

    let mut terms = Vec::with_capacity(batch.ids.len() * n);
    let mut sources = vec![None; n];
    for t in 0..batch.ids.len() {
        let Some(request) = request_of(t, batch.query_start) else {
            terms.resize(terms.len() + n, map.pad());
            continue;
        };
        let first = batch.query_start[request] as usize;
        let position = batch.positions[t] as usize;
        let chunk_start = batch.positions[first] as usize;
        if position.checked_sub(chunk_start) != Some(t - first) {
            let reason = format!("position {position} of request {request} is out of order");
            return Err(Error::shape(OP, reason));
        }
        for (s, source) in sources.iter_mut().enumerate() {
            *source = match position.checked_sub(s) {
                None => None,
                Some(at) if at >= chunk_start => Some(batch_ids[t - s]),
                Some(at) => {
                    let before = chunk_start - 1 - at;
                    match windows.map_or(Ok(None), |w| w.source(request, before, map))? {
                        Some(id) => Some(id),
                        None => Some(slot_source(slots, request, at, map)?),
                    }
                }
            };
        }
        push_terms(&mut terms, n, map.pad(), |s| sources[s]);
    }
    Ok(terms)
}

impl LookbackWindows<'_> {
    /// Compressed id of the token `before` places ahead of the chunk's predecessor, if known.
    fn source(&self, request: usize, before: usize, map: &TokenMap) -> Result<Option<i32>> {
        if before >= self.depth {
            return Ok(None);
        }
        let entry = request * self.depth + before;
        match u32::try_from(self.ids[entry]) {
            Err(_) => Ok(None),
            Ok(_) if self.image_mask.is_some_and(|mask| mask[entry] != 0) => Ok(Some(DEAD)),
            Ok(id) => Ok(Some(map.compress(id)? as i32)),
        }
    }
}

fn slot_source(
    slots: Option<(&SlotCache, &BlockTable<'_>)>,
    request: usize,
    position: usize,
    map: &TokenMap,
) -> Result<i32> {
    let Some((cache, table)) = slots else {
        return Ok(map.pad() as i32);
    };
    let slot = table.slot(request, position)?;
    cache.get(slot).ok_or_else(|| {
        Error::value(
            format!("slot {slot}"),
            format!("the cache has {} slots", cache.ids.len()),
        )
    })
}

fn check_batch(batch: &FlatBatch<'_>, windows: Option<&LookbackWindows<'_>>) -> Result<()> {
    let tokens = batch.ids.len();
    let requests = batch.query_start.len().saturating_sub(1);
    let lengths_fit = batch.positions.len() == tokens
        && batch.image_mask.is_none_or(|mask| mask.len() == tokens)
        && batch.query_start.is_sorted()
        && batch
            .query_start
            .last()
            .is_none_or(|&end| end as usize <= tokens);
    if !lengths_fit {
        return Err(Error::shape(
            OP,
            format!("positions, mask or boundaries do not fit {tokens} tokens"),
        ));
    }
    if let Some(w) = windows {
        let entries = requests.checked_mul(w.depth);
        let fits = |len: usize| entries == Some(len);
        if !fits(w.ids.len()) || w.image_mask.is_some_and(|mask| !fits(mask.len())) {
            let reason = format!(
                "windows: expected {requests} requests of {} entries",
                w.depth
            );
            return Err(Error::shape(OP, reason));
        }
    }
    Ok(())
}
