//! Checkpoints that are what they should be: every stored type, both policies, any order, any split.

mod common;

use std::collections::HashMap;

use bytes::Bytes;
use candle_core::{DType, Device, Tensor};
use common::{dir, index, ramp, valid};
use deepseek_v41_core::{Error, LoadPolicy, RawTensor, Shard, StoredDtype, WeightError, Weights};
use half::bf16;
use proptest::prelude::*;

/// Everything a checkpoint holds, in the order of names.
fn contents(weights: &Weights) -> Vec<(String, StoredDtype, Vec<usize>, Bytes)> {
    weights
        .iter()
        .map(|t| (t.name.clone(), t.dtype, t.shape.clone(), t.bytes.clone()))
        .collect()
}

fn one(label: &str, bytes: Vec<u8>) -> (String, Bytes) {
    (label.to_owned(), Bytes::from(bytes))
}

#[test]
fn every_stored_type_comes_back_byte_for_byte() {
    use StoredDtype::*;
    // Trap C9: fp4, fp8 and scale bytes have no arithmetic in candle, and F4 has no size there.
    let shapes: &[(StoredDtype, &[usize], usize)] = &[
        (F8_E4M3, &[4, 32], 128),
        (F8_E8M0, &[4, 1], 4),
        (I8, &[4, 16], 64),
        (F4, &[4, 32], 64),
        (U8, &[7], 7),
        (BOOL, &[3], 3),
        (BF16, &[3, 5], 30),
        (F16, &[2], 4),
        (F32, &[24], 96),
        (I32, &[2], 8),
        (U32, &[2], 8),
        (I64, &[2], 16),
        (F64, &[2], 16),
    ];
    let names: Vec<String> = shapes
        .iter()
        .map(|(dtype, ..)| format!("t.{dtype:?}"))
        .collect();
    let tensors: Vec<_> = shapes
        .iter()
        .zip(&names)
        .map(|((dtype, shape, len), name)| (name.as_str(), *dtype, *shape, ramp(*len, *len as u8)))
        .collect();
    let dir = dir(&[("model.safetensors", &valid(&tensors))]);
    for policy in [LoadPolicy::Mmap, LoadPolicy::Read] {
        let weights = Weights::open(dir.path(), policy).expect("valid");
        let vb = weights.var_builder(&Device::Cpu).pp("t");
        for (dtype, shape, len) in shapes {
            let raw = vb
                .raw(&format!("{dtype:?}"), &[*dtype], shape)
                .expect("stored as asked for");
            assert_eq!(raw.bytes, ramp(*len, *len as u8), "{dtype:?}");
            // Only F4 has no candle form: its owner reads the bytes.
            assert_eq!(
                raw.to_tensor(&Device::Cpu).is_ok(),
                *dtype != F4,
                "{dtype:?}"
            );
        }
        assert!(weights.unused().is_empty());
    }
}

#[test]
fn one_byte_types_arrive_as_bytes_not_numbers() {
    // Trap C8: the scale byte 130 means 8.0; a numeric cast would make it 130.0 or 0.
    let bytes = valid(&[("scale", StoredDtype::F8_E8M0, &[3], vec![0, 130, 255])]);
    let weights = Weights::from_shards(vec![one("m", bytes)]).expect("valid");
    let raw = weights.get("scale").expect("there");
    let tensor = raw.to_tensor(&Device::Cpu).expect("as U8");
    assert_eq!(tensor.dtype(), DType::U8);
    assert_eq!(tensor.to_vec1::<u8>().expect("bytes"), [0, 130, 255]);
}

#[test]
fn widening_reads_bf16_and_f32_and_nothing_else() {
    let values = [1.5f32, -0.0, f32::INFINITY, 1e-40];
    let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let bf16s: Vec<u8> = values
        .iter()
        .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
        .collect();
    let bytes = valid(&[
        ("wide", StoredDtype::F32, &[4], f32s),
        ("narrow", StoredDtype::BF16, &[4], bf16s),
        ("half", StoredDtype::F16, &[1], vec![0, 60]),
    ]);
    let weights = Weights::from_shards(vec![one("m", bytes)]).expect("valid");
    let vb = weights.var_builder(&Device::Cpu);
    let read = |name| {
        vb.tensor_f32(name, &[4])
            .expect("widened")
            .to_vec1::<f32>()
            .expect("f32")
    };
    let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(read("wide")), values.map(f32::to_bits));
    assert_eq!(
        bits(read("narrow")),
        values.map(|v| bf16::from_f32(v).to_f32().to_bits())
    );
    assert!(matches!(
        vb.tensor_f32("half", &[1]),
        Err(Error::Weight {
            reason: WeightError::Dtype {
                found: StoredDtype::F16,
                ..
            },
            ..
        })
    ));
    assert!(
        vb.tensor("narrow", DType::F32, &[4]).is_err(),
        "tensor() never casts"
    );
}

#[test]
fn mapped_and_read_checkpoints_are_equal() {
    let a = valid(&[
        ("x", StoredDtype::BF16, &[2, 2], ramp(8, 3)),
        ("y", StoredDtype::U8, &[0, 4], vec![]),
    ]);
    let b = valid(&[("z", StoredDtype::I8, &[5], ramp(5, 9))]);
    let map = index(&[
        ("x", "1.safetensors"),
        ("y", "1.safetensors"),
        ("z", "2.safetensors"),
    ]);
    let with_index = dir(&[
        ("model.safetensors.index.json", &map),
        ("1.safetensors", &a),
        ("2.safetensors", &b),
        // Not in the index, so not part of the checkpoint.
        ("3.safetensors", b"rubbish"),
    ]);
    let without = dir(&[("1.safetensors", &a), ("2.safetensors", &b)]);
    let mapped = contents(&Weights::open(&with_index, LoadPolicy::Mmap).expect("valid"));
    assert_eq!(mapped.len(), 3);
    assert_eq!(mapped[1].2, [0, 4], "an empty tensor keeps its shape");
    for (dir, policy) in [
        (&with_index, LoadPolicy::Read),
        (&without, LoadPolicy::Mmap),
        (&without, LoadPolicy::Read),
    ] {
        assert_eq!(
            contents(&Weights::open(dir, policy).expect("valid")),
            mapped
        );
    }
    let in_memory = Weights::from_shards(vec![one("1", a), one("2", b)]).expect("valid");
    assert_eq!(contents(&in_memory), mapped);
}

#[test]
fn load_order_does_not_matter() {
    // Trap G4: draft weights that share a suffix with backbone ones were overwritten, depending on order.
    let shards = [
        valid(&[("layers.0.ffn.w1", StoredDtype::U8, &[4], ramp(4, 0))]),
        valid(&[("mtp.0.ffn.w1", StoredDtype::U8, &[4], ramp(4, 50))]),
        valid(&[
            ("mtp.0.norm", StoredDtype::BF16, &[2], ramp(4, 100)),
            ("norm", StoredDtype::BF16, &[2], ramp(4, 150)),
        ]),
    ];
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    let loaded = orders.map(|order| {
        let shards = order
            .iter()
            .map(|i| one(&i.to_string(), shards[*i].clone()))
            .collect();
        contents(&Weights::from_shards(shards).expect("valid"))
    });
    assert_eq!(loaded[0].len(), 4);
    assert!(loaded.iter().all(|l| *l == loaded[0]));
}

#[test]
fn tensors_made_in_memory_equal_stored_ones() {
    let f = Tensor::new(&[[1f32, -2.5], [0.0, 4.0]], &Device::Cpu).expect("tensor");
    let h = f
        .to_dtype(DType::BF16)
        .expect("bf16")
        .t()
        .expect("a transposed view is made contiguous");
    let made = Weights::from_tensors(HashMap::from([("f".to_owned(), f), ("h".to_owned(), h)]))
        .expect("known dtypes");
    let f32s: Vec<u8> = [1f32, -2.5, 0.0, 4.0]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    let bf16s: Vec<u8> = [1f32, 0.0, -2.5, 4.0]
        .iter()
        .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
        .collect();
    let stored = valid(&[
        ("f", StoredDtype::F32, &[2, 2], f32s),
        ("h", StoredDtype::BF16, &[2, 2], bf16s),
    ]);
    let stored = Weights::from_shards(vec![one("m", stored)]).expect("valid");
    assert_eq!(contents(&made), contents(&stored));
}

#[test]
fn names_walk_as_paths() {
    let bytes = valid(&[("layers.7.attn.wq_a.scale", StoredDtype::U8, &[1], vec![130])]);
    let weights = Weights::from_shards(vec![one("m", bytes)]).expect("valid");
    let vb = weights
        .var_builder(&Device::Cpu)
        .pp("layers")
        .pp(7)
        .pp("attn");
    assert_eq!(vb.prefix(), "layers.7.attn");
    assert!(vb.contains("wq_a.scale") && vb.pp("wq_a").contains("scale"));
    assert!(!vb.contains("wq_b.scale"));
    assert_eq!(
        weights.unused().len(),
        1,
        "asking whether it is there does not use it"
    );
    vb.pp("wq_a")
        .raw("scale", &[StoredDtype::U8], &[1])
        .expect("there");
    assert!(
        weights.clone().unused().is_empty(),
        "clones share what was used"
    );
}

fn raw(dtype: StoredDtype, shape: &[usize]) -> Weights {
    let bits = shape.iter().product::<usize>() * dtype.bitsize();
    Weights::from_raw([RawTensor {
        name: "w".into(),
        file: None,
        dtype,
        shape: shape.to_vec(),
        bytes: ramp(bits / 8, 5).into(),
    }])
}

#[test]
fn splits_that_cannot_be_are_errors() {
    let split = |dtype, shape: &[usize], dim, rank, world_size| {
        let vb = raw(dtype, shape).var_builder(&Device::Cpu);
        vb.raw_sharded(
            "w",
            &[dtype],
            shape,
            Shard {
                dim,
                rank,
                world_size,
            },
        )
    };
    for (dim, rank, world_size) in [(0, 0, 4), (2, 0, 2), (0, 2, 2), (0, 0, 0), (1, 7, 2)] {
        let got = split(StoredDtype::BF16, &[6, 4], dim, rank, world_size);
        assert!(
            matches!(got, Err(Error::Shape { .. })),
            "dim {dim}, rank {rank} of {world_size}"
        );
    }
    assert!(matches!(
        split(StoredDtype::U8, &[0, 4], 0, 0, 2),
        Err(Error::Shape { .. })
    ));
    // Half a byte cannot be cut out.
    assert!(matches!(
        split(StoredDtype::F4, &[4, 6], 1, 1, 2),
        Err(Error::Shape { .. })
    ));
    let part = split(StoredDtype::F4, &[4, 8], 1, 1, 2).expect("two bytes of each row");
    assert_eq!(part.shape, [4, 4]);
    let whole = ramp(16, 5);
    assert_eq!(
        part.bytes,
        [2, 3, 6, 7, 10, 11, 14, 15].map(|i| whole[i]).as_slice()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn raw_sharded_is_manual_slicing(
        dims in prop::collection::vec(1usize..5, 1..4),
        dim in 0usize..3,
        world_size in 1usize..4,
        dtype in prop::sample::select(vec![StoredDtype::U8, StoredDtype::BF16, StoredDtype::F32]),
    ) {
        let dim = dim % dims.len();
        let mut shape = dims;
        shape[dim] *= world_size;
        let width = dtype.bitsize() / 8;
        let weights = raw(dtype, &shape);
        let whole = weights.get("w").expect("there").bytes.clone();
        let inner: usize = shape[dim + 1..].iter().product();
        let part = shape[dim] / world_size;
        for rank in 0..world_size {
            let got = weights
                .var_builder(&Device::Cpu)
                .raw_sharded("w", &[dtype], &shape, Shard { dim, rank, world_size })
                .expect("divides");
            let mut expected = Vec::new();
            for i in 0..shape.iter().product::<usize>() {
                let at = i / inner % shape[dim];
                if (rank * part..(rank + 1) * part).contains(&at) {
                    expected.extend_from_slice(&whole[i * width..(i + 1) * width]);
                }
            }
            prop_assert_eq!(got.bytes, expected);
            prop_assert_eq!(got.shape[dim], part);
        }
    }

    /// Whatever happens to the bytes of a valid file: an error, or tensors whose bytes are as many as
    /// their shape says.
    #[test]
    fn a_mutated_file_never_panics(
        edits in prop::collection::vec((0usize..400, any::<u8>(), any::<bool>()), 1..12),
        cut in prop::option::of(0usize..400),
        digits in prop::collection::vec((0usize..64, b'0'..=b'9'), 0..6),
    ) {
        let mut bytes = valid(&[
            ("layers.0.w1.weight", StoredDtype::I8, &[4, 16], ramp(64, 0)),
            ("layers.0.w1.scale", StoredDtype::F8_E8M0, &[4, 1], ramp(4, 0)),
            ("norm.weight", StoredDtype::BF16, &[10], ramp(20, 0)),
            ("packed", StoredDtype::F4, &[2, 6], ramp(6, 0)),
        ]);
        // Most random bytes only break the JSON: changing digits reaches the checks behind it.
        let numbers: Vec<usize> = (8..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
        for (i, digit) in &digits {
            bytes[numbers[i % numbers.len()]] = *digit;
        }
        if digits.is_empty() {
            for (at, byte, header) in edits {
                let at = if header { at % 8 } else { at % bytes.len() };
                bytes[at] = byte;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        if let Ok(weights) = Weights::from_shards(vec![one("m", bytes)]) {
            for tensor in weights.iter() {
                let bits = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize();
                prop_assert_eq!(tensor.bytes.len() * 8, bits);
                let _ = tensor.to_f32();
                let _ = tensor.to_tensor(&Device::Cpu);
            }
        }
    }
}

#[test]
fn the_fingerprint_tells_checkpoints_apart() {
    let tensor = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| RawTensor {
        name: name.into(),
        file: None,
        dtype,
        shape: shape.to_vec(),
        bytes: Bytes::from(bytes),
    };
    let of = |tensors: Vec<RawTensor>| Weights::from_raw(tensors).fingerprint();
    let a = || {
        tensor(
            "a",
            StoredDtype::U8,
            &[2, 300],
            (0..600).map(|i| i as u8).collect(),
        )
    };
    let b = || tensor("b", StoredDtype::F32, &[1], vec![0; 4]);
    let whole = of(vec![a(), b()]);
    assert_eq!(
        of(vec![b(), a()]),
        whole,
        "the order of shards does not matter"
    );
    let mut changed = a();
    changed.shape = vec![300, 2];
    assert_ne!(of(vec![changed, b()]), whole);
    let mut changed = b();
    changed.dtype = StoredDtype::I32;
    assert_ne!(of(vec![a(), changed]), whole);
    let mut changed = b();
    changed.name = "c".into();
    assert_ne!(of(vec![a(), changed]), whole);
    assert_ne!(of(vec![a()]), whole);
    for at in [0, 200, 599] {
        let mut bytes = a().bytes.to_vec();
        bytes[at] ^= 1;
        assert_ne!(
            of(vec![tensor("a", StoredDtype::U8, &[2, 300], bytes), b()]),
            whole,
            "{at}"
        );
    }
    // Thousands of tensors: a sample of them, the same every time.
    let many = |flip: bool| {
        let value = u8::from(flip);
        of((0..9001)
            .map(|i| tensor(&format!("t.{i}"), StoredDtype::U8, &[1], vec![value]))
            .collect())
    };
    assert_eq!(many(false), many(false));
    assert_ne!(many(false), many(true));
}
