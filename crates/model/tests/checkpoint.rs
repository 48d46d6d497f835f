//! Checkpoints that are not what the config says, and batches that cannot be run.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{LoadPolicy, RawTensor, Result, Weights};
use deepseek_v41_model::{
    Chunk, Config, ForwardBatch, ImageSpan, Limits, LogitRows, ModelState, Transformer,
    refuse_unexpected,
};
use deepseek_v41_testing::golden_dir;

fn config() -> Config {
    Config::from_file(golden_dir().join("model_text/config.json")).unwrap()
}

fn tensors() -> Vec<RawTensor> {
    let weights = Weights::open(golden_dir().join("model_text"), LoadPolicy::Mmap).unwrap();
    weights.iter().cloned().collect()
}

fn load(tensors: Vec<RawTensor>) -> Result<Transformer> {
    let weights = Weights::from_raw(tensors);
    let model = Transformer::new(&config(), None, weights.var_builder(&Device::Cpu))?;
    refuse_unexpected(&weights)?;
    Ok(model)
}

#[test]
fn missing_extra_misshaped_and_mistyped_tensors_are_four_errors() {
    load(tensors()).unwrap();
    let name = "layers.4.attn.wq_a.scale";
    let at = tensors().iter().position(|t| t.name == name).unwrap();

    let mut missing = tensors();
    missing.remove(at);
    let err = load(missing).unwrap_err().to_string();
    assert!(err.contains(name) && err.contains("missing"), "{err}");

    let mut extra = tensors();
    let mut more = extra[at].clone();
    more.name = "layers.4.attn.wq_c.scale".into();
    extra.push(more);
    let err = load(extra).unwrap_err().to_string();
    assert!(err.contains("wq_c") && err.contains("not part of"), "{err}");
    assert!(err.contains("model-0000"), "names its file: {err}");

    let mut renamed = tensors();
    renamed[at].name = "layers.4.attn.wq_a.scales".into();
    assert!(load(renamed).unwrap_err().to_string().contains(name));

    let mut misshaped = tensors();
    misshaped[at].shape.reverse();
    let err = load(misshaped).unwrap_err().to_string();
    assert!(err.contains(name) && err.contains("shape"), "{err}");

    let mut mistyped = tensors();
    mistyped[at].dtype = deepseek_v41_core::StoredDtype::F16;
    let err = load(mistyped).unwrap_err().to_string();
    assert!(err.contains(name) && err.contains("dtype"), "{err}");
}

/// A part that may be left out is left out as a whole.
#[test]
fn a_tower_that_is_loaded_in_part_is_refused() {
    let mut more = tensors();
    let names = ["vision.norm.weight", "aligner.w1.weight", "image_end"];
    more.extend(names.map(|name| RawTensor {
        name: name.into(),
        ..tensors()[0].clone()
    }));
    load(more.clone()).unwrap();
    let weights = Weights::from_raw(more);
    let vb = weights.var_builder(&Device::Cpu);
    Transformer::new(&config(), None, vb).unwrap();
    weights.get("aligner.w1.weight").unwrap();
    let err = refuse_unexpected(&weights).unwrap_err().to_string();
    assert!(
        err.contains("image_end") && err.contains("not part of"),
        "{err}"
    );
}

#[test]
fn the_order_of_tensors_does_not_matter() {
    let mut reversed = tensors();
    reversed.reverse();
    let run = |model: &Transformer| {
        let mut state = ModelState::new(model.config(), Limits::default(), &Device::Cpu).unwrap();
        let seq = state.create().unwrap();
        let out = model
            .forward(&ForwardBatch::one(seq, [3, 4, 5]), &mut state)
            .unwrap();
        out.logits.to_vec2::<f32>().unwrap()
    };
    assert_eq!(
        run(&load(tensors()).unwrap()),
        run(&load(reversed).unwrap())
    );
}

#[test]
fn draft_layers_and_vision_may_lie_unused_in_a_checkpoint() {
    let mut more = tensors();
    for name in [
        "mtp.0.norm.weight",
        "vision.norm.weight",
        "aligner.w1.bias",
        "image_start",
    ] {
        let mut tensor = more[0].clone();
        tensor.name = name.into();
        more.push(tensor);
    }
    load(more).unwrap();
}

#[test]
fn engram_models_need_their_token_map() {
    let dir = golden_dir().join("model_bf16");
    let cfg = Config::from_file(dir.join("config.json")).unwrap();
    let weights = Weights::open(&dir, LoadPolicy::Mmap).unwrap();
    let err = Transformer::new(&cfg, None, weights.var_builder(&Device::Cpu)).unwrap_err();
    assert!(err.to_string().contains("token map"), "{err}");
}

#[test]
fn impossible_batches_are_refused_before_anything_changes() {
    let model = load(tensors()).unwrap();
    let cfg = model.config();
    let limits = Limits {
        max_seqs: 2,
        max_len: 16,
        ..Limits::default()
    };
    let mut state = ModelState::new(cfg, limits, &Device::Cpu).unwrap();
    let seq = state.create().unwrap();
    model
        .forward(&ForwardBatch::one(seq, [3, 4]), &mut state)
        .unwrap();
    let other = state.create().unwrap();
    state.release(other).unwrap();
    let rows = Tensor::zeros((2, cfg.dim), DType::BF16, &Device::Cpu).unwrap();
    let image = |start| Chunk {
        images: vec![ImageSpan {
            start,
            rows: rows.clone(),
        }],
        ..Chunk::text(seq, [3, 4])
    };
    let bad: Vec<(&str, Vec<Chunk>)> = vec![
        ("token id", vec![Chunk::text(seq, [320])]),
        ("context length", vec![Chunk::text(seq, [3; 15])]),
        ("live", vec![Chunk::text(other, [3])]),
        ("image span", vec![image(1)]),
        ("slot", vec![Chunk::text(seq, [3]), Chunk::text(seq, [4])]),
    ];
    for (what, chunks) in bad {
        let batch = ForwardBatch {
            chunks,
            ..ForwardBatch::default()
        };
        let err = model.forward(&batch, &mut state).unwrap_err().to_string();
        assert!(err.contains(what), "{what}: {err}");
    }
    assert_eq!(state.token_ids(seq).unwrap(), [3, 4]);
    model
        .forward(&ForwardBatch::one(seq, [5]), &mut state)
        .unwrap();
}

#[test]
fn empty_batches_and_chunks_have_empty_results() {
    let model = load(tensors()).unwrap();
    let mut state = ModelState::new(
        model.config(),
        Limits {
            max_seqs: 3,
            ..Limits::default()
        },
        &Device::Cpu,
    )
    .unwrap();
    let out = model.forward(&ForwardBatch::default(), &mut state).unwrap();
    assert_eq!(out.logits.dims(), [0, 320]);
    let (a, b) = (state.create().unwrap(), state.create().unwrap());
    let batch = ForwardBatch {
        chunks: vec![Chunk::text(a, []), Chunk::text(b, [3, 4, 5])],
        ..ForwardBatch::default()
    };
    let out = model.forward(&batch, &mut state).unwrap();
    assert_eq!(out.logits.dims(), [1, 320]);
    assert_eq!((state.len(a).unwrap(), state.len(b).unwrap()), (0, 3));
    let none = ForwardBatch {
        logits: LogitRows::None,
        ..ForwardBatch::one(b, [6])
    };
    assert_eq!(
        model.forward(&none, &mut state).unwrap().logits.dims(),
        [0, 320]
    );
}

#[test]
fn states_know_their_limits() {
    let cfg = config();
    let new = |limits| ModelState::new(&cfg, limits, &Device::Cpu);
    assert!(
        new(Limits {
            max_len: 0,
            ..Limits::default()
        })
        .is_err()
    );
    assert!(
        new(Limits {
            max_seqs: 0,
            ..Limits::default()
        })
        .is_err()
    );
    assert!(
        new(Limits {
            max_len: usize::MAX,
            ..Limits::default()
        })
        .is_err()
    );
    assert!(
        new(Limits {
            max_seqs: usize::MAX,
            ..Limits::default()
        })
        .is_err()
    );
    assert!(
        new(Limits {
            max_rollback: usize::MAX,
            ..Limits::default()
        })
        .is_err()
    );
    let mut state = new(Limits::default()).unwrap();
    let seq = state.create().unwrap();
    assert!(
        state
            .create()
            .unwrap_err()
            .to_string()
            .contains("sequences")
    );
    state.release(seq).unwrap();
    assert!(state.is_empty() && state.len(seq).is_err());
}

#[test]
fn weights_serve_many_states_from_many_threads() {
    fn shared<T: Send + Sync>(t: T) -> Arc<T> {
        Arc::new(t)
    }
    let model = shared(load(tensors()).unwrap());
    let run = |model: &Transformer| {
        let mut state = ModelState::new(model.config(), Limits::default(), &Device::Cpu).unwrap();
        let seq = state.create().unwrap();
        let out = model
            .forward(&ForwardBatch::one(seq, [7, 8, 9]), &mut state)
            .unwrap();
        out.logits.to_vec2::<f32>().unwrap()
    };
    let alone = run(&model);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| run(&model))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), alone);
        }
    });
}
