//! The indexer's scores and selections.

use candle_core::{CudaDevice, DType, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, Ptr, is_hopper, kernels, multiprocessors,
        ops::{device, supported},
    },
    upload,
};
use half::bf16;

use super::topk_rows::{Counts, Scores, select};
use crate::ops::{CandidateBlocks, IndexSpan};
use crate::rows::RowQuant;
use crate::stored::StoredRows;

const OP: &str = "index_topk";

/// Bytes of scores held at a time; longer prefills go in groups of queries.
const SCORE_BYTES: usize = 64 << 20;
/// What an index pass is to keep, as in `index_topk`.
pub(crate) struct Wanted {
    pub(crate) k: usize,
    pub(crate) topk_blocks: usize,
    pub(crate) block: usize,
}

/// What each query may see.
pub(crate) struct Spans<'a> {
    pub(crate) each: &'a [IndexSpan],
    /// The same as `[T, 2]` i32.
    pub(crate) rows: &'a Tensor,
    /// Positions to score, at least the most that any query may see.
    pub(crate) columns: usize,
}

/// Scoring and selection of checked operands: `[T, k]` rows and `[T, topk_blocks]` block ids, i32.
pub(crate) fn index_topk(
    q: &Tensor,
    weights: &Tensor,
    keys: StoredRows<'_>,
    spans: &Spans<'_>,
    wanted: &Wanted,
    candidates: Option<&CandidateBlocks>,
) -> Result<(Tensor, Tensor)> {
    let (q, weights) = (q.contiguous()?, weights.contiguous()?);
    let dev = device(&q)?;
    let (t, h, d) = q.dims3()?;
    supported(
        d.is_multiple_of(32) && d <= 128,
        OP,
        d,
        "head widths of multiples of 32 up to 128",
    )?;
    let most = spans.columns;
    let (per_row, block) = match candidates {
        Some(c) => (c.ids.dim(1)?, c.block),
        None => (0, 1),
    };
    let n = if candidates.is_some() {
        per_row * block
    } else {
        most
    };
    let Wanted { k, topk_blocks, .. } = *wanted;
    if most == 0 || n == 0 || t == 0 {
        let nothing = |width: usize| upload(vec![-1i32; t * width], (t, width), q.device());
        return Ok((nothing(k)?, nothing(topk_blocks)?));
    }
    let Spans {
        rows: flat, each, ..
    } = *spans;
    let ids = candidates.map(|c| c.ids.contiguous()).transpose()?;

    let keys = Keys::of(&keys, (h, d), candidates.is_some())?;
    // Queries of one sequence may share each key they read.
    let one_base = each.iter().all(|s| s.base == each[0].base);
    let shared = if one_base && candidates.is_none() && t >= 4 && keys.kernel != Kernel::Hopper {
        4
    } else {
        1
    };
    let ld = n.next_multiple_of(8);
    let group = (SCORE_BYTES / (2 * ld))
        .clamp(1, t)
        .next_multiple_of(shared);
    let scores = Out::<u8>::new(dev, 2 * ld * group)?;
    let topk = Out::<i32>::new(dev, t * k)?;
    let chosen = Out::<i32>::new(dev, t * topk_blocks)?;
    let blocks = n.div_ceil(wanted.block);
    let ld_blocks = blocks.next_multiple_of(8);
    let best = (topk_blocks > 0)
        .then(|| Out::<u8>::new(dev, 2 * ld_blocks * group))
        .transpose()?;

    let (q0, w0) = (
        Held::new(&q, OP).ptr::<bf16>()?,
        Held::new(&weights, OP).ptr::<bf16>()?,
    );
    let spans0 = Held::new(flat, OP).ptr::<i32>()?;
    let ids0 = ids
        .as_ref()
        .map(|ids| Held::new(ids, OP).ptr::<i32>())
        .transpose()?;
    for first in (0..t).step_by(group) {
        let rows = group.min(t - first);
        let found = Scores {
            keys: scores.ptr(),
            rows,
            n,
            ld,
            spans: spans0.offset(8 * first),
            blocks: ids0.map_or(Ptr::NULL, |ids| ids.offset(4 * first * per_row)),
            per_row,
            block,
        };
        let queries = Queries {
            q: q0.offset(2 * first * h * d),
            weights: w0.offset(2 * first * h),
            heads: h,
            dim: d,
            shared,
        };
        let mut counts = Counts::of(dev, &found, k, keys.counts)?;
        score(dev, &queries, &keys, &found, counts.as_mut())?;
        if k > 0 {
            select(dev, &found, k, topk.ptr().offset(4 * first * k), counts)?;
        }
        if let Some(best) = &best {
            let launch = Launch::new(dev, kernels::CANDIDATE_BLOCKS, "block_max")
                .ptr(found.keys)
                .ptr(found.spans)
                .ptr(best.ptr())
                .int(n)
                .long(ld)
                .long(ld_blocks)
                .int(wanted.block);
            // SAFETY: scores [rows, ld] in, [rows, ld_blocks] out; a thread a block of positions.
            unsafe { launch.launch((blocks.div_ceil(256), rows, 1), 256, 0)? };
            let by_block = Scores {
                keys: best.ptr(),
                n: blocks,
                ld: ld_blocks,
                spans: Ptr::NULL,
                blocks: Ptr::NULL,
                per_row: 0,
                block: 1,
                rows,
            };
            select(
                dev,
                &by_block,
                topk_blocks,
                chosen.ptr().offset(4 * first * topk_blocks),
                Counts::of(dev, &by_block, topk_blocks, keys.counts)?,
            )?;
        }
    }
    Ok((
        topk.into_tensor((t, k))?,
        chosen.into_tensor((t, topk_blocks))?,
    ))
}

/// Which kernel scores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Bf16,
    Fp4,
    /// Packed keys, 32 heads of 128, no candidates.
    Hopper,
}

/// Index keys and what reads them.
struct Keys<'a> {
    codes: Ptr<'a>,
    scales: Ptr<'a>,
    kernel: Kernel,
    /// Zeros that selections may count in.
    counts: Option<Ptr<'a>>,
}

impl<'a> Keys<'a> {
    fn of(keys: &StoredRows<'a>, shape: (usize, usize), in_candidates: bool) -> Result<Self> {
        let planes = match keys {
            StoredRows::Whole(keys) => {
                supported(
                    keys.dtype() == DType::BF16,
                    OP,
                    "packed keys in one tensor",
                    "those of a pool on the GPU",
                )?;
                return Ok(Self {
                    codes: Held::new(keys, OP).ptr::<bf16>()?,
                    scales: Ptr::NULL,
                    kernel: Kernel::Bf16,
                    counts: None,
                });
            }
            StoredRows::Planes(planes) => planes,
        };
        supported(
            planes.codec().quant() == RowQuant::Index,
            OP,
            format!("{:?} keys", planes.codec().quant()),
            "RowQuant::Index",
        )?;
        let hopper = shape == (32, 128) && !in_candidates && is_hopper(device(planes.codes())?)?;
        Ok(Self {
            codes: Held::new(planes.codes(), OP).ptr::<u8>()?,
            scales: Held::new(planes.scales(), OP).ptr::<u8>()?,
            kernel: if hopper { Kernel::Hopper } else { Kernel::Fp4 },
            counts: planes
                .counts()
                .map(|counts| Held::new(counts, OP).ptr::<u32>())
                .transpose()?,
        })
    }
}

/// The queries of one pass.
struct Queries<'a> {
    q: Ptr<'a>,
    weights: Ptr<'a>,
    heads: usize,
    dim: usize,
    /// Neighbouring queries that share each key they read.
    shared: usize,
}

/// Fills `out` with the scores of every query, and counts them if the kernel can.
fn score(
    dev: &CudaDevice,
    queries: &Queries<'_>,
    keys: &Keys<'_>,
    out: &Scores<'_>,
    counts: Option<&mut Counts<'_>>,
) -> Result<()> {
    let blocks = 2 * multiprocessors(dev)?;
    if keys.kernel == Kernel::Hopper {
        let hist = counts.map(|counts| {
            counts.done = true;
            counts.hist()
        });
        let launch = Launch::new(dev, kernels::INDEX_SCORES_SM90, "index_scores_sm90")
            .ptr(queries.q)
            .ptr(queries.weights)
            .ptr(keys.codes)
            .ptr(keys.scales)
            .ptr(out.spans)
            .ptr(out.keys)
            .maybe(hist)
            .int(out.rows)
            .int(out.n)
            .long(out.ld);
        // A few rounds of blocks in all, so that laying out a query is paid for by many keys.
        let columns = (4 * blocks).div_ceil(out.rows).min(blocks);
        let grid = (columns.min(out.n.div_ceil(256)), out.rows, 1);
        // SAFETY: q [rows, 32, 128], weights [rows, 32], visible spans inside the pool, scores [rows, ld].
        return unsafe { launch.launch(grid, 256, 73_728) };
    }
    let scores = match keys.kernel {
        Kernel::Bf16 => "index_scores_bf16",
        _ => "index_scores_fp4",
    };
    let launch = Launch::new(dev, kernels::INDEX_SCORES, scores)
        .ptr(queries.q)
        .ptr(queries.weights)
        .ptr(keys.codes)
        .ptr(keys.scales)
        .ptr(out.spans)
        .ptr(out.blocks)
        .ptr(out.keys)
        .int(out.rows)
        .int(queries.heads)
        .int(queries.dim)
        .int(out.n)
        .long(out.ld)
        .int(queries.shared)
        .int(out.per_row)
        .int(out.block);
    let grid = (
        blocks.min(out.n.div_ceil(256)),
        out.rows.div_ceil(queries.shared),
        1,
    );
    let shared = queries.shared * 2 * queries.heads.div_ceil(16) * 2064;
    // SAFETY: q [rows, H, D], weights [rows, H], visible spans inside the pool, scores [rows, ld].
    unsafe { launch.launch(grid, 256, shared) }
}
