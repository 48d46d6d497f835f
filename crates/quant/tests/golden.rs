//! The crate against the official formulas: every case of `ops_quant` and `ops_gemm`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::Bytes;
use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{RawTensor, StoredDtype, Weights};
use deepseek_v41_quant::{
    ActScale, Fp4Weight, Fp8Weight, Linear, QuantizedActivation, ScaleFormat, WeightFormat,
    act_quant_with, e2m1, fake_quant_fp4, fake_quant_fp8_with, fp4_act_quant, fp4_gemm, fp8_gemm,
    ops::{act_quant::fp8_scale, fp4_act_quant::fp4_scale, fp4_gemm::*, fp8_gemm::*},
};
use deepseek_v41_testing::{Golden, assert_bits_eq, bf16_ulp_distance};
use half::bf16;

fn bytes_of(t: &Tensor) -> Vec<u8> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

fn bf16_of(t: &Tensor) -> Vec<bf16> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn act_quant_is_bit_exact() {
    let g = Golden::open("ops_quant");
    for (name, group, format) in [
        ("act_quant_b32_ue8m0", 32, ActScale::E8M0),
        ("act_quant_b128_ue8m0", 128, ActScale::E8M0),
        ("act_quant_b128_fp32", 128, ActScale::F32),
    ] {
        let xs = g.tensor(&format!("{name}.x"));
        let q = act_quant_with(&xs, group, format).unwrap();
        assert_eq!(
            bytes_of(&q.data),
            g.bytes(&format!("{name}.q_bits")),
            "{name}"
        );
        match format {
            ActScale::E8M0 => assert_eq!(bytes_of(&q.scale), g.bytes(&format!("{name}.scale"))),
            ActScale::F32 => assert_eq!(
                q.scale.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                g.f32(&format!("{name}.scale"))
            ),
        }
        let y = fake_quant_fp8_with(&xs, group, format).unwrap();
        assert_bits_eq(&bf16_of(&y), &g.bf16(&format!("{name}.inplace")));
    }
}

#[test]
fn fp4_act_quant_is_bit_exact() {
    let g = Golden::open("ops_quant");
    for (name, group, format) in [
        ("fp4_act_quant_b32_e8m0", 32, ScaleFormat::E8M0),
        ("fp4_act_quant_b16_e4m3", 16, ScaleFormat::E4M3),
    ] {
        let xs = g.tensor(&format!("{name}.x"));
        let q = fp4_act_quant(&xs, group, format).unwrap();
        assert_eq!(
            bytes_of(&q.data),
            g.bytes(&format!("{name}.packed")),
            "{name}"
        );
        assert_eq!(
            bytes_of(&q.scale),
            g.bytes(&format!("{name}.scale")),
            "{name}"
        );
        let y = fake_quant_fp4(&xs, group, format).unwrap();
        assert_bits_eq(&bf16_of(&y), &g.bf16(&format!("{name}.inplace")));
    }
}

#[test]
fn e2m1_round_is_bit_exact() {
    let g = Golden::open("ops_quant");
    let codes = g.bytes("e2m1_round.codes");
    let values = g.f32("e2m1_round.values");
    for ((x, code), value) in g.f32("e2m1_round.x").iter().zip(codes).zip(values) {
        assert_eq!(e2m1::encode(*x), *code, "{x}");
        assert_eq!(e2m1::decode(*code).to_bits(), value.to_bits());
    }
}

#[test]
fn scale_rules_are_bit_exact() {
    let g = Golden::open("ops_quant");
    let (fp8, e8m0, e4m3) = (
        g.f32("scales.fp8_pow2"),
        g.f32("scales.fp4_pow2"),
        g.f32("scales.fp4_e4m3"),
    );
    for (i, amax) in g.f32("scales.amax").into_iter().enumerate() {
        assert_eq!(fp8_scale(amax, ActScale::E8M0), fp8[i], "{amax}");
        assert_eq!(fp4_scale(amax, ScaleFormat::E8M0), e8m0[i], "{amax}");
        assert_eq!(fp4_scale(amax, ScaleFormat::E4M3), e4m3[i], "{amax}");
    }
}

/// The manifest's tolerance: 1 bf16 ulp, both to the blockwise f32 sum and to the f64 sum.
#[track_caller]
fn assert_one_ulp(name: &str, got: &[bf16], expected: &[bf16]) {
    assert_eq!(got.len(), expected.len());
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(bf16_ulp_distance(*a, *b) <= 1, "{name}[{i}]: {a} vs {b}");
    }
}

#[track_caller]
fn check(g: &Golden, name: &str, y: &Tensor, reference: &[bf16]) {
    let y = bf16_of(y);
    assert_bits_eq(&y, reference);
    assert_one_ulp(name, &y, &g.bf16(&format!("{name}.out")));
    let exact: Vec<bf16> = g
        .f32(&format!("{name}.exact"))
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    assert_one_ulp(name, &y, &exact);
}

fn gemm_case(g: &Golden, name: &str) -> (usize, usize, QuantizedActivation, [Vec<u8>; 4]) {
    let part = |p: &str| g.bytes(&format!("{name}.{p}")).to_vec();
    let parts = [part("a"), part("a_s"), part("b"), part("b_s")];
    let a = QuantizedActivation {
        data: g.tensor(&format!("{name}.a")),
        scale: g.tensor(&format!("{name}.a_s")),
    };
    (
        g.shape(&format!("{name}.b"))[0],
        g.shape(&format!("{name}.a"))[1],
        a,
        parts,
    )
}

#[test]
fn fp8_gemm_cases() {
    let g = Golden::open("ops_gemm");
    for (name, block) in [
        ("fp8_gemm_b32_5x80x96", 32),
        ("fp8_gemm_b32_1x64x256", 32),
        ("fp8_gemm_b128_4x130x256", 128),
    ] {
        let (n, k, a, [codes, scales, b, b_s]) = gemm_case(&g, name);
        let mut reference = vec![bf16::ZERO; codes.len() / k * n];
        fp8_gemm_ref(&codes, &scales, &b, &b_s, k, block, block, &mut reference);
        let w = Fp8Weight::new(Bytes::from(b), Bytes::from(b_s), n, k, block).unwrap();
        check(&g, name, &fp8_gemm(&a, &w).unwrap(), &reference);
    }
}

#[test]
fn fp4_gemm_cases() {
    let g = Golden::open("ops_gemm");
    for (name, group) in [
        ("fp4_gemm_b32_7x48x128", 32),
        ("fp4_gemm_b128_3x64x256", 128),
        ("fp4_gemm_b32_1x96x64", 32),
    ] {
        let (n, k, a, [codes, scales, b, b_s]) = gemm_case(&g, name);
        let mut reference = vec![bf16::ZERO; codes.len() / k * n];
        fp4_gemm_ref(&codes, &scales, &b, &b_s, k, group, &mut reference);
        let w = Fp4Weight::new(Bytes::from(b), Bytes::from(b_s), n, k).unwrap();
        check(&g, name, &fp4_gemm(&a, &w).unwrap(), &reference);
    }
}

#[test]
fn linear_case() {
    let g = Golden::open("ops_gemm");
    let raw = |name: &str, key: &str, dtype| RawTensor {
        name: name.to_owned(),
        file: None,
        dtype,
        shape: g.shape(key).to_vec(),
        bytes: Bytes::from(g.bytes(key).to_vec()),
    };
    let weights = Weights::from_raw([
        raw("fp8.weight", "linear_6x64x96.w8", StoredDtype::F8_E4M3),
        raw("fp8.scale", "linear_6x64x96.w8_s", StoredDtype::F8_E8M0),
        raw("fp4.weight", "linear_6x64x96.w4", StoredDtype::I8),
        raw("fp4.scale", "linear_6x64x96.w4_s", StoredDtype::F8_E8M0),
    ]);
    let vb = weights.var_builder(&Device::Cpu);
    let xs = g.tensor("linear_6x64x96.x");
    for (name, format, y) in [
        ("fp8", WeightFormat::Fp8, "y8"),
        ("fp4", WeightFormat::Fp4, "y4"),
    ] {
        let linear = Linear::new(96, 64, format, vb.pp(name)).unwrap();
        let out = linear.forward(&xs).unwrap();
        assert_eq!((out.dtype(), out.dims()), (DType::BF16, &[6, 64][..]));
        assert_one_ulp(
            name,
            &bf16_of(&out),
            &g.bf16(&format!("linear_6x64x96.{y}")),
        );
    }
}
