//! Against inputs and outputs saved from the official code.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use candle_core::Tensor;
use common::{bf16s, f32s};
use deepseek_v41_core::Weights;
use deepseek_v41_hyperconn::{
    HyperConn, HyperConnConfig, PreMix, SinkhornParams, Site, hc_expand, hc_mean, hc_post, hc_pre,
    split_sinkhorn,
};
use deepseek_v41_testing::{Golden, assert_close, bf16_ulp_distance};

/// The manifest's bound for the f32 coefficients.
const SINKHORN_RTOL: f32 = 1e-5;
/// The manifest's bound for the whole of `hc_mixes`: the projection's sum has another order.
const MIXES_RTOL: f32 = 1e-4;

/// `[1, T, ..]` → `[T, ..]`: golden data keeps the batch dimension of the reference.
fn flat(golden: &Golden, key: &str) -> Tensor {
    golden.tensor(key).squeeze(0).unwrap()
}

#[test]
fn split_sinkhorn_matches() {
    let golden = Golden::open("ops_attn");
    for (case, hc_mult, iters, eps) in [(0, 4, 20, 1e-6), (1, 2, 1, 1e-6), (2, 2, 3, 1e-3)] {
        let key = |part: &str| format!("sinkhorn_{case}.{part}");
        let mix = split_sinkhorn(
            &flat(&golden, &key("mixes")),
            &golden.tensor(&key("scale")),
            &golden.tensor(&key("base")),
            SinkhornParams {
                hc_mult,
                iters,
                eps,
            },
        )
        .unwrap();
        assert_close(
            &f32s(mix.pre.tensor()),
            &golden.f32(&key("pre")),
            0.0,
            SINKHORN_RTOL,
        );
        assert_close(
            &f32s(&mix.post),
            &golden.f32(&key("post")),
            0.0,
            SINKHORN_RTOL,
        );
        assert_close(
            &f32s(&mix.comb),
            &golden.f32(&key("comb")),
            0.0,
            SINKHORN_RTOL,
        );
    }
}

#[test]
fn mixes_match() {
    let golden = Golden::open("ops_basic");
    let cfg = HyperConnConfig {
        hc_mult: 4,
        dim: 32,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-20,
    };
    let weights = ["fn", "base", "scale"].map(|part| {
        (
            format!("hc_ffn_{part}"),
            golden.tensor(&format!("hc.{part}")),
        )
    });
    let weights = Weights::from_tensors(weights.into_iter().collect()).unwrap();
    let hc = HyperConn::new(
        &cfg,
        Site::Ffn,
        weights.var_builder(&candle_core::Device::Cpu),
    )
    .unwrap();
    let mix = hc.mixes(&flat(&golden, "hc.x")).unwrap();
    assert_close(
        &f32s(mix.pre.tensor()),
        &golden.f32("hc.mix_pre"),
        0.0,
        MIXES_RTOL,
    );
    assert_close(
        &f32s(&mix.post),
        &golden.f32("hc.mix_post"),
        0.0,
        MIXES_RTOL,
    );
    assert_close(
        &f32s(&mix.comb),
        &golden.f32("hc.mix_comb"),
        0.0,
        MIXES_RTOL,
    );
}

#[test]
fn collapse_and_expand_match() {
    let golden = Golden::open("ops_basic");
    let stream = flat(&golden, "hc.x");
    let within_one_ulp = |got: &Tensor, key: &str| {
        for (i, (a, b)) in bf16s(got).into_iter().zip(golden.bf16(key)).enumerate() {
            assert!(
                bf16_ulp_distance(a, b) <= 1,
                "{key} element {i}: {a} vs expected {b}"
            );
        }
    };
    let pre = PreMix::from_tensor(flat(&golden, "hc.pre")).unwrap();
    within_one_ulp(&hc_pre(&stream, &pre).unwrap(), "hc.collapsed");
    let expanded = hc_post(
        &flat(&golden, "hc.branch"),
        &stream,
        &flat(&golden, "hc.post"),
        &flat(&golden, "hc.comb"),
    );
    within_one_ulp(&expanded.unwrap(), "hc.expanded");
}

/// The golden set has no case for these two: copies of one row average to that row.
#[test]
fn mean_undoes_expand() {
    let golden = Golden::open("ops_basic");
    let branch = flat(&golden, "hc.branch");
    for c in [1, 2, 4] {
        let stream = hc_expand(&branch, c).unwrap();
        assert_eq!(bf16s(&hc_mean(&stream).unwrap()), bf16s(&branch));
    }
}
