//! The attention of draft layers: a ring of the backbone's tokens, and a block that sees all of itself.

use std::{ops::Range, sync::Arc};

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Comm, Error, Result, Rope, RopeTable, VarBuilder};

use crate::attention::check_input;
use crate::cache::WindowCache;
use crate::config::{AttentionConfig, LayerRole};
use crate::ops::KvScope;
use crate::plan::{
    ChunkSpec, REPEATED_TOKENS, RaggedRows, i32_tensor, indices_on, push_ring_slots,
    window_positions,
};
use crate::projections::Projections;
use crate::slots::CacheGeometry;

/// What one sequence does in a draft step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftChunk {
    /// The tokens the backbone has processed since the last draft step: all of a prompt's, or those of
    /// one decoding round. May be empty.
    pub committed: ChunkSpec,
    /// Whether a block is drafted after them; otherwise they only enter the ring.
    pub draft: bool,
}

/// Every index of one draft step: `M` committed tokens, `Q = blocks * block_size` block positions.
#[derive(Debug, Clone)]
pub struct DraftPlan {
    /// Position of each committed token, `[M]`; 0 for those that only fill up.
    pub main_positions: Vec<u32>,
    /// `[M]` i32 ring row of each committed token, `-1` for tokens a long prompt itself pushes out and for
    /// those that only fill up.
    pub main_slots: Tensor,
    /// Position of each row of the blocks, `[Q]`.
    pub block_positions: Vec<u32>,
    /// `[Q, n]` i32 ring rows that each block row sees: the last `min(W, end)` committed positions,
    /// ascending, `-1` after them.
    pub ring_idxs: Tensor,
    /// `[Q, block_size]` i32 rows of the blocks that each block row sees: all of its own block.
    pub block_idxs: Tensor,
}

impl DraftPlan {
    /// Plans a draft step with blocks of `block_size`.
    ///
    /// # Errors
    /// [`Error::Capacity`] for a slot or position that the rings have no room for, [`Error::Value`]
    /// for two chunks of one slot, a block after no token at all, or blocks of nothing.
    pub fn new(
        chunks: &[DraftChunk],
        block_size: usize,
        geometry: &CacheGeometry,
        device: &Device,
    ) -> Result<Self> {
        let plan = Self::on_host(chunks, block_size, geometry, !device.is_cpu())?;
        match device.is_cpu() {
            true => Ok(plan),
            false => plan.map(&mut |tensor| indices_on(tensor, device)),
        }
    }

    /// The plan with its tensors on the CPU. `for_kernels`: as a GPU's kernels take it, to be moved there by
    /// [`DraftPlan::map`]. Small steps are then laid out alike, so that the same launches serve whatever position and
    /// however many drafts stood: committed tokens fill up to as many as a round commits if all stand, and lists
    /// of ring rows are as wide as the window. What is added lists nothing and is written nowhere.
    ///
    /// # Errors
    /// As [`DraftPlan::new`].
    pub fn on_host(
        chunks: &[DraftChunk],
        block_size: usize,
        geometry: &CacheGeometry,
        for_kernels: bool,
    ) -> Result<Self> {
        let committed: Vec<ChunkSpec> = chunks.iter().map(|chunk| chunk.committed).collect();
        crate::plan::check_chunks(&committed, geometry)?;
        let size = u32::try_from(block_size)
            .ok()
            .filter(|&n| n > 0)
            .ok_or_else(|| Error::config("dspark_block_size", format!("found {block_size}")))?;
        let window = geometry.window as u32;
        let (mut ring, mut block) = (RaggedRows::default(), RaggedRows::default());
        let (mut main_slots, mut block_positions) = (Vec::new(), Vec::new());
        for DraftChunk { committed, draft } in chunks {
            let map = geometry.ring(committed.slot);
            push_ring_slots(&mut main_slots, committed, &map)?;
            if !draft {
                continue;
            }
            let end = committed.positions().end;
            let Some(last) = end.checked_sub(1) else {
                return Err(Error::value(
                    "draft block",
                    "there is no token to draft after",
                ));
            };
            let first = block_positions.len() as u32;
            // Positions past the longest sequence are fine: they are rotations, not rows.
            block_positions.extend(end..end + size);
            for _ in 0..size {
                ring.push(window_positions(last, window), |p| {
                    map.row(p).map(|row| row as i32)
                })?;
                block.push(first..first + size, |row| Ok(row as i32))?;
            }
        }
        let mut main_positions: Vec<u32> =
            committed.iter().flat_map(ChunkSpec::positions).collect();
        let mut width = 0;
        let filled = main_positions.len().max(chunks.len() * (block_size + 1));
        if for_kernels && filled.max(block_positions.len()) <= REPEATED_TOKENS {
            width = geometry.window;
            if !main_positions.is_empty() {
                main_positions.resize(filled, 0);
                main_slots.resize(filled, -1);
            }
        }
        let cpu = &Device::Cpu;
        Ok(Self {
            main_positions,
            main_slots: i32_tensor(main_slots, cpu)?,
            block_positions,
            ring_idxs: ring.at_least(width, cpu)?,
            block_idxs: block.into_tensor(cpu)?,
        })
    }

    /// The plan with each of its tensors replaced by what `f` makes of it, always in the same order.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            main_positions: self.main_positions.clone(),
            main_slots: f(&self.main_slots)?,
            block_positions: self.block_positions.clone(),
            ring_idxs: f(&self.ring_idxs)?,
            block_idxs: f(&self.block_idxs)?,
        })
    }
}

/// Rotations of one draft step, shared by all draft layers.
#[derive(Debug, Clone)]
pub struct DraftRopes {
    /// Of the committed tokens: `[M, rope / 2]`.
    pub main: RopeTable,
    /// Of the block rows: `[Q, rope / 2]`.
    pub block: RopeTable,
}

impl DraftRopes {
    /// Tables for `plan`, by the rotation of layers with a window alone.
    ///
    /// # Errors
    /// Moving the tables to `device` fails.
    pub fn new(plan: &DraftPlan, rope: &Rope, device: &Device) -> Result<Self> {
        Ok(Self {
            main: rope.table(&plan.main_positions, device)?,
            block: rope.table(&plan.block_positions, device)?,
        })
    }

    /// The tables with each of their tensors replaced by what `f` makes of it, always in the same order.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            main: self.main.map(f)?,
            block: self.block.map(f)?,
        })
    }
}

/// Attention of one draft layer.
///
/// Keys are a window of rows made from the backbone's hidden states, and the rows of the block being
/// drafted, each seen by all of its block. Block rows are never cached: a rejected draft leaves
/// nothing behind.
#[derive(Debug)]
pub struct DSparkAttention {
    dim: usize,
    core: Projections,
}

impl DSparkAttention {
    /// Reads the tensors of a layer with a window alone under `vb`.
    ///
    /// # Errors
    /// A configuration that does not validate or has compressed KV, or a weight that does not fit.
    pub fn new(cfg: &AttentionConfig, comm: Arc<dyn Comm>, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        if cfg.role != LayerRole::Window {
            return Err(Error::config(
                "compress_ratios",
                "draft layers have a window alone",
            ));
        }
        Ok(Self {
            dim: cfg.dim,
            core: Projections::new(cfg, comm, vb)?,
        })
    }

    /// Puts the committed tokens' rows, made from `main_x: [M, dim]` bf16, into the rings; of rows that only
    /// fill up any values will do.
    ///
    /// # Errors
    /// Shapes or a plan that do not fit.
    ///
    /// Reference: `DSparkAttention.forward` up to the ring write, for any number of tokens.
    pub fn commit(
        &self,
        main_x: &Tensor,
        plan: &DraftPlan,
        ropes: &DraftRopes,
        cache: &mut WindowCache,
    ) -> Result<()> {
        check_input(main_x, plan.main_positions.len(), self.dim)?;
        if plan.main_positions.is_empty() {
            return Ok(());
        }
        cache.write_rows(&self.core.kv_rows(main_x, &ropes.main)?, &plan.main_slots)
    }

    /// `xs: [Q, dim]` bf16, the rows of all blocks → `[Q, dim]` bf16. After
    /// [`commit`](Self::commit) of the same plan.
    ///
    /// # Errors
    /// Shapes or a plan that do not fit.
    ///
    /// Reference: `DSparkAttention.forward`.
    pub fn forward(
        &self,
        xs: &Tensor,
        plan: &DraftPlan,
        ropes: &DraftRopes,
        cache: &WindowCache,
    ) -> Result<Tensor> {
        check_input(xs, plan.block_positions.len(), self.dim)?;
        if plan.block_positions.is_empty() {
            return Ok(xs.clone());
        }
        let rows = 0..plan.block_positions.len();
        let (q, kv) = self.prepare(xs, &rows, ropes)?;
        self.attend(&q, &kv, &rows, plan, ropes, cache)
    }

    /// The first half of [`DSparkAttention::forward`] for some rows of the blocks, `xs: [rows, dim]`:
    /// their queries, not rotated, and their rows.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn prepare(
        &self,
        xs: &Tensor,
        rows: &Range<usize>,
        ropes: &DraftRopes,
    ) -> Result<(Tensor, Tensor)> {
        let table = ropes.block.narrow(rows)?;
        let ((_, q), kv) = self.core.queries_and_kv(xs, &table)?;
        Ok((q, kv))
    }

    /// The second half for the same rows, with their queries and the `kv` of all rows end to end.
    ///
    /// # Errors
    /// Shapes or a plan that do not fit.
    pub fn attend(
        &self,
        q: &Tensor,
        kv: &Tensor,
        rows: &Range<usize>,
        plan: &DraftPlan,
        ropes: &DraftRopes,
        cache: &WindowCache,
    ) -> Result<Tensor> {
        let part = |idxs: &Tensor| idxs.narrow(0, rows.start, rows.len());
        let (ring, block) = (part(&plan.ring_idxs)?, part(&plan.block_idxs)?);
        let scopes = [
            KvScope::new(cache.kv().stored(), &ring),
            KvScope::new(kv, &block),
        ];
        let table = ropes.block.narrow(rows)?;
        self.core
            .output(&self.core.attend(q, &scopes, &table, None)?)
    }
}
