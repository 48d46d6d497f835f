//! The tower's products and its attention on one thread, taking turns with the machine's multiply-add peak.
//!
//! `cargo bench -p deepseek-v41-vision --bench products` prints the smallest of seven averages, in the
//! thread's own time where the system tells it (Linux), so that other work on the machine counts less.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::{hint::black_box, time::Instant};

use bytes::Bytes;
use candle_core::{Device, Tensor};
use deepseek_v41_core::cpu::Bf16Rows;
use deepseek_v41_testing::{random_bf16, with_threads};
use deepseek_v41_vision::ops::{Linear, PatchRuns, full_attention};

/// Operations of a turn: a quarter of a second or so.
const TURN: f64 = 4e10;
const TURNS: usize = 7;

/// Seconds this thread has run.
fn seconds(start: Instant) -> f64 {
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let spent = spent.and_then(|s| s.split(' ').next()?.parse::<f64>().ok());
    spent.map_or_else(|| start.elapsed().as_secs_f64(), |ns| ns / 1e9)
}

/// Multiply-adds on registers, `None` without AVX-512.
fn peak() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature has been found.
        return Some(unsafe { avx512() });
    }
    None
}

/// The operations that were done.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512() -> f64 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    const SUMS: usize = 12;
    let rounds = (TURN / (SUMS * 32) as f64) as usize;
    let mut sums = [_mm512_set1_ps(0.5); SUMS];
    let (a, b) = (
        _mm512_set1_ps(black_box(0.999)),
        _mm512_set1_ps(black_box(1e-3)),
    );
    for _ in 0..rounds {
        sums.iter_mut().for_each(|s| *s = _mm512_fmadd_ps(*s, a, b));
    }
    black_box(sums.map(|s| _mm512_reduce_add_ps(s)));
    (rounds * SUMS * 32) as f64
}

struct Case {
    name: String,
    operations: f64,
    run: Box<dyn Fn()>,
}

fn linear(rows: usize, k: usize, n: usize) -> Case {
    let weight = random_bf16(n * k, 0.05, 1);
    let bytes: Vec<u8> = weight.iter().flat_map(|v| v.to_le_bytes()).collect();
    let weight = Bf16Rows::new(Bytes::from(bytes), n, k).unwrap();
    let layer = Linear::from_rows(weight, Some(vec![0.1; n])).unwrap();
    let xs = random_bf16(rows * k, 1.0, 2);
    let xs = Tensor::from_vec(xs, (rows, k), &Device::Cpu).unwrap();
    Case {
        name: format!("linear {k} -> {n}, {rows} rows"),
        operations: (2 * rows * k * n) as f64,
        run: Box::new(move || drop(black_box(layer.forward(&xs).unwrap()))),
    }
}

fn attention(patches: usize) -> Case {
    let qkv = random_bf16(patches * 3 * 1024, 1.0, 2);
    let qkv = Tensor::from_vec(qkv, (patches, 3, 16, 64), &Device::Cpu).unwrap();
    let runs = PatchRuns::one(patches, &Device::Cpu).unwrap();
    Case {
        name: format!("attention, 16 heads of 64, {patches} patches"),
        operations: (4 * patches * patches * 1024) as f64,
        run: Box::new(move || drop(black_box(full_attention(&qkv, &runs).unwrap()))),
    }
}

fn main() {
    with_threads(1, || {
        let cases = [
            linear(1026, 1024, 3072),
            linear(1026, 1024, 5632),
            linear(1026, 2816, 1024),
            linear(1026, 1024, 1024),
            linear(1026, 9216, 1024),
            linear(114, 9216, 5120),
            attention(1026),
            attention(2025),
        ];
        let start = Instant::now();
        let mut best_peak = f64::INFINITY;
        let mut best = [f64::INFINITY; 8];
        for _ in 0..TURNS {
            let from = seconds(start);
            if let Some(operations) = peak() {
                best_peak = best_peak.min((seconds(start) - from) / operations);
            }
            for (best, case) in best.iter_mut().zip(&cases) {
                let runs = (TURN / case.operations).ceil() as usize;
                let from = seconds(start);
                for _ in 0..runs {
                    (case.run)();
                }
                *best = best.min((seconds(start) - from) / runs as f64);
            }
        }
        println!("peak {:.0} GFLOP/s", 1e-9 / best_peak);
        for (seconds, case) in best.iter().zip(&cases) {
            let rate = case.operations / seconds;
            println!(
                "{:<44} {:6.1} ms {:5.0} GFLOP/s {:3.0} %",
                case.name,
                seconds * 1e3,
                rate * 1e-9,
                rate * best_peak * 100.0
            );
        }
    });
}
