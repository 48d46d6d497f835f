//! Whose index keys an indexer scores: the owner's, or those the official code happens to hold.

use std::ops::Range;

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result, upload};

use crate::cache::CompressedCache;
use crate::ops::{CandidateBlocks, IndexSpan, TopkIdxs};
use crate::plan::CompressPlan;
use crate::stored::StoredRows;

/// Whose index keys a layer's indexer scores.
#[derive(Debug, Clone, Copy, Default)]
pub enum IndexKeySource<'a> {
    /// The keys beside the compressed rows that the layer attends to.
    #[default]
    Owner,
    /// For each token of the step the keys of another cache, or `None` for the owner's.
    ///
    /// The official code publishes keys only when a group completes, so in between a layer scores
    /// whatever was written last; with [`last_published`] this reproduces it.
    PerToken(&'a [Option<&'a CompressedCache>]),
}

/// The source whose index keys the official code scores, which publishes keys only as groups finish.
///
/// `ratios` are those of the layers that make index keys, in layer order; the asking layer has
/// `upto` of them at or before itself. `prefill` is the length of the sequence's first chunk and `pos`
/// the query's position. Returns an index into `ratios`, `None` where nothing was published yet.
///
/// Inside the first chunk every source has just published; later, one whose group is still open
/// leaves the layers after it with whatever was written last, up to a step earlier and possibly by
/// a source further up.
///
/// Reference: `shared_attn.index_k` in `Indexer.forward`.
pub fn last_published(ratios: &[usize], upto: usize, prefill: u32, pos: u32) -> Option<usize> {
    let in_prefill = |sources: &[usize]| sources.iter().rposition(|&r| r <= prefill as usize);
    let at = |sources: &[usize], pos: u32| {
        sources
            .iter()
            .rposition(|&r| (pos as usize + 1).is_multiple_of(r))
    };
    let before = &ratios[..upto.min(ratios.len())];
    if pos < prefill {
        return in_prefill(before);
    }
    at(before, pos)
        .or_else(|| (prefill..pos).rev().find_map(|earlier| at(ratios, earlier)))
        .or_else(|| in_prefill(ratios))
}

/// What one scoring pass found.
pub(crate) struct Scored {
    pub(crate) topk: TopkIdxs,
    pub(crate) candidates: Option<CandidateBlocks>,
}

/// Consecutive tokens that score the same keys.
pub(crate) struct KeyRun<'a> {
    pub(crate) tokens: Range<usize>,
    /// Rows of `Di`.
    pub(crate) keys: StoredRows<'a>,
    /// Visible rows of each token, in `keys`.
    pub(crate) spans: Vec<IndexSpan>,
}

/// Scores run by run, and names the rows found in another cache's keys by the same logical rows of
/// `cache`. Goes through the host: it serves comparison with the official code alone.
pub(crate) fn score_per_token(
    sources: &[Option<&CompressedCache>],
    cache: &CompressedCache,
    plan: &CompressPlan,
    score: impl Fn(KeyRun<'_>) -> Result<Scored>,
) -> Result<Scored> {
    if sources.len() != plan.spans.len() {
        return Err(Error::shape(
            "index_topk",
            format!(
                "{} key sources for {} tokens",
                sources.len(),
                plan.spans.len()
            ),
        ));
    }
    let same = |a: &Option<&CompressedCache>, b: &Option<&CompressedCache>| match (a, b) {
        (Some(a), Some(b)) => std::ptr::eq(*a, *b),
        (a, b) => a.is_none() && b.is_none(),
    };
    let (mut topk, mut candidates) = (Vec::new(), Vec::new());
    let (mut block, mut start) = (None, 0);
    for run in sources.chunk_by(same) {
        let tokens = start..start + run.len();
        start = tokens.end;
        let source = run[0].unwrap_or(cache);
        let here = &plan.spans[tokens.clone()];
        let spans: Vec<_> = here
            .iter()
            .map(|span| source.moved(span, cache))
            .collect::<Result<_>>()?;
        let keys = source.index_k()?.stored();
        let found = score(KeyRun {
            tokens,
            keys,
            spans: spans.clone(),
        })?;
        for ((mut row, there), here) in found
            .topk
            .0
            .to_vec2::<i32>()?
            .into_iter()
            .zip(spans)
            .zip(here)
        {
            let shift = here.base as i32 - there.base as i32;
            row.iter_mut()
                .filter(|idx| **idx >= 0)
                .for_each(|idx| *idx += shift);
            topk.push(row);
        }
        if let Some(found) = found.candidates {
            block = Some(found.block);
            candidates.extend(found.ids.to_vec2::<i32>()?);
        }
    }
    let device = cache.kv().device();
    let tensor = |mut rows: Vec<Vec<i32>>| -> Result<Tensor> {
        let width = rows.iter().map(Vec::len).max().unwrap_or(0);
        rows.iter_mut().for_each(|row| row.resize(width, -1));
        upload(rows.concat(), (rows.len(), width), device)
    };
    let candidates = match block {
        Some(block) => Some(CandidateBlocks {
            block,
            ids: tensor(candidates)?,
        }),
        None => None,
    };
    Ok(Scored {
        topk: TopkIdxs(tensor(topk)?),
        candidates,
    })
}
