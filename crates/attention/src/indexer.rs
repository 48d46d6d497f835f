//! The small attention that picks which compressed rows each query reads.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Result, RmsNorm, RopeTable, VarBuilder, cpu};
use deepseek_v41_quant::{Linear, WeightFormat};
use half::bf16;

use crate::cache::CompressedCache;
use crate::config::{AttentionConfig, CandidateRole, IndexConfig};
use crate::index_keys::{IndexKeySource, Scored, score_per_token};
use crate::ops::{CandidateBlocks, TopkIdxs, Visible, Wanted, select_rows};
use crate::plan::CompressPlan;
use crate::projections::QueryLatent;
use crate::rows::{RowQuant, finish_rows};
use crate::runtime::SharedAttentionRuntime;
use crate::stored::StoredRows;

/// Keeps the `topk` best compressed rows of every query.
///
/// fp4 query heads against one shared fp4 key per compressed row; scores are rectified and summed
/// over heads with weights of the token's own.
#[derive(Debug)]
pub struct Indexer {
    cfg: IndexConfig,
    candidates: CandidateRole,
    wq_b: Linear,
    weights_proj: Linear,
    /// `head_dim^-0.5 * n_heads^-0.5`, one f64 product rounded once.
    weight_scale: f32,
    keys: Option<(Linear, RmsNorm)>,
}

impl Indexer {
    /// Reads `wq_b`, `weights_proj` and, where the layer makes index keys, `wk` and `k_norm`.
    ///
    /// Every rank holds all heads: a sharded indexer would have to sum scores as wide as the context
    /// over the ranks.
    ///
    /// # Errors
    /// A weight is missing or of another shape or dtype.
    pub fn new(cfg: &AttentionConfig, candidates: CandidateRole, vb: VarBuilder) -> Result<Self> {
        let IndexConfig {
            n_heads, head_dim, ..
        } = cfg.index;
        let bf16 = WeightFormat::Bf16;
        let keys = match cfg.owns_index_k {
            true => Some((
                Linear::new(cfg.head_dim, head_dim, bf16, vb.pp("wk"))?,
                RmsNorm::new(head_dim, cfg.norm_eps, vb.pp("k_norm"))?,
            )),
            false => None,
        };
        let wq_b = vb.pp("wq_b");
        Ok(Self {
            candidates,
            wq_b: Linear::new(cfg.q_lora_rank, n_heads * head_dim, cfg.linear_format, wq_b)?,
            weights_proj: Linear::new(cfg.dim, n_heads, bf16, vb.pp("weights_proj"))?,
            weight_scale: ((head_dim as f64).powf(-0.5) * (n_heads as f64).powf(-0.5)) as f32,
            keys,
            cfg: cfg.index,
        })
    }

    /// Index keys `[G, index_head_dim]` bf16 of unrotated latents `[G, head_dim]`; `None` for a layer
    /// that makes none. `table` holds the groups' first positions.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub fn keys(&self, latent: &Tensor, table: &RopeTable) -> Result<Option<Tensor>> {
        let Some((wk, k_norm)) = &self.keys else {
            return Ok(None);
        };
        finish_rows(&wk.forward(latent)?, Some(k_norm), table, RowQuant::Index).map(Some)
    }

    /// What the tokens ask with.
    ///
    /// `xs: [T, dim]` bf16 is the layer's input, `qr: [T, q_lora_rank]` bf16 its query latent, `table`
    /// the rotations of the tokens' positions.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn query(&self, xs: &Tensor, qr: &Tensor, table: &RopeTable) -> Result<IndexQuery> {
        self.query_for(self.weights(xs)?, &QueryLatent::new(qr.clone()), table)
    }

    /// The heads' weights `[T, Hi]` bf16 of the layer's input.
    pub(crate) fn weights(&self, xs: &Tensor) -> Result<Tensor> {
        scale_bf16(&self.weights_proj.forward(xs)?, self.weight_scale)
    }

    /// [`Indexer::query`] of its weights and a latent that may be quantised already.
    pub(crate) fn query_for(
        &self,
        weights: Tensor,
        qr: &QueryLatent,
        table: &RopeTable,
    ) -> Result<IndexQuery> {
        let heads = (weights.dims()[0], self.cfg.n_heads, self.cfg.head_dim);
        let q = qr.through(&self.wq_b)?.reshape(heads)?;
        Ok(IndexQuery {
            q: finish_rows(&q, None, table, RowQuant::Index)?,
            weights,
            candidates: None,
        })
    }

    /// Scores the visible rows of `cache` for every token and publishes the selection, as physical
    /// rows of `cache`.
    ///
    /// # Errors
    /// [`Error::MissingSource`](deepseek_v41_core::Error::MissingSource) for keys or candidates that
    /// nobody made; shapes that do not fit.
    ///
    /// Reference: `Indexer.forward`.
    pub fn select(
        &self,
        query: IndexQuery,
        plan: &CompressPlan,
        cache: &CompressedCache,
        keys: IndexKeySource<'_>,
        shared: &mut SharedAttentionRuntime,
    ) -> Result<()> {
        let query = IndexQuery {
            candidates: match self.candidates {
                CandidateRole::Use => Some(shared.candidates()?.clone()),
                CandidateRole::None | CandidateRole::Publish => None,
            },
            ..query
        };
        let k = self.cfg.topk.min(plan.columns as usize);
        let scored = match keys {
            IndexKeySource::Owner => {
                let spans = Visible {
                    each: &plan.spans,
                    columns: plan.columns as usize,
                    rows: plan.kernel_rows.as_ref().map(|rows| &rows.spans),
                };
                self.score(&query, cache.index_k()?.stored(), &spans, k)?
            }
            IndexKeySource::PerToken(keys) => score_per_token(keys, cache, plan, |run| {
                let spans = Visible::of(&run.spans);
                self.score(&query.narrow(run.tokens)?, run.keys, &spans, k)
            })?,
        };
        if let Some(candidates) = scored.candidates {
            shared.publish_candidates(candidates);
        }
        shared.publish_topk(scored.topk);
        Ok(())
    }

    /// One pass over `keys`: the selection and, from the layer that publishes them, the candidates.
    fn score(
        &self,
        IndexQuery {
            q,
            weights,
            candidates,
        }: &IndexQuery,
        keys: StoredRows<'_>,
        spans: &Visible<'_>,
        k: usize,
    ) -> Result<Scored> {
        let publishes = self.candidates == CandidateRole::Publish;
        let (topk_blocks, block) = match publishes {
            true => (
                self.cfg.candidate_topk_blocks,
                self.cfg.candidate_block_size,
            ),
            false => (0, 1),
        };
        let wanted = Wanted {
            k,
            topk_blocks,
            block,
        };
        let (topk, ids) = select_rows(q, weights, keys, spans, wanted, candidates.as_ref())?;
        Ok(Scored {
            topk: TopkIdxs(topk),
            candidates: publishes.then_some(CandidateBlocks { block, ids }),
        })
    }
}

/// What an indexer asks with, one row for each token.
#[derive(Debug, Clone)]
pub struct IndexQuery {
    /// `[T, Hi, Di]` bf16, rotated and rounded to fp4.
    q: Tensor,
    /// `[T, Hi]` bf16.
    weights: Tensor,
    candidates: Option<CandidateBlocks>,
}

impl IndexQuery {
    fn narrow(&self, tokens: Range<usize>) -> Result<Self> {
        let rows = |xs: &Tensor| xs.narrow(0, tokens.start, tokens.len());
        let candidates = match &self.candidates {
            Some(all) => Some(CandidateBlocks {
                block: all.block,
                ids: rows(&all.ids)?,
            }),
            None => None,
        };
        Ok(Self {
            q: rows(&self.q)?,
            weights: rows(&self.weights)?,
            candidates,
        })
    }
}

/// `bf16(x * factor)` for each element, the product in f32.
///
/// candle's own `affine` would round the factor to bf16 first.
fn scale_bf16(xs: &Tensor, factor: f32) -> Result<Tensor> {
    if xs.device().is_cpu() {
        return Ok(xs.apply_op1_no_bwd(&ScaleBf16 { factor })?);
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return deepseek_v41_core::cuda::ops::scale_bf16(xs, factor);
    }
    Ok(xs
        .to_dtype(DType::F32)?
        .affine(f64::from(factor), 0.0)?
        .to_dtype(DType::BF16)?)
}

struct ScaleBf16 {
    factor: f32,
}

impl CustomOp1 for ScaleBf16 {
    fn name(&self) -> &'static str {
        "scale_bf16"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, self.name())?;
        let out = xs
            .iter()
            .map(|x| bf16::from_f32(x.to_f32() * self.factor))
            .collect();
        Ok((CpuStorage::BF16(out), l.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// 0.1 is not a bf16 number, and neither is the release's 0.015625 * sqrt(2).
    #[test]
    fn weight_factor_is_not_rounded_to_bf16() -> Result<()> {
        let xs = [1.5, -3.0].map(bf16::from_f32);
        let xs = Tensor::new(&xs, &Device::Cpu)?;
        let ys = scale_bf16(&xs, 0.1)?.to_vec1::<bf16>()?;
        assert_eq!(ys, [bf16::from_f32(1.5 * 0.1), bf16::from_f32(-3.0 * 0.1)]);
        let slow = (xs.to_dtype(DType::F32)? * 0.1)?.to_dtype(DType::BF16)?;
        assert_eq!(ys, slow.to_vec1::<bf16>()?);
        Ok(())
    }
}
