//! Reading either dialect into [`Config`].

use deepseek_v41_core::{Error, Result};
use deepseek_v41_moe::ScoreFunc;
use deepseek_v41_quant::WeightFormat;
use serde_json::{Map, Value};

use super::{Config, IndexKeys, LinearDtype};

/// Which names a config uses.
#[derive(Clone, Copy, PartialEq)]
enum Dialect {
    Inference,
    Published,
}

/// One JSON object and the dialect its keys are in.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    dialect: Dialect,
}

fn wrong(field: &str, expected: &str, found: &Value) -> Error {
    let mut found = found.to_string();
    if found.len() > 60 {
        found = found.chars().take(57).chain("...".chars()).collect();
    }
    Error::config(field, format!("expected {expected}, found {found}"))
}

impl<'a> Fields<'a> {
    /// The value under the inference name, or under the published one in that dialect. JSON null
    /// counts as absent.
    fn get(&self, inference: &'a str, published: &'a str) -> (&'a str, Option<&'a Value>) {
        let key = if self.dialect == Dialect::Published {
            published
        } else {
            inference
        };
        (key, self.map.get(key).filter(|v| !v.is_null()))
    }

    fn usize(&self, inference: &'a str, published: &'a str, default: usize) -> Result<usize> {
        let (key, value) = self.get(inference, published);
        value.map_or(Ok(default), |v| as_usize(key, v))
    }

    fn usizes(
        &self,
        inference: &'a str,
        published: &'a str,
        default: &[usize],
    ) -> Result<Vec<usize>> {
        let (key, value) = self.get(inference, published);
        let Some(value) = value else {
            return Ok(default.to_vec());
        };
        let list = value
            .as_array()
            .ok_or_else(|| wrong(key, "a list of integers", value))?;
        list.iter().map(|v| as_usize(key, v)).collect()
    }

    fn f64(&self, inference: &'a str, published: &'a str, default: f64) -> Result<f64> {
        let (key, value) = self.get(inference, published);
        value.map_or(Ok(default), |v| {
            v.as_f64().ok_or_else(|| wrong(key, "a number", v))
        })
    }

    fn bool(&self, inference: &'a str, published: &'a str, default: bool) -> Result<bool> {
        let (key, value) = self.get(inference, published);
        value.map_or(Ok(default), |v| {
            v.as_bool().ok_or_else(|| wrong(key, "true or false", v))
        })
    }

    fn str(&self, inference: &'a str, published: &'a str) -> Result<Option<(&'a str, &'a str)>> {
        let (key, value) = self.get(inference, published);
        let text = value
            .map(|v| v.as_str().ok_or_else(|| wrong(key, "a string", v)))
            .transpose()?;
        Ok(text.map(|t| (key, t)))
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        let value = self.map.get(key).filter(|v| !v.is_null());
        value
            .map(|v| v.as_object().ok_or_else(|| wrong(key, "an object", v)))
            .transpose()
    }
}

fn as_usize(key: &str, value: &Value) -> Result<usize> {
    value
        .as_u64()
        .and_then(|v| usize::try_from(v).ok())
        .ok_or_else(|| wrong(key, "an integer from 0 up", value))
}

pub(super) fn from_json(text: &str) -> Result<Config> {
    let root: Value = serde_json::from_str(text)
        .map_err(|e| Error::config("config.json", format!("not JSON: {e}")))?;
    let root = root
        .as_object()
        .ok_or_else(|| Error::config("config.json", "expected an object at the top"))?;
    let top = Fields {
        map: root,
        dialect: Dialect::Published,
    };
    let empty = Map::new();
    // The nested form has its text part under `text_config`; a flat file with published names (as
    // the previous generation's) is told by its `hidden_size`.
    match top.object("text_config")? {
        Some(text) => {
            let vision = top.object("vision_config")?.unwrap_or(&empty);
            published(text, vision, root)
        }
        None if root.contains_key("hidden_size") => published(root, &empty, root),
        None => inference(root),
    }
}

fn inference(map: &Map<String, Value>) -> Result<Config> {
    let fields = Fields {
        map,
        dialect: Dialect::Inference,
    };
    let mut config = text_fields(&fields)?;
    config.dtype = match fields.str("dtype", "dtype")? {
        None | Some((_, "fp8")) => LinearDtype::Fp8,
        Some((_, "bf16")) => LinearDtype::Bf16,
        Some((key, other)) => return Err(wrong(key, "\"fp8\" or \"bf16\"", &other.into())),
    };
    // Absent means the default, fp4; an explicit null means "as dtype".
    config.expert_dtype = match map.get("expert_dtype") {
        None => Some(WeightFormat::Fp4),
        Some(Value::Null) => None,
        Some(Value::String(s)) if s == "fp4" => Some(WeightFormat::Fp4),
        Some(other) => return Err(wrong("expert_dtype", "\"fp4\" or null", other)),
    };
    vision_fields(&mut config, &fields)?;
    Ok(config)
}

fn published(
    text: &Map<String, Value>,
    vision: &Map<String, Value>,
    root: &Map<String, Value>,
) -> Result<Config> {
    let fields = Fields {
        map: text,
        dialect: Dialect::Published,
    };
    let mut config = text_fields(&fields)?;
    let top = Fields {
        map: root,
        dialect: Dialect::Published,
    };
    config.image_token_id = top.usize("image_token_id", "image_token_id", config.image_token_id)?;
    match top.object("quantization_config")? {
        None => (config.dtype, config.expert_dtype) = (LinearDtype::Bf16, None),
        Some(quant) => {
            let quant = Fields {
                map: quant,
                dialect: Dialect::Published,
            };
            if let Some((key, method)) = quant.str("quant_method", "quant_method")?
                && method != "fp8"
            {
                return Err(wrong(key, "\"fp8\"", &method.into()));
            }
            let block = quant.usizes("weight_block_size", "weight_block_size", &[32, 32])?;
            if block != [32, 32] {
                return Err(wrong("weight_block_size", "[32, 32]", &block.into()));
            }
            if let Some((key, fmt)) = quant.str("scale_fmt", "scale_fmt")?
                && fmt != "ue8m0"
            {
                return Err(wrong(key, "\"ue8m0\"", &fmt.into()));
            }
            config.dtype = LinearDtype::Fp8;
            config.expert_dtype = match quant.str("expert_dtype", "expert_dtype")? {
                Some((_, "fp4")) => Some(WeightFormat::Fp4),
                None | Some((_, "fp8")) => None,
                Some((key, other)) => return Err(wrong(key, "\"fp4\" or \"fp8\"", &other.into())),
            };
        }
    }
    if let Some(scaling) = fields.object("rope_scaling")? {
        let scaling = Fields {
            map: scaling,
            dialect: Dialect::Published,
        };
        if let Some((key, kind)) = scaling.str("rope_type", "rope_type")?
            && kind != "yarn"
        {
            return Err(wrong(key, "\"yarn\"", &kind.into()));
        }
        config.rope_factor = scaling.f64("", "factor", config.rope_factor)?;
        config.beta_fast = scaling.f64("", "beta_fast", config.beta_fast)?;
        config.beta_slow = scaling.f64("", "beta_slow", config.beta_slow)?;
        config.original_seq_len = scaling.usize("", "original_max_position_embeddings", 0)?;
    }
    vision_fields(
        &mut config,
        &Fields {
            map: vision,
            dialect: Dialect::Published,
        },
    )?;
    Ok(config)
}

/// The keys of `text_config`, or their inference names.
fn text_fields(f: &Fields<'_>) -> Result<Config> {
    let same = |key| (key, key);
    let usize = |(a, b), default| f.usize(a, b, default);
    let candidate = match f.get("candidate_source_layer", "candidate_source_layer_id") {
        (_, None) => None,
        (_, Some(v)) if v.as_i64().is_some_and(|v| v < 0) => None,
        (key, Some(v)) => Some(as_usize(key, v)?),
    };
    Ok(Config {
        dtype: LinearDtype::Fp8,
        expert_dtype: Some(WeightFormat::Fp4),
        vocab_size: usize(same("vocab_size"), 129_280)?,
        dim: usize(("dim", "hidden_size"), 1024)?,
        moe_inter_dim: usize(("moe_inter_dim", "moe_intermediate_size"), 1024)?,
        n_layers: usize(("n_layers", "num_hidden_layers"), 5)?,
        n_mtp_layers: usize(("n_mtp_layers", "num_nextn_predict_layers"), 1)?,
        n_heads: usize(("n_heads", "num_attention_heads"), 16)?,
        n_routed_experts: usize(same("n_routed_experts"), 8)?,
        n_shared_experts: usize(same("n_shared_experts"), 1)?,
        n_activated_experts: usize(("n_activated_experts", "num_experts_per_tok"), 2)?,
        score_func: match f.str("score_func", "scoring_func")? {
            None | Some((_, "sqrtsoftplus")) => ScoreFunc::SqrtSoftplus,
            Some((_, "softmax")) => ScoreFunc::Softmax,
            Some((_, "sigmoid")) => ScoreFunc::Sigmoid,
            Some((key, other)) => {
                let expected = "\"softmax\", \"sigmoid\" or \"sqrtsoftplus\"";
                return Err(wrong(key, expected, &other.into()));
            }
        },
        gate_temp: f.f64("gate_temp", "gate_temp", 1.0)? as f32,
        norm_topk_prob: f.bool("norm_topk_prob", "norm_topk_prob", true)?,
        route_scale: f.f64("route_scale", "routed_scaling_factor", 1.0)? as f32,
        swiglu_limit: f.f64("swiglu_limit", "swiglu_limit", 0.0)? as f32,
        q_lora_rank: usize(same("q_lora_rank"), 256)?,
        head_dim: usize(same("head_dim"), 128)?,
        rope_head_dim: usize(("rope_head_dim", "qk_rope_head_dim"), 32)?,
        norm_eps: f.f64("norm_eps", "rms_norm_eps", 1e-20)? as f32,
        o_groups: usize(same("o_groups"), 8)?,
        o_lora_rank: usize(same("o_lora_rank"), 256)?,
        window_size: usize(("window_size", "sliding_window"), 128)?,
        compress_ratios: f.usizes("compress_ratios", "compress_ratios", &[0, 2, 2, 1, 1, 0])?,
        kv_source_layers: f.usizes("kv_source_layers", "kv_source_layer_ids", &[1, 3])?,
        index_source_layers: f.usizes("index_source_layers", "index_source_layer_ids", &[1, 3])?,
        compress_rope_theta: f.f64("compress_rope_theta", "compress_rope_theta", 40_000.0)?,
        original_seq_len: f.usize("original_seq_len", "original_seq_len", 0)?,
        rope_theta: f.f64("rope_theta", "rope_theta", 10_000.0)?,
        rope_factor: f.f64("rope_factor", "rope_factor", 40.0)?,
        beta_fast: f.f64("beta_fast", "beta_fast", 32.0)?,
        beta_slow: f.f64("beta_slow", "beta_slow", 1.0)?,
        index_n_heads: usize(same("index_n_heads"), 16)?,
        index_head_dim: usize(same("index_head_dim"), 64)?,
        index_topk: usize(same("index_topk"), 64)?,
        candidate_source_layer: candidate,
        candidate_topk_blocks: usize(same("candidate_topk_blocks"), 0)?,
        candidate_block_size: usize(same("candidate_block_size"), 0)?,
        hc_mult: usize(same("hc_mult"), 4)?,
        hc_sinkhorn_iters: usize(same("hc_sinkhorn_iters"), 20)?,
        hc_eps: f.f64("hc_eps", "hc_eps", 1e-6)? as f32,
        engram_layer_ids: f.usizes("engram_layer_ids", "engram_layer_ids", &[])?,
        engram_num_embeddings: f.usizes("engram_num_embeddings", "engram_num_embeddings", &[])?,
        engram_max_ngram_size: usize(same("engram_max_ngram_size"), 1)?,
        engram_vocab_size: usize(same("engram_vocab_size"), 0)?,
        engram_n_heads: usize(same("engram_n_heads"), 0)?,
        engram_head_dim: usize(same("engram_head_dim"), 0)?,
        engram_pad_id: usize(("engram_pad_id", "engram_pad_token_id"), 2)?,
        engram_compressed_vocab_size: usize(same("engram_compressed_vocab_size"), 0)?,
        vision_n_layers: 0,
        vision_dim: 1024,
        vision_n_heads: 16,
        vision_inter_dim: 2816,
        vision_patch_size: 14,
        vision_rope_theta: 10_000.0,
        vision_downsample_ratio: 3,
        vision_max_n_token: 1024,
        vision_min_pixels: 544 * 544,
        vision_max_wh_ratio: None,
        image_token_id: usize(same("image_token_id"), 129_264)?,
        dspark_block_size: usize(same("dspark_block_size"), 0)?,
        dspark_noise_token_id: usize(same("dspark_noise_token_id"), 0)?,
        dspark_target_layer_ids: f.usizes(
            "dspark_target_layer_ids",
            "dspark_target_layer_ids",
            &[],
        )?,
        dspark_markov_rank: usize(same("dspark_markov_rank"), 256)?,
        dspark_n_routed_experts: usize(same("dspark_n_routed_experts"), 0)?,
        dspark_n_activated_experts: usize(
            ("dspark_n_activated_experts", "dspark_num_experts_per_tok"),
            0,
        )?,
        max_position_embeddings: usize(same("max_position_embeddings"), 1 << 20)?,
        index_keys: IndexKeys::Owner,
    })
}

/// The keys of `vision_config`, or their inference names.
fn vision_fields(config: &mut Config, f: &Fields<'_>) -> Result<()> {
    let usize = |a, b, default| f.usize(a, b, default);
    config.vision_n_layers = usize("vision_n_layers", "num_hidden_layers", 0)?;
    config.vision_dim = usize("vision_dim", "hidden_size", config.vision_dim)?;
    config.vision_n_heads = usize(
        "vision_n_heads",
        "num_attention_heads",
        config.vision_n_heads,
    )?;
    config.vision_inter_dim = usize(
        "vision_inter_dim",
        "intermediate_size",
        config.vision_inter_dim,
    )?;
    config.vision_patch_size = usize("vision_patch_size", "patch_size", config.vision_patch_size)?;
    config.vision_rope_theta =
        f.f64("vision_rope_theta", "rope_theta", config.vision_rope_theta)?;
    config.vision_downsample_ratio = usize(
        "vision_downsample_ratio",
        "downsample_ratio",
        config.vision_downsample_ratio,
    )?;
    config.vision_max_n_token = usize(
        "vision_max_n_token",
        "max_image_tokens",
        config.vision_max_n_token,
    )?;
    config.vision_min_pixels = usize("vision_min_pixels", "min_pixels", config.vision_min_pixels)?;
    config.vision_max_wh_ratio = match f.get("vision_max_wh_ratio", "max_wh_ratio") {
        (_, None) => None,
        (key, Some(v)) => Some(
            v.as_f64()
                .ok_or_else(|| wrong(key, "a number or null", v))?,
        ),
    };
    Ok(())
}
