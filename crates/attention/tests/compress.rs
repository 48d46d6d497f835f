//! `compress`: the gate is per channel, and groups may begin in the pending ring.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor};
use deepseek_v41_attention::ops::compress;
use deepseek_v41_core::{Error, Result};
use deepseek_v41_testing::{assert_close, random_f32};
use half::bf16;
use proptest::prelude::*;

const CPU: Device = Device::Cpu;

fn f32s(x: &Tensor) -> Vec<f32> {
    let x: Vec<bf16> = x.flatten_all().unwrap().to_vec1().unwrap();
    x.into_iter().map(|v| v.to_f32()).collect()
}

#[test]
fn the_gate_is_per_channel() {
    let kv = Tensor::new(&[[1f32, 1., 1., 1.], [3., 3., 3., 3.]], &CPU).unwrap();
    let score = Tensor::new(&[[0f32, 100., -100., 0.], [0., 0., 0., 100.]], &CPU).unwrap();
    let out = compress(&kv, &score, None, &[0, 1], 2).unwrap();
    assert_eq!((out.dims(), out.dtype()), (&[1, 4][..], DType::BF16));
    assert_eq!(f32s(&out), [2.0, 1.0, 3.0, 3.0]);
}

#[test]
fn pending_rows_come_before_the_chunk() {
    // Ring of two rows, kv | score; the group is ring row 1, then chunk row 0.
    let pending = Tensor::new(&[[9f32, 9., 0., 0.], [1., 2., 0., 0.]], &CPU).unwrap();
    let kv = Tensor::new(&[[3f32, 6.]], &CPU).unwrap();
    let score = Tensor::zeros((1, 2), DType::F32, &CPU).unwrap();
    let out = compress(&kv, &score, Some(&pending), &[-2, 0], 2).unwrap();
    assert_eq!(f32s(&out), [2.0, 4.0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against f64, and the same bits wherever the rows of a group come from.
    #[test]
    fn pooling(dim in prop::sample::select(vec![1usize, 5, 40]), ratio in 1usize..5, groups in 0usize..4, seed in 0u64..1000) {
        let t = groups * ratio + 1;
        let (kv, score) = (random_f32(t * dim, 1.0, seed), random_f32(t * dim, 3.0, seed + 1));
        let tensor = |v: &[f32], w: usize| Tensor::from_slice(v, (v.len() / w, w), &CPU).unwrap();
        let src: Vec<i64> = (0..(groups * ratio) as i64).collect();
        let (kv_t, score_t) = (tensor(&kv, dim), tensor(&score, dim));
        let got = compress(&kv_t, &score_t, None, &src, ratio).unwrap();
        prop_assert_eq!(got.dims(), &[groups, dim]);

        let mut want = Vec::new();
        for g in 0..groups {
            for d in 0..dim {
                let at = |x: &[f32], i: usize| f64::from(x[(g * ratio + i) * dim + d]);
                let e: Vec<f64> = (0..ratio).map(|i| at(&score, i).exp()).collect();
                let sum: f64 = e.iter().sum();
                want.push((0..ratio).map(|i| at(&kv, i) * e[i] / sum).sum::<f64>() as f32);
            }
        }
        assert_close(&f32s(&got), &want, 1e-6, 0.004);

        let pending = Tensor::cat(&[&kv_t, &score_t], 1).unwrap();
        let mixed: Vec<i64> = src.iter().map(|&v| if v % 2 == 0 { -(v + 1) } else { v }).collect();
        let from_ring = compress(&kv_t, &score_t, Some(&pending), &mixed, ratio).unwrap();
        prop_assert_eq!(f32s(&from_ring), f32s(&got));
    }
}

#[test]
fn a_channel_without_a_finite_score_is_nan() {
    let kv = Tensor::ones((2, 2), DType::F32, &CPU).unwrap();
    let inf = f32::NEG_INFINITY;
    let score = Tensor::new(&[[inf, inf], [inf, 0.0]], &CPU).unwrap();
    let out = f32s(&compress(&kv, &score, None, &[0, 1], 2).unwrap());
    assert!(out[0].is_nan());
    assert_eq!(out[1], 1.0);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let x = Tensor::zeros((3, 4), DType::F32, &CPU).unwrap();
    let ring = Tensor::zeros((2, 8), DType::F32, &CPU).unwrap();
    let value = |r: Result<Tensor>| assert!(matches!(r, Err(Error::Value { .. })));
    let shape = |r: Result<Tensor>| assert!(matches!(r, Err(Error::Shape { .. })));
    value(compress(&x, &x, None, &[0, 3], 2));
    value(compress(&x, &x, None, &[-1, 0], 2));
    value(compress(&x, &x, Some(&ring), &[-3, 0], 2));
    value(compress(&x, &x, Some(&ring), &[i64::MIN, i64::MAX], 2));
    shape(compress(&x, &x, None, &[0, 1, 2], 2));
    shape(compress(&x, &x, None, &[0, 1], 0));
    shape(compress(&x, &x, Some(&x), &[0, 1], 2));
    shape(compress(&x, &x.narrow(0, 0, 2).unwrap(), None, &[0, 1], 2));
}
