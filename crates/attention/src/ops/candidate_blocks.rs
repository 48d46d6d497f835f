//! Level one of the two-level top-k: which blocks of positions later indexers may look at.

use candle_core::Tensor;
use deepseek_v41_core::Result;

use super::index_topk::{IndexSpan, Visible, Wanted, select_rows};
use super::topk_rows::topk_rows_ref;
use crate::stored::StoredRows;

/// Blocks of `block` consecutive positions each query may select from.
///
/// Block ids instead of a mask over positions: the layers that use them score the rows inside and
/// nothing else.
#[derive(Debug, Clone)]
pub struct CandidateBlocks {
    /// Positions per block.
    pub block: usize,
    /// `[T, B]` i32: block ids, strictly ascending, -1 at the tail. Block `b` holds positions
    /// `b * block .. (b + 1) * block`.
    pub ids: Tensor,
}

/// The `topk_blocks` blocks with the best positions, per query.
///
/// A block scores as its best visible position (see [`index_topk`](super::index_topk()) for scores,
/// shapes and errors; NaN counts as minus infinity). The block of the newest visible position is always
/// kept: it is only partly filled, and an older, full block could outscore the most recent tokens.
/// Higher scores first, the lower block among equals; blocks without a visible position, or whose
/// every score is minus infinity, are dropped. A query that sees nothing keeps nothing.
///
/// # Errors
/// Those of [`index_topk`](super::index_topk()), and `block == 0`.
///
/// Reference: `select_candidate_blocks`.
pub fn candidate_blocks<'k>(
    q: &Tensor,
    weights: &Tensor,
    keys: impl Into<StoredRows<'k>>,
    spans: &[IndexSpan],
    topk_blocks: usize,
    block: usize,
) -> Result<CandidateBlocks> {
    let wanted = Wanted {
        k: 0,
        topk_blocks,
        block,
    };
    let (_, ids) = select_rows(q, weights, keys.into(), &Visible::of(spans), wanted, None)?;
    Ok(CandidateBlocks { block, ids })
}

/// The definition of the selection, from scores that are already there.
///
/// `scores: [T, width]`, `visible: [T]` → `[T, topk_blocks]` block ids, ascending, -1 at the tail.
/// Position `j` of query `t` is visible when `j < visible[t]`, whatever its score.
pub fn select_candidate_blocks_ref(
    scores: &[f32],
    width: usize,
    visible: &[u32],
    topk_blocks: usize,
    block: usize,
) -> Vec<i32> {
    let mut out = vec![-1; visible.len() * topk_blocks];
    for (t, &visible) in visible.iter().enumerate() {
        let visible = (visible as usize).min(width);
        let mut best: Vec<f32> = scores[t * width..][..visible]
            .chunks(block)
            .map(|b| b.iter().fold(f32::NEG_INFINITY, |m, &s| m.max(s)))
            .collect();
        // Floor division: with nothing visible the newest block is -1, which pins nothing.
        let newest = (visible as i64 - 1).div_euclid(block as i64);
        if let Ok(newest) = usize::try_from(newest) {
            best[newest] = f32::INFINITY;
        }
        let kept = topk_rows_ref(&best, topk_blocks);
        let kept = kept
            .into_iter()
            .filter(|&b| best[b as usize] > f32::NEG_INFINITY);
        for (out, id) in out[t * topk_blocks..].iter_mut().zip(kept) {
            *out = id as i32;
        }
    }
    out
}
