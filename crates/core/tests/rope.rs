//! Rotary tables and rotation against the official code's values.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Rope, RopeConfig, RopeTable, apply_rope};
use deepseek_v41_testing::{Golden, bf16_ulp_distance};
use half::bf16;

fn check_table(case: &str, dim: usize, theta: f64, original_seq_len: usize, factor: f64) {
    let golden = Golden::open("ops_basic");
    let positions: Vec<u32> = golden
        .i64(&format!("{case}.positions"))
        .iter()
        .map(|p| *p as u32)
        .collect();
    let cfg = RopeConfig {
        dim,
        theta,
        original_seq_len,
        factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    let table = Rope::new(&cfg)
        .unwrap()
        .table(&positions, &Device::Cpu)
        .unwrap();
    for (name, got) in [("cos", &table.cos), ("sin", &table.sin)] {
        let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (i, (got, want)) in got
            .iter()
            .zip(golden.f32(&format!("{case}.{name}")))
            .enumerate()
        {
            let at = (positions[i / (dim / 2)], i % (dim / 2));
            assert!(
                (got - want).abs() <= 1e-6,
                "{case} {name} {at:?}: {got} vs {want}"
            );
        }
    }
}

#[test]
fn tables_match_the_official_ones() {
    check_table("rope_small", 16, 10_000.0, 0, 1.0);
    check_table("rope_small_yarn", 16, 40_000.0, 32, 4.0);
    check_table("rope_real_window", 64, 10_000.0, 0, 16.0);
}

#[test]
fn yarn_table_is_right_up_to_the_last_position_of_the_release() {
    check_table("rope_real_compressed", 64, 160_000.0, 65_536, 16.0);
}

#[test]
fn apply_rope_rotates_forward_and_back() {
    let golden = Golden::open("ops_basic");
    let table = RopeTable {
        cos: golden.tensor("apply_rope.cos"),
        sin: golden.tensor("apply_rope.sin"),
    };
    for (x, y, inverse) in [("x3", "y3", false), ("x4", "y4_inverse", true)] {
        let xs = golden.tensor(&format!("apply_rope.{x}"));
        let want = golden.bf16(&format!("apply_rope.{y}"));
        // The golden batch rows share their positions.
        let rows: Vec<Tensor> = (0..xs.dims()[0])
            .map(|b| apply_rope(&xs.get(b).unwrap(), &table, inverse).unwrap())
            .collect();
        let got = Tensor::stack(&rows, 0)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<bf16>()
            .unwrap();
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!(
                bf16_ulp_distance(*g, *w) <= 1,
                "{x} element {i}: {g} vs {w}"
            );
        }
    }
}

#[test]
fn impossible_configs_name_their_field() {
    let good = RopeConfig {
        dim: 64,
        theta: 1e4,
        original_seq_len: 8,
        factor: 2.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    for (bad, field) in [
        (
            RopeConfig {
                dim: 7,
                ..good.clone()
            },
            "rope_head_dim",
        ),
        (
            RopeConfig {
                dim: 0,
                ..good.clone()
            },
            "rope_head_dim",
        ),
        (
            RopeConfig {
                theta: f64::NAN,
                ..good.clone()
            },
            "rope_theta",
        ),
        (
            RopeConfig {
                factor: 0.0,
                ..good.clone()
            },
            "rope_factor",
        ),
        (
            RopeConfig {
                beta_slow: -1.0,
                ..good.clone()
            },
            "beta_fast",
        ),
    ] {
        let err = Rope::new(&bad).unwrap_err().to_string();
        assert!(err.contains(field), "{err}");
    }
    let table = Rope::new(&good)
        .unwrap()
        .table(&[1, 2], &Device::Cpu)
        .unwrap();
    let short = Tensor::zeros((2, 32), candle_core::DType::BF16, &Device::Cpu).unwrap();
    assert!(apply_rope(&short, &table, false).is_err());
}
