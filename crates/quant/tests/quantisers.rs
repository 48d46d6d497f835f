//! Properties of the quantisers, and what they do with input that has no good answer.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use deepseek_v41_quant::{
    ActScale, ScaleFormat, act_quant, act_quant_slice, act_quant_values, act_quant_with,
    dequant_fp8_slice, e2m1, e4m3, e8m0, fake_quant_fp4, fake_quant_fp4_slice, fake_quant_fp8,
    fake_quant_fp8_slice, fake_quant_fp8_with, fp4_act_quant, fp4_act_quant_slice,
    ops::act_quant::act_quant_ref,
};
use deepseek_v41_testing::{assert_bits_eq, random_bf16, with_threads};
use half::bf16;
use proptest::prelude::*;

fn tensor(xs: &[bf16], rows: usize) -> Tensor {
    Tensor::from_slice(xs, (rows, xs.len() / rows), &Device::Cpu).unwrap()
}

/// Any bit pattern of a finite bf16.
fn finite() -> impl Strategy<Value = bf16> {
    any::<u16>().prop_map(|b| {
        if b & 0x7f80 == 0x7f80 {
            bf16::from_bits(b & 0x8000)
        } else {
            bf16::from_bits(b)
        }
    })
}

fn group(n: usize) -> impl Strategy<Value = Vec<bf16>> {
    prop_oneof![
        prop::collection::vec(finite(), n),
        (any::<u64>(), -30i32..30).prop_map(move |(seed, e)| random_bf16(n, 2f32.powi(e), seed)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn act_quant_follows_its_definition(xs in group(3 * 96)) {
        for format in [ActScale::E8M0, ActScale::F32] {
            let q = act_quant_with(&tensor(&xs, 3), 32, format).unwrap();
            let (mut codes, mut scales) = (vec![0; xs.len()], vec![0f32; xs.len() / 32]);
            act_quant_ref(&xs, 32, format, &mut codes, &mut scales);
            prop_assert_eq!(q.data.flatten_all().unwrap().to_vec1::<u8>().unwrap(), codes);
            if format == ActScale::F32 {
                prop_assert_eq!(q.scale.flatten_all().unwrap().to_vec1::<f32>().unwrap(), scales);
            } else {
                let bytes: Vec<u8> = scales.iter().map(|s| e8m0::encode(*s)).collect();
                prop_assert_eq!(q.scale.flatten_all().unwrap().to_vec1::<u8>().unwrap(), bytes);
            }
        }
    }

    /// Slices, tensors, values and codes are views of one result.
    #[test]
    fn all_forms_agree(xs in group(2 * 64)) {
        let mut fake = xs.clone();
        fake_quant_fp8_slice(&mut fake);
        assert_bits_eq(&fake_quant_fp8(&tensor(&xs, 2)).unwrap().flatten_all().unwrap().to_vec1().unwrap(), &fake);
        let (mut codes, mut scales) = (vec![0; 128], vec![0; 4]);
        act_quant_slice(&xs, &mut codes, &mut scales);
        let mut dequantised = vec![bf16::ZERO; 128];
        dequant_fp8_slice(&codes, &scales, 32, &mut dequantised);
        assert_bits_eq(&dequantised, &fake);
        let mut values = vec![0f32; 128];
        act_quant_values(&xs, &mut values);
        for (value, fake) in values.iter().zip(&fake) {
            prop_assert!(bf16::from_f32(*value).to_bits() == fake.to_bits());
        }

        for (group, format) in [(32, ScaleFormat::E8M0), (16, ScaleFormat::E4M3)] {
            let mut fake = xs.clone();
            fake_quant_fp4_slice(&mut fake, group, format);
            let y = fake_quant_fp4(&tensor(&xs, 2), group, format).unwrap();
            assert_bits_eq(&y.flatten_all().unwrap().to_vec1().unwrap(), &fake);
            let (mut packed, mut scales) = (vec![0; 64], vec![0; 128 / group]);
            fp4_act_quant_slice(&xs, group, format, &mut packed, &mut scales);
            let decode = if format == ScaleFormat::E8M0 { e8m0::decode } else { e4m3::decode };
            for i in 0..128 {
                let code = packed[i / 2] >> (i % 2 * 4);
                let value = e2m1::decode(code) * decode(scales[i / group]);
                prop_assert_eq!(bf16::from_f32(value).to_bits(), fake[i].to_bits());
            }
        }
    }

    /// With power-of-two scales a second pass changes nothing.
    #[test]
    fn fake_quant_is_idempotent(seed: u64, exponent in -10i32..20) {
        let xs = random_bf16(64, 2f32.powi(exponent), seed);
        let mut once = xs.clone();
        fake_quant_fp8_slice(&mut once);
        let mut twice = once.clone();
        fake_quant_fp8_slice(&mut twice);
        assert_bits_eq(&twice, &once);
        let mut once = xs;
        fake_quant_fp4_slice(&mut once, 32, ScaleFormat::E8M0);
        let mut twice = once.clone();
        fake_quant_fp4_slice(&mut twice, 32, ScaleFormat::E8M0);
        assert_bits_eq(&twice, &once);
    }

    /// Half of a step at most, and signs stay.
    #[test]
    fn error_is_bounded(seed: u64, exponent in -10i32..20) {
        let xs = random_bf16(64, 2f32.powi(exponent), seed);
        let mut ys = xs.clone();
        fake_quant_fp8_slice(&mut ys);
        for (group, ys) in xs.chunks(32).zip(ys.chunks(32)) {
            let amax = group.iter().fold(1e-4f32, |m, x| m.max(x.to_f32().abs()));
            for (x, y) in group.iter().zip(ys) {
                let (x, y) = (x.to_f32(), y.to_f32());
                // 2^-4 of the value for normal codes, half of 2^-9 scales for subnormal ones; the
                // scale is below amax / 224.
                prop_assert!((x - y).abs() <= (x.abs() / 16.0).max(amax / 224.0 / 1024.0));
                prop_assert!(x.is_sign_negative() == y.is_sign_negative());
            }
        }
    }
}

/// Trap C14: zeros stay zeros with their signs, and the floor of the scale differs by format.
#[test]
fn zero_groups() {
    let zeros: Vec<bf16> = (0..32)
        .map(|i| {
            if i % 3 == 0 {
                bf16::NEG_ZERO
            } else {
                bf16::ZERO
            }
        })
        .collect();
    let (mut codes, mut scale) = (vec![1; 32], vec![0]);
    act_quant_slice(&zeros, &mut codes, &mut scale);
    // 2^-22: the power of two above 1e-4 / 448.
    assert_eq!(scale, [127 - 22]);
    assert!(
        codes
            .iter()
            .zip(&zeros)
            .all(|(c, z)| *c == if z.is_sign_negative() { 0x80 } else { 0 })
    );
    let mut packed = vec![1; 16];
    fp4_act_quant_slice(&zeros, 32, ScaleFormat::E8M0, &mut packed, &mut scale);
    assert_eq!(scale, [1]); // 2^-126
    let mut scales = vec![0, 0];
    fp4_act_quant_slice(&zeros, 16, ScaleFormat::E4M3, &mut packed, &mut scales);
    assert_eq!(scales, [1, 1]); // 2^-9, an e4m3 subnormal
    for (group, format) in [(32, ScaleFormat::E8M0), (16, ScaleFormat::E4M3)] {
        let mut xs = zeros.clone();
        fake_quant_fp4_slice(&mut xs, group, format);
        assert_bits_eq(&xs, &zeros);
    }
    let mut xs = zeros.clone();
    fake_quant_fp8_slice(&mut xs);
    assert_bits_eq(&xs, &zeros);
}

/// Trap C13: the e4m3 scale is a true division by 6 and lets values sit on e2m1 ties.
#[test]
fn e4m3_scale_divides() {
    // amax 6.6 (bf16 6.59375) / 6 = 1.0989… rounds to 1.125; 1.125 * 1.25 is a tie between 1 and 1.5.
    let mut xs = vec![bf16::ZERO; 16];
    xs[0] = bf16::from_f32(6.59375);
    xs[1] = bf16::from_f32(1.125 * 1.25);
    xs[2] = bf16::from_f32(1.125 * 2.5);
    fake_quant_fp4_slice(&mut xs, 16, ScaleFormat::E4M3);
    assert_eq!(xs[0].to_f32(), 6.0 * 1.125);
    assert_eq!(xs[1].to_f32(), 1.125, "1.25 goes to the even code, 1.0");
    assert_eq!(
        xs[2].to_f32(),
        2.0 * 1.125,
        "2.5 goes to the even code, 2.0"
    );
}

/// A scale that rounds down lets `x / s` pass 6, and the clamp catches it.
#[test]
fn e4m3_scale_that_rounds_down_saturates() {
    let mut xs = vec![bf16::from_f32(6.0 * 1.0546875); 16];
    fake_quant_fp4_slice(&mut xs, 16, ScaleFormat::E4M3);
    assert!(xs.iter().all(|x| x.to_f32() == 6.0));
}

/// Long inputs go over threads in pieces; a group of 48 does not divide the usual piece.
#[test]
fn threads_do_not_show() {
    let xs = random_bf16(600 * 96, 1.0, 9);
    let long = tensor(&xs, 600);
    let rows = |y: Tensor| -> Vec<bf16> { y.flatten_all().unwrap().to_vec1().unwrap() };
    let alone = |f: &dyn Fn(&Tensor) -> Tensor| -> Vec<bf16> {
        xs.chunks(96).flat_map(|x| rows(f(&tensor(x, 1)))).collect()
    };
    let fp8 = |x: &Tensor| fake_quant_fp8_with(x, 48, ActScale::E8M0).unwrap();
    let fp4 = |x: &Tensor| fake_quant_fp4(x, 48, ScaleFormat::E4M3).unwrap();
    for threads in [1, 4] {
        assert_bits_eq(&with_threads(threads, || rows(fp8(&long))), &alone(&fp8));
        assert_bits_eq(&with_threads(threads, || rows(fp4(&long))), &alone(&fp4));
        let mut values = vec![0f32; xs.len()];
        with_threads(threads, || act_quant_values(&xs, &mut values));
        let mut one = vec![0f32; 96];
        for (x, values) in xs.chunks(96).zip(values.chunks(96)) {
            act_quant_values(x, &mut one);
            assert_eq!(one, values);
        }
    }
}

/// NaN and infinity take their own group and nothing else.
#[test]
fn non_finite_input_poisons_its_group() {
    for bad in [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY] {
        let mut xs = random_bf16(96, 1.0, 7);
        let clean = xs.clone();
        xs[40] = bad;
        let q = act_quant(&tensor(&xs, 1)).unwrap();
        let codes: Vec<u8> = q.data.flatten_all().unwrap().to_vec1().unwrap();
        let scales: Vec<u8> = q.scale.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(scales[1], e8m0::NAN);
        assert!(codes[32..64].iter().all(|c| *c == e4m3::NAN));
        let p = fp4_act_quant(&tensor(&xs, 1), 32, ScaleFormat::E8M0).unwrap();
        assert_eq!(
            p.scale.flatten_all().unwrap().to_vec1::<u8>().unwrap()[1],
            e8m0::NAN
        );
        let p = fp4_act_quant(&tensor(&xs, 1), 16, ScaleFormat::E4M3).unwrap();
        assert_eq!(
            p.scale.flatten_all().unwrap().to_vec1::<u8>().unwrap()[2],
            e4m3::NAN
        );

        type Form = fn(&mut [bf16]);
        let forms: [(Form, std::ops::Range<usize>); 3] = [
            (fake_quant_fp8_slice, 32..64),
            (|xs| fake_quant_fp4_slice(xs, 32, ScaleFormat::E8M0), 32..64),
            (|xs| fake_quant_fp4_slice(xs, 16, ScaleFormat::E4M3), 32..48),
        ];
        for (fake, group) in forms {
            let (mut got, mut expected) = (xs.clone(), clean.clone());
            fake(&mut got);
            fake(&mut expected);
            for i in 0..96 {
                if group.contains(&i) {
                    assert!(got[i].is_nan());
                } else {
                    assert_eq!(got[i].to_bits(), expected[i].to_bits());
                }
            }
        }
    }
}

#[test]
fn shapes_and_dtypes_are_checked() {
    let xs = Tensor::zeros((3, 48), DType::BF16, &Device::Cpu).unwrap();
    assert!(act_quant(&xs).is_err(), "48 is not a multiple of 32");
    assert!(fake_quant_fp8(&xs).is_err());
    assert!(fake_quant_fp4(&xs, 32, ScaleFormat::E8M0).is_err());
    assert!(fake_quant_fp4(&xs, 0, ScaleFormat::E8M0).is_err());
    assert!(
        fp4_act_quant(&xs, 3, ScaleFormat::E8M0).is_err(),
        "codes go in pairs"
    );
    assert!(fake_quant_fp4(&xs, 16, ScaleFormat::E4M3).is_ok());
    let f32s = Tensor::zeros((3, 64), DType::F32, &Device::Cpu).unwrap();
    assert!(act_quant(&f32s).is_err());
    let empty = Tensor::zeros((0, 64), DType::BF16, &Device::Cpu).unwrap();
    assert_eq!(act_quant(&empty).unwrap().scale.dims(), [0, 2]);
    // A view is made contiguous first.
    let wide = Tensor::zeros((64, 3), DType::BF16, &Device::Cpu).unwrap();
    assert_eq!(fake_quant_fp8(&wide.t().unwrap()).unwrap().dims(), [3, 64]);
}
