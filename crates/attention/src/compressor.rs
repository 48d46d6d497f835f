//! Pooling of consecutive tokens into one latent, by a learned gate.

use candle_core::Tensor;
use deepseek_v41_core::{Result, RmsNorm, VarBuilder};
use deepseek_v41_quant::{Linear, WeightFormat};

use crate::cache::CompressedCache;
use crate::config::AttentionConfig;
use crate::ops;
use crate::plan::CompressPlan;

/// Turns every `ratio` consecutive tokens into one latent of `head_dim`.
///
/// The latent leaves before any rotation: the indexer makes its key from the unrotated form. Tokens
/// of a group that is still open wait in the cache.
#[derive(Debug)]
pub struct Compressor {
    wkv: Linear,
    /// A group of one has nothing to weigh, so no gate exists at ratio 1.
    wgate: Option<Linear>,
    norm: RmsNorm,
}

/// What tokens bring to their groups.
#[derive(Debug)]
pub(crate) struct Entries {
    /// `[T, head_dim]`.
    kv: Tensor,
    /// Alike; `None` for groups of one.
    score: Option<Tensor>,
}

impl Compressor {
    /// Reads `wkv`, `wgate` (for ratios above 1) and `norm` under `vb`.
    ///
    /// # Errors
    /// A weight is missing or of another shape or dtype.
    pub fn new(cfg: &AttentionConfig, ratio: usize, vb: VarBuilder) -> Result<Self> {
        // Pooling is in f32 and so are its projections; a plain projection stays bf16.
        let format = if ratio > 1 {
            WeightFormat::F32
        } else {
            WeightFormat::Bf16
        };
        let linear = |name| Linear::new(cfg.dim, cfg.head_dim, format, vb.pp(name));
        Ok(Self {
            wkv: linear("wkv")?,
            wgate: if ratio > 1 {
                Some(linear("wgate")?)
            } else {
                None
            },
            norm: RmsNorm::new(cfg.head_dim, cfg.norm_eps, vb.pp("norm"))?,
        })
    }

    /// `xs: [T, dim]` bf16 → the unrotated latents `[G, head_dim]` bf16 of the groups these tokens
    /// complete, `None` if there are none. The tokens' entries go to the open groups of `cache`.
    ///
    /// # Errors
    /// Shapes or a plan that do not fit each other.
    ///
    /// Reference: `Compressor.forward`.
    pub fn forward(
        &self,
        xs: &Tensor,
        plan: &CompressPlan,
        cache: &mut CompressedCache,
    ) -> Result<Option<Tensor>> {
        self.pool(&self.project(xs)?, plan, cache)
    }

    /// The half of [`Compressor::forward`] that needs no cache.
    pub(crate) fn project(&self, xs: &Tensor) -> Result<Entries> {
        let score = self.wgate.as_ref().map(|wgate| wgate.forward(xs));
        Ok(Entries {
            kv: self.wkv.forward(xs)?,
            score: score.transpose()?,
        })
    }

    /// The other half.
    pub(crate) fn pool(
        &self,
        Entries { kv, score }: &Entries,
        plan: &CompressPlan,
        cache: &mut CompressedCache,
    ) -> Result<Option<Tensor>> {
        let Some(score) = score else {
            return Ok(Some(self.norm.forward(kv)?));
        };
        let latent = match plan.groups() {
            0 => None,
            _ => {
                // Rounded to bf16 by the pooling, before the norm: the norm of the f32 value differs.
                let sources = &plan.group_src;
                #[cfg(feature = "cuda")]
                if let Some(rows) = &plan.kernel_rows {
                    let (norm, pending) = (Some(&self.norm), cache.pending());
                    let sources = &rows.sources;
                    let latent =
                        crate::cuda::compress(kv, score, pending, sources, plan.ratio, norm)?;
                    cache.write_pending(kv, score, plan)?;
                    return Ok(Some(latent));
                }
                let pooled = ops::compress(kv, score, cache.pending(), sources, plan.ratio)?;
                Some(self.norm.forward(&pooled)?)
            }
        };
        // After pooling: a long chunk may overwrite entries that its first group was waiting on.
        cache.write_pending(kv, score, plan)?;
        Ok(latent)
    }
}
