//! The fused last steps of a row against the three operations they stand for.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use common::{CPU, bits, input};
use deepseek_v41_attention::{RowQuant, finish_rows, finish_rows_unfused};
use deepseek_v41_core::{RmsNorm, Rope, RopeConfig, RopeTable, Weights};
use deepseek_v41_testing::{assert_bits_eq, random_bf16, with_threads};
use proptest::prelude::*;

const QUANTS: [RowQuant; 3] = [RowQuant::Window, RowQuant::Compressed, RowQuant::Index];

fn table(positions: &[u32]) -> RopeTable {
    let cfg = RopeConfig {
        dim: 8,
        theta: 10000.0,
        original_seq_len: 0,
        factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    Rope::new(&cfg).unwrap().table(positions, &CPU).unwrap()
}

fn norm(dim: usize, seed: u64) -> RmsNorm {
    let weight = Tensor::from_vec(random_bf16(dim, 1.0, seed), dim, &CPU).unwrap();
    let weights = Weights::from_tensors(HashMap::from([("weight".to_string(), weight)])).unwrap();
    RmsNorm::new(dim, 1e-20, weights.var_builder(&CPU)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn fused_is_unfused(tokens in 0usize..40, heads in 0usize..6, groups in 1usize..4, normed: bool, quant in 0usize..3, seed: u64) {
        let dim = groups * 32;
        let xs = input(tokens * heads.max(1), dim, seed);
        // 0 heads stands for rows without a head dimension.
        let xs = if heads > 0 { xs.reshape((tokens, heads, dim)).unwrap() } else { xs };
        let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 977).collect();
        let (table, norm) = (table(&positions), norm(dim, seed));
        let norm = normed.then_some(&norm);
        let fused = || bits(&finish_rows(&xs, norm, &table, QUANTS[quant]).unwrap());
        let want = bits(&finish_rows_unfused(&xs, norm, &table, QUANTS[quant]).unwrap());
        assert_bits_eq(&with_threads(1, fused), &want);
        assert_bits_eq(&with_threads(4, fused), &want);
    }
}

/// A cache of a row that is all zeros, or whose group is, holds zeros.
#[test]
fn zeros_stay_zeros() {
    for quant in QUANTS {
        let xs = Tensor::zeros((2, 64), DType::BF16, &CPU).unwrap();
        let rows = finish_rows(&xs, Some(&norm(64, 1)), &table(&[3, 4]), quant).unwrap();
        assert!(bits(&rows).iter().all(|v| v.to_f32() == 0.0));
    }
}

#[test]
fn misfits_are_refused() {
    let quant = RowQuant::Window;
    let rows = |tokens, dim| input(tokens, dim, 1);
    assert!(finish_rows(&rows(2, 48), None, &table(&[0, 1]), quant).is_err());
    assert!(finish_rows(&rows(3, 64), None, &table(&[0, 1]), quant).is_err());
    assert!(finish_rows(&rows(2, 64), Some(&norm(32, 1)), &table(&[0, 1]), quant).is_err());
    let wide = rows(2, 64).to_dtype(DType::F32).unwrap();
    assert!(finish_rows(&wide, None, &table(&[0, 1]), quant).is_err());
}
