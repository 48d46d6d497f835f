//! The mixture of experts at released shapes: a gate over 384 experts, and 6 of 16 fp4 experts of
//! 5120 ↔ 2304 with the fp8 shared one.
//!
//! Sixteen experts are 302 MB, far beyond any cache, and enough to route every token to six. Bytes
//! are those of the weights that a call needs (each expert that got a token, once) and of the tokens in
//! and out. Run: `cargo bench -p deepseek-v41-benches --bench moe`.

use std::{collections::HashMap, sync::Arc};

use candle_core::{DType, Device, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41::{
    Weights,
    core::LocalComm,
    moe::{Gate, Moe, MoeConfig, Routing, ScoreFunc},
    quant::WeightFormat,
};
use deepseek_v41_testing::{random_bf16, random_f32};

const CPU: Device = Device::Cpu;
const DIM: usize = 5120;
const INTER: usize = 2304;
const K: usize = 6;

fn config(n_routed: usize) -> MoeConfig {
    MoeConfig {
        dim: DIM,
        inter_dim: INTER,
        n_routed,
        n_activated: K,
        score_func: ScoreFunc::SqrtSoftplus,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.5,
        swiglu_limit: 10.0,
        expert_format: WeightFormat::Fp4,
        shared_format: WeightFormat::Fp8,
        bias_vl: false,
    }
}

/// Pseudo-random bytes, quickly: there are 340 MB of them.
fn bytes(n: usize, seed: u64, map: impl Fn(u8) -> u8) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        map((state >> 32) as u8)
    };
    (0..n).map(|_| next()).collect()
}

fn u8s(data: Vec<u8>, rows: usize, cols: usize) -> Tensor {
    Tensor::from_vec(data, (rows, cols), &CPU).expect("a tensor")
}

fn gate_weights(all: &mut HashMap<String, Tensor>, prefix: &str, e: usize) {
    let weight = Tensor::from_vec(random_bf16(e * DIM, 0.014, 1), (e, DIM), &CPU);
    all.insert(format!("{prefix}weight"), weight.expect("a tensor"));
    let bias = Tensor::from_vec(random_f32(e, 0.1, 2), e, &CPU);
    all.insert(format!("{prefix}bias"), bias.expect("a tensor"));
}

fn layer(e: usize) -> Moe {
    let mut all = HashMap::new();
    gate_weights(&mut all, "gate.", e);
    let shapes = [("w1", INTER, DIM), ("w2", DIM, INTER), ("w3", INTER, DIM)];
    for j in 0..e {
        for (i, (w, n, k)) in shapes.into_iter().enumerate() {
            let seed = (3 * j + i) as u64 + 1;
            let name = format!("experts.{j}.{w}");
            all.insert(
                format!("{name}.weight"),
                u8s(bytes(n * k / 2, seed, |b| b), n, k / 2),
            );
            let scale = bytes(n * k / 32, seed, |b| 117 + b % 4);
            all.insert(format!("{name}.scale"), u8s(scale, n, k / 32));
        }
    }
    for (w, n, k) in shapes {
        let name = format!("shared_experts.{w}");
        // No exponent of ones, so no NaN.
        all.insert(
            format!("{name}.weight"),
            u8s(bytes(n * k, 99, |b| b & 0xBF), n, k),
        );
        let scale = bytes(n / 32 * (k / 32), 99, |b| 119 + b % 3);
        all.insert(format!("{name}.scale"), u8s(scale, n / 32, k / 32));
    }
    let weights = Weights::from_tensors(all).expect("weights");
    Moe::new(&config(e), Arc::new(LocalComm), weights.var_builder(&CPU)).expect("weights that fit")
}

fn tokens(t: usize) -> Tensor {
    Tensor::from_vec(random_bf16(t * DIM, 1.0, t as u64), (t, DIM), &CPU).expect("a tensor")
}

fn bench_gate(c: &mut Criterion) {
    let mut all = HashMap::new();
    gate_weights(&mut all, "", 384);
    let weights = Weights::from_tensors(all).expect("weights");
    let gate = Gate::new(&config(384), weights.var_builder(&CPU)).expect("weights that fit");
    let mut group = c.benchmark_group("cpu/gate");
    for t in [1, 64] {
        let xs = tokens(t);
        group.throughput(Throughput::Bytes(
            (gate.weight_bytes() + 2 * t * DIM + 8 * t * K) as u64,
        ));
        group.bench_function(format!("5120->384,T={t}"), |b| {
            b.iter(|| gate.forward(&xs, None).expect("fits"));
        });
    }
    group.finish();
}

fn bench_experts(c: &mut Criterion) {
    const E: usize = 16;
    let moe = layer(E);
    let one = moe.experts().get(0).expect("a first expert").weight_bytes();
    let mut group = c.benchmark_group("cpu/moe");
    group.sample_size(10);
    for t in [1, 64] {
        let xs = tokens(t);
        // Token i goes to six neighbours from i on, so that 64 tokens use all sixteen alike.
        let experts = (0..t)
            .flat_map(|i| (0..K).map(move |j| ((i + j) % E) as u32))
            .collect();
        let routing = Routing {
            weights: Tensor::full(0.25f32, (t, K), &CPU).expect("a tensor"),
            experts: Tensor::from_vec::<_, u32>(experts, (t, K), &CPU).expect("a tensor"),
        };
        assert_eq!(routing.weights.dtype(), DType::F32);
        let active = (t + K - 1).min(E);
        let weights = active * one + moe.shared().weight_bytes();
        group.throughput(Throughput::Bytes((weights + 4 * t * DIM) as u64));
        group.bench_function(format!("6of16,5120<->2304,fp4+shared_fp8,T={t}"), |b| {
            b.iter(|| moe.forward_routed(&xs, &routing).expect("fits"));
        });
    }
    group.finish();
}

criterion_group!(benches, bench_gate, bench_experts);
criterion_main!(benches);
