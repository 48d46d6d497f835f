//! One attention layer.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Comm, Error, Result, RopeTable, VarBuilder};

use crate::cache::{CompressedCache, WindowCache};
use crate::compressor::{Compressor, Entries};
use crate::config::{AttentionConfig, IndexRole, LayerRole};
use crate::index_keys::IndexKeySource;
use crate::indexer::{IndexQuery, Indexer};
use crate::ops::KvScope;
use crate::plan::AttnPlan;
use crate::projections::Projections;
use crate::rows::{RowQuant, finish_rows};
use crate::runtime::{RopeTables, SharedAttentionRuntime};

/// The caches that one layer writes and reads in one step.
///
/// A model keeps its compressed caches in one list and lends a layer its own mutably
/// (`slice::get_disjoint_mut` splits the list) and others shared.
#[derive(Debug)]
pub struct LayerCache<'a> {
    /// This layer's window rings.
    pub window: &'a mut WindowCache,
    /// The compressed cache this layer owns, if it compresses its own KV.
    pub source: Option<&'a mut CompressedCache>,
    /// The compressed cache this layer reads, if it does not own one.
    pub kv: Option<&'a CompressedCache>,
    /// Whose index keys its indexer scores.
    pub index_k: IndexKeySource<'a>,
}

/// What the tokens of a step bring to their attention: queries, rows, entries of groups.
#[derive(Debug)]
pub struct Prepared {
    /// `[T, heads of this rank, head_dim]` bf16, not rotated.
    q: Tensor,
    /// `[T, head_dim]` bf16.
    kv: Tensor,
    index: Option<IndexQuery>,
    entries: Option<Entries>,
}

/// `work` on `xs`, which a captured step's queries need not wait for.
fn beside<R>(xs: &Tensor, work: impl FnOnce() -> Result<R>) -> Result<R> {
    #[cfg(feature = "cuda")]
    return deepseek_v41_core::cuda::beside(&[xs], work);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = xs;
        work()
    }
}

/// Latent attention over a sliding window and, in most layers, selected compressed rows.
///
/// K and V of a position are one row shared by all heads. Queries and the output go through
/// low-rank projections, the output's grouped by heads.
#[derive(Debug)]
pub struct Attention {
    cfg: AttentionConfig,
    core: Projections,
    compressor: Option<Compressor>,
    indexer: Option<Indexer>,
}

impl Attention {
    /// Reads `wq_a`, `q_norm`, `wq_b`, `wkv`, `kv_norm`, `attn_sink`, `wo_a`, `wo_b` under `vb` and, as
    /// the role asks, `compressor.*` and `indexer.*`.
    ///
    /// Heads and output groups are split over the ranks of `comm`; everything else, caches included,
    /// is the same on every rank.
    ///
    /// # Errors
    /// A configuration that does not validate, or a weight that is missing or does not fit it.
    pub fn new(cfg: &AttentionConfig, comm: Arc<dyn Comm>, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let compressor = match cfg.role {
            LayerRole::Compressed {
                ratio,
                owns_kv: true,
                ..
            } => Some(Compressor::new(cfg, ratio, vb.pp("compressor"))?),
            _ => None,
        };
        let indexer = match cfg.role.indexer() {
            Some(candidates) => Some(Indexer::new(cfg, candidates, vb.pp("indexer"))?),
            None => None,
        };
        Ok(Self {
            core: Projections::new(cfg, comm, vb)?,
            cfg: cfg.clone(),
            compressor,
            indexer,
        })
    }

    /// What this layer attends to.
    pub fn role(&self) -> LayerRole {
        self.cfg.role
    }

    /// `xs: [T, dim]` bf16, the tokens of `plan` → `[T, dim]` bf16. Writes this step's rows into
    /// `cache`, publishes this layer's selection in `shared` or reads an earlier layer's from it.
    ///
    /// Any chunk at any position takes the same path, and a chunk of several tokens gives the bits of
    /// as many steps of one. A plan without tokens returns an empty tensor and touches nothing.
    ///
    /// # Errors
    /// [`Error::MissingSource`] for a cache or selection that this layer needs and was not given;
    /// shapes or a plan that do not fit.
    ///
    /// Reference: `Attention.forward`.
    pub fn forward(
        &self,
        xs: &Tensor,
        plan: &AttnPlan,
        ropes: &RopeTables,
        cache: LayerCache<'_>,
        shared: &mut SharedAttentionRuntime,
    ) -> Result<Tensor> {
        check_input(xs, plan.tokens, self.cfg.dim)?;
        if plan.tokens == 0 {
            return Ok(xs.clone());
        }
        let prepared = self.prepare(xs, ropes)?;
        let o = self.attend(prepared, plan, ropes, cache, shared)?;
        self.output(&o)
    }

    fn table<'a>(&self, ropes: &'a RopeTables) -> &'a RopeTable {
        match self.cfg.role {
            LayerRole::Window => &ropes.window,
            LayerRole::Compressed { .. } => &ropes.compressed,
        }
    }

    /// The first of three steps that [`Attention::forward`] takes: everything before the caches.
    /// `xs: [T, dim]` bf16, `T > 0`.
    ///
    /// Whoever runs parts of a sequence side by side calls them one by one: of two parts the later may
    /// attend once the earlier has, and nothing else waits.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    pub fn prepare(&self, xs: &Tensor, ropes: &RopeTables) -> Result<Prepared> {
        let table = self.table(ropes);
        let (compressor, indexer) = (self.compressor.as_ref(), self.indexer.as_ref());
        let entries = compressor.map(|own| beside(xs, || own.project(xs)));
        let weights = indexer.map(|own| beside(xs, || own.weights(xs)));
        let (entries, weights) = (entries.transpose()?, weights.transpose()?);
        let ((qr, q), kv) = self.core.queries_and_kv(xs, table)?;
        let index = indexer
            .zip(weights)
            .map(|(own, weights)| own.query_for(weights, &qr, table));
        Ok(Prepared {
            kv,
            q,
            index: index.transpose()?,
            entries,
        })
    }

    /// The last of the three: `o` as [`Attention::attend`] gives it → `[T, dim]` bf16.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn output(&self, o: &Tensor) -> Result<Tensor> {
        self.core.output(o)
    }

    /// The second of the three, and the one with the caches → `[T, heads of this rank, head_dim]` bf16.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    pub fn attend(
        &self,
        prepared: Prepared,
        plan: &AttnPlan,
        ropes: &RopeTables,
        cache: LayerCache<'_>,
        shared: &mut SharedAttentionRuntime,
    ) -> Result<Tensor> {
        // What [`Attention::prepare`] began beside the queries.
        #[cfg(feature = "cuda")]
        deepseek_v41_core::cuda::join()?;
        let LayerCache {
            window,
            source,
            kv: lent,
            index_k,
        } = cache;
        let Prepared {
            q,
            kv,
            index: query,
            entries,
        } = prepared;
        let own = self.write_source(entries, plan, ropes, source)?;
        let far = match self.cfg.role {
            LayerRole::Window => None,
            LayerRole::Compressed { ratio, index, .. } => {
                let far = own.or(lent).ok_or(Error::MissingSource {
                    what: "a compressed cache",
                })?;
                if let (IndexRole::Run(_), Some(indexer), Some(query)) =
                    (index, &self.indexer, query)
                {
                    let plan = plan.compress(ratio)?;
                    indexer.select(query, plan, far, index_k, shared)?;
                }
                Some((far, &shared.topk()?.0))
            }
        };
        let entering = window.entering(&kv, &plan.window);
        let mut scopes = Vec::with_capacity(3);
        scopes.push(KvScope::new(entering.stored(), &plan.window.ring_idxs));
        scopes.push(KvScope::new(&kv, &plan.window.present_idxs));
        if let Some((far, idxs)) = far {
            scopes.push(KvScope::new(far.kv().stored(), idxs));
        }
        self.core
            .attend(&q, &scopes, self.table(ropes), Some(entering))
    }

    /// Compresses the tokens into the layer's own cache, if it has one, and returns it.
    fn write_source<'a>(
        &self,
        entries: Option<Entries>,
        plan: &AttnPlan,
        ropes: &RopeTables,
        source: Option<&'a mut CompressedCache>,
    ) -> Result<Option<&'a CompressedCache>> {
        let LayerRole::Compressed { ratio, .. } = self.cfg.role else {
            return Ok(None);
        };
        let (Some(compressor), Some(entries), Some(own)) =
            (&self.compressor, entries, self.own_source(source)?)
        else {
            return Ok(None);
        };
        let plan = plan.compress(ratio)?;
        if let Some(latent) = compressor.pool(&entries, plan, own)? {
            let groups = ropes.groups(ratio)?;
            // Keys come from the unrotated latent, and before the scores: a token sees the group it
            // completes.
            if let Some(indexer) = &self.indexer
                && let Some(keys) = indexer.keys(&latent, groups)?
            {
                own.write_index_k(&keys, plan)?;
            }
            let rows = finish_rows(&latent, None, groups, RowQuant::Compressed)?;
            own.write_kv(&rows, plan)?;
        }
        Ok(Some(own))
    }

    /// The layer's own cache, which must be there exactly if it compresses its own KV.
    fn own_source<'a>(
        &self,
        source: Option<&'a mut CompressedCache>,
    ) -> Result<Option<&'a mut CompressedCache>> {
        match (&self.compressor, source) {
            (None, _) => Ok(None),
            (Some(_), Some(own)) if Some(own.ratio()) == self.cfg.role.ratio() => Ok(Some(own)),
            (Some(_), Some(own)) => Err(Error::shape(
                "attention",
                format!("a cache of ratio {} for {:?}", own.ratio(), self.cfg.role),
            )),
            (Some(_), None) => Err(Error::MissingSource {
                what: "a layer's own compressed cache",
            }),
        }
    }
}

pub(crate) fn check_input(xs: &Tensor, tokens: usize, dim: usize) -> Result<()> {
    if xs.dims() == [tokens, dim] && xs.dtype() == DType::BF16 {
        return Ok(());
    }
    Err(Error::shape(
        "attention",
        format!(
            "expected [{tokens}, {dim}] bf16, found {:?} {:?}",
            xs.shape(),
            xs.dtype()
        ),
    ))
}
