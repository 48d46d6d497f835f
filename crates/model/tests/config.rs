//! Both dialects of the config, and configs that cannot be.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use deepseek_v41_model::{Config, LayerPlan, LinearDtype};
use deepseek_v41_moe::ScoreFunc;
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::golden_dir;
use proptest::prelude::*;
use serde_json::{Value, json};

fn released() -> (Value, Value) {
    let text = std::fs::read_to_string(golden_dir().join("config_released.json")).unwrap();
    let both: Value = serde_json::from_str(&text).unwrap();
    (both["inference"].clone(), both["hf"].clone())
}

fn parse(value: &Value) -> Result<Config, String> {
    Config::from_json(&value.to_string()).map_err(|e| e.to_string())
}

#[test]
fn both_dialects_of_the_release_are_the_same_model() {
    let (inference, published) = released();
    let (a, b) = (parse(&inference).unwrap(), parse(&published).unwrap());
    assert_eq!(a, b);
    assert_eq!(
        (a.dim, a.n_layers, a.n_heads, a.n_routed_experts),
        (5120, 40, 64, 384)
    );
    assert_eq!(
        (a.dtype, a.expert_dtype),
        (LinearDtype::Fp8, Some(WeightFormat::Fp4))
    );
    assert_eq!(
        (a.score_func, a.swiglu_limit, a.norm_eps),
        (ScoreFunc::SqrtSoftplus, 10.0, 1e-20)
    );
    assert_eq!(
        (a.rope_factor, a.original_seq_len, a.max_position_embeddings),
        (16.0, 65_536, 1 << 20)
    );
    assert_eq!(a.candidate_source_layer, Some(20));
}

#[test]
fn roles_of_the_release() {
    let plan = LayerPlan::new(&parse(&released().0).unwrap()).unwrap();
    let sources: Vec<_> = plan.sources().iter().map(|s| (s.layer, s.ratio)).collect();
    assert_eq!(sources, [(2, 2), (8, 2), (14, 2), (20, 1)]);
    assert_eq!(plan.ratios(), [1, 2]);
    let layers = plan.layers();
    assert_eq!(
        (layers[0].source, layers[7].source, layers[39].source),
        (None, Some(0), Some(3))
    );
    assert_eq!(
        (layers[1].engram, layers[14].engram, layers[2].engram),
        (Some(0), Some(1), None)
    );
    assert!(layers[39].draft_target && !layers[36].draft_target);
}

#[test]
fn a_flat_config_with_published_names_is_understood() {
    let (_, published) = released();
    let mut flat = published["text_config"].clone();
    flat["quantization_config"] = published["quantization_config"].clone();
    flat["image_token_id"] = published["image_token_id"].clone();
    let config = parse(&flat).unwrap();
    assert_eq!(config.dim, 5120);
    assert!(!config.vision_enabled());
}

#[test]
fn an_unquantised_published_config_is_bf16() {
    let (_, mut published) = released();
    published
        .as_object_mut()
        .unwrap()
        .remove("quantization_config");
    let config = parse(&published).unwrap();
    assert_eq!(
        (config.dtype, config.expert_dtype),
        (LinearDtype::Bf16, None)
    );
}

#[test]
fn wrong_values_are_refused_by_name() {
    let cases: &[(&str, Value)] = &[
        ("dim", json!(-1)),
        ("dim", json!("wide")),
        ("dim", json!(0)),
        ("dim", json!(5121)),
        ("dim", json!(u64::MAX)),
        ("n_layers", json!(0)),
        ("n_layers", json!(1e300)),
        ("n_heads", json!(63)),
        ("head_dim", json!(500)),
        ("rope_head_dim", json!(7)),
        ("rope_head_dim", json!(1024)),
        ("index_head_dim", json!(32)),
        ("n_activated_experts", json!(385)),
        ("n_shared_experts", json!(2)),
        ("score_func", json!("argmax")),
        ("dtype", json!("int8")),
        ("expert_dtype", json!("fp2")),
        ("hc_mult", json!(0)),
        ("hc_sinkhorn_iters", json!(0)),
        ("norm_eps", json!(-1.0)),
        ("rope_theta", json!(0.0)),
        ("rope_factor", json!(null)),
        ("compress_ratios", json!([0, 2])),
        ("compress_ratios", json!({"0": 2})),
        ("kv_source_layers", json!([0])),
        ("kv_source_layers", json!([99])),
        ("index_source_layers", json!([2])),
        ("candidate_source_layer", json!(21)),
        ("candidate_block_size", json!(0)),
        ("engram_layer_ids", json!([14, 1])),
        ("engram_layer_ids", json!([1, 41])),
        ("engram_pad_id", json!(129_280)),
        ("engram_max_ngram_size", json!(1)),
        ("dspark_target_layer_ids", json!([39, 37])),
        ("dspark_noise_token_id", json!(1u64 << 40)),
    ];
    for (field, value) in cases {
        let (mut config, _) = released();
        config[*field] = value.clone();
        if value.is_null() {
            continue; // absent: the default
        }
        let err = parse(&config).expect_err(&format!("{field} = {value}"));
        assert!(err.contains("config field"), "{err}");
        let related = err.contains(field)
            || (*field == "compress_ratios" && err.contains("layer"))
            || (*field == "index_source_layers" && err.contains("layer"));
        assert!(related, "{field} = {value}: {err}");
    }
}

#[test]
fn readers_before_their_source_or_of_another_ratio_are_refused() {
    let small = |ratios: Value, kv: Value, index: Value| {
        json!({"n_layers": 4, "n_mtp_layers": 0, "compress_ratios": ratios, "kv_source_layers": kv,
               "index_source_layers": index, "o_groups": 8})
    };
    assert!(parse(&small(json!([0, 2, 2, 1]), json!([1, 3]), json!([1, 3]))).is_ok());
    for (config, what) in [
        (
            small(json!([2, 2, 2, 1]), json!([1, 3]), json!([1, 3])),
            "no source comes before",
        ),
        (
            small(json!([0, 2, 1, 1]), json!([1, 3]), json!([1, 3])),
            "ratio 1",
        ),
        (
            small(json!([0, 2, 2, 2]), json!([1, 3]), json!([1])),
            "must run an indexer",
        ),
    ] {
        let err = parse(&config).unwrap_err();
        assert!(err.contains(what), "{err}");
    }
}

#[test]
fn published_quantisation_that_is_not_this_models_is_refused() {
    for (field, value) in [
        ("quant_method", json!("awq")),
        ("weight_block_size", json!([128, 128])),
        ("scale_fmt", json!("fp32")),
        ("expert_dtype", json!("nf4")),
    ] {
        let (_, mut published) = released();
        published["quantization_config"][field] = value;
        assert!(parse(&published).unwrap_err().contains(field));
    }
    let (_, mut published) = released();
    published["text_config"]["rope_scaling"]["rope_type"] = json!("linear");
    assert!(parse(&published).unwrap_err().contains("rope_type"));
}

#[test]
fn what_is_not_a_config_is_refused() {
    for text in [
        "",
        "[]",
        "3",
        "{\"text_config\": []}",
        "{\"dim\": 1e999}",
        "\u{0}",
    ] {
        assert!(Config::from_json(text).is_err(), "{text:?}");
    }
    assert!(
        Config::from_file("no/such/config.json")
            .unwrap_err()
            .to_string()
            .contains("no/such")
    );
}

proptest! {
    /// No value of any field makes parsing panic or loop.
    #[test]
    fn random_values_never_panic(
        field in 0usize..40,
        value in prop_oneof![
            any::<i64>().prop_map(|v| json!(v)),
            any::<f64>().prop_map(|v| json!(v)),
            prop::collection::vec(any::<i32>(), 0..50).prop_map(|v| json!(v)),
            ".{0,8}".prop_map(|v| json!(v)),
        ],
        published in any::<bool>(),
    ) {
        let (inference, hf) = released();
        let mut config = if published { hf } else { inference };
        let target = match published {
            true => config["text_config"].as_object_mut().unwrap(),
            false => config.as_object_mut().unwrap(),
        };
        let keys: Vec<String> = target.keys().cloned().collect();
        target.insert(keys[field % keys.len()].clone(), value);
        let _ = parse(&config);
    }
}
