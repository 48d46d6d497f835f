//! The projections around the attention itself, which draft layers have too.

use std::sync::Arc;

use candle_core::Tensor;
use deepseek_v41_core::{
    Comm, Error, Result, RmsNorm, RopeTable, Shard, StoredDtype, VarBuilder, apply_rope,
};
use deepseek_v41_quant::{ColumnParallelLinear, GroupedLinear, Linear, RowParallelLinear};
#[cfg(feature = "cuda")]
use deepseek_v41_quant::{
    cuda::{Activation, quantised},
    shared_input::{Joined, norm_activation},
};

use crate::config::AttentionConfig;
#[cfg(feature = "cuda")]
use crate::ops::check_attn;
use crate::ops::{KvScope, sparse_attn};
use crate::pool::Entering;
use crate::rows::{RowQuant, finish_rows};

/// The query latent of a step's tokens.
#[derive(Debug, Clone)]
pub(crate) struct QueryLatent {
    /// `[T, q_lora_rank]` bf16.
    values: Tensor,
    /// How a GPU's products take it.
    #[cfg(feature = "cuda")]
    form: Option<LatentForm>,
}

#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
enum LatentForm {
    /// What quantised products take for the values.
    Coded(Activation),
    /// One token on Hopper, whose values are not normed yet: its products do that as they read it.
    Unnormed(RmsNorm),
}

impl QueryLatent {
    pub(crate) fn new(values: Tensor) -> Self {
        Self {
            values,
            #[cfg(feature = "cuda")]
            form: None,
        }
    }

    /// `layer` of it.
    pub(crate) fn through(&self, layer: &Linear) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        match &self.form {
            Some(LatentForm::Coded(coded)) => return quantised(layer, coded),
            Some(LatentForm::Unnormed(norm)) => {
                if let Some((y, _)) = crate::cuda::query_heads(&self.values, norm, layer, None)? {
                    return Ok(y);
                }
                return quantised(layer, &norm_activation(&self.values, norm)?.1);
            }
            None => {}
        }
        layer.forward(&self.values)
    }
}

#[derive(Debug)]
pub(crate) struct Projections {
    wq_a: Linear,
    q_norm: RmsNorm,
    wq_b: ColumnParallelLinear,
    wkv: Linear,
    /// `wq_a` and `wkv`, where a GPU multiplies both at once.
    #[cfg(feature = "cuda")]
    joined: Option<Joined>,
    kv_norm: RmsNorm,
    /// `[heads of this rank]` f32.
    attn_sink: Tensor,
    /// `head_dim^-0.5`, an f64 power rounded once.
    scale: f32,
    wo_a: GroupedLinear,
    wo_b: RowParallelLinear,
    heads: usize,
    head_dim: usize,
}

impl Projections {
    pub(crate) fn new(cfg: &AttentionConfig, comm: Arc<dyn Comm>, vb: VarBuilder) -> Result<Self> {
        let AttentionConfig {
            dim,
            n_heads,
            q_lora_rank,
            head_dim,
            linear_format,
            ..
        } = *cfg;
        let ranks = comm.world_size();
        if !cfg.o_groups.is_multiple_of(ranks) {
            return Err(Error::config(
                "o_groups",
                format!("{} groups cannot be split over {ranks} ranks", cfg.o_groups),
            ));
        }
        let shard = Shard {
            dim: 0,
            rank: comm.rank(),
            world_size: ranks,
        };
        let sink = vb.raw_sharded("attn_sink", &[StoredDtype::F32], &[n_heads], shard)?;
        let o_in = n_heads * head_dim / cfg.o_groups;
        let o_mid = cfg.o_groups * cfg.o_lora_rank;
        let norm = |name, width| RmsNorm::new(width, cfg.norm_eps, vb.pp(name));
        let linear = |name, width| Linear::new(dim, width, linear_format, vb.pp(name));
        let (wq_a, wkv) = (linear("wq_a", q_lora_rank)?, linear("wkv", head_dim)?);
        #[cfg(feature = "cuda")]
        let (mut wq_a, mut wkv) = (wq_a, wkv);
        Ok(Self {
            #[cfg(feature = "cuda")]
            joined: Joined::new(&mut [&mut wq_a, &mut wkv])?,
            wq_a,
            q_norm: norm("q_norm", q_lora_rank)?,
            wq_b: ColumnParallelLinear::new(
                q_lora_rank,
                n_heads * head_dim,
                linear_format,
                &comm,
                vb.pp("wq_b"),
            )?,
            wkv,
            kv_norm: norm("kv_norm", head_dim)?,
            attn_sink: sink.to_tensor(vb.device())?,
            scale: (head_dim as f64).powf(-0.5) as f32,
            wo_a: GroupedLinear::new_parallel(
                cfg.o_groups,
                o_in,
                cfg.o_lora_rank,
                &*comm,
                vb.pp("wo_a"),
            )?,
            wo_b: RowParallelLinear::new(o_mid, dim, linear_format, comm, vb.pp("wo_b"))?,
            heads: n_heads / ranks,
            head_dim,
        })
    }

    /// `xs: [T, dim]` → the query latent and the heads `[T, H, head_dim]`, not rotated.
    pub(crate) fn queries(&self, xs: &Tensor) -> Result<(QueryLatent, Tensor)> {
        let qr = QueryLatent::new(self.q_norm.forward(&self.wq_a.forward(xs)?)?);
        let q = qr.through(self.wq_b.linear())?;
        Ok((qr, self.split(&q)?))
    }

    /// `[T, H * head_dim]` → `[T, H, head_dim]`.
    fn split(&self, q: &Tensor) -> Result<Tensor> {
        Ok(q.reshape((q.dims()[0], self.heads, self.head_dim))?)
    }

    /// `xs: [T, dim]` → window KV rows `[T, head_dim]`, rounded as the cache keeps them.
    pub(crate) fn kv_rows(&self, xs: &Tensor, table: &RopeTable) -> Result<Tensor> {
        self.finish_kv(&self.wkv.forward(xs)?, table)
    }

    fn finish_kv(&self, kv: &Tensor, table: &RopeTable) -> Result<Tensor> {
        // The whole vector is rounded, its rotated tail included.
        finish_rows(kv, Some(&self.kv_norm), table, RowQuant::Window)
    }

    /// [`queries`](Self::queries) and [`kv_rows`](Self::kv_rows) with what they share made once.
    pub(crate) fn queries_and_kv(
        &self,
        xs: &Tensor,
        table: &RopeTable,
    ) -> Result<((QueryLatent, Tensor), Tensor)> {
        #[cfg(feature = "cuda")]
        if let Some(joined) = &self.joined {
            return self.joined_queries_and_kv(joined, xs, table);
        }
        Ok((self.queries(xs)?, self.kv_rows(xs, table)?))
    }

    #[cfg(feature = "cuda")]
    fn joined_queries_and_kv(
        &self,
        joined: &Joined,
        xs: &Tensor,
        table: &RopeTable,
    ) -> Result<((QueryLatent, Tensor), Tensor)> {
        let input = Activation::new(xs)?;
        let both = joined.forward(&input)?;
        let (a, kv) = match both.as_deref() {
            Some([a, kv]) => (a.clone(), kv.clone()),
            _ => (
                quantised(&self.wq_a, &input)?,
                quantised(&self.wkv, &input)?,
            ),
        };
        let row = crate::cuda::Row {
            kv: &kv,
            norm: &self.kv_norm,
            table,
        };
        let wq_b = self.wq_b.linear();
        if let Some((q, Some(row))) = crate::cuda::query_heads(&a, &self.q_norm, wq_b, Some(row))? {
            let qr = QueryLatent {
                values: a,
                form: Some(LatentForm::Unnormed(self.q_norm.clone())),
            };
            return Ok(((qr, self.split(&q)?), row));
        }
        let (values, coded) = norm_activation(&a, &self.q_norm)?;
        let qr = QueryLatent {
            values,
            form: Some(LatentForm::Coded(coded)),
        };
        let q = self.split(&qr.through(wq_b)?)?;
        Ok(((qr, q), self.finish_kv(&kv, table)?))
    }

    /// Attention of heads `q: [T, H, head_dim]` as they come from their projection, over `scopes`, and then
    /// `entering` rows into their pool → `[T, H, head_dim]`.
    ///
    /// `table` turns the queries. KV rows are values too and carry the rotation of their position: turning what
    /// comes out back by the query's leaves the relative one.
    pub(crate) fn attend(
        &self,
        q: &Tensor,
        scopes: &[KvScope<'_>],
        table: &RopeTable,
        entering: Option<Entering<'_>>,
    ) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if q.device().is_cuda() {
            check_attn(q, scopes, &self.attn_sink)?;
            let around = crate::cuda::Around {
                turn: Some(table),
                entering,
            };
            return crate::cuda::sparse_attn(q, scopes, &self.attn_sink, self.scale, around);
        }
        let q = apply_rope(q, table, false)?;
        let o = sparse_attn(&q, scopes, &self.attn_sink, self.scale)?;
        // A chunk's own rows may push out rows that its first tokens still see.
        entering.map_or(Ok(()), Entering::enter)?;
        apply_rope(&o, table, true)
    }

    /// Attention's result `o: [T, H, head_dim]` → `[T, dim]`.
    pub(crate) fn output(&self, o: &Tensor) -> Result<Tensor> {
        let o = o.reshape((o.dims()[0], self.heads * self.head_dim))?;
        self.wo_b.forward(&self.wo_a.forward(&o)?)
    }
}
