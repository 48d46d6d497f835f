//! The model's configuration, in both dialects it is published in.

mod read;
mod validate;

use std::path::Path;

use deepseek_v41_attention::{AttentionConfig, IndexConfig, LayerRole};
use deepseek_v41_core::{Error, Result, RopeConfig};
use deepseek_v41_engram::EngramConfig;
use deepseek_v41_hyperconn::HyperConnConfig;
use deepseek_v41_moe::{MoeConfig, ScoreFunc};
use deepseek_v41_quant::WeightFormat;

/// Storage of the linear layers (`dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearDtype {
    /// bf16 weights.
    Bf16,
    /// e4m3 weights with one e8m0 scale per 32×32 tile.
    Fp8,
}

/// Whose index keys an indexer scores while its own source has not finished a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IndexKeys {
    /// Every source's own keys: what the model was trained with.
    #[default]
    Owner,
    /// The keys published last by any source, as the official decode loop does: in decode a source
    /// of ratio 2 scores another source's keys on every second token. For comparisons only.
    LastPublished,
}

/// Configuration of the whole model; field names and defaults are those of the official inference
/// config.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Config {
    pub dtype: LinearDtype,
    /// Storage of the routed experts; `None` follows `dtype`.
    pub expert_dtype: Option<WeightFormat>,
    pub vocab_size: usize,
    pub dim: usize,
    pub moe_inter_dim: usize,
    pub n_layers: usize,
    /// Draft layers after the backbone.
    pub n_mtp_layers: usize,
    pub n_heads: usize,
    pub n_routed_experts: usize,
    pub n_shared_experts: usize,
    pub n_activated_experts: usize,
    pub score_func: ScoreFunc,
    pub gate_temp: f32,
    pub norm_topk_prob: bool,
    pub route_scale: f32,
    /// Clamp of the SwiGLU branches; 0 means none.
    pub swiglu_limit: f32,
    pub q_lora_rank: usize,
    pub head_dim: usize,
    pub rope_head_dim: usize,
    pub norm_eps: f32,
    pub o_groups: usize,
    pub o_lora_rank: usize,
    pub window_size: usize,
    /// One entry a layer, draft layers included: 0 = window only, r = KV compressed r to 1.
    pub compress_ratios: Vec<usize>,
    pub kv_source_layers: Vec<usize>,
    pub index_source_layers: Vec<usize>,
    pub compress_rope_theta: f64,
    /// Context of the original training in tokens; 0 turns YaRN off.
    pub original_seq_len: usize,
    pub rope_theta: f64,
    pub rope_factor: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    /// The layer that publishes candidate blocks, if any.
    pub candidate_source_layer: Option<usize>,
    pub candidate_topk_blocks: usize,
    pub candidate_block_size: usize,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub engram_layer_ids: Vec<usize>,
    pub engram_num_embeddings: Vec<usize>,
    pub engram_max_ngram_size: usize,
    pub engram_vocab_size: usize,
    pub engram_n_heads: usize,
    pub engram_head_dim: usize,
    pub engram_pad_id: usize,
    pub engram_compressed_vocab_size: usize,
    /// 0 = no vision tower.
    pub vision_n_layers: usize,
    pub vision_dim: usize,
    pub vision_n_heads: usize,
    pub vision_inter_dim: usize,
    pub vision_patch_size: usize,
    pub vision_rope_theta: f64,
    pub vision_downsample_ratio: usize,
    pub vision_max_n_token: usize,
    pub vision_min_pixels: usize,
    pub vision_max_wh_ratio: Option<f64>,
    pub image_token_id: usize,
    /// Tokens drafted a step; 0 = no draft head.
    pub dspark_block_size: usize,
    pub dspark_noise_token_id: usize,
    pub dspark_target_layer_ids: Vec<usize>,
    pub dspark_markov_rank: usize,
    /// 0 = as the backbone.
    pub dspark_n_routed_experts: usize,
    /// 0 = as the backbone.
    pub dspark_n_activated_experts: usize,
    /// Longest context the model was made for, in tokens. The inference dialect does not name one;
    /// it is then 2^20, the released model's.
    pub max_position_embeddings: usize,
    /// Not part of the published files: see [`IndexKeys`].
    pub index_keys: IndexKeys,
}

impl Config {
    /// Parses and validates a config in either dialect: the inference config (keys of the official
    /// `ModelArgs`) or the published nested `config.json` with `text_config`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field that is missing, of another type, or impossible.
    pub fn from_json(text: &str) -> Result<Self> {
        let config = read::from_json(text)?;
        config.validate()?;
        Ok(config)
    }

    /// [`Config::from_json`] on a file.
    ///
    /// # Errors
    /// Also [`Error::Io`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        Self::from_json(&text)
    }

    /// Checks every field, alone and against the others.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field.
    pub fn validate(&self) -> Result<()> {
        validate::validate(self)
    }

    /// Storage of the linear layers.
    pub fn linear_format(&self) -> WeightFormat {
        match self.dtype {
            LinearDtype::Bf16 => WeightFormat::Bf16,
            LinearDtype::Fp8 => WeightFormat::Fp8,
        }
    }

    /// Whether the checkpoint has a vision tower (and a routing bias for image tokens).
    pub fn vision_enabled(&self) -> bool {
        self.vision_n_layers > 0
    }

    /// Settings of an attention layer in this role.
    pub fn attention(&self, role: LayerRole) -> AttentionConfig {
        AttentionConfig {
            dim: self.dim,
            n_heads: self.n_heads,
            q_lora_rank: self.q_lora_rank,
            head_dim: self.head_dim,
            rope_head_dim: self.rope_head_dim,
            o_groups: self.o_groups,
            o_lora_rank: self.o_lora_rank,
            window_size: self.window_size,
            norm_eps: self.norm_eps,
            role,
            linear_format: self.linear_format(),
            index: IndexConfig {
                n_heads: self.index_n_heads,
                head_dim: self.index_head_dim,
                topk: self.index_topk,
                candidate_topk_blocks: self.candidate_topk_blocks,
                candidate_block_size: self.candidate_block_size,
            },
            owns_index_k: role.owns_kv() && role.indexer().is_some(),
        }
    }

    /// Settings of a backbone layer's experts.
    pub fn moe(&self) -> MoeConfig {
        MoeConfig {
            dim: self.dim,
            inter_dim: self.moe_inter_dim,
            n_routed: self.n_routed_experts,
            n_activated: self.n_activated_experts,
            score_func: self.score_func,
            gate_temp: self.gate_temp,
            norm_topk_prob: self.norm_topk_prob,
            route_scale: self.route_scale,
            swiglu_limit: self.swiglu_limit,
            expert_format: self.expert_dtype.unwrap_or(self.linear_format()),
            shared_format: self.linear_format(),
            bias_vl: self.vision_enabled(),
        }
    }

    /// Settings of a draft layer's experts.
    pub fn draft_moe(&self) -> MoeConfig {
        let or = |own: usize, backbone: usize| if own > 0 { own } else { backbone };
        MoeConfig {
            n_routed: or(self.dspark_n_routed_experts, self.n_routed_experts),
            n_activated: or(self.dspark_n_activated_experts, self.n_activated_experts),
            ..self.moe()
        }
    }

    /// Settings of the hyper-connections.
    pub fn hyperconn(&self) -> HyperConnConfig {
        HyperConnConfig {
            hc_mult: self.hc_mult,
            dim: self.dim,
            sinkhorn_iters: self.hc_sinkhorn_iters,
            hc_eps: self.hc_eps,
            norm_eps: self.norm_eps,
        }
    }

    /// Settings of the Engram layers; `None` when the model has none.
    pub fn engram(&self) -> Option<EngramConfig> {
        (!self.engram_layer_ids.is_empty()).then(|| EngramConfig {
            layer_ids: self.engram_layer_ids.clone(),
            max_ngram_size: self.engram_max_ngram_size,
            vocab_size: self.engram_vocab_size,
            n_heads: self.engram_n_heads,
            head_dim: self.engram_head_dim,
            num_embeddings: self.engram_num_embeddings.clone(),
            compressed_vocab_size: self.engram_compressed_vocab_size,
            pad_id: self.engram_pad_id as u32,
            dim: self.dim,
            hc_mult: self.hc_mult,
            norm_eps: self.norm_eps,
            linear_format: self.linear_format(),
        })
    }

    /// Rotary frequencies of layers that have a window alone (and of the draft layers).
    pub fn window_rope(&self) -> RopeConfig {
        RopeConfig {
            dim: self.rope_head_dim,
            theta: self.rope_theta,
            original_seq_len: 0,
            factor: self.rope_factor,
            beta_fast: self.beta_fast,
            beta_slow: self.beta_slow,
        }
    }

    /// Rotary frequencies of layers with a compressed cache, for all their vectors.
    pub fn compressed_rope(&self) -> RopeConfig {
        RopeConfig {
            theta: self.compress_rope_theta,
            original_seq_len: self.original_seq_len,
            ..self.window_rope()
        }
    }
}
