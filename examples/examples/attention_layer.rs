//! One attention layer alone: a prompt, decoding, and taking tokens back.
//!
//! ```text
//! cargo run --release --example attention_layer
//! ```
//! The layer compresses its past two tokens to a row and selects the eight best rows for each query. The
//! same tokens give the same bits whether they come as one prompt, in pieces, or one at a time, and
//! whether caches hold bf16 or packed rows. Expected output: two lines ending in `same bits`, and the
//! size of the caches.

use std::{collections::HashMap, sync::Arc};

use candle_core::{DType, Device, Tensor};
use deepseek_v41::attention::{
    Attention, AttentionConfig, AttnPlan, CacheGeometry, CandidateRole, ChunkSpec, CompressedCache,
    IndexConfig, IndexKeySource, IndexRole, KvFormat, LayerCache, LayerRole, RopeTables,
    SharedAttentionRuntime, WindowCache,
};
use deepseek_v41::core::{LocalComm, Rope, RopeConfig};
use deepseek_v41::quant::WeightFormat;
use deepseek_v41::{Result, Weights};

const CPU: Device = Device::Cpu;
const DIM: usize = 128;

fn config() -> AttentionConfig {
    AttentionConfig {
        dim: DIM,
        n_heads: 4,
        q_lora_rank: 64,
        head_dim: 64,
        rope_head_dim: 16,
        o_groups: 2,
        o_lora_rank: 32,
        window_size: 8,
        norm_eps: 1e-20,
        role: LayerRole::Compressed {
            ratio: 2,
            owns_kv: true,
            index: IndexRole::Run(CandidateRole::None),
        },
        linear_format: WeightFormat::Bf16,
        index: IndexConfig {
            n_heads: 4,
            head_dim: 32,
            topk: 8,
            candidate_topk_blocks: 0,
            candidate_block_size: 0,
        },
        owns_index_k: true,
    }
}

/// Random weights under the checkpoint's names.
fn weights() -> Result<Weights> {
    let shapes = [
        ("wq_a", 64, DIM),
        ("wq_b", 4 * 64, 64),
        ("wkv", 64, DIM),
        ("wo_a", 2 * 32, 2 * 64),
        ("wo_b", DIM, 2 * 32),
        ("compressor.wkv", 64, DIM),
        ("compressor.wgate", 64, DIM),
        ("indexer.wq_b", 4 * 32, 64),
        ("indexer.weights_proj", 4, DIM),
        ("indexer.wk", 32, 64),
    ];
    let mut map = HashMap::from([("attn_sink".into(), Tensor::zeros(4, DType::F32, &CPU)?)]);
    for (name, out, input) in shapes {
        let weight = Tensor::randn(0f32, 1.0 / (input as f32).sqrt(), (out, input), &CPU)?;
        map.insert(format!("{name}.weight"), weight.to_dtype(DType::BF16)?);
    }
    for (name, dim) in [
        ("q_norm", 64),
        ("kv_norm", 64),
        ("compressor.norm", 64),
        ("indexer.k_norm", 32),
    ] {
        map.insert(
            format!("{name}.weight"),
            Tensor::ones(dim, DType::BF16, &CPU)?,
        );
    }
    Weights::from_tensors(map)
}

/// The layer's memory of one sequence, and how many tokens are in it.
struct Sequence {
    geometry: CacheGeometry,
    window: WindowCache,
    compressed: CompressedCache,
    len: u32,
}

impl Sequence {
    fn new(format: KvFormat) -> Result<Self> {
        let geometry = CacheGeometry {
            window: 8,
            max_rollback: 4,
            max_len: 1024,
            max_seqs: 1,
        };
        Ok(Self {
            geometry,
            window: WindowCache::new(geometry, 64, format, &CPU)?,
            compressed: CompressedCache::new(geometry, 2, 64, Some(32), format, &CPU)?,
            len: 0,
        })
    }

    /// Appends the tokens `xs: [T, DIM]` and returns the layer's output for them.
    fn append(&mut self, layer: &Attention, ropes: &[Rope; 2], xs: &Tensor) -> Result<Tensor> {
        let chunk = ChunkSpec {
            slot: 0,
            start: self.len,
            len: xs.dims()[0] as u32,
        };
        let plan = AttnPlan::new(&[chunk], &self.geometry, &[2], &CPU)?;
        let tables = RopeTables::new(&plan, &ropes[0], &ropes[1], &CPU)?;
        let cache = LayerCache {
            window: &mut self.window,
            source: Some(&mut self.compressed),
            kv: None,
            index_k: IndexKeySource::Owner,
        };
        self.len += chunk.len;
        layer.forward(
            xs,
            &plan,
            &tables,
            cache,
            &mut SharedAttentionRuntime::new(),
        )
    }
}

#[allow(clippy::print_stdout, reason = "what this program is for")]
fn main() -> Result<()> {
    let layer = Attention::new(&config(), Arc::new(LocalComm), weights()?.var_builder(&CPU))?;
    let plain = RopeConfig {
        dim: 16,
        theta: 10000.0,
        original_seq_len: 0,
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    let yarn = RopeConfig {
        theta: 160_000.0,
        original_seq_len: 64,
        ..plain.clone()
    };
    let ropes = [Rope::new(&plain)?, Rope::new(&yarn)?];
    let xs = Tensor::randn(0f32, 1.0, (41, DIM), &CPU)?.to_dtype(DType::BF16)?;
    let f32s = |xs: &Tensor| -> Result<Vec<f32>> {
        Ok(xs.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    };
    let verdict = |same| if same { "same bits" } else { "DIFFERENT" };

    let mut whole = Sequence::new(KvFormat::Bf16)?;
    let at_once = whole.append(&layer, &ropes, &xs)?;

    let mut packed = Sequence::new(KvFormat::Packed)?;
    let mut pieces = vec![packed.append(&layer, &ropes, &xs.narrow(0, 0, 30)?)?];
    for t in 30..41 {
        pieces.push(packed.append(&layer, &ropes, &xs.narrow(0, t, 1)?)?);
    }
    let pieces = Tensor::cat(&pieces, 0)?;
    println!(
        "a prompt of 41, or 30 and 11 single tokens: {}",
        verdict(f32s(&at_once)? == f32s(&pieces)?)
    );

    // Three other tokens, taken back: the caches need nothing but the old length.
    let other = Tensor::randn(0f32, 1.0, (3, DIM), &CPU)?.to_dtype(DType::BF16)?;
    let next = xs.narrow(0, 0, 2)?;
    let straight = whole.append(&layer, &ropes, &next)?;
    packed.append(&layer, &ropes, &other)?;
    packed.len -= 3;
    let rewound = packed.append(&layer, &ropes, &next)?;
    println!(
        "after three tokens taken back: {}",
        verdict(f32s(&straight)? == f32s(&rewound)?)
    );

    let bytes = |s: &Sequence| s.window.memory_usage() + s.compressed.memory_usage();
    println!(
        "caches for {} tokens: {} bytes as bf16, {} packed",
        1024,
        bytes(&whole),
        bytes(&packed)
    );
    Ok(())
}
