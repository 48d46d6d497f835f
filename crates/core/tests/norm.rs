//! RMSNorm against the official code and on rows that could go wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::rms_norm;
use deepseek_v41_testing::{Golden, assert_bits_eq, bf16_ulp_distance, random_bf16, with_threads};
use half::bf16;

fn flat(t: &Tensor) -> Vec<bf16> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn matches_the_official_norm() {
    let golden = Golden::open("ops_basic");
    for (case, eps) in [("rmsnorm_1e-20", 1e-20), ("rmsnorm_1e-06", 1e-6)] {
        let w = golden
            .tensor(&format!("{case}.weight"))
            .to_dtype(DType::F32)
            .unwrap();
        let got = flat(&rms_norm(&golden.tensor(&format!("{case}.x")), &w, eps).unwrap());
        for (g, w) in got.iter().zip(golden.bf16(&format!("{case}.y"))) {
            assert!(bf16_ulp_distance(*g, w) <= 1, "{case}: {g} vs {w}");
        }
    }
}

#[test]
fn zero_rows_stay_zero_under_the_released_epsilon() {
    let xs = Tensor::zeros((2, 40), DType::BF16, &Device::Cpu).unwrap();
    let w = Tensor::ones(40, DType::F32, &Device::Cpu).unwrap();
    assert!(
        flat(&rms_norm(&xs, &w, 1e-20).unwrap())
            .iter()
            .all(|v| v.to_f32() == 0.0)
    );
}

#[test]
fn tiny_rows_are_not_flushed() {
    // mean(x²) is 1e-38, far above 1e-20 squared away: the row must still come out with rms 1.
    let xs = Tensor::full(bf16::from_f32(1e-8), (1, 32), &Device::Cpu).unwrap();
    let w = Tensor::ones(32, DType::F32, &Device::Cpu).unwrap();
    let y = flat(&rms_norm(&xs, &w, 1e-20).unwrap());
    assert!(y.iter().all(|v| (v.to_f32() - 0.995).abs() < 0.02), "{y:?}");
}

#[test]
fn rows_do_not_see_each_other_nor_the_threads() {
    let (rows, dim) = (700, 333);
    let x = random_bf16(rows * dim, 1.0, 7);
    let xs = Tensor::from_vec(x, (rows, dim), &Device::Cpu).unwrap();
    let w = Tensor::ones(dim, DType::F32, &Device::Cpu).unwrap();
    let one = with_threads(1, || flat(&rms_norm(&xs, &w, 1e-6).unwrap()));
    let many = with_threads(4, || flat(&rms_norm(&xs, &w, 1e-6).unwrap()));
    assert_bits_eq(&one, &many);
    let alone = flat(&rms_norm(&xs.narrow(0, 123, 1).unwrap(), &w, 1e-6).unwrap());
    assert_bits_eq(&alone, &one[123 * dim..124 * dim]);
    let none = rms_norm(&xs.narrow(0, 0, 0).unwrap(), &w, 1e-6).unwrap();
    assert_eq!(none.dims(), &[0, dim]);
}

#[test]
fn wrong_width_is_an_error() {
    let xs = Tensor::zeros((2, 40), DType::BF16, &Device::Cpu).unwrap();
    let w = Tensor::ones(41, DType::F32, &Device::Cpu).unwrap();
    assert!(
        rms_norm(&xs, &w, 1e-6)
            .unwrap_err()
            .to_string()
            .contains("rms_norm")
    );
}
