//! What attention layers of one forward pass hand down the stack.

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Error, Result, Rope, RopeTable};

use crate::ops::{CandidateBlocks, TopkIdxs};
use crate::plan::AttnPlan;

/// Selections that one layer computes and later layers use.
///
/// Made anew for every forward pass, so reading before anyone published is an error, where a
/// longer-lived one would quietly serve the previous step's rows.
#[derive(Debug, Default)]
pub struct SharedAttentionRuntime {
    topk: Option<TopkIdxs>,
    candidates: Option<CandidateBlocks>,
    /// Test hook: the next indexer publishes this instead of what it computed.
    pub replay: Option<TopkIdxs>,
    /// What the last indexer computed, replayed or not.
    pub computed: Option<TopkIdxs>,
}

impl SharedAttentionRuntime {
    /// Nothing published yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The selection published last.
    ///
    /// # Errors
    /// [`Error::MissingSource`] if no indexer ran in this pass.
    pub fn topk(&self) -> Result<&TopkIdxs> {
        self.topk.as_ref().ok_or(Error::MissingSource {
            what: "a selection of compressed rows",
        })
    }

    /// The candidate blocks published last.
    ///
    /// # Errors
    /// [`Error::MissingSource`] if no layer published any in this pass.
    pub fn candidates(&self) -> Result<&CandidateBlocks> {
        self.candidates.as_ref().ok_or(Error::MissingSource {
            what: "candidate blocks",
        })
    }

    /// Publishes an indexer's selection, or the one to replay in its place.
    pub fn publish_topk(&mut self, computed: TopkIdxs) {
        self.topk = Some(self.replay.take().unwrap_or_else(|| computed.clone()));
        self.computed = Some(computed);
    }

    /// Publishes the candidate blocks.
    pub fn publish_candidates(&mut self, candidates: CandidateBlocks) {
        self.candidates = Some(candidates);
    }
}

/// Rotations of one step's positions, computed once for all layers.
#[derive(Debug, Clone)]
pub struct RopeTables {
    /// For layers with a window alone: `[T, rope / 2]`.
    pub window: RopeTable,
    /// For queries and window KV of layers with compressed KV: `[T, rope / 2]`.
    pub compressed: RopeTable,
    /// By ratio, the first position of each finished group: `[G, rope / 2]`.
    groups: Vec<(usize, RopeTable)>,
}

impl RopeTables {
    /// Tables for `plan`. `compressed` is the rotation with YaRN and its own base.
    ///
    /// # Errors
    /// Moving the tables to `device` fails.
    pub fn new(plan: &AttnPlan, window: &Rope, compressed: &Rope, device: &Device) -> Result<Self> {
        let groups = plan.compress.iter().map(|at_ratio| {
            Ok((
                at_ratio.ratio,
                compressed.table(&at_ratio.group_pos, device)?,
            ))
        });
        Ok(Self {
            window: window.table(&plan.positions, device)?,
            compressed: compressed.table(&plan.positions, device)?,
            groups: groups.collect::<Result<_>>()?,
        })
    }

    /// The tables with each of their tensors replaced by what `f` makes of it, always in the same order.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let (window, compressed) = (self.window.map(f)?, self.compressed.map(f)?);
        let groups = self.groups.iter();
        let groups = groups.map(|(ratio, own)| Ok((*ratio, own.map(f)?)));
        Ok(Self {
            window,
            compressed,
            groups: groups.collect::<Result<_>>()?,
        })
    }

    /// The table of finished groups at `ratio`.
    ///
    /// # Errors
    /// [`Error::MissingSource`] if the step was not planned for this ratio.
    pub fn groups(&self, ratio: usize) -> Result<&RopeTable> {
        self.groups
            .iter()
            .find_map(|(r, table)| (*r == ratio).then_some(table))
            .ok_or(Error::MissingSource {
                what: "rotations of groups at this ratio",
            })
    }
}
