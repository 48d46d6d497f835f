//! The indexer: scores every compressed position a query can see and keeps the best.
//!
//! ```text
//! score_j = bf16( sum_h bf16( relu(bf16(q_h . key_j)) * w_h ) )
//! ```
//!
//! with the dot in f32 (one chain of multiply-adds in ascending column), the sum in f32 in ascending
//! head order, and rounding to bf16 where the reference's tensors are bf16. Scores are therefore bf16
//! and ties are common: the lower position wins.
//!
//! Positions are scored a tile at a time and only the best so far are kept, so memory per thread is
//! bounded by `k` and a tile whatever the context length. With candidate blocks only the rows inside
//! them are read and scored.

mod cpu;
mod positions;

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor};
#[cfg(feature = "cuda")]
use deepseek_v41_core::upload;
use deepseek_v41_core::{Error, Result, cpu::contiguous};
use half::bf16;

use super::candidate_blocks::{CandidateBlocks, select_candidate_blocks_ref};
use super::pool_rows::PoolRows;
use super::simd::round_bf16;
use super::tile::dot;
use super::topk_rows::topk_rows_ref;
use crate::stored::StoredRows;

const OP: &str = "index_topk";

/// What one query can see of a pool of index keys.
///
/// Per token, never one length for a chunk: within a prefill chunk each query sees a different number
/// of positions, and has a different newest block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexSpan {
    /// Pool row of position 0; position `j` is row `base + j`.
    pub base: u32,
    /// Number of visible positions.
    pub visible: u32,
}

/// Selected rows: `[T, K]` i32, rows of the pool in ascending position, -1 only at the tail.
#[derive(Debug, Clone)]
pub struct TopkIdxs(pub Tensor);

/// The `k` best visible positions of each query, as pool rows.
///
/// * `q`: `[T, Hi, Di]` bf16, `weights`: `[T, Hi]` bf16 (softmax scale folded in);
/// * `keys`: the pool, rows of `Di` (on a GPU, packed ones must be [`RowQuant::Index`](crate::RowQuant));
///   `spans`: one per token;
/// * `candidates`: look only inside these blocks of the same positions (those of the layer that
///   published them).
///
/// → `[T, k]`: higher scores first, the lower position among equals, listed by ascending position,
/// padded with -1 when fewer than `k` are visible (and inside the candidates). The width is `k`
/// whatever is visible. A NaN score counts as minus infinity: such a position is selected last, after
/// every other, and lower ones first.
///
/// A query's selection depends on its own data alone, not on `T` or on threads.
///
/// # Errors
/// Shapes or dtypes that do not fit; a span past the pool; candidate ids that are not ascending with
/// -1 at the tail.
///
/// Reference: `Indexer.forward`.
pub fn index_topk<'k>(
    q: &Tensor,
    weights: &Tensor,
    keys: impl Into<StoredRows<'k>>,
    spans: &[IndexSpan],
    k: usize,
    candidates: Option<&CandidateBlocks>,
) -> Result<TopkIdxs> {
    let wanted = Wanted {
        k,
        topk_blocks: 0,
        block: 1,
    };
    Ok(TopkIdxs(
        select_rows(
            q,
            weights,
            keys.into(),
            &Visible::of(spans),
            wanted,
            candidates,
        )?
        .0,
    ))
}

/// [`index_topk`] and [`candidate_blocks`](super::candidate_blocks()) from one scoring pass, for the
/// layer that publishes the candidates.
///
/// # Errors
/// Those of the two.
pub fn index_topk_with_candidates<'k>(
    q: &Tensor,
    weights: &Tensor,
    keys: impl Into<StoredRows<'k>>,
    spans: &[IndexSpan],
    k: usize,
    topk_blocks: usize,
    block: usize,
) -> Result<(TopkIdxs, CandidateBlocks)> {
    let wanted = Wanted {
        k,
        topk_blocks,
        block,
    };
    let (topk, ids) = select_rows(q, weights, keys.into(), &Visible::of(spans), wanted, None)?;
    Ok((TopkIdxs(topk), CandidateBlocks { block, ids }))
}

/// What a scoring pass is to keep.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) k: usize,
    pub(crate) topk_blocks: usize,
    pub(crate) block: usize,
}

/// What each query may see.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "kernels read what the CPU does not")
)]
pub(crate) struct Visible<'a> {
    pub(crate) each: &'a [IndexSpan],
    /// Positions that a GPU's pass covers.
    pub(crate) columns: usize,
    /// `each` on a GPU, if it is there already.
    pub(crate) rows: Option<&'a Tensor>,
}

impl<'a> Visible<'a> {
    pub(crate) fn of(each: &'a [IndexSpan]) -> Self {
        let columns = each.iter().map(|span| span.visible as usize).max();
        Self {
            each,
            columns: columns.unwrap_or(0),
            rows: None,
        }
    }
}

/// Candidate blocks over slices.
#[derive(Debug, Clone, Copy)]
struct BlockRows<'a> {
    block: usize,
    /// `[T, width]`.
    ids: &'a [i32],
    width: usize,
}

/// One scoring pass over slices: `q: [T, heads, dim]`, `weights: [T, heads]`, `keys: [rows, dim]`.
#[derive(Debug, Clone, Copy)]
struct Scoring<'a> {
    q: &'a [bf16],
    weights: &'a [bf16],
    keys: PoolRows<'a>,
    spans: &'a [IndexSpan],
    heads: usize,
    dim: usize,
}

/// Checks everything once, then scores: `[T, k]` rows and `[T, topk_blocks]` block ids.
pub(crate) fn select_rows(
    q: &Tensor,
    weights: &Tensor,
    keys: StoredRows<'_>,
    visible: &Visible<'_>,
    wanted: Wanted,
    candidates: Option<&CandidateBlocks>,
) -> Result<(Tensor, Tensor)> {
    let shape = |reason: String| Error::shape(OP, reason);
    let spans = visible.each;
    let (t, heads, dim) = q
        .dims3()
        .map_err(|_| shape(format!("q is {:?}", q.shape())))?;
    let fits =
        heads > 0 && dim > 0 && weights.dims() == [t, heads] && keys.fit(dim) && spans.len() == t;
    if !fits {
        return Err(shape(format!(
            "q {:?}, weights {:?}, keys {}, {} spans",
            q.shape(),
            weights.shape(),
            keys.describe(),
            spans.len()
        )));
    }
    if [q, weights].iter().any(|x| x.dtype() != DType::BF16) {
        return Err(shape("q and weights must be bf16".into()));
    }
    if wanted.block == 0 {
        return Err(shape("candidate blocks of 0 positions".into()));
    }
    // Positions fit in an i32, so longer blocks select the same; the kernel divides by a u32.
    let wanted = Wanted {
        block: wanted.block.min(i32::MAX as usize),
        ..wanted
    };
    let rows = keys.rows();
    for (t, span) in spans.iter().enumerate() {
        let end = u64::from(span.base) + u64::from(span.visible);
        if end > rows as u64 || end > i32::MAX as u64 {
            return Err(Error::value(
                format!("{OP}: span of token {t}"),
                format!("rows {}..{end} of a pool of {rows}", span.base),
            ));
        }
    }
    if let Some(c) = candidates {
        if c.block == 0 || c.ids.rank() != 2 || c.ids.dims()[0] != t || c.ids.dtype() != DType::I32
        {
            let (ids, dtype) = (c.ids.shape(), c.ids.dtype());
            return Err(shape(format!(
                "candidates {ids:?} {dtype:?} of {} for T {t}",
                c.block
            )));
        }
        if c.ids.device().is_cpu() {
            with_blocks(c, |blocks| check_blocks(&blocks))?;
        }
    }
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        let Wanted {
            k,
            topk_blocks,
            block,
        } = wanted;
        let wanted = crate::cuda::Wanted {
            k,
            topk_blocks,
            block,
        };
        let uploaded;
        let rows = match visible.rows {
            Some(rows) => rows,
            None => {
                let rows = spans.iter();
                let rows = rows.flat_map(|s| [s.base as i32, s.visible as i32]);
                uploaded = upload(rows.collect::<Vec<_>>(), (t, 2), q.device())?;
                &uploaded
            }
        };
        let spans = crate::cuda::Spans {
            each: spans,
            rows,
            columns: visible.columns,
        };
        return crate::cuda::index_topk(q, weights, keys, &spans, &wanted, candidates);
    }
    let op = IndexTopk {
        spans,
        wanted,
        candidates,
    };
    let both = q
        .contiguous()?
        .apply_op3_no_bwd(&weights.contiguous()?, keys.whole(OP)?, &op)?;
    let (rows, blocks) = (t * wanted.k, t * wanted.topk_blocks);
    Ok((
        both.narrow(0, 0, rows)?.reshape((t, wanted.k))?,
        both.narrow(0, rows, blocks)?
            .reshape((t, wanted.topk_blocks))?,
    ))
}

/// The ids' slice for the duration of `f`.
fn with_blocks<R>(c: &CandidateBlocks, f: impl FnOnce(BlockRows<'_>) -> Result<R>) -> Result<R> {
    let (storage, layout) = c.ids.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::shape(OP, "the candidates are on another device"));
    };
    let ids = contiguous::<i32>(storage, layout, OP)?;
    f(BlockRows {
        block: c.block,
        ids,
        width: layout.dims()[1],
    })
}

fn check_blocks(blocks: &BlockRows<'_>) -> Result<()> {
    for (t, ids) in blocks.ids.chunks_exact(blocks.width.max(1)).enumerate() {
        let used = ids.iter().position(|&id| id == -1).unwrap_or(ids.len());
        let (ids, tail) = ids.split_at(used);
        let ascending = ids.windows(2).all(|w| w[0] < w[1]);
        if !ascending || ids.iter().any(|&id| id < 0) || tail.iter().any(|&id| id != -1) {
            return Err(Error::value(
                format!("{OP}: candidates of token {t}"),
                "ids must ascend from 0 on, with -1 only at the tail",
            ));
        }
    }
    Ok(())
}

struct IndexTopk<'a> {
    spans: &'a [IndexSpan],
    wanted: Wanted,
    candidates: Option<&'a CandidateBlocks>,
}

/// Both outputs flat in one tensor: `[T * k | T * topk_blocks]` i32.
impl CustomOp3 for IndexTopk<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
        keys: &CpuStorage,
        keys_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let scoring = Scoring {
            q: contiguous::<bf16>(q, q_layout, OP)?,
            weights: contiguous::<bf16>(weights, weights_layout, OP)?,
            keys: PoolRows::new(keys, keys_layout, q_layout.dims()[2], OP)?,
            spans: self.spans,
            heads: q_layout.dims()[1],
            dim: q_layout.dims()[2],
        };
        let t = self.spans.len();
        let mut out = vec![-1i32; t * (self.wanted.k + self.wanted.topk_blocks)];
        let (topk, blocks) = out.split_at_mut(t * self.wanted.k);
        match self.candidates {
            None => cpu::select(&scoring, self.wanted, None, topk, blocks),
            Some(c) => with_blocks(c, |ids| {
                cpu::select(&scoring, self.wanted, Some(ids), topk, blocks);
                Ok(())
            })?,
        }
        let len = out.len();
        Ok((CpuStorage::I32(out), Shape::from(len)))
    }
}

/// The score of one position: `q: [heads, dim]`, `weights: [heads]`, `key: [dim]`.
pub fn index_score_ref(q: &[bf16], weights: &[bf16], key: &[bf16]) -> f32 {
    let mut sum = 0f32;
    for (q, w) in q.chunks_exact(key.len()).zip(weights) {
        let s = round_bf16(dot(key, q));
        // Not `max`, which would hide a NaN.
        let s = if s < 0.0 { 0.0 } else { s };
        sum += round_bf16(s * w.to_f32());
    }
    round_bf16(sum)
}

/// The definition of [`index_topk`]: scores everything, drops what the candidates leave out, sorts.
///
/// One query: `q: [heads, dim]`, `weights: [heads]`, `keys: [rows, dim]`, `candidates`: block length and
/// ids → up to `k` rows of the pool.
pub fn index_topk_ref(
    q: &[bf16],
    weights: &[bf16],
    keys: &[bf16],
    span: IndexSpan,
    k: usize,
    candidates: Option<(usize, &[i32])>,
) -> Vec<i32> {
    let (positions, scores) = visible_scores(q, weights, keys, span, |j| {
        candidates.is_none_or(|(block, ids)| ids.contains(&((j as usize / block) as i32)))
    });
    let best = topk_rows_ref(&scores, k);
    best.into_iter()
        .map(|i| (span.base + positions[i as usize]) as i32)
        .collect()
}

/// The definition of [`candidate_blocks`](super::candidate_blocks()) for one query.
pub fn candidate_blocks_ref(
    q: &[bf16],
    weights: &[bf16],
    keys: &[bf16],
    span: IndexSpan,
    topk_blocks: usize,
    block: usize,
) -> Vec<i32> {
    let (_, scores) = visible_scores(q, weights, keys, span, |_| true);
    select_candidate_blocks_ref(&scores, scores.len(), &[span.visible], topk_blocks, block)
}

fn visible_scores(
    q: &[bf16],
    weights: &[bf16],
    keys: &[bf16],
    span: IndexSpan,
    keep: impl Fn(u32) -> bool,
) -> (Vec<u32>, Vec<f32>) {
    let dim = q.len() / weights.len();
    let key = |j: u32| &keys[(span.base + j) as usize * dim..][..dim];
    (0..span.visible)
        .filter(|&j| keep(j))
        .map(|j| (j, index_score_ref(q, weights, key(j))))
        .unzip()
}
