//! One token through decoder layers of the released shapes, on random weights.

use std::time::Instant;

use candle_core::{DType, Device};
use deepseek_v41::{
    Result,
    core::RawTensor,
    model::{Config, ForwardBatch, Limits, ModelState, Transformer},
    quant::WeightFormat::{self, Bf16, Fp4, Fp8},
};

use crate::data::{Random, checkpoint};

/// The models: layers, and those of them that are a source of compressed KV with an indexer. The others read what
/// the one before has and use its selection, as most of the released model's do. What a larger model takes more
/// than the first is its additional layers' alone.
const MODELS: [(usize, &[usize]); 3] = [(4, &[0]), (8, &[0]), (5, &[0, 4])];
/// Instead of 384: a token reads as many, and they can be made quickly.
const EXPERTS: usize = 32;

/// The released configuration with `layers` layers, [`EXPERTS`] experts and a small vocabulary.
fn config(layers: usize, sources: &[usize]) -> Result<Config> {
    let ratios = vec!["2"; layers].join(", ");
    let text = format!(
        r#"{{
        "vocab_size": 1024, "dim": 5120, "moe_inter_dim": 2304, "n_layers": {layers}, "n_mtp_layers": 0,
        "n_heads": 64, "n_routed_experts": {EXPERTS}, "n_shared_experts": 1, "n_activated_experts": 6,
        "score_func": "sqrtsoftplus", "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1280,
        "head_dim": 512, "rope_head_dim": 64, "norm_eps": 1e-20, "o_groups": 8, "o_lora_rank": 1024,
        "window_size": 128, "kv_source_layers": {sources:?}, "index_source_layers": {sources:?},
        "original_seq_len": 65536, "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32,
        "beta_slow": 1, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "dtype": "fp8", "expert_dtype": "fp4",
        "compress_rope_theta": 160000, "compress_ratios": [{ratios}]
        }}"#
    );
    Config::from_json(&text)
}

/// Tensors by name, and their bytes.
struct Tensors {
    rng: Random,
    all: Vec<RawTensor>,
    /// Bytes that one token reads of the layers' weights.
    read: usize,
}

impl Tensors {
    fn add(&mut self, name: &str, n: usize, k: usize, format: WeightFormat, share: f64) {
        let parts = self.rng.weight(&format!("{name}."), n, k, format);
        let bytes: usize = parts.iter().map(|part| part.bytes.len()).sum();
        self.read += (bytes as f64 * share) as usize;
        self.all.extend(parts);
    }

    fn named(&mut self, name: &str, shape: &[usize], std: f32, dtype: DType) -> Result<()> {
        let tensor = self.rng.named(name, shape, std, dtype)?;
        self.read += tensor.bytes.len();
        self.all.push(tensor);
        Ok(())
    }
}

fn weights(cfg: &Config) -> Result<(Vec<RawTensor>, usize)> {
    let mut t = Tensors {
        rng: Random::new(5),
        all: Vec::new(),
        read: 0,
    };
    let (dim, inter, hd) = (cfg.dim, cfg.moe_inter_dim, cfg.head_dim);
    let (bf16, f32) = (DType::BF16, DType::F32);
    let used = cfg.n_activated_experts as f64 / cfg.n_routed_experts as f64;
    for layer in 0..cfg.n_layers {
        let at = |name: &str| format!("layers.{layer}.{name}");
        for site in ["attn", "ffn"] {
            let mixes = (2 + cfg.hc_mult) * cfg.hc_mult;
            t.named(
                &at(&format!("hc_{site}_fn")),
                &[mixes, cfg.hc_mult * dim],
                0.01,
                f32,
            )?;
            t.named(&at(&format!("hc_{site}_base")), &[mixes], 0.5, f32)?;
            t.named(&at(&format!("hc_{site}_scale")), &[3], 0.5, f32)?;
            t.named(&at(&format!("{site}_norm.weight")), &[dim], 1.0, bf16)?;
        }
        t.named(&at("attn.attn_sink"), &[cfg.n_heads], 1.0, f32)?;
        t.named(&at("attn.q_norm.weight"), &[cfg.q_lora_rank], 1.0, bf16)?;
        t.named(&at("attn.kv_norm.weight"), &[hd], 1.0, bf16)?;
        let heads = cfg.n_heads * hd;
        let o_mid = cfg.o_groups * cfg.o_lora_rank;
        t.add(&at("attn.wq_a"), cfg.q_lora_rank, dim, Fp8, 1.0);
        t.add(&at("attn.wq_b"), heads, cfg.q_lora_rank, Fp8, 1.0);
        t.add(&at("attn.wkv"), hd, dim, Fp8, 1.0);
        t.add(&at("attn.wo_a"), o_mid, heads / cfg.o_groups, Fp8, 1.0);
        t.add(&at("attn.wo_b"), dim, o_mid, Fp8, 1.0);
        if cfg.kv_source_layers.contains(&layer) {
            t.add(&at("attn.compressor.wkv"), hd, dim, Bf16, 1.0);
            t.add(&at("attn.compressor.wgate"), hd, dim, Bf16, 1.0);
            t.named(&at("attn.compressor.norm.weight"), &[hd], 1.0, bf16)?;
            // Once in two steps.
            t.add(&at("attn.indexer.wk"), cfg.index_head_dim, hd, Bf16, 0.5);
            t.named(
                &at("attn.indexer.k_norm.weight"),
                &[cfg.index_head_dim],
                1.0,
                bf16,
            )?;
        }
        if cfg.index_source_layers.contains(&layer) {
            let rows = cfg.index_n_heads * cfg.index_head_dim;
            t.add(&at("attn.indexer.wq_b"), rows, cfg.q_lora_rank, Fp8, 1.0);
            t.add(
                &at("attn.indexer.weights_proj"),
                cfg.index_n_heads,
                dim,
                Bf16,
                1.0,
            );
        }
        t.add(&at("ffn.gate"), cfg.n_routed_experts, dim, Bf16, 1.0);
        t.named(&at("ffn.gate.bias"), &[cfg.n_routed_experts], 0.1, f32)?;
        for (w, n, k) in [("w1", inter, dim), ("w2", dim, inter), ("w3", inter, dim)] {
            t.add(&at(&format!("ffn.shared_experts.{w}")), n, k, Fp8, 1.0);
            for e in 0..cfg.n_routed_experts {
                t.add(&at(&format!("ffn.experts.{e}.{w}")), n, k, Fp4, used);
            }
        }
    }
    let read = t.read;
    t.named("norm.weight", &[dim], 1.0, bf16)?;
    t.add("embed", cfg.vocab_size, dim, Bf16, 0.0);
    t.add("head", cfg.vocab_size, dim, Bf16, 0.0);
    Ok((t.all, read))
}

/// A model with its configuration and the bytes that a token reads of its layers.
type Sized = (Transformer, Config, f64);

/// Rows for the table: a layer's share of a step of one token, launched and replayed, at two contexts, and what
/// a layer that reads another's rows and one that makes and indexes rows take of a replayed one.
#[allow(clippy::print_stdout, reason = "the table is what this program is for")]
pub(crate) fn run(device: &Device, ceiling: f64) -> Result<()> {
    let model = |(layers, sources): (usize, &[usize])| -> Result<Sized> {
        let cfg = config(layers, sources)?;
        let (tensors, bytes) = weights(&cfg)?;
        let model = Transformer::new(&cfg, None, checkpoint(tensors, device))?;
        Ok((model, cfg, bytes as f64))
    };
    let [few, reading, indexing] = MODELS.map(model);
    let (few, reading, indexing) = (few?, reading?, indexing?);
    let layers = few.1.n_layers as f64;
    let row = |name: &str, context: usize, seconds: f64, bytes: f64| {
        println!(
            "| {name} | {context} | {:.1} | {:.0} GB/s | {:.1} % |",
            seconds * 1e6,
            bytes / seconds / 1e9,
            bytes / seconds / ceiling * 100.0
        );
    };
    println!(
        "\ndecoder layers of the released shapes, 1 token, {EXPERTS} experts instead of 384, {:.0} MB of \
         weights a layer\n\n| step | context | µs a layer | rate | of ceiling |\n| --- | ---: | ---: | ---: | ---: |",
        few.2 / layers / 1e6
    );
    for context in [4096usize, 65_536] {
        row(
            "launched",
            context,
            step(&few, context, false)? / layers,
            few.2 / layers,
        );
        let replayed = step(&few, context, true)?;
        row("replayed", context, replayed / layers, few.2 / layers);
        let more = [
            ("replayed, a reading layer more", &reading),
            ("replayed, an indexing layer more", &indexing),
        ];
        for (name, larger) in more {
            let added = larger.1.n_layers as f64 - layers;
            let seconds = step(larger, context, true)? - replayed;
            row(name, context, seconds / added, (larger.2 - few.2) / added);
        }
    }
    Ok(())
}

/// Median seconds of a step, from the host's call until its logits are there.
fn step((model, cfg, _): &Sized, context: usize, replay: bool) -> Result<f64> {
    let limits = Limits {
        max_len: context + 256,
        ..Limits::default()
    };
    let mut state = ModelState::new(cfg, limits, model.device())?;
    state.set_replay(replay);
    let seq = state.create_synthetic(cfg, context)?;
    let mut times = Vec::new();
    for i in 0..60 {
        let start = Instant::now();
        let batch = ForwardBatch::one(seq, vec![(i * 97 % 1024) as u32]);
        let out = model.forward(&batch, &mut state)?;
        out.logits.flatten_all()?.to_vec1::<f32>()?;
        times.push(start.elapsed().as_secs_f64());
    }
    if replay && state.replayed() * 2 < times.len() as u64 {
        return Err(deepseek_v41::Error::Unsupported {
            what: "replaying steps: launched ones were measured".into(),
        });
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
