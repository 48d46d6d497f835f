//! One layer with its caches, driven step by step.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses its own part"
)]

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_attention::{
    Attention, AttentionConfig, AttnPlan, CacheGeometry, CandidateRole, ChunkSpec, CompressedCache,
    IndexConfig, IndexKeySource, IndexRole, KvFormat, KvPool, LayerCache, LayerRole, RopeTables,
    SharedAttentionRuntime, WindowCache,
};
use deepseek_v41_core::{LocalComm, Result, Rope, RopeConfig, Weights};
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::{random_bf16, random_f32};
use half::bf16;

pub const CPU: Device = Device::Cpu;

/// Five heads, a window of seven, nothing a multiple of anything.
pub fn odd_config(ratio: usize) -> AttentionConfig {
    AttentionConfig {
        dim: 64,
        n_heads: 5,
        q_lora_rank: 32,
        head_dim: 32,
        rope_head_dim: 8,
        o_groups: 5,
        o_lora_rank: 32,
        window_size: 7,
        norm_eps: 1e-20,
        role: match ratio {
            0 => LayerRole::Window,
            _ => LayerRole::Compressed {
                ratio,
                owns_kv: true,
                index: IndexRole::Run(CandidateRole::None),
            },
        },
        linear_format: WeightFormat::Fp8,
        index: IndexConfig {
            n_heads: 3,
            head_dim: 32,
            topk: 4,
            candidate_topk_blocks: 2,
            candidate_block_size: 3,
        },
        owns_index_k: ratio > 0,
    }
}

/// Random weights for every tensor a layer of this configuration reads.
pub fn random_weights(cfg: &AttentionConfig, seed: u64) -> HashMap<String, Tensor> {
    let mut weights = Random {
        map: HashMap::new(),
        seed,
    };
    let index = cfg.index;
    weights.linear("wq_a", cfg.q_lora_rank, cfg.dim, cfg.linear_format);
    weights.norm("q_norm", cfg.q_lora_rank);
    weights.linear(
        "wq_b",
        cfg.n_heads * cfg.head_dim,
        cfg.q_lora_rank,
        cfg.linear_format,
    );
    weights.linear("wkv", cfg.head_dim, cfg.dim, cfg.linear_format);
    weights.norm("kv_norm", cfg.head_dim);
    let (o_in, o_mid) = (
        cfg.n_heads * cfg.head_dim / cfg.o_groups,
        cfg.o_groups * cfg.o_lora_rank,
    );
    weights.linear("wo_a", o_mid, o_in, WeightFormat::Bf16);
    weights.linear("wo_b", cfg.dim, o_mid, cfg.linear_format);
    let sink = random_f32(cfg.n_heads, 1.0, seed);
    weights.map.insert(
        "attn_sink".into(),
        Tensor::from_vec(sink, cfg.n_heads, &CPU).unwrap(),
    );
    if cfg.role.owns_kv() {
        weights.linear("compressor.wkv", cfg.head_dim, cfg.dim, WeightFormat::Bf16);
        if cfg.role.ratio() > Some(1) {
            weights.linear(
                "compressor.wgate",
                cfg.head_dim,
                cfg.dim,
                WeightFormat::Bf16,
            );
        }
        weights.norm("compressor.norm", cfg.head_dim);
    }
    if cfg.role.indexer().is_some() {
        let heads = index.n_heads * index.head_dim;
        weights.linear("indexer.wq_b", heads, cfg.q_lora_rank, cfg.linear_format);
        weights.linear(
            "indexer.weights_proj",
            index.n_heads,
            cfg.dim,
            WeightFormat::Bf16,
        );
    }
    if cfg.owns_index_k {
        weights.linear(
            "indexer.wk",
            index.head_dim,
            cfg.head_dim,
            WeightFormat::Bf16,
        );
        weights.norm("indexer.k_norm", index.head_dim);
    }
    weights.map
}

struct Random {
    map: HashMap<String, Tensor>,
    seed: u64,
}

impl Random {
    fn linear(&mut self, name: &str, out: usize, input: usize, format: WeightFormat) {
        self.seed += 1;
        let std = (input as f32).powf(-0.5);
        let weight = if format == WeightFormat::Fp8 {
            let (rows, cols) = (out.div_ceil(32), input.div_ceil(32));
            let scale: Vec<u8> = (0..rows * cols).map(|i| 118 + (i % 3) as u8).collect();
            let scale = Tensor::from_vec(scale, (rows, cols), &CPU).unwrap();
            self.map.insert(format!("{name}.scale"), scale);
            // Codes spread over the whole format, NaN left out.
            let codes: Vec<u8> = random_f32(out * input, 1.0, self.seed)
                .iter()
                .map(|x| ((x.abs() * 40.0) as u8).min(0x7e) | if *x < 0.0 { 0x80 } else { 0 })
                .collect();
            Tensor::from_vec(codes, (out, input), &CPU).unwrap()
        } else {
            Tensor::from_vec(random_bf16(out * input, std, self.seed), (out, input), &CPU).unwrap()
        };
        self.map.insert(format!("{name}.weight"), weight);
    }

    fn norm(&mut self, name: &str, dim: usize) {
        self.seed += 1;
        let weight: Vec<bf16> = random_f32(dim, 0.2, self.seed)
            .into_iter()
            .map(|x| bf16::from_f32(1.0 + x))
            .collect();
        self.map.insert(
            format!("{name}.weight"),
            Tensor::from_vec(weight, dim, &CPU).unwrap(),
        );
    }
}

/// A layer, its caches and its rotations.
pub struct Rig {
    pub cfg: AttentionConfig,
    pub geometry: CacheGeometry,
    pub attention: Attention,
    pub window: WindowCache,
    pub source: Option<CompressedCache>,
    pub rope: Rope,
    pub compressed_rope: Rope,
    pub shared: SharedAttentionRuntime,
}

impl Rig {
    pub fn new(cfg: &AttentionConfig, geometry: CacheGeometry, seed: u64) -> Self {
        Self::with_weights(cfg, geometry, random_weights(cfg, seed))
    }

    /// The same with its caches kept in another format.
    pub fn kept_as(mut self, format: KvFormat) -> Self {
        self.window = WindowCache::new(self.geometry, self.cfg.head_dim, format, &CPU).unwrap();
        self.source = CompressedCache::for_layer(&self.cfg, self.geometry, format, &CPU).unwrap();
        self
    }

    pub fn with_weights(
        cfg: &AttentionConfig,
        geometry: CacheGeometry,
        weights: HashMap<String, Tensor>,
    ) -> Self {
        let vb = Weights::from_tensors(weights).unwrap().var_builder(&CPU);
        let format = KvFormat::default();
        let rope = RopeConfig {
            dim: cfg.rope_head_dim,
            theta: 10000.0,
            original_seq_len: 0,
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let yarn = RopeConfig {
            theta: 40000.0,
            original_seq_len: 32,
            ..rope.clone()
        };
        Self {
            attention: Attention::new(cfg, Arc::new(LocalComm), vb).unwrap(),
            window: WindowCache::new(geometry, cfg.head_dim, format, &CPU).unwrap(),
            source: CompressedCache::for_layer(cfg, geometry, format, &CPU).unwrap(),
            rope: Rope::new(&rope).unwrap(),
            compressed_rope: Rope::new(&yarn).unwrap(),
            cfg: cfg.clone(),
            geometry,
            shared: SharedAttentionRuntime::new(),
        }
    }

    pub fn plan(&self, chunks: &[ChunkSpec]) -> AttnPlan {
        let ratios: Vec<usize> = self.cfg.role.ratio().into_iter().collect();
        AttnPlan::new(chunks, &self.geometry, &ratios, &CPU).unwrap()
    }

    pub fn try_step(&mut self, chunks: &[ChunkSpec], xs: &Tensor) -> Result<Tensor> {
        let plan = self.plan(chunks);
        let ropes = RopeTables::new(&plan, &self.rope, &self.compressed_rope, &CPU)?;
        self.shared = SharedAttentionRuntime::new();
        let cache = LayerCache {
            window: &mut self.window,
            source: self.source.as_mut(),
            kv: None,
            index_k: IndexKeySource::Owner,
        };
        self.attention
            .forward(xs, &plan, &ropes, cache, &mut self.shared)
    }

    /// Runs one step; `xs` holds the chunks' tokens end to end.
    pub fn step(&mut self, chunks: &[ChunkSpec], xs: &Tensor) -> Tensor {
        self.try_step(chunks, xs).unwrap()
    }

    /// Feeds `xs: [len, dim]` to `slot` from position `start` on, in chunks of the given lengths, the
    /// last repeated.
    pub fn feed(&mut self, slot: u32, start: u32, xs: &Tensor, lens: &[u32]) -> Vec<bf16> {
        let len = xs.dims()[0] as u32;
        let (mut at, mut out, mut lens) = (0, Vec::new(), lens.iter().copied());
        let mut step = len.max(1);
        while at < len {
            step = lens.next().unwrap_or(step).min(len - at);
            let part = xs.narrow(0, at as usize, step as usize).unwrap();
            out.extend(bits(&self.step(&[chunk(slot, start + at, step)], &part)));
            at += step;
            step = step.max(1);
        }
        out
    }

    /// The logical compressed rows selected for each token, in the last step.
    pub fn selected(&self, slots: &[u32]) -> Vec<Vec<i32>> {
        let source = self.source.as_ref().unwrap();
        let rows = self.shared.topk().unwrap().0.to_vec2::<i32>().unwrap();
        let logical = |(row, slot): (Vec<i32>, &u32)| {
            let base = source.rows(*slot).rows().start as i32;
            row.into_iter()
                .filter(|i| *i >= 0)
                .map(|i| i - base)
                .collect()
        };
        rows.into_iter().zip(slots).map(logical).collect()
    }
}

pub fn geometry(
    window: usize,
    max_rollback: usize,
    max_len: usize,
    max_seqs: usize,
) -> CacheGeometry {
    CacheGeometry {
        window,
        max_rollback,
        max_len,
        max_seqs,
    }
}

pub fn chunk(slot: u32, start: u32, len: u32) -> ChunkSpec {
    ChunkSpec { slot, start, len }
}

pub fn input(tokens: usize, dim: usize, seed: u64) -> Tensor {
    Tensor::from_vec(random_bf16(tokens * dim, 1.0, seed), (tokens, dim), &CPU).unwrap()
}

pub fn bits(xs: &Tensor) -> Vec<bf16> {
    assert_eq!(xs.dtype(), DType::BF16);
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

/// Every row of a pool.
pub fn kept(pool: &KvPool) -> Vec<bf16> {
    bits(&pool.read(0..pool.rows() as u32).unwrap())
}
