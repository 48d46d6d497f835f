//! Faults other implementations shipped, as small inputs with their right answers.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use std::{collections::HashMap, sync::Arc, thread};

use candle_core::{DType, Device, Tensor};
use common::{bf16s, bits, build, config, f32s, input, moe, tensor, u32s, weights};
use deepseek_v41_core::{LocalComm, ThreadComm, Weights};
use deepseek_v41_moe::{
    Gate, GateParams, Moe, MoeConfig, Routing, ScoreFunc, scores_ref, swiglu_ref, topk_gate,
};
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::assert_close;
use half::bf16;

fn params(score_func: ScoreFunc, n_activated: usize) -> GateParams {
    GateParams {
        n_activated,
        score_func,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.0,
    }
}

fn pick(logits: &[f32], bias: &[f32], p: GateParams) -> (Vec<u32>, Vec<f32>) {
    let e = logits.len();
    let logits = tensor(logits.to_vec(), &[1, e]);
    let routing = topk_gate(&logits, &tensor(bias.to_vec(), &[e]), p).unwrap();
    (u32s(&routing.experts), f32s(&routing.weights))
}

/// `log(1 + exp(x))` written plainly is 0 below -16.64 and infinite above 88.7.
#[test]
fn d1_softplus_keeps_small_and_large_logits() {
    let logits = [-16.7f32, -20.0, 89.0, 100.0];
    let mut scores = logits;
    scores_ref(&mut scores, params(ScoreFunc::SqrtSoftplus, 1)).unwrap();
    let exact = logits.map(|x| f64::from(x).exp().ln_1p().sqrt());
    assert_close(&scores, &exact.map(|s| s as f32), 0.0, 1e-6);
    assert_close(&scores, &[2.36e-4, 4.54e-5, 9.43, 10.0], 0.0, 5e-3);
    // And their weights are numbers, down to where exp underflows.
    let p = params(ScoreFunc::SqrtSoftplus, 2);
    let (a, b) = (exact[0], exact[1]);
    let expected = [a / (a + b), b / (a + b)].map(|w| w as f32);
    assert_close(&pick(&[-20.0, -16.7], &[0.0; 2], p).1, &expected, 0.0, 1e-6);
    assert_eq!(pick(&[-110.0, -120.0], &[0.0; 2], p).1, [0.0, 0.0]);
    assert_eq!(pick(&[f32::NEG_INFINITY; 2], &[0.0; 2], p).1, [0.0, 0.0]);
}

/// At the threshold both branches agree to f32's precision; just above it the identity holds.
#[test]
fn d1_softplus_threshold() {
    let above = 20f32.next_up();
    let mut scores = [20.0, above];
    scores_ref(&mut scores, params(ScoreFunc::SqrtSoftplus, 1)).unwrap();
    assert_eq!(scores, [20f32.exp().ln_1p().sqrt(), above.sqrt()]);
}

/// Sigmoid is not a stand-in: once a bias is added it picks another expert.
#[test]
fn d2_score_functions_select_differently() {
    let (logits, bias) = ([0.0, 0.0, 5.0], [1.0, 0.0, 0.0]);
    assert_eq!(
        pick(&logits, &bias, params(ScoreFunc::SqrtSoftplus, 1)).0,
        [2]
    );
    assert_eq!(pick(&logits, &bias, params(ScoreFunc::Sigmoid, 1)).0, [0]);
}

/// Logits stay f32: these two are the same bf16.
#[test]
fn d3_logits_are_not_rounded_to_bf16() {
    let cfg = MoeConfig {
        dim: 2,
        bias_vl: false,
        ..config(2, 1)
    };
    let w = [1.0, 0.0, 1.0, 2f32.powi(-12)].map(bf16::from_f32).to_vec();
    let all = HashMap::from([
        ("weight".to_owned(), tensor(w, &[2, 2])),
        ("bias".to_owned(), tensor(vec![0f32; 2], &[2])),
    ]);
    let all = Weights::from_tensors(all).unwrap();
    let gate = Gate::new(&cfg, all.var_builder(&Device::Cpu)).unwrap();
    let xs = tensor(vec![bf16::ONE; 2], &[1, 2]);
    assert_eq!(u32s(&gate.forward(&xs, None).unwrap().experts), [1]);
    // And a difference of one ulp decides.
    let p = params(ScoreFunc::SqrtSoftplus, 1);
    let mut logits = vec![1f32; 384];
    logits[200] = 1f32.next_up().next_up();
    assert_eq!(pick(&logits, &[0.0; 384], p).0, [200]);
}

#[test]
fn d4_all_384_experts_can_win() {
    let mut logits = vec![0f32; 384];
    (logits[383], logits[256], logits[255]) = (3.0, 2.0, 1.0);
    for f in [
        ScoreFunc::Softmax,
        ScoreFunc::Sigmoid,
        ScoreFunc::SqrtSoftplus,
    ] {
        assert_eq!(pick(&logits, &[0.0; 384], params(f, 3)).0, [383, 256, 255]);
    }
    // Through a whole layer, where only the last expert differs from nothing.
    let cfg = MoeConfig {
        n_routed: 384,
        ..config(384, 6)
    };
    let moe = moe(&cfg, 4);
    let xs = input(3, 64, 5);
    let only = |e: u32| Routing {
        weights: tensor(vec![1f32; 3], &[3, 1]),
        experts: tensor(vec![e; 3], &[3, 1]),
    };
    let [last, first] = [383, 0].map(|e| bf16s(&moe.forward_routed(&xs, &only(e)).unwrap()));
    assert_ne!(last, first);
    assert_eq!(moe.forward(&xs, None).unwrap().dims(), [3, 64]);
}

/// No atomics, no races: the same bits every time.
#[test]
fn d5_fifty_runs_are_bit_equal() {
    let cfg = config(16, 4);
    let moe = moe(&cfg, 5);
    let xs = input(40, 64, 6);
    let first = bf16s(&moe.forward(&xs, None).unwrap());
    for run in 1..50 {
        assert_eq!(bf16s(&moe.forward(&xs, None).unwrap()), first, "run {run}");
    }
}

fn on_two_ranks(cfg: &MoeConfig, all: &HashMap<String, Tensor>, xs: &Tensor) -> [Vec<bf16>; 2] {
    let run = |comm| bf16s(&build(cfg, all, Arc::new(comm)).forward(xs, None).unwrap());
    let ranks = thread::scope(|s| {
        let spawn = |comm| s.spawn(move || run(comm));
        let handles: Vec<_> = ThreadComm::group(2).into_iter().map(spawn).collect();
        handles
            .into_iter()
            .map(|h| h.join().unwrap())
            .collect::<Vec<_>>()
    });
    ranks.try_into().unwrap()
}

/// Ranks add their f32 parts: with two experts a token that is the same addition, with four its
/// order differs, which one rounding to bf16 shows as at most one step of the largest term.
#[test]
fn d6_two_ranks_equal_one() {
    for k in [2, 4] {
        let cfg = config(8, k);
        let all = weights(&cfg, 6);
        let xs = input(13, 64, 7);
        let one = bf16s(
            &build(&cfg, &all, Arc::new(LocalComm))
                .forward(&xs, None)
                .unwrap(),
        );
        let [a, b] = on_two_ranks(&cfg, &all, &xs);
        assert_eq!(a, b, "ranks agree");
        if k == 2 {
            assert_eq!(a, one);
        } else {
            let wide = |v: &[bf16]| -> Vec<f32> { v.iter().map(|v| v.to_f32()).collect() };
            assert_close(&wide(&a), &wide(&one), 1e-6, 2f32.powi(-8));
        }
    }
}

#[test]
fn d6_experts_must_divide_over_ranks() {
    let cfg = config(7, 2);
    let all = Weights::from_tensors(weights(&cfg, 1)).unwrap();
    let rank = ThreadComm::group(2).remove(0);
    let err = Moe::new(&cfg, Arc::new(rank), all.var_builder(&Device::Cpu)).unwrap_err();
    assert!(
        err.to_string()
            .contains("7 experts do not divide over 2 ranks"),
        "{err}"
    );
}

/// All tokens to one expert, the others empty; each row as if alone.
#[test]
fn d7_one_expert_takes_all_tokens() {
    let cfg = config(4, 1);
    let moe = moe(&cfg, 8);
    let xs = input(4096, 64, 9);
    let routed = |t: usize| Routing {
        weights: Tensor::ones((t, 1), DType::F32, &Device::Cpu).unwrap(),
        experts: Tensor::zeros((t, 1), DType::U32, &Device::Cpu).unwrap(),
    };
    let all = bf16s(&moe.forward_routed(&xs, &routed(4096)).unwrap());
    for row in [0, 1, 2047, 4095] {
        let alone = moe
            .forward_routed(&xs.narrow(0, row, 1).unwrap(), &routed(1))
            .unwrap();
        assert_eq!(bf16s(&alone), all[row * 64..(row + 1) * 64], "row {row}");
    }
}

/// A bias that forces an expert leaves its weight what the score alone says.
#[test]
fn d8_the_bias_selects_but_never_weighs() {
    let logits = [0.3, 2.0, 1.0, -1.0];
    for norm_topk_prob in [true, false] {
        let p = GateParams {
            norm_topk_prob,
            route_scale: 1.5,
            ..params(ScoreFunc::SqrtSoftplus, 2)
        };
        let (experts, w) = pick(&logits, &[0.0, 0.0, 0.0, 1e6], p);
        assert_eq!(experts, [3, 1]);
        let score = |x: f32| x.exp().ln_1p().sqrt();
        let (a, b) = (score(-1.0), score(2.0));
        let sum = if norm_topk_prob { a + b } else { 1.0 };
        assert_close(&w, &[1.5 * a / sum, 1.5 * b / sum], 0.0, 1e-6);
    }
    // With a single expert a token nothing is normalised, or every weight would be 1.
    let (_, w) = pick(&logits, &[0.0; 4], params(ScoreFunc::Sigmoid, 1));
    assert_eq!(bits(&w), bits(&[1.0 / (1.0 + (-2f32).exp())]));
}

/// The routing weight multiplies the f32 activation, not the output of `w2`: the roundings differ.
#[test]
fn d9_the_weight_comes_before_the_rounding_and_w2() {
    let w2 = bf16::from_f32(1.125);
    let cfg = MoeConfig {
        dim: 1,
        inter_dim: 1,
        swiglu_limit: 0.0,
        expert_format: WeightFormat::Bf16,
        shared_format: WeightFormat::Bf16,
        bias_vl: false,
        ..config(1, 1)
    };
    // silu(32) is 32 in f32, times up = 1.0078125 / 32.
    let one = |v: bf16| tensor(vec![v], &[1, 1]);
    let mut all = weights(&cfg, 1);
    all.insert("experts.0.w1.weight".into(), one(bf16::from_f32(32.0)));
    all.insert(
        "experts.0.w3.weight".into(),
        one(bf16::from_f32(1.0078125 / 32.0)),
    );
    all.insert("experts.0.w2.weight".into(), one(w2));
    all.insert("shared_experts.w2.weight".into(), one(bf16::ZERO));
    let moe = build(&cfg, &all, Arc::new(LocalComm));
    let third = 1f32 / 3.0;
    let routing = Routing {
        weights: tensor(vec![third], &[1, 1]),
        experts: tensor(vec![0u32], &[1, 1]),
    };
    let got = bf16s(&moe.forward_routed(&one(bf16::ONE), &routing).unwrap())[0];

    let round = bf16::from_f32;
    let before = round(round(third * 1.0078125).to_f32() * w2.to_f32());
    let after = round(third * round(1.0078125 * w2.to_f32()).to_f32());
    assert_ne!(before, after, "the case can tell the orders apart");
    assert_eq!(got, before);
}

/// The up branch is clamped on both sides, the gate branch only from above.
#[test]
fn c11_swiglu_clamps() {
    let swiglu = |gate: f32, up: f32, limit| {
        let mut out = [bf16::ZERO];
        swiglu_ref(
            &[bf16::from_f32(gate)],
            &[bf16::from_f32(up)],
            limit,
            None,
            &mut out,
        );
        out[0]
    };
    let silu = |x: f32| x / (1.0 + (-x).exp());
    assert_eq!(
        swiglu(1000.0, -1000.0, 10.0),
        bf16::from_f32(silu(10.0) * -10.0)
    );
    assert_eq!(
        swiglu(-20.0, 1000.0, 10.0),
        bf16::from_f32(silu(-20.0) * 10.0)
    );
    // Without a limit nothing is clamped.
    assert_eq!(swiglu(1000.0, -1000.0, 0.0), bf16::from_f32(-1e6));
    // A clamp must not turn NaN into a number.
    assert!(swiglu(f32::NAN, 1.0, 10.0).is_nan());
    assert!(swiglu(1.0, f32::NAN, 10.0).is_nan());
    // exp overflows for a very negative gate: the product is 0, not NaN.
    assert_eq!(swiglu(-1000.0, 3.0, 10.0), bf16::ZERO);
}

/// The second bias acts inside the image span and nowhere else.
#[test]
fn a7_the_image_mask_reaches_the_gate() {
    let cfg = config(8, 2);
    let mut all = weights(&cfg, 3);
    all.insert("gate.bias".into(), tensor(vec![0f32; 8], &[8]));
    let mut vl = vec![0f32; 8];
    (vl[5], vl[6]) = (100.0, 50.0);
    all.insert("gate.bias_vl".into(), tensor(vl, &[8]));
    let moe = build(&cfg, &all, Arc::new(LocalComm));
    let xs = input(10, 64, 2);
    let mask = tensor(vec![0u8, 0, 0, 1, 1, 1, 1, 0, 0, 0], &[10]);
    let plain = u32s(&moe.gate().forward(&xs, None).unwrap().experts);
    let masked = u32s(&moe.gate().forward(&xs, Some(&mask)).unwrap().experts);
    assert_eq!(masked[6..14], [5, 6].repeat(4));
    assert_eq!((&masked[..6], &masked[14..]), (&plain[..6], &plain[14..]));
    assert_ne!(
        bf16s(&moe.forward(&xs, None).unwrap()),
        bf16s(&moe.forward(&xs, Some(&mask)).unwrap())
    );
}
