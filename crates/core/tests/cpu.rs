//! The reduction contract: one order of additions, whatever the batch, the threads or the CPU.

use bytes::Bytes;
use deepseek_v41_core::cpu::{
    Bf16Rows, F32Rows, Isa, Magnitudes, WeightRows, dot, matmul, matmul_bf16, round_bf16,
};
use deepseek_v41_testing::{random_bf16, random_f32, seed_of, with_threads};
use half::bf16;
use proptest::prelude::*;

/// The definition, written out: eight lanes by `k % 8`, fused multiply-adds in ascending `k`, one tree.
fn dot_by_definition(a: &[f32], b: &[f32]) -> f32 {
    let mut lane = [0f32; 8];
    for k in 0..a.len() {
        lane[k % 8] = a[k].mul_add(b[k], lane[k % 8]);
    }
    let [l0, l1, l2, l3, l4, l5, l6, l7] = lane;
    ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
}

fn f32_rows(values: &[f32], rows: usize, cols: usize) -> F32Rows {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    F32Rows::new(Bytes::from(bytes), rows, cols).expect("the length fits")
}

fn bf16_rows(values: &[bf16], rows: usize, cols: usize) -> Bf16Rows {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Bf16Rows::new(Bytes::from(bytes), rows, cols).expect("the length fits")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// `[m, n]`, each element the dot of a row of `xs` with a decoded row.
fn expected<W: WeightRows>(w: &W, xs: &[f32], m: usize) -> Vec<f32> {
    let k = w.cols();
    let mut row = vec![0f32; k];
    let mut out = vec![0f32; m * w.rows()];
    for n in 0..w.rows() {
        w.decode(n, 0, &mut row);
        for i in 0..m {
            out[i * w.rows() + n] = dot_by_definition(&xs[i * k..(i + 1) * k], &row);
        }
    }
    out
}

fn product<W: WeightRows>(w: &W, xs: &[f32], m: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * w.rows()];
    matmul(w, xs, m, &mut out);
    out
}

#[test]
fn the_order_is_visible_in_the_result() {
    // In lanes 0 and 1 the small term survives or not depending on what it meets first.
    let a = [1e8f32, 1.0, 0.0, 0.0, -1e8, 1.0, 0.0, 0.0, 1.0];
    let b = [1.0f32; 9];
    // Lane 0 is 1e8 + 1 = 1e8 (the 1 is lost), lane 4 is -1e8: together 0; lanes 1 and 5 give 2.
    assert_eq!(dot(&a, &b), 2.0);
    // A fused multiply-add keeps the low half of a product that rounding first would lose.
    let (x, y) = (1.0f32 + f32::EPSILON, 1.0f32 - f32::EPSILON);
    let fused = dot(
        &[-1.0, 0., 0., 0., 0., 0., 0., 0., x],
        &[1.0, 0., 0., 0., 0., 0., 0., 0., y],
    );
    assert_eq!(fused, -f32::EPSILON * f32::EPSILON);
}

#[test]
fn corners_of_dot() {
    assert_eq!(dot(&[], &[]).to_bits(), 0f32.to_bits());
    assert_eq!(
        dot(&[1.0, 2.0, 3.0], &[1.0]),
        1.0,
        "the shorter slice decides"
    );
    assert!(dot(&[f32::INFINITY, f32::NEG_INFINITY], &[1.0, 1.0]).is_nan());
    assert!(dot(&[f32::NAN; 20], &[0.0; 20]).is_nan());
    // Subnormals are not flushed: the released norm constant 1e-20 relies on it.
    assert_eq!(dot(&[1e-20], &[1e-20]).to_bits(), 1e-40f32.to_bits());
}

#[test]
fn empty_products() {
    let none = f32_rows(&[], 0, 5);
    assert!(product(&none, &[0.0; 15], 3).is_empty());
    let w = f32_rows(&[0.0; 15], 3, 5);
    assert!(product(&w, &[], 0).is_empty());
    let flat = f32_rows(&[], 4, 0);
    assert_eq!(
        bits(&product(&flat, &[], 2)),
        vec![0; 8],
        "an empty sum is zero"
    );
}

#[test]
fn rows_refuse_bytes_that_do_not_fit() {
    assert!(Bf16Rows::new(Bytes::from(vec![0; 11]), 2, 3).is_none());
    assert!(F32Rows::new(Bytes::from(vec![0; 23]), 2, 3).is_none());
    assert!(
        Bf16Rows::new(Bytes::new(), usize::MAX, 3).is_none(),
        "no overflow"
    );
    assert!(
        F32Rows::new(Bytes::new(), usize::MAX / 2, 2).is_none(),
        "no overflow"
    );
}

#[test]
fn decoding_from_the_middle_of_a_row() {
    let values = random_bf16(3 * 37, 1.0, 1);
    let w = bf16_rows(&values, 3, 37);
    let wide = f32_rows(
        &values.iter().map(|v| v.to_f32()).collect::<Vec<_>>(),
        3,
        37,
    );
    for (row, k0, len) in [(0, 0, 37), (1, 8, 9), (2, 36, 1), (2, 37, 0)] {
        let (mut a, mut b) = (vec![0f32; len], vec![0f32; len]);
        w.decode(row, k0, &mut a);
        wide.decode(row, k0, &mut b);
        assert_eq!(bits(&a), bits(&b));
        assert!(
            a.iter()
                .zip(&values[row * 37 + k0..])
                .all(|(a, v)| a.to_bits() == v.to_f32().to_bits())
        );
    }
}

#[test]
fn large_enough_for_threads_and_still_the_same() {
    let (m, n, k) = (19, 131, 333);
    let w = bf16_rows(&random_bf16(n * k, 0.05, seed_of("w")), n, k);
    let xs = random_f32(m * k, 1.0, seed_of("x"));
    let whole = expected(&w, &xs, m);
    for threads in [1, 2, 5] {
        with_threads(threads, || {
            assert_eq!(
                bits(&product(&w, &xs, m)),
                bits(&whole),
                "{threads} threads"
            );
            for i in 0..m {
                let alone = product(&w, &xs[i * k..(i + 1) * k], 1);
                assert_eq!(
                    bits(&alone),
                    bits(&whole[i * n..(i + 1) * n]),
                    "row {i} alone"
                );
            }
        });
    }
}

/// Eight outputs at a time, and some that are left over.
#[test]
fn sums_that_are_no_numbers_round_to_one_nan() {
    let specials = [
        f32::NAN,
        -f32::NAN,
        f32::INFINITY,
        -1e39_f64 as f32,
        f32::MAX,
        1e-40,
    ];
    let values: Vec<f32> = (0..19 * 8).map(|i| specials[i / 8 % 6]).collect();
    let w = f32_rows(&values, 19, 8);
    let x = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let mut rounded = vec![bf16::ONE; 19];
    matmul_bf16(&w, &x, 1, &mut rounded);
    for (r, v) in rounded.iter().zip(expected(&w, &x, 1)) {
        assert_eq!(r.to_bits(), round_bf16(v).to_bits(), "{v}");
    }
}

#[test]
fn magnitudes_leave_zeros_out_and_keep_what_is_no_number() {
    let of = |xs: &[f32]| {
        let all = Isa::available()
            .into_iter()
            .map(|isa| Magnitudes::of(isa, xs));
        let all: Vec<_> = all.map(|m| (m.least, m.most)).collect();
        assert!(
            all.iter()
                .all(|m| format!("{m:?}") == format!("{:?}", all[0])),
            "{xs:?}"
        );
        all[0]
    };
    assert_eq!(of(&[]), (1.0, 0.0));
    assert_eq!(of(&[0.0, -0.0]), (1.0, 0.0));
    assert_eq!(of(&[-3.0, 0.0, 0.25, 7.0, -0.0]), (0.25, 7.0));
    assert_eq!(
        of(&[f32::from_bits(1); 9]),
        (f32::from_bits(1), f32::from_bits(1))
    );
    assert_eq!(of(&[2.0, f32::NEG_INFINITY]), (2.0, f32::INFINITY));
    assert!(of(&[2.0, -f32::NAN, 5.0]).1.is_nan());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn dot_follows_its_definition(k in 0usize..300, seed in any::<u64>(), std in 1e-3f32..1e3) {
        let (a, b) = (random_f32(k, std, seed), random_f32(k, std, !seed));
        prop_assert_eq!(dot(&a, &b).to_bits(), dot_by_definition(&a, &b).to_bits());
    }

    /// f32 operands, whose products round: only the same fused order gives the same bits.
    #[test]
    fn matmul_is_dot_bit_for_bit(m in 0usize..9, n in 0usize..40, k in 0usize..150, seed in any::<u64>()) {
        let w = f32_rows(&random_f32(n * k, 1.0, seed), n, k);
        let xs = random_f32(m * k, 1.0, !seed);
        let whole = expected(&w, &xs, m);
        prop_assert_eq!(bits(&product(&w, &xs, m)), bits(&whole));
        let mut rounded = vec![bf16::NAN; m * n];
        matmul_bf16(&w, &xs, m, &mut rounded);
        for (r, v) in rounded.iter().zip(&whole) {
            prop_assert_eq!(r.to_bits(), bf16::from_f32(*v).to_bits());
        }
    }

    #[test]
    fn bf16_weights_too(m in 1usize..6, n in 1usize..40, k in 1usize..150, seed in any::<u64>()) {
        let w = bf16_rows(&random_bf16(n * k, 1.0, seed), n, k);
        let xs = random_f32(m * k, 1.0, !seed);
        prop_assert_eq!(bits(&product(&w, &xs, m)), bits(&expected(&w, &xs, m)));
    }
}
