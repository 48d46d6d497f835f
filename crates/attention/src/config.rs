//! Settings of one attention layer, already resolved: nothing here knows layer numbers.

use deepseek_v41_core::{Error, Result};
use deepseek_v41_quant::WeightFormat;

/// What a layer attends to, and which parts of that it makes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerRole {
    /// The sliding window alone.
    Window,
    /// The sliding window and selected rows of a compressed KV cache.
    Compressed {
        /// Tokens a compressed row stands for, at least 1.
        ratio: usize,
        /// Whether this layer compresses its own KV; otherwise it reads another layer's.
        owns_kv: bool,
        /// Where its selection comes from.
        index: IndexRole,
    },
}

/// Where a layer's selection of compressed rows comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexRole {
    /// The selection published last in this forward pass.
    Reuse,
    /// Its own indexer, whose selection it publishes.
    Run(CandidateRole),
}

/// An indexer's part in the two-level selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CandidateRole {
    /// Scores every visible row.
    None,
    /// Scores every visible row and publishes the best blocks.
    Publish,
    /// Scores only rows inside the published blocks.
    Use,
}

/// Shape of the indexers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexConfig {
    /// Query heads (`index_n_heads`).
    pub n_heads: usize,
    /// Width of queries and keys (`index_head_dim`), a multiple of 32.
    pub head_dim: usize,
    /// Rows kept for each query (`index_topk`).
    pub topk: usize,
    /// Blocks kept for each query; unused where no layer publishes candidates.
    pub candidate_topk_blocks: usize,
    /// Compressed rows in a block.
    pub candidate_block_size: usize,
}

/// Settings of one attention layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Width of the residual stream.
    pub dim: usize,
    /// Query heads, over all ranks.
    pub n_heads: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Width of a head and of every KV row, a multiple of 32.
    pub head_dim: usize,
    /// Rotated dimensions at the end of a head, even.
    pub rope_head_dim: usize,
    /// Groups of heads that share one slice of `wo_a`.
    pub o_groups: usize,
    /// Width each group is projected to.
    pub o_lora_rank: usize,
    /// Positions the sliding window holds, the query's own included.
    pub window_size: usize,
    /// Constant under the root of every RMSNorm.
    pub norm_eps: f32,
    /// What this layer attends to.
    pub role: LayerRole,
    /// Storage of `wq_a`, `wq_b`, `wkv`, `wo_b` and the indexer's `wq_b`: fp8 or bf16.
    pub linear_format: WeightFormat,
    /// Shape of the indexer; read only where one runs or its keys are cached.
    pub index: IndexConfig,
    /// Whether this layer turns its latents into index keys. Needs `owns_kv` and its own indexer.
    pub owns_index_k: bool,
}

impl LayerRole {
    /// Tokens a compressed row stands for; `None` for a layer with a window alone.
    pub fn ratio(&self) -> Option<usize> {
        match *self {
            Self::Window => None,
            Self::Compressed { ratio, .. } => Some(ratio),
        }
    }

    /// Whether the layer compresses its own KV.
    pub fn owns_kv(&self) -> bool {
        matches!(self, Self::Compressed { owns_kv: true, .. })
    }

    /// The role of its indexer, if it runs one.
    pub fn indexer(&self) -> Option<CandidateRole> {
        match *self {
            Self::Compressed {
                index: IndexRole::Run(candidates),
                ..
            } => Some(candidates),
            _ => None,
        }
    }
}

impl AttentionConfig {
    /// Checks every field on its own and against the others.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first field that cannot be.
    pub fn validate(&self) -> Result<()> {
        let positive = [
            ("dim", self.dim),
            ("n_heads", self.n_heads),
            ("q_lora_rank", self.q_lora_rank),
            ("head_dim", self.head_dim),
            ("o_groups", self.o_groups),
            ("o_lora_rank", self.o_lora_rank),
            ("window_size", self.window_size),
        ];
        for (field, value) in positive {
            check(field, value > 0, || {
                format!("expected at least 1, found {value}")
            })?;
        }
        check("head_dim", self.head_dim.is_multiple_of(32), || {
            format!(
                "expected a multiple of 32, the quantisation group, found {}",
                self.head_dim
            )
        })?;
        let rope = self.rope_head_dim;
        check(
            "rope_head_dim",
            rope > 0 && rope.is_multiple_of(2) && rope <= self.head_dim,
            || {
                format!(
                    "expected an even number up to head_dim {}, found {rope}",
                    self.head_dim
                )
            },
        )?;
        check(
            "o_groups",
            self.n_heads.is_multiple_of(self.o_groups),
            || {
                format!(
                    "expected a divisor of n_heads {}, found {}",
                    self.n_heads, self.o_groups
                )
            },
        )?;
        check(
            "n_heads",
            self.n_heads.checked_mul(self.head_dim).is_some(),
            || "n_heads * head_dim does not fit a machine word".into(),
        )?;
        check(
            "o_lora_rank",
            self.o_groups.checked_mul(self.o_lora_rank).is_some(),
            || "o_groups * o_lora_rank does not fit a machine word".into(),
        )?;
        check(
            "norm_eps",
            self.norm_eps.is_finite() && self.norm_eps >= 0.0,
            || {
                format!(
                    "expected a finite number from 0 up, found {}",
                    self.norm_eps
                )
            },
        )?;
        let format_ok = matches!(self.linear_format, WeightFormat::Fp8 | WeightFormat::Bf16);
        check("dtype", format_ok, || {
            format!(
                "attention weights are fp8 or bf16, not {:?}",
                self.linear_format
            )
        })?;
        if let Some(ratio) = self.role.ratio() {
            check("compress_ratios", ratio > 0, || {
                "a compressed layer needs a ratio above 0".into()
            })?;
        }
        let owner_ok = !self.owns_index_k || (self.role.owns_kv() && self.role.indexer().is_some());
        check("kv_source_layers", owner_ok, || {
            "index keys come from a layer that compresses its own KV and runs an indexer".into()
        })?;
        match self.role.indexer() {
            Some(candidates) => self.index.validate(rope, candidates),
            None => Ok(()),
        }
    }
}

impl IndexConfig {
    fn validate(&self, rope_head_dim: usize, candidates: CandidateRole) -> Result<()> {
        check("index_n_heads", self.n_heads > 0, || {
            "expected at least 1".into()
        })?;
        check("index_topk", self.topk > 0, || "expected at least 1".into())?;
        let width = self.head_dim;
        check(
            "index_head_dim",
            width > 0 && width.is_multiple_of(32),
            || format!("expected a multiple of 32, the quantisation group, found {width}"),
        )?;
        check("index_head_dim", rope_head_dim <= width, || {
            format!("expected at least rope_head_dim {rope_head_dim}, found {width}")
        })?;
        check(
            "index_n_heads",
            self.n_heads.checked_mul(width).is_some(),
            || "index_n_heads * index_head_dim does not fit a machine word".into(),
        )?;
        if candidates != CandidateRole::None {
            let at_least_one = || "expected at least 1 where candidates are in use".into();
            check(
                "candidate_topk_blocks",
                self.candidate_topk_blocks > 0,
                at_least_one,
            )?;
            check(
                "candidate_block_size",
                self.candidate_block_size > 0,
                at_least_one,
            )?;
        }
        Ok(())
    }
}

fn check(field: &str, ok: bool, reason: impl FnOnce() -> String) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(Error::config(field, reason()))
    }
}
