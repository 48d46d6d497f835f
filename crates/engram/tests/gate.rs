//! The gate: golden values, the shared value, signs and NaN, and rows without a key.

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::cpu::Isa;
use deepseek_v41_engram::{
    ops::engram_gate::{GateParams, engram_gate, engram_gate_ref, gate_into, gate_with},
    pcg64::Pcg64,
};
use deepseek_v41_testing::{assert_bits_eq, bf16_ulp_distance, with_threads};
use half::bf16;
use proptest::prelude::*;

fn random(n: usize, scale: f32, rng: &mut Pcg64) -> Vec<f32> {
    (0..n)
        .map(|_| (rng.next_f64() as f32 * 2.0 - 1.0) * scale)
        .collect()
}

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&v| bf16::from_f32(v)).collect()
}

struct Case {
    stream: Vec<bf16>,
    kv: Vec<bf16>,
    weight: Vec<f32>,
    params: GateParams,
}

impl Case {
    fn random(tokens: usize, copies: usize, dim: usize, seed: u64) -> Self {
        let mut rng = Pcg64::from_seed(seed);
        Self {
            stream: to_bf16(&random(tokens * copies * dim, 2.0, &mut rng)),
            kv: to_bf16(&random(tokens * (copies + 1) * dim, 3.0, &mut rng)),
            weight: random(copies * dim, 1.5, &mut rng),
            params: GateParams {
                copies,
                dim,
                eps: 1e-20,
            },
        }
    }

    fn run(&self, mask: Option<&[u8]>) -> Vec<bf16> {
        let mut out = vec![bf16::ZERO; self.stream.len()];
        gate_into(
            &self.stream,
            &self.kv,
            &self.weight,
            mask,
            self.params,
            &mut out,
        );
        for isa in Isa::available() {
            let mut same = vec![bf16::ONE; out.len()];
            let (stream, kv) = (&self.stream, &self.kv);
            gate_with(isa, stream, kv, &self.weight, mask, self.params, &mut same);
            assert_bits_eq(&same, &out);
        }
        out
    }

    fn reference(&self, mask: Option<&[u8]>) -> Vec<bf16> {
        let mut out = vec![bf16::ZERO; self.stream.len()];
        engram_gate_ref(
            &self.stream,
            &self.kv,
            &self.weight,
            mask,
            self.params,
            &mut out,
        );
        out
    }
}

/// Four copies with different keys, one value 1..8: each copy gets its own gate times the same value.
#[test]
fn the_value_is_shared_by_all_copies() {
    let (copies, dim) = (4, 8);
    let mut case = Case::random(1, copies, dim, 7);
    for (i, v) in case.kv[copies * dim..].iter_mut().enumerate() {
        *v = bf16::from_f32(i as f32 + 1.0);
    }
    case.stream.fill(bf16::ZERO);
    case.weight.fill(1.0);
    // One-hot streams and constant keys of different signs and sizes.
    for (c, sign) in [1.0, -1.0, 0.5, -0.25].into_iter().enumerate() {
        case.stream[c * dim] = bf16::ONE;
        for i in 0..dim {
            case.kv[c * dim + i] = bf16::from_f32(if i == 0 { sign } else { 0.125 });
        }
    }
    let (out, expected) = (case.run(None), case.reference(None));
    let mut gates = Vec::new();
    for c in 0..copies {
        // Element 0 is the stream's one; the others are gate * value alone.
        let gate = out[c * dim + 7].to_f32() / 8.0;
        for i in 1..dim {
            let got = out[c * dim + i].to_f32();
            assert!(
                (got - gate * (i as f32 + 1.0)).abs() <= 0.01 * got.abs(),
                "copy {c} element {i}"
            );
            assert!(bf16_ulp_distance(out[c * dim + i], expected[c * dim + i]) <= 1);
        }
        gates.push(gate);
    }
    assert!(gates[0] > 0.5 && gates[1] < 0.5 && gates[2] > 0.5 && gates[3] < 0.5);
    gates.sort_by(f32::total_cmp);
    assert!(gates.windows(2).all(|pair| pair[1] - pair[0] > 0.01));
}

/// The floor under the dot keeps the dot's sign: however small, it opens the gate by
/// sigmoid(±0.001), on one side of a half or the other.
#[test]
fn a_tiny_dot_opens_the_gate_by_its_sign() {
    let params = GateParams {
        copies: 1,
        dim: 1,
        eps: 1e-20,
    };
    // 1 + gate * 2^-7 lies just above or below the midpoint of 1 and its upper neighbour.
    let out = |key: f32, weight: f32| {
        let (stream, kv) = (to_bf16(&[1.0]), to_bf16(&[key, 1.0 / 128.0]));
        let (mut slow, mut fast) = (vec![bf16::ZERO], vec![bf16::ZERO]);
        engram_gate_ref(&stream, &kv, &[weight], None, params, &mut slow);
        gate_into(&stream, &kv, &[weight], None, params, &mut fast);
        assert_eq!(slow, fast);
        fast[0].to_f32()
    };
    let up = 1.0 + 1.0 / 128.0;
    assert_eq!(out(1.0, 1e-30), up);
    assert_eq!(out(1.0, -1e-30), 1.0);
    // Sums start at +0, so a zero key gives +0 whatever its sign.
    assert_eq!(out(0.0, 1.0), up);
    assert_eq!(out(-0.0, 1.0), up);
}

#[test]
fn zero_rows_and_keys_stay_finite() {
    let mut case = Case::random(2, 3, 5, 3);
    case.stream[..15].fill(bf16::ZERO);
    case.kv[20 + 5..20 + 10].fill(bf16::ZERO);
    assert!(case.run(None).iter().all(|v| v.is_finite()));
}

#[test]
fn nan_is_passed_on_and_not_clamped_away() {
    for poison in ["stream", "key", "value"] {
        let mut case = Case::random(2, 2, 9, 5);
        match poison {
            "stream" => case.stream[3] = bf16::NAN,
            "key" => case.kv[3] = bf16::NAN,
            _ => case.kv[2 * 9 + 3] = bf16::NAN,
        }
        let (out, expected) = (case.run(None), case.reference(None));
        assert!(out[3].is_nan(), "{poison}");
        for (a, b) in out.iter().zip(expected) {
            assert_eq!(a.is_nan(), b.is_nan(), "{poison}");
        }
        assert!(
            out[18..].iter().all(|v| v.is_finite()),
            "the other token is untouched"
        );
        // Masked, the token passes through whatever its rows hold.
        assert_eq!(
            case.run(Some(&[1, 0]))[0].to_bits(),
            case.stream[0].to_bits()
        );
    }
}

#[test]
fn tokens_without_a_row_pass_through() {
    let mut case = Case::random(5, 4, 12, 11);
    let whole = case.run(None);
    case.kv.truncate(3 * 5 * 12);
    for out in [case.run(None), case.reference(None)] {
        assert_eq!(out[3 * 48..], case.stream[3 * 48..]);
    }
    assert_eq!(case.run(None)[..3 * 48], whole[..3 * 48]);
    let tensor = |v: &[bf16], shape: &[usize]| Tensor::from_slice(v, shape, &Device::Cpu).unwrap();
    let weight = Tensor::from_slice(&case.weight, (4, 12), &Device::Cpu).unwrap();
    let stream = tensor(&case.stream, &[5, 4, 12]);
    let mask = Tensor::new(&[0u8, 1, 0], &Device::Cpu).unwrap();
    let out = engram_gate(
        &stream,
        &tensor(&case.kv, &[3, 60]),
        &weight,
        Some(&mask),
        1e-20,
    )
    .unwrap();
    let out: Vec<bf16> = out.flatten_all().unwrap().to_vec1().unwrap();
    assert_eq!(out, case.run(Some(&[0, 1, 0])));
    let none = Tensor::zeros((0, 60), DType::BF16, &Device::Cpu).unwrap();
    let same = engram_gate(&stream, &none, &weight, None, 1e-20).unwrap();
    assert_eq!(
        same.flatten_all().unwrap().to_vec1::<bf16>().unwrap(),
        case.stream
    );
}

#[test]
fn shapes_and_dtypes_are_checked() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let (stream, kv) = (zeros(&[3, 2, 4], DType::BF16), zeros(&[3, 12], DType::BF16));
    let weight = zeros(&[2, 4], DType::F32);
    let run =
        |s: &Tensor, kv: &Tensor, w: &Tensor, m: Option<&Tensor>| engram_gate(s, kv, w, m, 1e-20);
    assert!(run(&stream, &kv, &weight, None).is_ok());
    assert!(run(&stream, &zeros(&[4, 12], DType::BF16), &weight, None).is_err());
    assert!(run(&stream, &zeros(&[3, 8], DType::BF16), &weight, None).is_err());
    assert!(run(&stream, &kv, &zeros(&[4, 2], DType::F32), None).is_err());
    assert!(run(&stream, &kv, &zeros(&[2, 4], DType::BF16), None).is_err());
    assert!(run(&zeros(&[3, 2, 4], DType::F32), &kv, &weight, None).is_err());
    assert!(run(&stream, &kv, &weight, Some(&zeros(&[2], DType::U8))).is_err());
    assert!(run(&stream, &kv, &weight, Some(&zeros(&[3], DType::U32))).is_err());
    let empty = run(
        &zeros(&[0, 2, 4], DType::BF16),
        &zeros(&[0, 12], DType::BF16),
        &weight,
        None,
    );
    assert_eq!(empty.unwrap().dims(), [0, 2, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn fast_path_is_within_one_ulp_and_tokens_are_independent(
        (tokens, copies, dim) in (1usize..8, 1usize..6, 1usize..70),
        seed in any::<u64>(),
        mask in prop::collection::vec(0u8..2, 8),
    ) {
        let case = Case::random(tokens, copies, dim, seed);
        let mask = &mask[..tokens];
        let out = case.run(Some(mask));
        for (a, b) in out.iter().zip(case.reference(Some(mask))) {
            prop_assert!(bf16_ulp_distance(*a, b) <= 1 || (a.to_f32() - b.to_f32()).abs() < 1e-5, "{} {}", a, b);
        }
        let (row, kv_row) = (copies * dim, (copies + 1) * dim);
        for t in 0..tokens {
            let alone = Case {
                stream: case.stream[t * row..][..row].to_vec(),
                kv: case.kv[t * kv_row..][..kv_row].to_vec(),
                weight: case.weight.clone(),
                params: case.params,
            };
            prop_assert_eq!(&alone.run(Some(&mask[t..=t])), &out[t * row..][..row]);
        }
    }
}

#[test]
fn threads_do_not_show() {
    let case = Case::random(67, 4, 321, 2);
    let run = |threads| with_threads(threads, || case.run(None));
    assert_eq!(run(1), run(4));
}
