//! Odd shapes, independence of batch and threads, ties, and what is refused.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use common::{bf16s, bits, build, config, f32s, input, moe, tensor, u32s, weights};
use deepseek_v41_core::{Error, LocalComm, WeightError, Weights};
use deepseek_v41_moe::{
    GateParams, Moe, MoeConfig, Routing, ScoreFunc, group_tokens, scores_ref, select_ref, topk_gate,
};
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::{random_f32, with_threads};
use half::bf16;
use proptest::prelude::*;

fn bf16_config(dim: usize, inter_dim: usize, e: usize, k: usize) -> MoeConfig {
    MoeConfig {
        dim,
        inter_dim,
        expert_format: WeightFormat::Bf16,
        shared_format: WeightFormat::Bf16,
        ..config(e, k)
    }
}

/// What the layer means, one token and one expert at a time.
fn by_hand(moe: &Moe, xs: &Tensor, routing: &Routing) -> Vec<bf16> {
    let (t, dim) = xs.dims2().unwrap();
    let k = routing.experts.dims()[1];
    let (xs, experts, weights) = (bf16s(xs), u32s(&routing.experts), f32s(&routing.weights));
    let mut out = Vec::new();
    for i in 0..t {
        let x = &xs[i * dim..(i + 1) * dim];
        let mut chosen: Vec<(u32, f32)> = (i * k..(i + 1) * k)
            .map(|p| (experts[p], weights[p]))
            .collect();
        chosen.sort_by_key(|(e, _)| *e);
        let mut sum = vec![0f32; dim];
        let mut y = vec![bf16::ZERO; dim];
        for (e, w) in chosen {
            let expert = moe.experts().get(e as usize).unwrap();
            expert.forward_slice(x, Some(&[w]), &mut y).unwrap();
            sum.iter_mut().zip(&y).for_each(|(s, y)| *s += y.to_f32());
        }
        moe.shared().forward_slice(x, None, &mut y).unwrap();
        out.extend(
            sum.iter()
                .zip(&y)
                .map(|(s, y)| bf16::from_f32(s + y.to_f32())),
        );
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Grouped execution is the loop over tokens and experts, bit for bit, in every storage.
    #[test]
    fn grouping_equals_token_by_token(
        t in 0usize..9,
        (dim, inter) in (1usize..50, 1usize..50),
        e in 1usize..9,
        k in 1usize..5,
        format in 0usize..4,
        seed: u32,
    ) {
        let k = k.min(e);
        let cfg = match format {
            0 => bf16_config(dim, inter, e, k),
            1 => config(e, k),
            2 => MoeConfig { expert_format: WeightFormat::Fp8, ..config(e, k) },
            // Routed and shared experts that prepare their input differently.
            _ => MoeConfig { shared_format: WeightFormat::Bf16, ..config(e, k) },
        };
        let moe = moe(&cfg, u64::from(seed));
        let xs = input(t, cfg.dim, u64::from(seed) + 1);
        let routing = moe.gate().forward(&xs, None).unwrap();
        let ys = bf16s(&moe.forward(&xs, None).unwrap());
        prop_assert!(ys.iter().all(|v| v.is_finite()));
        prop_assert_eq!(&ys, &by_hand(&moe, &xs, &routing));
        prop_assert_eq!(&ys, &bf16s(&moe.forward_routed(&xs, &routing).unwrap()));
    }

    /// The selection is a stable sort by score, descending.
    #[test]
    fn select_is_a_stable_sort(
        scores in proptest::collection::vec(0u8..6, 1..40),
        k in 1usize..9,
    ) {
        let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
        let bias: Vec<f32> = scores.iter().enumerate().map(|(i, _)| (i % 3) as f32).collect();
        let mut got = vec![0u32; k.min(scores.len())];
        select_ref(&scores, &bias, &mut got);
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        let key = |e: &u32| scores[*e as usize] + bias[*e as usize];
        order.sort_by(|a, b| key(b).total_cmp(&key(a)));
        prop_assert_eq!(&got, &order[..got.len()]);
    }

    #[test]
    fn groups_are_a_partition(
        experts in proptest::collection::vec(0u32..12, 0..60),
        start in 0usize..6,
        len in 0usize..7,
    ) {
        let groups = group_tokens(&experts, start..start + len);
        let mut seen = Vec::new();
        let mut last = None;
        for (e, pairs) in groups.active() {
            prop_assert!(last < Some(e) && (start..start + len).contains(&e));
            prop_assert!(!pairs.is_empty() && pairs.is_sorted());
            prop_assert!(pairs.iter().all(|p| experts[*p as usize] == e as u32));
            seen.extend_from_slice(pairs);
            last = Some(e);
        }
        let inside = |e: &u32| (start..start + len).contains(&(*e as usize));
        prop_assert_eq!(seen.len(), experts.iter().filter(|e| inside(e)).count());
        prop_assert_eq!((groups.len(), groups.is_empty()), (seen.len(), seen.is_empty()));
    }

    #[test]
    fn weights_sum_to_the_scale(e in 2usize..40, k in 2usize..9, seed: u32) {
        let k = k.min(e);
        for score_func in [ScoreFunc::Softmax, ScoreFunc::Sigmoid, ScoreFunc::SqrtSoftplus] {
            let p = GateParams {
                n_activated: k, score_func, gate_temp: 0.7, norm_topk_prob: true, route_scale: 2.5,
            };
            let logits = tensor(random_f32(3 * e, 3.0, u64::from(seed)), &[3, e]);
            let bias = tensor(random_f32(e, 0.5, u64::from(seed) + 1), &[e]);
            let routing = topk_gate(&logits, &bias, p).unwrap();
            for (experts, w) in u32s(&routing.experts).chunks(k).zip(f32s(&routing.weights).chunks(k)) {
                prop_assert!((w.iter().sum::<f32>() - 2.5).abs() < 1e-5);
                prop_assert!((1..k).all(|i| !experts[..i].contains(&experts[i])));
            }
        }
    }
}

#[test]
fn a_batch_is_each_token_alone_bit_for_bit() {
    for cfg in [config(16, 4), bf16_config(33, 21, 5, 3)] {
        let moe = moe(&cfg, 41);
        let xs = input(37, cfg.dim, 42);
        let mask = tensor((0..37).map(|i| u8::from(i % 3 == 0)).collect(), &[37]);
        let routing = moe.gate().forward(&xs, Some(&mask)).unwrap();
        let (experts, w) = (u32s(&routing.experts), bits(&f32s(&routing.weights)));
        let ys = bf16s(&moe.forward(&xs, Some(&mask)).unwrap());
        let (k, dim) = (cfg.n_activated, cfg.dim);
        for i in 0..37 {
            let (x, m) = (xs.narrow(0, i, 1).unwrap(), mask.narrow(0, i, 1).unwrap());
            let alone = moe.gate().forward(&x, Some(&m)).unwrap();
            assert_eq!(u32s(&alone.experts), experts[i * k..(i + 1) * k]);
            assert_eq!(bits(&f32s(&alone.weights)), w[i * k..(i + 1) * k]);
            assert_eq!(
                bf16s(&moe.forward(&x, Some(&m)).unwrap()),
                ys[i * dim..(i + 1) * dim]
            );
        }
    }
}

#[test]
fn one_thread_is_many_threads_bit_for_bit() {
    // Wide enough for the gate, the experts and the products to spread.
    let cfg = MoeConfig {
        dim: 256,
        inter_dim: 160,
        ..config(48, 5)
    };
    let moe = moe(&cfg, 51);
    for t in [1, 3, 70] {
        let xs = input(t, 256, 52);
        let run = || bf16s(&moe.forward(&xs, None).unwrap());
        let one = with_threads(1, run);
        for threads in [2, 5] {
            assert!(
                with_threads(threads, run) == one,
                "{t} tokens, {threads} threads"
            );
        }
    }
}

#[test]
fn ties_go_to_the_lowest_index() {
    let p = GateParams {
        n_activated: 3,
        score_func: ScoreFunc::Sigmoid,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.0,
    };
    let logits = tensor(vec![0f32, 1.0, 1.0, 0.0, 1.0, 1.0], &[1, 6]);
    let routing = topk_gate(&logits, &tensor(vec![0f32; 6], &[6]), p).unwrap();
    assert_eq!(u32s(&routing.experts), [1, 2, 4]);
}

#[test]
fn no_tokens_give_empty_tensors() {
    let moe = moe(&config(4, 2), 1);
    let xs = Tensor::zeros((0, 64), DType::BF16, &Device::Cpu).unwrap();
    let mask = Tensor::zeros(0, DType::U8, &Device::Cpu).unwrap();
    assert_eq!(moe.forward(&xs, Some(&mask)).unwrap().dims(), [0, 64]);
    let routing = moe.gate().forward(&xs, None).unwrap();
    assert_eq!(
        (routing.experts.dims(), routing.weights.dims()),
        (&[0, 2][..], &[0, 2][..])
    );
    assert_eq!(moe.forward_routed(&xs, &routing).unwrap().dims(), [0, 64]);
    assert_eq!(
        moe.gate()
            .forward_chosen(&xs, &routing.experts)
            .unwrap()
            .weights
            .dims(),
        [0, 2]
    );
}

/// Replays may leave a token without any routed expert: the shared one remains.
#[test]
fn no_experts_leave_the_shared_one() {
    let moe = moe(&config(4, 2), 1);
    let xs = input(2, 64, 3);
    let none = Routing {
        weights: Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap(),
        experts: Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap(),
    };
    let mut shared = vec![bf16::ZERO; 128];
    moe.shared()
        .forward_slice(&bf16s(&xs), None, &mut shared)
        .unwrap();
    assert_eq!(bf16s(&moe.forward_routed(&xs, &none).unwrap()), shared);
}

#[test]
fn logits_without_an_answer_are_errors() {
    let scores = |score_func, logits: &[f32]| {
        let p = GateParams {
            n_activated: 1,
            score_func,
            gate_temp: 1.0,
            norm_topk_prob: true,
            route_scale: 1.0,
        };
        scores_ref(&mut logits.to_vec(), p)
    };
    for f in [
        ScoreFunc::Softmax,
        ScoreFunc::Sigmoid,
        ScoreFunc::SqrtSoftplus,
    ] {
        assert!(matches!(
            scores(f, &[0.0, f32::NAN]),
            Err(Error::Value { .. })
        ));
        assert!(matches!(
            scores(f, &[f32::INFINITY, 0.0]),
            Err(Error::Value { .. })
        ));
        assert!(scores(f, &[f32::NEG_INFINITY, 0.0]).is_ok());
    }
    assert!(scores(ScoreFunc::Softmax, &[f32::NEG_INFINITY; 2]).is_err());

    // Through the layer the error names the token, also beyond the first block of tokens.
    let moe = moe(&config(4, 2), 1);
    let mut xs = bf16s(&input(100, 64, 2));
    xs[97 * 64 + 5] = bf16::NAN;
    let err = moe.forward(&tensor(xs, &[100, 64]), None).unwrap_err();
    assert_eq!(err.to_string(), "gate logits: token 97, expert 0: NaN");
}

#[test]
fn misfits_are_errors() {
    let moe = moe(&config(4, 2), 1);
    let xs = input(3, 64, 2);
    let shape = |r: deepseek_v41_core::Result<()>| {
        assert!(matches!(r, Err(Error::Shape { .. })), "{r:?}");
    };
    let value = |r: deepseek_v41_core::Result<()>| {
        assert!(matches!(r, Err(Error::Value { .. })), "{r:?}");
    };
    shape(moe.forward(&input(3, 63, 2), None).map(drop));
    shape(
        moe.forward(&xs.to_dtype(DType::F32).unwrap(), None)
            .map(drop),
    );
    shape(
        moe.forward(&xs, Some(&tensor(vec![1u8; 2], &[2])))
            .map(drop),
    );
    shape(
        moe.forward(&xs, Some(&tensor(vec![1u32; 3], &[3])))
            .map(drop),
    );
    let routing = |experts: Vec<u32>, t: usize| Routing {
        weights: tensor(vec![0.5f32; experts.len()], &[t, 2]),
        experts: tensor(experts, &[t, 2]),
    };
    shape(moe.forward_routed(&xs, &routing(vec![0, 1], 1)).map(drop));
    value(
        moe.forward_routed(&xs, &routing(vec![0, 1, 2, 4, 0, 1], 3))
            .map(drop),
    );
    value(
        moe.forward_routed(&xs, &routing(vec![0, 1, 2, 2, 0, 1], 3))
            .map(drop),
    );
    shape(
        moe.gate()
            .forward_chosen(&xs, &tensor(vec![0u32; 2], &[1, 2]))
            .map(drop),
    );
    value(
        moe.gate()
            .forward_chosen(&xs, &tensor(vec![9u32; 6], &[3, 2]))
            .map(drop),
    );
}

#[test]
fn wrong_weights_are_typed_errors() {
    let cfg = config(4, 2);
    let load = |name: &str, replacement: Option<Tensor>| {
        let mut all = weights(&cfg, 1);
        all.remove(name);
        all.extend(replacement.map(|t| (name.to_owned(), t)));
        let all = Weights::from_tensors(all).unwrap();
        match Moe::new(&cfg, Arc::new(LocalComm), all.var_builder(&Device::Cpu)) {
            Err(Error::Weight {
                name: found,
                reason,
                ..
            }) => {
                assert_eq!(found, name);
                reason
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(load("experts.3.w2.scale", None), WeightError::Missing);
    assert_eq!(load("gate.bias_vl", None), WeightError::Missing);
    let bf = |n| tensor(vec![bf16::ONE; n], &[n]);
    assert!(matches!(
        load("gate.bias", Some(bf(4))),
        WeightError::Dtype { .. }
    ));
    assert!(matches!(
        load("gate.weight", Some(bf(4))),
        WeightError::Shape { .. }
    ));
    let nan = tensor(vec![0.0, f32::NAN, 0.0, 0.0], &[4]);
    let reason = load("gate.bias", Some(nan));
    assert_eq!(reason, WeightError::Content("element 1 is NaN".into()));
}

/// A layer for text only never asks for the second bias, and ignores a mask.
#[test]
fn without_bias_vl_the_mask_is_ignored() {
    let cfg = MoeConfig {
        bias_vl: false,
        ..config(4, 2)
    };
    let mut all = weights(&cfg, 1);
    all.remove("gate.bias_vl");
    let moe = build(&cfg, &all, Arc::new(LocalComm));
    let xs = input(3, 64, 2);
    let mask = tensor(vec![1u8; 3], &[3]);
    let masked = bf16s(&moe.forward(&xs, Some(&mask)).unwrap());
    assert_eq!(masked, bf16s(&moe.forward(&xs, None).unwrap()));
}

#[test]
fn settings_without_meaning_are_refused() {
    let refuse = |field: &str, change: &dyn Fn(&mut MoeConfig)| {
        let mut cfg = config(4, 2);
        change(&mut cfg);
        match cfg.validate() {
            Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
    };
    refuse("dim", &|c| c.dim = 0);
    refuse("moe_inter_dim", &|c| c.inter_dim = 0);
    refuse("n_routed_experts", &|c| c.n_routed = 0);
    refuse("n_activated_experts", &|c| c.n_activated = 0);
    refuse("n_activated_experts", &|c| c.n_activated = 5);
    refuse("gate_temp", &|c| c.gate_temp = 0.0);
    refuse("gate_temp", &|c| c.gate_temp = f32::NAN);
    refuse("route_scale", &|c| c.route_scale = f32::INFINITY);
    refuse("swiglu_limit", &|c| c.swiglu_limit = -1.0);
    refuse("expert_dtype", &|c| c.expert_format = WeightFormat::F32);
}
