//! Table rows: exact values, hostile bytes, mapped files, and what a lookup touches.
#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use candle_core::{Device, Tensor};
use deepseek_v41_core::{Error, cpu::Isa};
use deepseek_v41_engram::{
    EngramTable,
    ops::engram_lookup::{engram_lookup, engram_lookup_ref, lookup_into, lookup_with},
};
use deepseek_v41_testing::{Golden, assert_bits_eq, with_threads};
use half::bf16;
use proptest::prelude::*;

/// The fast path, which must not depend on the instruction set.
fn lookup(rows: &[u32], table: &EngramTable) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; rows.len() * table.head_dim()];
    lookup_into(rows, table, &mut out).unwrap();
    for isa in Isa::available() {
        let mut same = vec![bf16::ONE; out.len()];
        lookup_with(isa, rows, table, &mut same).unwrap();
        assert_bits_eq(&same, &out);
    }
    out
}

fn reference(rows: &[u32], table: &EngramTable) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; rows.len() * table.head_dim()];
    engram_lookup_ref(rows, table, &mut out);
    out
}

#[test]
fn golden_rows_are_exact() {
    let golden = Golden::open("ops_engram");
    let codes = Bytes::copy_from_slice(golden.bytes("engram_fwd.table"));
    let scales = Bytes::copy_from_slice(golden.bytes("engram_fwd.table_scale"));
    let table = EngramTable::from_bytes(864, 64, codes, scales).unwrap();
    let ids: Vec<u32> = golden
        .i64("engram_fwd.hash_ids")
        .iter()
        .map(|&v| v as u32)
        .collect();
    let rows = engram_lookup(
        &Tensor::from_slice(&ids, (18, 6), &Device::Cpu).unwrap(),
        &table,
    )
    .unwrap();
    assert_eq!(rows.dims(), [18, 6 * 64]);
    let rows: Vec<bf16> = rows.flatten_all().unwrap().to_vec1().unwrap();
    assert_bits_eq(&rows, &golden.bf16("engram_fwd.rows"));
}

/// Every code under every scale byte: 256 rows of scale byte `row`, all codes in each.
fn every_pair() -> EngramTable {
    let codes: Vec<u8> = (0..256).flat_map(|_| 0..=255u8).collect();
    let scales: Vec<u8> = (0..=255u8).flat_map(|byte| [byte; 8]).collect();
    EngramTable::from_bytes(256, 256, codes.into(), scales.into()).unwrap()
}

#[test]
fn fast_path_equals_the_reference_on_every_code_and_scale() {
    let table = every_pair();
    let rows: Vec<u32> = (0..256).collect();
    // NaN bits included: every NaN is written the same way.
    assert_bits_eq(&lookup(&rows, &table), &reference(&rows, &table));
}

/// Subnormal codes step by 2^-9; scale byte 0 is 2^-127 and not zero; 255 is NaN and not infinity;
/// NaN codes stay NaN.
#[test]
fn codes_and_scales_at_the_edges() {
    let rows = lookup(&(0..256).collect::<Vec<_>>(), &every_pair());
    let at = |scale: usize, code: usize| rows[scale * 256 + code].to_f64();
    assert_eq!(at(127, 0x01), 2f64.powi(-9));
    assert_eq!(at(127, 0x07), 7.0 * 2f64.powi(-9));
    assert_eq!(at(127, 0x08), 2f64.powi(-6));
    assert_eq!(at(127, 0x7e), 448.0);
    assert_eq!(at(127, 0xfe), -448.0);
    assert!(at(127, 0x80) == 0.0 && at(127, 0x80).is_sign_negative());
    assert_eq!(at(130, 0x38), 8.0);
    let one = 0x38;
    for (scale, expected) in [
        (0, 2f64.powi(-127)),
        (1, 2f64.powi(-126)),
        (126, 0.5),
        (254, 2f64.powi(127)),
    ] {
        assert_eq!(at(scale, one), expected, "scale byte {scale}");
    }
    for code in 0..256 {
        assert!(
            at(255, code).is_nan(),
            "scale byte 255 is NaN even for zero codes"
        );
    }
    for scale in 0..256 {
        assert!(at(scale, 0x7f).is_nan() && at(scale, 0xff).is_nan());
    }
    assert_eq!(at(254, 0x7e), f64::INFINITY);
    assert_eq!(
        at(0, 0x01),
        0.0,
        "2^-136 is below the smallest bf16 subnormal"
    );
}

#[test]
fn rows_outside_the_table_are_an_error() {
    let table = EngramTable::from_bytes(3, 32, vec![0; 96].into(), vec![127; 3].into()).unwrap();
    let hashes = Tensor::new(&[[0u32, 3]], &Device::Cpu).unwrap();
    let err = engram_lookup(&hashes, &table).unwrap_err().to_string();
    assert!(
        err.contains("engram row 3") && err.contains("3 rows"),
        "{err}"
    );
    let mut out = vec![bf16::ZERO; 32];
    assert!(matches!(
        lookup_into(&[u32::MAX], &table, &mut out),
        Err(Error::Value { .. })
    ));
    assert!(matches!(
        lookup_into(&[0, 1], &table, &mut out),
        Err(Error::Shape { .. })
    ));
    let floats = Tensor::new(&[[0f32]], &Device::Cpu).unwrap();
    assert!(engram_lookup(&floats, &table).is_err());
}

#[test]
fn impossible_tables_are_refused() {
    let bytes = |n| Bytes::from(vec![0u8; n]);
    assert!(matches!(
        EngramTable::from_bytes(2, 48, bytes(96), bytes(3)),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        EngramTable::from_bytes(2, 0, bytes(0), bytes(0)),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        EngramTable::from_bytes(2, 32, bytes(63), bytes(2)),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        EngramTable::from_bytes(2, 32, bytes(64), bytes(3)),
        Err(Error::Shape { .. })
    ));
    let huge = usize::MAX / 16;
    assert!(matches!(
        EngramTable::from_bytes(huge, 32, bytes(64), bytes(2)),
        Err(Error::Shape { .. })
    ));
}

/// The table keeps the bytes it was given, shared, wherever they live.
#[test]
fn a_table_does_not_copy_its_bytes() {
    let codes = Bytes::from(vec![0x38u8; 64]);
    let table = EngramTable::from_bytes(2, 32, codes.clone(), vec![127, 128].into()).unwrap();
    assert_eq!(table.row(0).0.as_ptr(), codes.as_ptr());
    assert_eq!(table.clone().row(1).0.as_ptr(), codes[32..].as_ptr());
}

#[test]
fn empty_lookups() {
    let table = EngramTable::from_bytes(0, 32, Bytes::new(), Bytes::new()).unwrap();
    let hashes = Tensor::zeros((0, 4), candle_core::DType::U32, &Device::Cpu).unwrap();
    assert_eq!(engram_lookup(&hashes, &table).unwrap().dims(), [0, 128]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_lookup_equals_the_reference(
        (rows, blocks) in (1usize..20, 1usize..5),
        seed in any::<u64>(),
        picks in prop::collection::vec(any::<u32>(), 0..30),
    ) {
        let mut rng = deepseek_v41_engram::pcg64::Pcg64::from_seed(seed);
        let mut bytes = |n: usize| (0..n).map(|_| rng.next_u32() as u8).collect::<Vec<u8>>();
        // No NaN here: its payload is nobody's business.
        let codes: Vec<u8> = bytes(rows * blocks * 32).iter().map(|c| if c & 0x7f == 0x7f { 1 } else { *c }).collect();
        let scales: Vec<u8> = bytes(rows * blocks).iter().map(|s| (*s).min(254)).collect();
        let table = EngramTable::from_bytes(rows, blocks * 32, codes.into(), scales.into()).unwrap();
        let picks: Vec<u32> = picks.iter().map(|p| p % rows as u32).collect();
        let fast = lookup(&picks, &table);
        assert_bits_eq(&fast, &reference(&picks, &table));
    }
}

#[test]
fn threads_do_not_show() {
    let table = every_pair();
    let rows: Vec<u32> = (0..4001).map(|i| i * 97 % 255).collect();
    let bits = |threads| {
        let out = with_threads(threads, || lookup(&rows, &table));
        out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(bits(1), bits(4));
}
