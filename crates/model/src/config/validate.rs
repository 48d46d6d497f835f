//! What a config must satisfy before anything is allocated from it.

use deepseek_v41_core::{Error, Result};
use deepseek_v41_quant::WeightFormat;

use super::Config;
use crate::LayerPlan;

/// Upper bounds of single dimensions: far above any model, far below an allocation that fails.
const MAX_DIM: usize = 1 << 20;
const MAX_COUNT: usize = 1 << 12;
/// Of what every token selects: the lists of a pass take this many numbers a token.
const MAX_SELECTED: usize = 1 << 16;
const MAX_VOCAB: usize = 1 << 24;
const MAX_CONTEXT: usize = 1 << 28;

fn in_range(field: &str, value: usize, min: usize, max: usize) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::config(
        field,
        format!("expected {min}..={max}, found {value}"),
    ))
}

fn divides(field: &str, value: usize, by: usize) -> Result<()> {
    if by != 0 && value.is_multiple_of(by) {
        return Ok(());
    }
    Err(Error::config(
        field,
        format!("expected a multiple of {by}, found {value}"),
    ))
}

fn positive(field: &str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::config(
        field,
        format!("expected a finite number above 0, found {value}"),
    ))
}

fn not_negative(field: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::config(
        field,
        format!("expected a finite number from 0 up, found {value}"),
    ))
}

pub(super) fn validate(c: &Config) -> Result<()> {
    in_range("vocab_size", c.vocab_size, 1, MAX_VOCAB)?;
    in_range("n_layers", c.n_layers, 1, MAX_COUNT)?;
    in_range("n_mtp_layers", c.n_mtp_layers, 0, MAX_COUNT)?;
    for (field, value) in [
        ("dim", c.dim),
        ("moe_inter_dim", c.moe_inter_dim),
        ("q_lora_rank", c.q_lora_rank),
        ("head_dim", c.head_dim),
        ("o_lora_rank", c.o_lora_rank),
        ("window_size", c.window_size),
    ] {
        in_range(field, value, 1, MAX_DIM)?;
    }
    in_range("index_topk", c.index_topk, 1, MAX_SELECTED)?;
    if c.candidate_source_layer.is_some() {
        let (blocks, size) = (c.candidate_topk_blocks, c.candidate_block_size);
        in_range("candidate_topk_blocks", blocks, 1, MAX_SELECTED)?;
        in_range("candidate_block_size", size, 1, MAX_DIM)?;
    }
    for &ratio in &c.compress_ratios {
        in_range("compress_ratios", ratio, 0, MAX_DIM)?;
    }
    in_range("original_seq_len", c.original_seq_len, 0, MAX_CONTEXT)?;
    if c.vision_enabled() {
        in_range("image_token_id", c.image_token_id, 0, c.vocab_size - 1)?;
    }
    for (field, value) in [
        ("n_heads", c.n_heads),
        ("n_routed_experts", c.n_routed_experts),
        ("o_groups", c.o_groups),
        ("index_n_heads", c.index_n_heads),
    ] {
        in_range(field, value, 1, MAX_COUNT)?;
    }
    in_range(
        "max_position_embeddings",
        c.max_position_embeddings,
        1,
        MAX_CONTEXT,
    )?;
    in_range(
        "n_activated_experts",
        c.n_activated_experts,
        1,
        c.n_routed_experts,
    )?;
    in_range("n_shared_experts", c.n_shared_experts, 1, 1)?;
    in_range("hc_mult", c.hc_mult, 1, 16)?;
    in_range("hc_sinkhorn_iters", c.hc_sinkhorn_iters, 1, 1000)?;

    // Activations are quantised in groups of 32 along the input of every quantised layer.
    if c.linear_format() == WeightFormat::Fp8 {
        divides("dim", c.dim, 32)?;
        divides("q_lora_rank", c.q_lora_rank, 32)?;
        divides("moe_inter_dim", c.moe_inter_dim, 32)?;
        divides("o_lora_rank", c.o_groups * c.o_lora_rank, 32)?;
    }
    if c.expert_dtype == Some(WeightFormat::Fp4) {
        divides("dim", c.dim, 32)?;
        divides("moe_inter_dim", c.moe_inter_dim, 32)?;
    }
    divides("head_dim", c.head_dim, 32)?;
    divides("n_heads", c.n_heads, c.o_groups)?;
    divides("rope_head_dim", c.rope_head_dim, 2)?;
    in_range("rope_head_dim", c.rope_head_dim, 2, c.head_dim)?;
    in_range("index_head_dim", c.index_head_dim, c.rope_head_dim, MAX_DIM)?;
    divides("index_head_dim", c.index_head_dim, 32)?;

    positive("gate_temp", c.gate_temp.into())?;
    positive("route_scale", c.route_scale.into())?;
    not_negative("swiglu_limit", c.swiglu_limit.into())?;
    not_negative("norm_eps", c.norm_eps.into())?;
    not_negative("hc_eps", c.hc_eps.into())?;
    positive("rope_theta", c.rope_theta)?;
    positive("compress_rope_theta", c.compress_rope_theta)?;
    if c.original_seq_len > 0 {
        positive("rope_factor", c.rope_factor)?;
        positive("beta_fast", c.beta_fast)?;
        positive("beta_slow", c.beta_slow)?;
    }
    validate_engram(c)?;
    validate_draft(c)?;
    // Sources, readers and ratios.
    LayerPlan::new(c).map(|_| ())
}

fn validate_engram(c: &Config) -> Result<()> {
    if c.engram_layer_ids.is_empty() {
        return Ok(());
    }
    for &layer in &c.engram_layer_ids {
        in_range("engram_layer_ids", layer, 0, c.n_layers - 1)?;
    }
    if !c.engram_layer_ids.is_sorted_by(|a, b| a < b) {
        let found = format!("expected ascending layers, found {:?}", c.engram_layer_ids);
        return Err(Error::config("engram_layer_ids", found));
    }
    in_range("engram_pad_id", c.engram_pad_id, 0, c.vocab_size - 1)?;
    in_range(
        "engram_compressed_vocab_size",
        c.engram_compressed_vocab_size,
        1,
        c.vocab_size,
    )?;
    in_range("engram_max_ngram_size", c.engram_max_ngram_size, 2, 64)?;
    in_range("engram_n_heads", c.engram_n_heads, 1, MAX_COUNT)?;
    in_range("engram_head_dim", c.engram_head_dim, 1, MAX_DIM)?;
    divides("engram_head_dim", c.engram_head_dim, 32)
}

fn validate_draft(c: &Config) -> Result<()> {
    if c.dspark_block_size == 0 {
        return Ok(());
    }
    in_range("dspark_block_size", c.dspark_block_size, 1, MAX_COUNT)?;
    in_range("n_mtp_layers", c.n_mtp_layers, 1, MAX_COUNT)?;
    in_range(
        "dspark_noise_token_id",
        c.dspark_noise_token_id,
        0,
        c.vocab_size - 1,
    )?;
    in_range("dspark_markov_rank", c.dspark_markov_rank, 1, MAX_DIM)?;
    in_range(
        "dspark_target_layer_ids",
        c.dspark_target_layer_ids.len(),
        1,
        c.n_layers,
    )?;
    for &layer in &c.dspark_target_layer_ids {
        in_range("dspark_target_layer_ids", layer, 0, c.n_layers - 1)?;
    }
    if !c.dspark_target_layer_ids.is_sorted_by(|a, b| a < b) {
        let found = format!(
            "expected ascending layers, found {:?}",
            c.dspark_target_layer_ids
        );
        return Err(Error::config("dspark_target_layer_ids", found));
    }
    let moe = c.draft_moe();
    in_range("dspark_n_routed_experts", moe.n_routed, 1, MAX_COUNT)?;
    in_range(
        "dspark_n_activated_experts",
        moe.n_activated,
        1,
        moe.n_routed,
    )
}
