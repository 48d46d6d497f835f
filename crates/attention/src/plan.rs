//! Every index one step needs, computed once on the host and shared by all layers.
//!
//! A step is a list of chunks, one for each sequence that takes part: tokens `start .. start + len` of
//! the sequence in slot `slot`, all chunks laid end to end in the flat `[T, ..]` activations. A
//! prefill is a chunk with an empty past, a decode step a chunk of one; there is no other case.

mod rows;

use std::ops::Range;

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Error, Result, upload};

pub(crate) use self::rows::{RaggedRows, i32_tensor};
use crate::ops::IndexSpan;
use crate::slots::{CacheGeometry, SlotMap};

/// The tokens of one sequence that take part in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSpec {
    /// The sequence's slot in every pool.
    pub slot: u32,
    /// Position of the first token: how many tokens of the sequence are already in the caches.
    pub start: u32,
    /// Number of tokens; 0 is allowed and changes nothing.
    pub len: u32,
}

impl ChunkSpec {
    /// Positions of the chunk's tokens.
    pub fn positions(&self) -> Range<u32> {
        self.start..self.start + self.len
    }
}

/// Positions a query at `pos` sees in its window: the last `min(window, pos + 1)`, itself included.
pub fn window_positions(pos: u32, window: u32) -> Range<u32> {
    (pos + 1).saturating_sub(window)..pos + 1
}

/// Positions of a chunk that stay in a ring of `capacity` rows: the last `min(len, capacity)`.
///
/// Earlier ones would be overwritten by the same write, in an order nobody promises.
pub fn kept_positions(chunk: &ChunkSpec, capacity: u32) -> Range<u32> {
    chunk.start + chunk.len.saturating_sub(capacity)..chunk.start + chunk.len
}

/// Compressed rows that the chunk completes: row `j` stands for tokens `j*ratio .. (j+1)*ratio`.
///
/// A group may begin in tokens of earlier chunks.
pub fn finished_groups(chunk: &ChunkSpec, ratio: u32) -> Range<u32> {
    chunk.start / ratio..(chunk.start + chunk.len) / ratio
}

/// Compressed rows a query at `pos` may see: a row becomes visible with the last of its tokens.
///
/// Reference: `Indexer.forward`, `compress_lens`.
pub fn visible_rows(pos: u32, ratio: u32) -> u32 {
    (pos + 1) / ratio
}

/// Where a token's `[kv, score]` entry lies when its group is pooled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupRow {
    /// A row of this step's `[T, ..]` tensors.
    Chunk(u32),
    /// A row of the pool of open-group entries, written in an earlier step.
    Pending(u32),
}

impl GroupRow {
    /// As `ops::compress` reads it: chunk rows from 0 up, pending row `p` as `-1 - p`.
    pub fn encode(self) -> i64 {
        match self {
            Self::Chunk(row) => i64::from(row),
            Self::Pending(row) => -1 - i64::from(row),
        }
    }
}

/// Window indices of a step. The same for every layer.
#[derive(Debug, Clone)]
pub struct WindowPlan {
    /// `[T, n]` i32 rows of the ring that a token sees: positions before its chunk, ascending, `-1`
    /// after them. `n` is 0 where no token has a past.
    pub ring_idxs: Tensor,
    /// `[T, m]` i32 rows of this step's KV that a token sees: its own and earlier ones of its chunk,
    /// ascending, `-1` after them.
    pub present_idxs: Tensor,
    /// `[T]` i32 ring row each token's KV goes to, `-1` for tokens a long chunk itself pushes out.
    pub ring_slots: Tensor,
}

/// Compression indices of a step at one ratio.
#[derive(Debug, Clone)]
pub struct CompressPlan {
    /// Tokens a compressed row stands for.
    pub ratio: usize,
    /// `[G * ratio]` sources, group by group, of the groups completed in this step; see
    /// [`GroupRow::encode`].
    pub group_src: Vec<i64>,
    /// Position of each group's first token, `j * ratio`.
    pub group_pos: Vec<u32>,
    /// `[G]` i32 row of the compressed pool that each group's result goes to.
    pub group_slots: Tensor,
    /// `[T]` i32 row of the pool of open-group entries for each token, `-1` for those a long chunk
    /// itself pushes out.
    pub pending_slots: Tensor,
    /// For each token the compressed rows it may see.
    pub spans: Vec<IndexSpan>,
    /// The largest `visible` of all tokens.
    pub max_visible: u32,
    /// Positions that indexing passes cover: `max_visible`, or more in steps of a GPU that repeat.
    pub columns: u32,
    /// `group_src` and `spans` as kernels read them; `None` on the CPU.
    pub kernel_rows: Option<KernelRows>,
}

/// What kernels read where the CPU reads host values.
#[derive(Debug, Clone)]
pub struct KernelRows {
    /// `[G * ratio]` i32: row `t` of the chunk as `t`, half-width row `p` of the open groups as `-2 - p`;
    /// a row of theirs is `kv | score`, so entry `p` begins at half-width row `2p`.
    pub sources: Tensor,
    /// `[T, 2]` i32: row of position 0, visible positions.
    pub spans: Tensor,
}

/// Every index of one step.
#[derive(Debug, Clone)]
pub struct AttnPlan {
    /// Tokens of the step, `T`.
    pub tokens: usize,
    /// The chunks it was made from.
    pub chunks: Vec<ChunkSpec>,
    /// Position of each token in its sequence.
    pub positions: Vec<u32>,
    /// The window's part.
    pub window: WindowPlan,
    /// One entry for each ratio, in the order asked for.
    pub compress: Vec<CompressPlan>,
}

/// Tokens up to which steps of a GPU are laid out alike whatever their positions.
pub(crate) const REPEATED_TOKENS: usize = 16;
/// Fewest columns of such a step's indexing passes.
const REPEATED_COLUMNS: u32 = 64;

impl AttnPlan {
    /// Plans a step over `chunks` for layers of the given `ratios` (each once, without 0).
    ///
    /// # Errors
    /// [`Error::Capacity`] for a slot or position that the pools have no room for, [`Error::Value`]
    /// for two chunks of one slot (the second would not find the first in its past).
    pub fn new(
        chunks: &[ChunkSpec],
        geometry: &CacheGeometry,
        ratios: &[usize],
        device: &Device,
    ) -> Result<Self> {
        let plan = Self::on_host(chunks, geometry, ratios, !device.is_cpu())?;
        match device.is_cpu() {
            true => Ok(plan),
            false => plan.map(&mut |tensor| indices_on(tensor, device)),
        }
    }

    /// The plan with its tensors on the CPU. `for_kernels`: as a GPU's kernels take it, to be moved there
    /// by [`AttnPlan::map`]. Lists of a few tokens' steps are then as wide as they can become, and indexing
    /// passes as wide as the next power of two, so that the same launches serve many positions; what is
    /// added lists nothing.
    ///
    /// # Errors
    /// As [`AttnPlan::new`].
    pub fn on_host(
        chunks: &[ChunkSpec],
        geometry: &CacheGeometry,
        ratios: &[usize],
        for_kernels: bool,
    ) -> Result<Self> {
        check_chunks(chunks, geometry)?;
        let positions: Vec<u32> = chunks.iter().flat_map(ChunkSpec::positions).collect();
        let repeated = for_kernels && positions.len() <= REPEATED_TOKENS;
        let compress = |&ratio: &usize| {
            let mut plan = CompressPlan::new(chunks, geometry, ratio)?;
            if repeated {
                plan.columns = plan.max_visible.next_power_of_two().max(REPEATED_COLUMNS);
            }
            if for_kernels {
                plan.kernel_rows = Some(plan.for_kernels()?);
            }
            Ok(plan)
        };
        Ok(Self {
            tokens: positions.len(),
            window: WindowPlan::new(chunks, geometry, repeated)?,
            compress: ratios.iter().map(compress).collect::<Result<_>>()?,
            chunks: chunks.to_vec(),
            positions,
        })
    }

    /// The plan with each of its tensors replaced by what `f` makes of it, always in the same order.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let window = WindowPlan {
            ring_idxs: f(&self.window.ring_idxs)?,
            present_idxs: f(&self.window.present_idxs)?,
            ring_slots: f(&self.window.ring_slots)?,
        };
        let mut compress = self.compress.clone();
        for plan in &mut compress {
            plan.group_slots = f(&plan.group_slots)?;
            plan.pending_slots = f(&plan.pending_slots)?;
            if let Some(rows) = &mut plan.kernel_rows {
                rows.sources = f(&rows.sources)?;
                rows.spans = f(&rows.spans)?;
            }
        }
        Ok(Self {
            tokens: self.tokens,
            chunks: self.chunks.clone(),
            positions: self.positions.clone(),
            window,
            compress,
        })
    }

    /// The plan at `ratio`.
    ///
    /// # Errors
    /// [`Error::MissingSource`] if the step was not planned for it.
    pub fn compress(&self, ratio: usize) -> Result<&CompressPlan> {
        self.compress
            .iter()
            .find(|plan| plan.ratio == ratio)
            .ok_or(Error::MissingSource {
                what: "the step's plan for this compression ratio",
            })
    }
}

/// i32 indices on `device`.
pub(crate) fn indices_on(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    match tensor.elem_count() {
        0 => upload(Vec::<i32>::new(), tensor.shape().clone(), device),
        _ => Ok(tensor.to_device(device)?),
    }
}

/// Whether a step may consist of these chunks.
///
/// # Errors
/// As [`AttnPlan::new`].
pub fn check_chunks(chunks: &[ChunkSpec], geometry: &CacheGeometry) -> Result<()> {
    let mut total = 0usize;
    for (i, chunk) in chunks.iter().enumerate() {
        geometry.check_slot(chunk.slot)?;
        let end = chunk.start as usize + chunk.len as usize;
        if end > geometry.max_len {
            return Err(Error::Capacity {
                what: "positions of a sequence",
                needed: end,
                available: geometry.max_len,
            });
        }
        if chunks[..i].iter().any(|other| other.slot == chunk.slot) {
            return Err(Error::value(
                "chunks of a step",
                format!(
                    "slot {} takes part twice; its tokens belong in one chunk",
                    chunk.slot
                ),
            ));
        }
        total += chunk.len as usize;
    }
    if total > i32::MAX as usize {
        return Err(Error::Capacity {
            what: "tokens of a step",
            needed: total,
            available: i32::MAX as usize,
        });
    }
    Ok(())
}

impl WindowPlan {
    fn new(chunks: &[ChunkSpec], geometry: &CacheGeometry, repeated: bool) -> Result<Self> {
        let window = geometry.window as u32;
        let (mut ring, mut present) = (RaggedRows::default(), RaggedRows::default());
        let mut ring_slots = Vec::new();
        let mut first = 0;
        for chunk in chunks {
            let map = geometry.ring(chunk.slot);
            for pos in chunk.positions() {
                let seen = window_positions(pos, window);
                let cut = seen.start.max(chunk.start);
                ring.push(seen.start..cut, |p| map.row(p).map(|row| row as i32))?;
                present.push(cut..seen.end, |p| Ok((first + p - chunk.start) as i32))?;
            }
            push_ring_slots(&mut ring_slots, chunk, &map)?;
            first += chunk.len;
        }
        // A query sees itself, so at most one position less than the window is before its chunk.
        let before = if repeated { geometry.window - 1 } else { 0 };
        Ok(Self {
            ring_idxs: ring.at_least(before, &Device::Cpu)?,
            present_idxs: present.into_tensor(&Device::Cpu)?,
            ring_slots: i32_tensor(ring_slots, &Device::Cpu)?,
        })
    }
}

impl CompressPlan {
    fn new(chunks: &[ChunkSpec], geometry: &CacheGeometry, ratio: usize) -> Result<Self> {
        if ratio == 0 {
            return Err(Error::config(
                "compress_ratios",
                "a ratio of 0 has no compressed rows",
            ));
        }
        let r = ratio as u32;
        let (mut group_src, mut group_pos) = (Vec::new(), Vec::new());
        let (mut group_slots, mut pending_slots) = (Vec::new(), Vec::new());
        let mut spans = Vec::new();
        let mut first = 0;
        for chunk in chunks {
            let rows = geometry.compressed(chunk.slot, ratio);
            let pending = geometry.pending(chunk.slot, ratio);
            for group in finished_groups(chunk, r) {
                for pos in group * r..(group + 1) * r {
                    group_src.push(group_row(pos, chunk, first, &pending)?.encode());
                }
                group_pos.push(group * r);
                group_slots.push(rows.row(group)? as i32);
            }
            push_ring_slots(&mut pending_slots, chunk, &pending)?;
            let base = rows.rows().start;
            spans.extend(chunk.positions().map(|pos| IndexSpan {
                base,
                visible: visible_rows(pos, r),
            }));
            first += chunk.len;
        }
        let max_visible = spans.iter().map(|span| span.visible).max().unwrap_or(0);
        Ok(Self {
            ratio,
            group_src,
            group_pos,
            group_slots: i32_tensor(group_slots, &Device::Cpu)?,
            pending_slots: i32_tensor(pending_slots, &Device::Cpu)?,
            max_visible,
            columns: max_visible,
            spans,
            kernel_rows: None,
        })
    }

    /// [`KernelRows`] on the CPU.
    fn for_kernels(&self) -> Result<KernelRows> {
        let sources = self.group_src.iter().map(|&src| kernel_source(src));
        let spans = self.spans.iter();
        let spans: Vec<i32> = spans
            .flat_map(|s| [s.base as i32, s.visible as i32])
            .collect();
        Ok(KernelRows {
            sources: i32_tensor(sources.collect(), &Device::Cpu)?,
            spans: upload(spans, (self.spans.len(), 2), &Device::Cpu)?,
        })
    }

    /// Groups completed in this step, `G`.
    pub fn groups(&self) -> usize {
        self.group_pos.len()
    }
}

/// [`GroupRow::encode`] as [`KernelRows::sources`] has it.
pub(crate) fn kernel_source(src: i64) -> i32 {
    (if src >= 0 { src } else { 2 * (src + 1) - 2 }) as i32
}

/// Where the entry of position `pos` lies: in this chunk, whose first token is row `first` of the
/// step, or in the ring that earlier steps wrote.
fn group_row(pos: u32, chunk: &ChunkSpec, first: u32, pending: &SlotMap) -> Result<GroupRow> {
    if pos >= chunk.start {
        Ok(GroupRow::Chunk(first + pos - chunk.start))
    } else {
        pending.row(pos).map(GroupRow::Pending)
    }
}

/// For each token of the chunk the ring row it is written to, or -1.
pub(crate) fn push_ring_slots(out: &mut Vec<i32>, chunk: &ChunkSpec, map: &SlotMap) -> Result<()> {
    let kept = kept_positions(chunk, map.capacity());
    for pos in chunk.positions() {
        out.push(if kept.contains(&pos) {
            map.row(pos)? as i32
        } else {
            -1
        });
    }
    Ok(())
}
