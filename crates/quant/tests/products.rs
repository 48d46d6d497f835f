//! Every way to compute a product gives the bits of its definition.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::Bytes;
use deepseek_v41_core::cpu::{self, Bf16Rows, F32Rows, Isa, WeightRows};
use deepseek_v41_quant::{Fp4Weight, Fp8Weight, Linear, e2m1, e4m3, e8m0};
use deepseek_v41_testing::{assert_bits_eq, random_bf16, random_f32, seed_of, with_threads};
use half::bf16;
use proptest::prelude::*;

/// Random bytes; e4m3 NaN only where asked for.
fn bytes(n: usize, seed: u64, nan: bool) -> Vec<u8> {
    let mut state = seed | 1;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let byte = (state >> 56) as u8;
            if !nan && byte & 0x7f == e4m3::NAN {
                byte ^ 1
            } else {
                byte
            }
        })
        .collect()
}

fn scales(n: usize, seed: u64, low: u8, high: u8) -> Vec<u8> {
    let span = u32::from(high - low) + 1;
    bytes(n, seed ^ 0x5ca1e, true)
        .into_iter()
        .map(|b| low + (u32::from(b) % span) as u8)
        .collect()
}

fn fp8(n: usize, k: usize, tile: usize, seed: u64, range: (u8, u8), nan: bool) -> Fp8Weight {
    let s = scales(n.div_ceil(tile) * (k / tile), seed, range.0, range.1);
    Fp8Weight::new(
        Bytes::from(bytes(n * k, seed, nan)),
        Bytes::from(s),
        n,
        k,
        tile,
    )
    .unwrap()
}

fn fp4(n: usize, k: usize, seed: u64, range: (u8, u8)) -> Fp4Weight {
    let s = scales(n * (k / 32), seed, range.0, range.1);
    Fp4Weight::new(
        Bytes::from(bytes(n * k / 2, seed, true)),
        Bytes::from(s),
        n,
        k,
    )
    .unwrap()
}

/// Decode a row, then the definition of the reduction.
fn reference(w: &dyn WeightRows, xs: &[f32], m: usize) -> Vec<f32> {
    let (n, k) = (w.rows(), w.cols());
    let mut out = vec![0f32; m * n];
    let mut row = vec![0f32; k];
    for j in 0..n {
        w.decode(j, 0, &mut row);
        for i in 0..m {
            out[i * n + j] = cpu::dot_ref(&row, &xs[i * k..][..k]);
        }
    }
    out
}

/// Equal bits, all NaN counting as one.
#[track_caller]
fn assert_same(got: &[f32], expected: &[f32], what: &str) {
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{what}[{i}]: {a} vs {b}"
        );
    }
}

/// Every instruction set, a batch and each of its rows alone, one thread and four.
fn check(w: &dyn WeightRows, xs: &[f32], m: usize) {
    let (n, k) = (w.rows(), w.cols());
    let expected = reference(w, xs, m);
    for isa in Isa::available() {
        let mut out = vec![f32::NAN; m * n];
        cpu::matmul_with(isa, w, xs, m, &mut out);
        assert_same(&out, &expected, &format!("{isa:?} m = {m}"));
        for (x, expected) in xs.chunks(k.max(1)).zip(expected.chunks(n.max(1))) {
            let mut out = vec![f32::NAN; n];
            cpu::matmul_with(isa, w, x, 1, &mut out);
            assert_same(&out, expected, &format!("{isa:?} alone"));
        }
    }
    for threads in [1, 4] {
        let mut out = vec![f32::NAN; m * n];
        with_threads(threads, || cpu::matmul(w, xs, m, &mut out));
        assert_same(&out, &expected, &format!("{threads} threads"));
    }
}

/// Decoding a row, from any column on, is one codec call per factor.
#[test]
fn decode_is_code_times_scale() {
    let seed = seed_of("decode_is_code_times_scale");
    let (n, k) = (37, 128);
    for (low, high, nan) in [
        (100, 140, false),
        (0, 3, false),
        (244, 255, false),
        (0, 255, true),
    ] {
        let w = fp8(n, k, 32, seed, (low, high), nan);
        let codes = bytes(n * k, seed, nan);
        let tiles = scales(n.div_ceil(32) * (k / 32), seed, low, high);
        let w4 = fp4(n, k, seed, (low, high));
        let packed = bytes(n * k / 2, seed, true);
        let groups = scales(n * (k / 32), seed, low, high);
        for (row, k0, len) in [
            (0, 0, k),
            (36, 32, 70),
            (33, 5, 60),
            (7, 96, 32),
            (7, 127, 1),
        ] {
            let (mut got8, mut got4) = (vec![0f32; len], vec![0f32; len]);
            w.decode(row, k0, &mut got8);
            w4.decode(row, k0, &mut got4);
            let at = |i: usize| row * k + k0 + i;
            let expected8: Vec<f32> = (0..len)
                .map(|i| {
                    let scale = tiles[row / 32 * (k / 32) + (k0 + i) / 32];
                    e4m3::decode(codes[at(i)]) * e8m0::decode(scale)
                })
                .collect();
            let expected4: Vec<f32> = (0..len)
                .map(|i| {
                    let code = packed[at(i) / 2] >> (at(i) % 2 * 4);
                    e2m1::decode(code) * e8m0::decode(groups[at(i) / 32])
                })
                .collect();
            assert_same(&got8, &expected8, "fp8");
            assert_same(&got4, &expected4, "fp4");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn fp8_on_odd_sizes(m in 1usize..9, n in 1usize..75, k in 1usize..12, seed: u64,
                        tile in prop::sample::select(vec![8usize, 32, 64, 128])) {
        let k = k * tile.max(32);
        let xs = random_f32(m * k, 1.0, seed);
        check(&fp8(n, k, tile, seed, (100, 140), false), &xs, m);
    }

    #[test]
    fn fp4_on_odd_sizes(m in 1usize..9, n in 1usize..75, k in 1usize..20, seed: u64) {
        let xs = random_f32(m * 32 * k, 1.0, seed);
        check(&fp4(n, 32 * k, seed, (100, 140)), &xs, m);
    }

    /// Scale bytes 0 and 255, overflowing ones, NaN codes, and inputs near both ends of f32.
    #[test]
    fn extreme_scales_and_inputs(m in 1usize..4, n in 1usize..40, k in 1usize..5, seed: u64,
                                 exponent in -120i32..120, low in 0u8..=255, width in 0u8..12) {
        let k = 32 * k;
        let range = (low, low.saturating_add(width));
        let mut xs = random_f32(m * k, 2f32.powi(exponent), seed);
        xs[seed as usize % (m * k)] = 0.0;
        check(&fp8(n, k, 32, seed, range, width % 2 == 1), &xs, m);
        check(&fp8(n, k, 32, seed, range, false).rounded_to_bf16(), &xs, m);
        check(&fp4(n, k, seed, range), &xs, m);
    }

    #[test]
    fn plain_weights_on_odd_sizes(m in 1usize..9, n in 1usize..75, k in 1usize..300, seed: u64) {
        let xs = random_f32(m * k, 1.0, seed);
        let values = random_f32(n * k, 1.0, seed ^ 1);
        let le: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        check(&F32Rows::new(Bytes::from(le), n, k).unwrap(), &xs, m);
        let le: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        check(&Bf16Rows::new(Bytes::from(le), n, k).unwrap(), &xs, m);
    }

    /// The rows of a mapped file start anywhere.
    #[test]
    fn unaligned_bytes(offset in 0usize..33, seed: u64) {
        let (n, k) = (7, 96);
        let xs = random_f32(2 * k, 1.0, seed);
        let shift = |v: Vec<u8>| Bytes::from([vec![0; offset], v].concat()).slice(offset..);
        let s8 = Bytes::from(scales(3, seed, 120, 130));
        let w8 = shift(bytes(n * k, seed, false));
        check(&Fp8Weight::new(w8, s8, n, k, 32).unwrap(), &xs, 2);
        let s4 = shift(scales(n * 3, seed, 120, 130));
        check(&Fp4Weight::new(shift(bytes(n * k / 2, seed, true)), s4, n, k).unwrap(), &xs, 2);
        check(&Bf16Rows::new(shift(bytes(n * k, seed, true)), n, k / 2).unwrap(), &xs[..k], 2);
    }
}

/// Large enough for several panels of columns, chunks of inputs and parallel tasks.
#[test]
fn panels_chunks_and_tasks_do_not_show() {
    let seed = seed_of("panels_chunks_and_tasks_do_not_show");
    let (m, n, k) = (101, 70, 544);
    let xs = random_f32(m * k, 1.0, seed);
    let xs: Vec<f32> = xs.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
    check(&fp8(n, k, 32, seed, (110, 130), false), &xs, m);
    check(&fp4(n, k, seed, (110, 130)), &xs, m);
}

/// A row's bits do not depend on the batch it is computed in.
#[test]
fn batch_of_linears_equals_rows_alone() {
    let seed = seed_of("batch_of_linears_equals_rows_alone");
    let (m, n, k) = (7, 45, 96);
    let xs = random_bf16(m * k, 1.0, seed);
    for linear in [
        Linear::Fp8(fp8(n, k, 32, seed, (115, 125), false)),
        Linear::Fp4(fp4(n, k, seed, (115, 125))),
    ] {
        let mut batch = vec![bf16::ZERO; m * n];
        linear.forward_slice(&xs, m, &mut batch).unwrap();
        for (x, batch) in xs.chunks(k).zip(batch.chunks(n)) {
            let mut alone = vec![bf16::ZERO; n];
            linear.forward_slice(x, 1, &mut alone).unwrap();
            assert_bits_eq(&alone, batch);
        }
    }
}

#[test]
fn empty_products() {
    let w = fp8(3, 32, 32, 1, (120, 125), false);
    cpu::matmul(&w, &[], 0, &mut []);
    let none = Fp8Weight::new(Bytes::new(), Bytes::new(), 0, 32, 32).unwrap();
    cpu::matmul(&none, &[0.0; 64], 2, &mut []);
    let mut out = [f32::NAN; 4];
    let no_columns = F32Rows::new(Bytes::new(), 2, 0).unwrap();
    cpu::matmul(&no_columns, &[], 2, &mut out);
    assert_eq!(out, [0.0; 4]);
}
