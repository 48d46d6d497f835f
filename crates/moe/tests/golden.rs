//! Against inputs and outputs saved from the official code.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use common::{bf16s, f32s, u32s};
use deepseek_v41_core::{LocalComm, Weights};
use deepseek_v41_moe::{Expert, Gate, Moe, MoeConfig, Routing, ScoreFunc};
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::{Golden, assert_close};
use half::bf16;

/// The manifest's bound for routing weights.
const GATE_RTOL: f32 = 1e-5;
/// The manifest's bound for experts, relative to the rms of the output: sums in another order can
/// flip a rounding of the quantised activation before `w2`.
const EXPERT_OF_RMS: f32 = 0.02;

fn config() -> MoeConfig {
    MoeConfig {
        dim: 64,
        inter_dim: 96,
        n_routed: 16,
        n_activated: 4,
        score_func: ScoreFunc::SqrtSoftplus,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.5,
        swiglu_limit: 0.0,
        expert_format: WeightFormat::Fp4,
        shared_format: WeightFormat::Fp8,
        bias_vl: false,
    }
}

#[track_caller]
fn assert_within_rms(got: &[bf16], expected: &[f32]) {
    let rms = (expected.iter().map(|v| v * v).sum::<f32>() / expected.len() as f32).sqrt();
    let got: Vec<f32> = got.iter().map(|v| v.to_f32()).collect();
    assert_close(&got, expected, EXPERT_OF_RMS * rms, 0.0);
}

#[test]
fn gates_match() {
    let golden = Golden::open("ops_gate");
    let funcs = [
        ("softmax", ScoreFunc::Softmax),
        ("sigmoid", ScoreFunc::Sigmoid),
        ("sqrtsoftplus", ScoreFunc::SqrtSoftplus),
    ];
    for (name, score_func) in funcs {
        for vl in [false, true] {
            let case = format!("gate_{name}_{}", if vl { "vl" } else { "text" });
            let cfg = MoeConfig {
                score_func,
                gate_temp: 1.3,
                bias_vl: vl,
                ..config()
            };
            let weights = Weights::from_tensors(golden.subtree(&case)).unwrap();
            let gate = Gate::new(&cfg, weights.var_builder(&Device::Cpu)).unwrap();
            let xs = golden.tensor(&format!("{case}.x"));
            let mask = vl.then(|| golden.tensor(&format!("{case}.image_mask")));
            let routing = gate.forward(&xs, mask.as_ref()).unwrap();

            let indices: Vec<u32> = golden
                .i64(&format!("{case}.indices"))
                .into_iter()
                .map(|e| e as u32)
                .collect();
            let expected = golden.f32(&format!("{case}.weights"));
            // Both are in order of selection, which ties could change: compare as sets.
            let sorted = |experts: &[u32], weights: &[f32]| {
                let rows = experts
                    .chunks_exact(4)
                    .zip(weights.chunks_exact(4))
                    .map(|(e, w)| {
                        let mut row: Vec<(u32, f32)> =
                            e.iter().copied().zip(w.iter().copied()).collect();
                        row.sort_by_key(|(e, _)| *e);
                        row
                    });
                rows.flatten().unzip::<u32, f32, Vec<u32>, Vec<f32>>()
            };
            let (got_e, got_w) = sorted(&u32s(&routing.experts), &f32s(&routing.weights));
            let (want_e, want_w) = sorted(&indices, &expected);
            assert_eq!(got_e, want_e, "{case}");
            assert_close(&got_w, &want_w, 0.0, GATE_RTOL);

            // Replaying the reference's selection gives its weights in its order.
            let chosen = common::tensor(indices, &[20, 4]);
            let replayed = gate.forward_chosen(&xs, &chosen).unwrap();
            assert_close(&f32s(&replayed.weights), &expected, 0.0, GATE_RTOL);
        }
    }
}

#[test]
fn experts_match() {
    let golden = Golden::open("ops_moe");
    let formats = [
        ("fp4", WeightFormat::Fp4),
        ("fp8", WeightFormat::Fp8),
        ("bf16", WeightFormat::Bf16),
    ];
    for (name, format) in formats {
        for (kind, swiglu_limit) in [("plain", 0.0), ("clamp", 1.5)] {
            let case = format!("expert_{name}_{kind}");
            let cfg = MoeConfig {
                swiglu_limit,
                ..config()
            };
            let weights = Weights::from_tensors(golden.subtree(&case)).unwrap();
            let expert = Expert::new(&cfg, format, weights.var_builder(&Device::Cpu)).unwrap();
            let xs = golden.bf16(&format!("{case}.x"));
            let mut out = vec![bf16::ZERO; xs.len()];
            expert.forward_slice(&xs, None, &mut out).unwrap();
            assert_within_rms(&out, &golden.f32(&format!("{case}.y")));
            let route = golden.f32(&format!("{case}.route"));
            expert.forward_slice(&xs, Some(&route), &mut out).unwrap();
            assert_within_rms(&out, &golden.f32(&format!("{case}.y_routed")));
        }
    }
}

#[test]
fn whole_layer_matches() {
    let golden = Golden::open("ops_moe");
    let cfg = MoeConfig {
        n_routed: 6,
        n_activated: 2,
        swiglu_limit: 1.5,
        bias_vl: true,
        ..config()
    };
    let weights = Weights::from_tensors(golden.subtree("moe")).unwrap();
    let moe = Moe::new(&cfg, Arc::new(LocalComm), weights.var_builder(&Device::Cpu)).unwrap();
    let xs = golden.tensor("moe.x").flatten(0, 1).unwrap();
    let mask = golden.tensor("moe.image_mask").flatten_all().unwrap();
    let ys = moe.forward(&xs, Some(&mask)).unwrap();
    assert_within_rms(&bf16s(&ys), &golden.f32("moe.y"));

    // Routed by hand: the gate's own answer, listed the other way round.
    let Routing { weights, experts } = moe.gate().forward(&xs, Some(&mask)).unwrap();
    let flip = |xs: &Tensor| xs.flip(&[1]).unwrap();
    let flipped = Routing {
        weights: flip(&weights),
        experts: flip(&experts.to_dtype(DType::I64).unwrap())
            .to_dtype(DType::U32)
            .unwrap(),
    };
    assert_eq!(
        bf16s(&moe.forward_routed(&xs, &flipped).unwrap()),
        bf16s(&ys)
    );
}
