//! fp8 and fp4 linear layers at released shapes, one token and 256, beside candle's f32 product with
//! the dequantised weights.
//!
//! One token reads every weight once, so its throughput is stored bytes (f32 bytes for the peer) a
//! second; 256 tokens are counted in floating-point operations. Weights rotate over enough copies that
//! a single token finds them in memory and not in a cache. The input's quantisation is part of the
//! time. Run: `cargo bench -p deepseek-v41-benches --bench quant`.

use std::{collections::HashMap, time::Duration};

use candle_core::{DType, Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41::{
    Weights,
    quant::{Linear, WeightFormat, dequant, fake_quant_fp8},
};
use deepseek_v41_testing::random_bf16;

const CPU: Device = Device::Cpu;
/// (in, out): `wq_a`, `wq_b`, and `w1` of an expert.
const SHAPES: [(usize, usize); 3] = [(5120, 1280), (1280, 32768), (5120, 2304)];
/// Bytes of weights that a run of single tokens walks through.
const COLD: usize = 96 << 20;

/// Pseudo-random bytes, quickly.
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

fn linear(k: usize, n: usize, format: WeightFormat, seed: u64) -> Linear {
    let near_one = |b: u8| 118 + b % 5;
    let (weight, scale) = match format {
        // A NaN code would send its rows down the slow path.
        WeightFormat::Fp8 => (
            u8s(
                bytes(n * k, seed, |b| if b & 0x7f == 0x7f { b ^ 1 } else { b }),
                n,
                k,
            ),
            u8s(bytes(n / 32 * k / 32, seed + 1, near_one), n / 32, k / 32),
        ),
        _ => (
            u8s(bytes(n * k / 2, seed, |b| b), n, k / 2),
            u8s(bytes(n * k / 32, seed + 1, near_one), n, k / 32),
        ),
    };
    let tensors = HashMap::from([("weight".to_owned(), weight), ("scale".to_owned(), scale)]);
    let weights = Weights::from_tensors(tensors).expect("weights");
    Linear::new(k, n, format, weights.var_builder(&CPU)).expect("a layer")
}

fn input(m: usize, k: usize) -> Tensor {
    Tensor::from_vec(random_bf16(m * k, 1.0, 3), (m, k), &CPU).expect("a tensor")
}

fn quant(c: &mut Criterion) {
    for (k, n) in SHAPES {
        for m in [1, 256] {
            let mut group = c.benchmark_group(format!("cpu/linear/{k}to{n}/M={m}"));
            group
                .sample_size(10)
                .warm_up_time(Duration::from_millis(300));
            group.measurement_time(Duration::from_millis(1500));
            let throughput = |weight_bytes: usize| {
                if m == 1 {
                    Throughput::Bytes(weight_bytes as u64)
                } else {
                    Throughput::Elements((2 * m * n * k) as u64)
                }
            };
            let xs = input(m, k);
            for (name, format) in [("fp8", WeightFormat::Fp8), ("fp4", WeightFormat::Fp4)] {
                let stored = linear(k, n, format, 1).weight_bytes();
                let copies = if m == 1 { COLD / stored + 1 } else { 1 };
                let layers: Vec<Linear> = (0..copies)
                    .map(|i| linear(k, n, format, 1 + i as u64))
                    .collect();
                group.throughput(throughput(stored));
                let mut next = 0;
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter(|| {
                        next = (next + 1) % copies;
                        layers[next].forward(&xs).expect("a product")
                    });
                });
            }
            let Linear::Fp8(weight) = linear(k, n, WeightFormat::Fp8, 1) else {
                continue;
            };
            let dense = dequant(&weight).expect("a tensor").t().expect("a view");
            let xs = xs.to_dtype(DType::F32).expect("a cast");
            group.throughput(throughput(4 * n * k));
            group.bench_function(BenchmarkId::from_parameter("candle_f32"), |b| {
                b.iter(|| xs.matmul(&dense).expect("a product"));
            });
            group.finish();
        }
    }
    let mut group = c.benchmark_group("cpu/fake_quant_fp8");
    let xs = input(256, 5120);
    group.throughput(Throughput::Bytes(2 * 2 * 256 * 5120));
    group.bench_function("256x5120", |b| {
        b.iter(|| fake_quant_fp8(&xs).expect("rows"))
    });
    group.finish();
}

criterion_group!(benches, quant);
criterion_main!(benches);
