//! A whole layer: golden values for fp8, and loading.
#![allow(clippy::unwrap_used)]

mod common;

use std::{collections::HashMap, sync::Arc};

use candle_core::{DType, Device, Tensor};
use common::small;
use deepseek_v41_core::{Error, LoadPolicy, RawTensor, StoredDtype, WeightError, Weights};
use deepseek_v41_engram::{
    Engram, EngramConfig, EngramLayout, NgramWindow, engram_hash, pcg64::Pcg64,
};
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::{Golden, rel_rms};
use half::bf16;

fn golden_config() -> EngramConfig {
    EngramConfig {
        layer_ids: vec![0, 3],
        head_dim: 64,
        num_embeddings: vec![660, 864],
        dim: 64,
        linear_format: WeightFormat::Fp8,
        ..small(2, 4, 2, 101, 50)
    }
}

fn golden_weights(golden: &Golden, code: StoredDtype, scale: StoredDtype) -> Weights {
    let names = [
        ("table", "embed.weight", code),
        ("table_scale", "embed.scale", scale),
        ("wkv.weight", "wkv.weight", code),
        ("wkv.scale", "wkv.scale", scale),
        ("q_weight", "q_weight", StoredDtype::BF16),
        ("k_weight", "k_weight", StoredDtype::BF16),
    ];
    Weights::from_raw(names.map(|(key, name, dtype)| {
        let key = format!("engram_fwd.{key}");
        RawTensor {
            name: format!("layers.3.engram.{name}"),
            file: None,
            dtype,
            shape: golden.shape(&key).to_vec(),
            bytes: golden.bytes(&key).to_vec().into(),
        }
    }))
}

#[test]
fn golden_layer() {
    let golden = Golden::open("ops_engram");
    let cfg = golden_config();
    EngramLayout::new(&cfg).unwrap();
    for (code, scale) in [
        (StoredDtype::F8_E4M3, StoredDtype::F8_E8M0),
        (StoredDtype::U8, StoredDtype::U8),
    ] {
        let vb = golden_weights(&golden, code, scale)
            .var_builder(&Device::Cpu)
            .pp("layers.3.engram");
        let engram = Engram::new(&cfg, 1, vb).unwrap();
        let ids: Vec<u32> = golden
            .i64("engram_fwd.hash_ids")
            .iter()
            .map(|&v| v as u32)
            .collect();
        let rows = engram
            .gather(&Tensor::from_slice(&ids, (18, 6), &Device::Cpu).unwrap())
            .unwrap();
        let stream = golden.tensor("engram_fwd.x").reshape((18, 4, 64)).unwrap();
        let image: Vec<u8> = golden
            .bytes("engram_fwd.mask")
            .iter()
            .map(|alive| 1 - alive)
            .collect();
        let image = Tensor::from_vec(image, 18, &Device::Cpu).unwrap();
        for (mask, key) in [
            (None, "engram_fwd.y"),
            (Some(&image), "engram_fwd.y_masked"),
        ] {
            let y = engram.forward(&stream, &rows, mask).unwrap();
            assert_eq!((y.dtype(), y.dims()), (DType::BF16, &[18, 4, 64][..]));
            let y = y
                .to_dtype(DType::F32)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1()
                .unwrap();
            let error = rel_rms(&y, &golden.f32(key));
            assert!(error < 0.01, "{key}: {error}");
        }
    }
}

fn bf16_layer(cfg: &EngramConfig) -> HashMap<String, Tensor> {
    let mut rng = Pcg64::from_seed(4);
    let mut bf = |shape: &[usize]| {
        let values: Vec<bf16> = (0..shape.iter().product())
            .map(|_| bf16::from_f64(rng.next_f64() - 0.5))
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    let (columns, rows) = (cfg.columns(), cfg.num_embeddings[0]);
    let mut tensors = HashMap::from([
        (
            "wkv.weight".to_owned(),
            bf(&[cfg.dim * (cfg.hc_mult + 1), columns * cfg.head_dim]),
        ),
        ("q_weight".to_owned(), bf(&[cfg.hc_mult, cfg.dim])),
        ("k_weight".to_owned(), bf(&[cfg.hc_mult, cfg.dim])),
    ]);
    let codes: Vec<u8> = (0..rows * cfg.head_dim)
        .map(|i| (i * 37 % 0x70) as u8)
        .collect();
    let scales = vec![126u8; rows * cfg.head_dim / 32];
    let shape = (rows, cfg.head_dim);
    tensors.insert(
        "embed.weight".to_owned(),
        Tensor::from_vec(codes, shape, &Device::Cpu).unwrap(),
    );
    let shape = (rows, cfg.head_dim / 32);
    tensors.insert(
        "embed.scale".to_owned(),
        Tensor::from_vec(scales, shape, &Device::Cpu).unwrap(),
    );
    tensors
}

/// From ids to the stream with a bf16 projection, in one step or token by token, bit for bit.
#[test]
fn one_shot_equals_token_by_token() {
    let mut cfg = small(1, 4, 5, 31, 20);
    cfg.dim = 40;
    let layout = EngramLayout::new(&cfg).unwrap();
    let map = common::identity_map(20, 3);
    let vb = Weights::from_tensors(bf16_layer(&cfg))
        .unwrap()
        .var_builder(&Device::Cpu);
    let engram = Engram::new(&cfg, 0, vb).unwrap();
    let ids: Vec<u32> = (0..13).map(|i| i * i * 7 % 20).collect();
    let mut rng = Pcg64::from_seed(9);
    let stream: Vec<bf16> = (0..13 * 160)
        .map(|_| bf16::from_f64(rng.next_f64() - 0.5))
        .collect();
    let stream = Tensor::from_vec(stream, (13, 4, 40), &Device::Cpu).unwrap();
    let bits = |t: Tensor| -> Vec<bf16> { t.flatten_all().unwrap().to_vec1().unwrap() };

    let window = NgramWindow {
        ids: &ids,
        ..Default::default()
    };
    let hashes = engram_hash(&[window], &layout, &map).unwrap();
    let rows = engram
        .gather(&hashes.tensor(0, &Device::Cpu).unwrap())
        .unwrap();
    let whole = bits(engram.forward(&stream, &rows, None).unwrap());
    for t in 0..ids.len() {
        let window = NgramWindow {
            history: &ids[..t],
            start: t,
            ids: &ids[t..=t],
            ..Default::default()
        };
        let hashes = engram_hash(&[window], &layout, &map).unwrap();
        let rows = engram
            .gather(&hashes.tensor(0, &Device::Cpu).unwrap())
            .unwrap();
        let out = engram
            .forward(&stream.narrow(0, t, 1).unwrap(), &rows, None)
            .unwrap();
        assert_eq!(bits(out), whole[t * 160..][..160]);
    }
}

#[test]
fn wrong_weights_are_named() {
    let cfg = small(1, 3, 2, 31, 20);
    let load = |edit: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let mut tensors = bf16_layer(&cfg);
        edit(&mut tensors);
        Engram::new(
            &cfg,
            0,
            Weights::from_tensors(tensors)
                .unwrap()
                .var_builder(&Device::Cpu),
        )
    };
    load(&|_| {}).unwrap();
    for name in [
        "embed.weight",
        "embed.scale",
        "wkv.weight",
        "q_weight",
        "k_weight",
    ] {
        match load(&|t| drop(t.remove(name))) {
            Err(Error::Weight {
                name: found,
                reason: WeightError::Missing,
                ..
            }) => assert_eq!(found, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let short = |t: &mut HashMap<String, Tensor>| {
        let table = t["embed.weight"]
            .narrow(0, 1, cfg.num_embeddings[0] - 1)
            .unwrap()
            .contiguous()
            .unwrap();
        t.insert("embed.weight".to_owned(), table);
    };
    let shape = load(&short);
    assert!(
        matches!(
            shape,
            Err(Error::Weight {
                reason: WeightError::Shape { .. },
                ..
            })
        ),
        "{shape:?}"
    );
    let float = |t: &mut HashMap<String, Tensor>| {
        let table = t["embed.weight"].to_dtype(DType::F32).unwrap();
        t.insert("embed.weight".to_owned(), table);
    };
    let dtype = load(&float);
    assert!(
        matches!(
            dtype,
            Err(Error::Weight {
                reason: WeightError::Dtype { .. },
                ..
            })
        ),
        "{dtype:?}"
    );
    let vb = Weights::from_tensors(bf16_layer(&cfg))
        .unwrap()
        .var_builder(&Device::Cpu);
    assert!(matches!(
        Engram::new(&cfg, 1, vb),
        Err(Error::Config { .. })
    ));
}

#[test]
fn hashes_of_another_width_are_refused() {
    let cfg = small(1, 3, 2, 31, 20);
    let vb = Weights::from_tensors(bf16_layer(&cfg))
        .unwrap()
        .var_builder(&Device::Cpu);
    let engram = Engram::new(&cfg, 0, vb).unwrap();
    let hashes = |shape: &[usize]| Tensor::zeros(shape, DType::U32, &Device::Cpu).unwrap();
    assert!(engram.gather(&hashes(&[2, 4])).is_ok());
    assert!(engram.gather(&hashes(&[2, 5])).is_err());
    assert!(engram.gather(&hashes(&[8])).is_err());
}

/// The table's bytes are the mapped file itself: nothing is read until a row is asked for.
#[test]
fn the_table_of_a_mapped_checkpoint_is_the_file() {
    let weights = Weights::open(
        deepseek_v41_testing::golden_dir().join("model_full"),
        LoadPolicy::Mmap,
    )
    .unwrap();
    let name = "layers.1.engram.embed.weight";
    let raw = weights.get(name).unwrap().clone();
    let vb = weights
        .var_builder(&Device::Cpu)
        .pp("layers.1.engram.embed");
    let table = deepseek_v41_engram::EngramTable::new(raw.shape[0], raw.shape[1], vb).unwrap();
    assert_eq!(table.row(0).0.as_ptr(), raw.bytes.as_ptr());
    let _: Option<Arc<std::path::Path>> = raw.file;
}
