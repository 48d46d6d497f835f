//! One layer with its own compressor and indexer: outputs, selections and caches of a prefill and
//! single steps.

use std::sync::Arc;

use candle_core::Tensor;
use deepseek_v41::{
    Result,
    attention::{
        Attention, AttentionConfig, AttnPlan, CacheGeometry, CandidateRole, ChunkSpec,
        CompressedCache, IndexConfig, IndexKeySource, IndexRole, KvFormat, KvPool, LayerCache,
        LayerRole, RopeTables, SharedAttentionRuntime, SlotMap, WindowCache,
    },
    core::{LocalComm, Rope, RopeConfig},
    quant::WeightFormat,
};

use crate::{
    case::{Case, f32s},
    tolerance::{ATTENTION, CACHE_FLIPS, SELECTION_FLIPS},
};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    if !case.name.starts_with("attention_") {
        return Ok(false);
    }
    let x = case.tensor("x")?;
    let (batch, len, dim) = x.dims3()?;
    let mut layer = Layer::new(case, batch, len)?;
    // Without a selection in the prefill the prompt is shorter than a group: any split before the
    // first recorded step gives the same.
    let recorded = (0..)
        .take_while(|j| case.has(&format!("step_idx.{j}")))
        .count();
    let prefill = match case.has("prefill_idx") {
        true => case.shape("prefill_idx")?[1],
        false => len - recorded,
    };

    let mut out = Vec::new();
    let mut selections = Selections::default();
    for (start, n) in std::iter::once((0, prefill)).chain((prefill..len).map(|at| (at, 1))) {
        let (y, selected) = layer.step(&x.narrow(1, start, n)?, start)?;
        out.push(y.reshape((batch, n, dim))?);
        if start == 0 && case.has("prefill_idx") {
            selections.compare(case, &selected, "prefill_idx", n)?;
        } else if start > 0 && start + recorded >= len {
            // The last `recorded` steps are those in which the indexer ran.
            let step = start + recorded - len;
            selections.compare(
                case,
                &selected,
                &format!("step_idx.{step}"),
                layer.cfg.window_size,
            )?;
        }
    }
    let y = f32s(&Tensor::cat(&out, 1)?)?;
    let want = case.f32s("y")?;
    case.rms("y", &y, &want, ATTENTION)?;
    case.share(
        "selected rows",
        selections.missed,
        selections.rows,
        SELECTION_FLIPS,
    );

    let groups = (len / layer.ratio) as u32;
    let (slots, source) = (0..batch as u32, &layer.source);
    let read = |pool: &KvPool, maps: Vec<SlotMap>, rows: u32| -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for map in maps {
            let base = map.rows().start;
            all.extend(f32s(&pool.read(base..base + rows)?)?);
        }
        Ok(all)
    };
    let rings = slots
        .clone()
        .map(|slot| layer.geometry.ring(slot))
        .collect();
    let rows: Vec<SlotMap> = slots.map(|slot| source.rows(slot)).collect();
    let caches = [
        (
            "window_cache",
            read(layer.window.kv(), rings, layer.cfg.window_size as u32)?,
        ),
        ("compress_cache", read(source.kv(), rows.clone(), groups)?),
        ("index_cache", read(source.index_k()?, rows, groups)?),
    ];
    for (part, got) in caches {
        let want = case.f32s(part)?;
        if got.len() != want.len() {
            return Err(case.bad(format!(
                "{part}: {} values, expected {}",
                got.len(),
                want.len()
            )));
        }
        let differing = got.iter().zip(&want).filter(|(a, b)| a != b).count();
        case.share(part, differing, want.len(), CACHE_FLIPS);
    }
    Ok(true)
}

/// Rows that only one of the two sides selected, and how many were selected.
#[derive(Default)]
struct Selections {
    missed: usize,
    rows: usize,
}

impl Selections {
    /// `got`: each token's compressed rows. The reference counts them from `offset`, the end of the
    /// window part of its keys.
    fn compare(
        &mut self,
        case: &Case<'_>,
        got: &[Vec<i64>],
        part: &str,
        offset: usize,
    ) -> Result<()> {
        let want = case.ints(part)?;
        let width = want.len() / got.len().max(1);
        for (got, want) in got.iter().zip(want.chunks(width.max(1))) {
            let want: Vec<i64> = want
                .iter()
                .filter(|i| **i >= 0)
                .map(|i| i - offset as i64)
                .collect();
            self.rows += want.len();
            self.missed += want.iter().filter(|i| !got.contains(i)).count();
            self.missed += got.len().saturating_sub(want.len());
        }
        Ok(())
    }
}

/// The layer, its caches and its rotations.
struct Layer {
    cfg: AttentionConfig,
    ratio: usize,
    attention: Attention,
    geometry: CacheGeometry,
    window: WindowCache,
    source: CompressedCache,
    ropes: [Rope; 2],
}

impl Layer {
    fn new(case: &Case<'_>, batch: usize, len: usize) -> Result<Self> {
        let ratios: Vec<usize> = case.arg("compress_ratios")?;
        let ratio = *ratios
            .first()
            .ok_or_else(|| case.bad("no compress_ratios"))?;
        let cfg = AttentionConfig {
            dim: case.arg("dim")?,
            n_heads: case.arg("n_heads")?,
            q_lora_rank: case.arg("q_lora_rank")?,
            head_dim: case.arg("head_dim")?,
            rope_head_dim: case.arg("rope_head_dim")?,
            o_groups: case.arg("o_groups")?,
            o_lora_rank: case.arg("o_lora_rank")?,
            window_size: case.arg("window_size")?,
            norm_eps: case.arg("norm_eps")?,
            role: LayerRole::Compressed {
                ratio,
                owns_kv: true,
                index: IndexRole::Run(CandidateRole::None),
            },
            linear_format: match case.arg::<String>("dtype")?.as_str() {
                "fp8" => WeightFormat::Fp8,
                _ => WeightFormat::Bf16,
            },
            index: IndexConfig {
                n_heads: case.arg("index_n_heads")?,
                head_dim: case.arg("index_head_dim")?,
                topk: case.arg("index_topk")?,
                candidate_topk_blocks: 0,
                candidate_block_size: 0,
            },
            owns_index_k: true,
        };
        let geometry = CacheGeometry {
            window: cfg.window_size,
            max_rollback: 0,
            max_len: len,
            max_seqs: batch,
        };
        let format = KvFormat::default();
        let window_rope = RopeConfig {
            dim: cfg.rope_head_dim,
            theta: case.arg("rope_theta")?,
            original_seq_len: 0,
            factor: case.arg("rope_factor")?,
            beta_fast: case.arg("beta_fast")?,
            beta_slow: case.arg("beta_slow")?,
        };
        let compressed_rope = RopeConfig {
            theta: case.arg("compress_rope_theta")?,
            original_seq_len: case.arg("original_seq_len")?,
            ..window_rope.clone()
        };
        Ok(Self {
            attention: Attention::new(&cfg, Arc::new(LocalComm), case.weights())?,
            window: WindowCache::new(geometry, cfg.head_dim, format, case.device)?,
            source: CompressedCache::new(
                geometry,
                ratio,
                cfg.head_dim,
                Some(cfg.index.head_dim),
                format,
                case.device,
            )?,
            ropes: [Rope::new(&window_rope)?, Rope::new(&compressed_rope)?],
            cfg,
            ratio,
            geometry,
        })
    }

    /// `xs: [batch, n, dim]` at position `start` → `[batch * n, dim]` and each token's compressed rows.
    fn step(&mut self, xs: &Tensor, start: usize) -> Result<(Tensor, Vec<Vec<i64>>)> {
        let (batch, n, _) = xs.dims3()?;
        let device = xs.device();
        let chunk = |slot| ChunkSpec {
            slot,
            start: start as u32,
            len: n as u32,
        };
        let chunks: Vec<ChunkSpec> = (0..batch as u32).map(chunk).collect();
        let plan = AttnPlan::new(&chunks, &self.geometry, &[self.ratio], device)?;
        let ropes = RopeTables::new(&plan, &self.ropes[0], &self.ropes[1], device)?;
        let cache = LayerCache {
            window: &mut self.window,
            source: Some(&mut self.source),
            kv: None,
            index_k: IndexKeySource::Owner,
        };
        let mut shared = SharedAttentionRuntime::new();
        let y = self
            .attention
            .forward(&xs.flatten(0, 1)?, &plan, &ropes, cache, &mut shared)?;
        let rows = shared.topk()?.0.to_vec2::<i32>()?;
        let logical = rows.into_iter().enumerate().map(|(token, rows)| {
            let base = i64::from(self.source.rows((token / n) as u32).rows().start);
            rows.into_iter()
                .filter(|i| *i >= 0)
                .map(|i| i64::from(i) - base)
                .collect()
        });
        Ok((y, logical.collect()))
    }
}
