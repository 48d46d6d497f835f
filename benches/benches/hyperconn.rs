//! Hyper-connections at the released shape, four copies of 5120.
//!
//! A step is what surrounds one sublayer: mixes, collapse, expand. Bytes are those of the projection
//! (f32, once a call) and of every stream and vector read or written. Run:
//! `cargo bench -p deepseek-v41-benches --bench hyperconn`.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41::{
    Weights,
    hyperconn::{
        HyperConn, HyperConnConfig, Site, hc_expand, hc_mean, hc_post, hc_pre, split_sinkhorn,
    },
};
use deepseek_v41_testing::{random_bf16, random_f32};

const CPU: Device = Device::Cpu;
const C: usize = 4;
const DIM: usize = 5120;
const WIDTH: usize = (2 + C) * C;

fn released() -> HyperConn {
    let cfg = HyperConnConfig {
        hc_mult: C,
        dim: DIM,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-20,
    };
    let f32s = |n: usize, std, shape: &[usize]| {
        Tensor::from_vec(random_f32(n, std, n as u64), shape, &CPU).expect("a tensor")
    };
    let weights = HashMap::from([
        (
            "hc_attn_fn".into(),
            f32s(WIDTH * C * DIM, 0.01, &[WIDTH, C * DIM]),
        ),
        ("hc_attn_base".into(), f32s(WIDTH, 0.5, &[WIDTH])),
        ("hc_attn_scale".into(), f32s(3, 1.0, &[3])),
    ]);
    let weights = Weights::from_tensors(weights).expect("three tensors");
    HyperConn::new(&cfg, Site::Attn, weights.var_builder(&CPU)).expect("weights that fit")
}

fn bench(c: &mut Criterion) {
    let hc = released();
    for t in [1, 64, 256] {
        let bf16s = |n: usize, shape: &[usize]| {
            Tensor::from_vec(random_bf16(n, 1.0, n as u64), shape, &CPU).expect("a tensor")
        };
        let stream = bf16s(t * C * DIM, &[t, C, DIM]);
        let y = bf16s(t * DIM, &[t, DIM]);
        let mix = hc.mixes(&stream).expect("coefficients");
        // Bytes of a stream and of one vector a token.
        let (copies, one) = (2 * t * C * DIM, 2 * t * DIM);
        let weights = hc.weights().weight_bytes();

        let mut group = c.benchmark_group("cpu");
        let mut run = |name: &str, bytes: usize, f: &dyn Fn() -> Tensor| {
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(format!("{name}/T={t}"), |b| b.iter(f));
        };
        run("hc_step", weights + 4 * copies + 2 * one, &|| {
            let mix = hc.mixes(&stream).expect("coefficients");
            let x = hc_pre(&stream, &mix.pre).expect("fits");
            mix.finish(&x, &stream).expect("fits").0
        });
        run("hc_mixes", weights + copies, &|| {
            hc.mixes(&stream).expect("coefficients").post
        });
        run("hc_pre", copies + one, &|| {
            hc_pre(&stream, &mix.pre).expect("fits")
        });
        run("hc_post", 2 * copies + one, &|| {
            hc_post(&y, &stream, &mix.post, &mix.comb).expect("fits")
        });
        run("hc_expand", copies + one, &|| {
            hc_expand(&y, C).expect("fits")
        });
        run("hc_mean", copies + one, &|| hc_mean(&stream).expect("fits"));
        let mixes = Tensor::randn(0f32, 1.0, (t, WIDTH), &CPU).expect("a tensor");
        let scale = Tensor::ones(3, DType::F32, &CPU).expect("a tensor");
        let base = Tensor::zeros(WIDTH, DType::F32, &CPU).expect("a tensor");
        run("split_sinkhorn", 8 * t * WIDTH, &|| {
            split_sinkhorn(&mixes, &scale, &base, hc.config().sinkhorn())
                .expect("fits")
                .post
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
