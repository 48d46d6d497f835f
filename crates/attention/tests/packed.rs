//! Packed rows: the same values in fewer bytes.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use candle_core::{DType, Tensor};
use common::{CPU, bits, geometry};
use deepseek_v41_attention::ops::{IndexSpan, KvScope, index_topk, sparse_attn};
use deepseek_v41_attention::{
    CompressedCache, KvFormat, RowCodec, RowQuant, WindowCache, pack_rows, unpack_rows,
};
use deepseek_v41_core::Error;
use deepseek_v41_quant::{
    ScaleFormat, e2m1, e4m3, fake_quant_fp4_slice, fake_quant_fp8_slice, fp4_act_quant_slice,
};
use deepseek_v41_testing::{assert_bits_eq, random_bf16, random_f32};
use half::bf16;
use proptest::prelude::*;

const QUANTS: [RowQuant; 3] = [RowQuant::Window, RowQuant::Compressed, RowQuant::Index];

fn round(quant: RowQuant, xs: &mut [bf16]) {
    match quant {
        RowQuant::Window => fake_quant_fp8_slice(xs),
        RowQuant::Compressed => fake_quant_fp4_slice(xs, 16, ScaleFormat::E4M3),
        RowQuant::Index => fake_quant_fp4_slice(xs, 32, ScaleFormat::E8M0),
    }
}

fn tensor(xs: &[bf16], dim: usize) -> Tensor {
    Tensor::from_slice(xs, (xs.len() / dim, dim), &CPU).unwrap()
}

fn assert_round_trip(quant: RowQuant, rows: &[bf16], dim: usize) {
    let codec = RowCodec::new(quant, dim).unwrap();
    let packed = pack_rows(&tensor(rows, dim), codec).unwrap();
    assert_eq!(packed.dims(), [rows.len() / dim, codec.row_bytes()]);
    let back = bits(&unpack_rows(&packed, codec).unwrap());
    for (a, b) in back.iter().zip(rows) {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{quant:?}: {a} vs {b}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rounded_rows_come_back_bit_for_bit(exponents in prop::collection::vec(-40i32..40, 8), seed: u64) {
        for quant in QUANTS {
            // Every group of a row has a magnitude of its own.
            let mut rows = random_bf16(8 * 64, 1.0, seed);
            for (xs, e) in rows.chunks_mut(32).zip(exponents.iter().cycle()) {
                xs.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * 2f32.powi(*e)));
            }
            round(quant, &mut rows);
            assert_round_trip(quant, &rows, 64);
        }
    }
}

/// Where e4m3 scales are coarse, rounding a rounded group again picks another scale: the packed form
/// must find the first one. A peak of 6 * 1.6 * 2^-9 has the scale 2 * 2^-9 and 4 as its largest code.
#[test]
fn smallest_scales_are_exact_too() {
    for step in 0..800 {
        let peak = (step as f32 / 100.0) * 6.0 * e4m3::MIN_POSITIVE;
        let mut row: Vec<bf16> = (0..16)
            .map(|i| bf16::from_f32(peak * i as f32 / 15.0))
            .collect();
        round(RowQuant::Compressed, &mut row);
        assert_round_trip(RowQuant::Compressed, &row, 16);
    }
}

/// Every code, under every scale that keeps the values normal bf16 numbers.
#[test]
fn every_code_under_every_scale() {
    let e4m3: Vec<f32> = (0..=255)
        .map(e4m3::decode)
        .filter(|v| !v.is_nan())
        .collect();
    for byte in 10..=240u8 {
        let scale = f32::from_bits(u32::from(byte) << 23);
        for (quant, values) in [
            (RowQuant::Window, &e4m3[..]),
            (RowQuant::Index, &e2m1::VALUES),
        ] {
            let mut row: Vec<bf16> = values.iter().map(|v| bf16::from_f32(v * scale)).collect();
            row.resize(256, bf16::ZERO);
            assert_round_trip(quant, &row, 256);
        }
    }
}

/// Attention and the indexer read either form of a pool, to the same bits.
#[test]
fn operations_read_either_form() {
    let (heads, dim, rows) = (5, 64, 90);
    let pool = |quant| {
        let mut xs = random_bf16(rows * dim, 1.0, 3);
        round(quant, &mut xs);
        let plain = tensor(&xs, dim);
        let packed = pack_rows(&plain, RowCodec::new(quant, dim).unwrap()).unwrap();
        (plain, packed)
    };
    let q = tensor(&random_bf16(2 * heads * dim, 1.0, 1), dim)
        .reshape((2, heads, dim))
        .unwrap();
    let sink = Tensor::from_vec(random_f32(heads, 1.0, 2), heads, &CPU).unwrap();
    let idxs: Vec<i32> = (0..2 * 75).map(|i| (i * 7) % 91 - 1).collect();
    let idxs = Tensor::from_vec(idxs, (2, 75), &CPU).unwrap();
    for quant in [RowQuant::Window, RowQuant::Compressed] {
        let (plain, packed) = pool(quant);
        let run = |kv| bits(&sparse_attn(&q, &[KvScope::new(kv, &idxs)], &sink, 0.2).unwrap());
        assert_bits_eq(&run(&packed), &run(&plain));
    }
    let (plain, packed) = pool(RowQuant::Index);
    let weights = tensor(&random_bf16(2 * heads, 1.0, 4), heads);
    let spans = [
        IndexSpan {
            base: 3,
            visible: 80,
        },
        IndexSpan {
            base: 0,
            visible: 41,
        },
    ];
    let run = |keys| {
        index_topk(&q, &weights, keys, &spans, 12, None)
            .unwrap()
            .0
            .to_vec2::<i32>()
            .unwrap()
    };
    assert_eq!(run(&packed), run(&plain));
    // Bytes of some other width are not rows of anything.
    let odd = Tensor::zeros((rows, 50), DType::U8, &CPU).unwrap();
    assert!(index_topk(&q, &weights, &odd, &spans, 12, None).is_err());
    assert!(sparse_attn(&q, &[KvScope::new(&odd, &idxs)], &sink, 0.2).is_err());
}

#[test]
fn zeros_signs_and_nan() {
    for quant in QUANTS {
        let mut row = vec![bf16::ZERO; 64];
        row[1] = bf16::NEG_ZERO;
        row[40] = bf16::from_f32(1.5);
        assert_round_trip(quant, &row, 64);
        row[33] = bf16::NAN;
        round(quant, &mut row);
        assert!(row[40].is_nan(), "rounding spreads NaN over its group");
        assert_round_trip(quant, &row, 64);
    }
}

/// A row that was not rounded would come back changed: refused, not stored.
#[test]
fn unrounded_rows_are_refused() {
    for quant in QUANTS {
        let codec = RowCodec::new(quant, 64).unwrap();
        let rows = random_bf16(64, 1.0, 1);
        assert!(pack_rows(&tensor(&rows, 64), codec).is_err());
    }
    assert!(RowCodec::new(RowQuant::Window, 48).is_err());
    assert!(RowCodec::new(RowQuant::Index, 0).is_err());
}

/// The quantiser's own codes are the stored ones wherever its scale is the only exact one.
#[test]
fn codes_are_those_of_the_quantiser() {
    let xs = random_bf16(64, 1.0, 3);
    let (mut codes, mut scales) = ([0; 32], [0; 4]);
    fp4_act_quant_slice(&xs, 16, ScaleFormat::E4M3, &mut codes, &mut scales);
    let mut rounded = xs;
    round(RowQuant::Compressed, &mut rounded);
    let codec = RowCodec::new(RowQuant::Compressed, 64).unwrap();
    let packed = pack_rows(&tensor(&rounded, 64), codec).unwrap();
    assert_eq!(
        packed.flatten_all().unwrap().to_vec1::<u8>().unwrap(),
        [&codes[..], &scales].concat()
    );
}

/// Release shapes: three sources at ratio 2 and one at ratio 1, rows of 512, index keys of 128.
#[test]
fn release_shapes_take_890_bytes_a_token() {
    let tokens = 1 << 20;
    let mut bytes = [0.0; 2];
    for (bytes, format) in bytes.iter_mut().zip([KvFormat::Packed, KvFormat::Bf16]) {
        // Memory is committed as it is written, so this costs none.
        let g = geometry(128, 8, tokens, 1);
        let mut total = 0;
        for ratio in [2, 2, 2, 1] {
            let cache = CompressedCache::new(g, ratio, 512, Some(128), format, &CPU).unwrap();
            let pending = cache.pending().map_or(0, |p| p.elem_count() * 4);
            total += cache.memory_usage() - pending;
        }
        *bytes = total as f64 / tokens as f64;
    }
    assert_eq!(bytes, [890.0, 3200.0]);
    assert!(bytes[0] * tokens as f64 <= 0.9 * (1u64 << 30) as f64);
    let window = |format| {
        WindowCache::new(geometry(128, 8, 4096, 1), 512, format, &CPU)
            .unwrap()
            .memory_usage()
    };
    assert_eq!(
        [window(KvFormat::Packed), window(KvFormat::Bf16)],
        [136 * 528, 136 * 1024]
    );
}

/// Saved rows do not depend on how the cache keeps them, and go into either kind.
#[test]
fn saved_rows_fit_both_formats() {
    let g = geometry(7, 2, 32, 2);
    let formats = [KvFormat::Bf16, KvFormat::Packed];
    let mut rows = random_bf16(9 * 64, 1.0, 5);
    round(RowQuant::Compressed, &mut rows);
    let rows = tensor(&rows, 64);
    let slots = Tensor::from_vec((0..9i32).collect(), 9, &CPU).unwrap();
    let mut caches: Vec<CompressedCache> = formats
        .map(|format| CompressedCache::new(g, 1, 64, None, format, &CPU).unwrap())
        .into_iter()
        .collect();
    let plan =
        deepseek_v41_attention::AttnPlan::new(&[common::chunk(0, 0, 9)], &g, &[1], &CPU).unwrap();
    assert_eq!(
        plan.compress[0].group_slots.to_vec1::<i32>().unwrap(),
        slots.to_vec1::<i32>().unwrap()
    );
    let mut saved = Vec::new();
    for cache in &mut caches {
        cache.write_kv(&rows, &plan.compress[0]).unwrap();
        saved.push(cache.export_slot(0, 9).unwrap());
    }
    for (a, b) in saved[0].iter().zip(&saved[1]) {
        assert_eq!(a.0, b.0);
        assert_eq!(a.1.to_vec2::<u8>().unwrap(), b.1.to_vec2::<u8>().unwrap());
    }
    for cache in &mut caches {
        cache.import_slot(1, 9, &saved[0]).unwrap();
        let base = cache.rows(1).rows().start;
        assert_bits_eq(
            &bits(&cache.kv().read(base..base + 9).unwrap()),
            &bits(&rows),
        );
        let missing = cache.import_slot(1, 9, &[]);
        assert!(matches!(missing, Err(Error::MissingSource { what: "kv" })));
        let wrong = vec![(
            "kv".to_string(),
            Tensor::zeros((9, 64), DType::U8, &CPU).unwrap(),
        )];
        assert!(matches!(
            cache.import_slot(1, 9, &wrong),
            Err(Error::Value { .. })
        ));
    }
}

/// No code of a saved window row may be the NaN pattern: rounding marks NaN in the scale.
#[test]
fn damaged_codes_are_refused() {
    let g = geometry(7, 0, 32, 1);
    let mut cache = WindowCache::new(g, 32, KvFormat::Bf16, &CPU).unwrap();
    let mut rows = vec![0u8; 33];
    rows[5] = 0xff;
    let rows = vec![(
        "window".to_string(),
        Tensor::from_vec(rows, (1, 33), &CPU).unwrap(),
    )];
    assert!(matches!(
        cache.import_slot(0, 1, &rows),
        Err(Error::Value { .. })
    ));
}
