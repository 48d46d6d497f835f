//! Compressed latents, over a prefill and single steps.

use deepseek_v41::{
    Result,
    attention::{
        AttentionConfig, AttnPlan, CacheGeometry, CandidateRole, ChunkSpec, CompressedCache,
        Compressor, IndexConfig, IndexRole, KvFormat, LayerRole,
    },
    quant::WeightFormat,
};
use half::bf16;

use crate::case::{Case, bf16s};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    let Some(ratio) = case
        .name
        .strip_prefix("compressor_r")
        .and_then(|r| r.parse::<usize>().ok())
    else {
        return Ok(false);
    };
    let x = case.tensor("x")?;
    let (batch, len, dim) = x.dims3()?;
    let head_dim = case.shape("prefill")?[2];
    let cfg = config(dim, head_dim, ratio);
    let names = [
        ("wkv.weight", "wkv.weight"),
        ("wgate.weight", "wgate.weight"),
        ("norm", "norm.weight"),
    ];
    let compressor = Compressor::new(&cfg, ratio, case.weights_named(&names))?;
    let geometry = CacheGeometry {
        window: 1,
        max_rollback: 0,
        max_len: len,
        max_seqs: batch,
    };
    let mut cache = CompressedCache::new(
        geometry,
        ratio,
        head_dim,
        None,
        KvFormat::default(),
        case.device,
    )?;

    let prefill: usize = case.noted("prefill")?;
    let (mut first, mut later) = (vec![Vec::new(); batch], vec![Vec::new(); batch]);
    for (start, n) in std::iter::once((0, prefill)).chain((prefill..len).map(|at| (at, 1))) {
        let chunk = |slot| ChunkSpec {
            slot,
            start: start as u32,
            len: n as u32,
        };
        let chunks: Vec<ChunkSpec> = (0..batch as u32).map(chunk).collect();
        let plan = AttnPlan::new(&chunks, &geometry, &[ratio], case.device)?;
        let xs = x.narrow(1, start, n)?.flatten(0, 1)?;
        if let Some(latent) = compressor.forward(&xs, plan.compress(ratio)?, &mut cache)? {
            let rows: Vec<bf16> = bf16s(&latent)?;
            let into = if start == 0 { &mut first } else { &mut later };
            for (out, rows) in into.iter_mut().zip(rows.chunks(rows.len() / batch)) {
                out.extend_from_slice(rows);
            }
        }
    }
    for (part, got) in [("prefill", first), ("decode", later)] {
        let want = case.bf16s(part)?;
        case.one_ulp_of(part, &got.concat(), &want)?;
    }
    Ok(true)
}

/// A layer of which only the compressor is built.
fn config(dim: usize, head_dim: usize, ratio: usize) -> AttentionConfig {
    AttentionConfig {
        dim,
        head_dim,
        norm_eps: 1e-20,
        role: LayerRole::Compressed {
            ratio,
            owns_kv: true,
            index: IndexRole::Run(CandidateRole::None),
        },
        n_heads: 1,
        q_lora_rank: 32,
        rope_head_dim: 2,
        o_groups: 1,
        o_lora_rank: 32,
        window_size: 1,
        linear_format: WeightFormat::Bf16,
        index: IndexConfig {
            n_heads: 1,
            head_dim: 32,
            topk: 1,
            candidate_topk_blocks: 0,
            candidate_block_size: 0,
        },
        owns_index_k: true,
    }
}
