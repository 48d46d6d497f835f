//! Saved sequences: whole again in any format, and errors for everything else.

mod state_common;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use deepseek_v41_attention::KvFormat;
use deepseek_v41_core::{Error, Fingerprint, LoadPolicy, SavedStateError, Weights};
use deepseek_v41_model::{
    Chunk, Config, ForwardBatch, ImageSpan, IndexKeys, Limits, LogitRows, ModelState, SequenceId,
};
use deepseek_v41_testing::{golden_dir, random_bf16};
use serde_json::{Value, json};
use state_common::{FORMATS, Small, bits, text};

fn limits(kv_format: KvFormat) -> Limits {
    Limits {
        max_seqs: 2,
        max_len: 64,
        max_rollback: 6,
        kv_format,
    }
}

fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 5) % 500).collect()
}

/// A state with one sequence of `ids`, all but the last two of which the draft head has seen.
fn run(small: &Small, format: KvFormat, ids: &[u32]) -> (ModelState, SequenceId, Tensor) {
    let mut state = small.state(limits(format));
    let seq = state.create().expect("a slot");
    let seen = ids.len() - 2;
    let out = small
        .model
        .forward(&text(&ids[..seen], seq), &mut state)
        .expect("a step");
    let hidden = out.target_hidden.expect("hidden states");
    small
        .draft(&mut state, seq, seen, ids[seen], &hidden)
        .expect("a draft");
    let out = small
        .model
        .forward(&text(&ids[seen..], seq), &mut state)
        .expect("a step");
    (state, seq, out.target_hidden.expect("hidden states"))
}

fn saved(small: &Small, format: KvFormat, ids: &[u32], dir: &Path) -> PathBuf {
    let (state, seq, _) = run(small, format, ids);
    let path = dir.join("saved.safetensors");
    state
        .save(seq, &[42, 43], &small.model, &path)
        .expect("saved");
    path
}

#[test]
fn a_file_is_the_same_from_both_formats_and_serves_both() {
    let small = Small::full();
    let dir = tempfile::tempdir().expect("a directory");
    // Shorter than the window, with an open group, without one, several windows long.
    for n in [3, 15, 16, 33, 50] {
        let ids = ids(n);
        let files =
            FORMATS.map(|f| std::fs::read(saved(&small, f, &ids, dir.path())).expect("a file"));
        assert!(files[0] == files[1], "{n}");
        let path = dir.path().join("saved.safetensors");
        for format in FORMATS {
            let (_, _, hidden) = run(&small, format, &ids);
            let mut state = small.state(limits(format));
            state.create().expect("a slot");
            let restored = state.restore(&small.model, &path).expect("restored");
            assert_eq!(restored.pending, [42, 43]);
            let seq = restored.seq;
            assert_eq!(state.token_ids(seq).expect("live"), ids);
            assert_eq!(state.drafted(seq).expect("live"), ids.len() - 2);
            let draft = small
                .draft(&mut state, seq, 2, 42, &hidden)
                .expect("a draft");
            assert_eq!(draft, small.fresh_draft(&ids, 42));
            let mut longer = ids.clone();
            longer.extend([42, 43, 44]);
            let out = small
                .model
                .forward(&text(&[42, 43, 44], seq), &mut state)
                .expect("a step");
            assert_eq!(
                bits(&out.logits),
                small.fresh(&longer)[ids.len()..],
                "{n} {format:?}"
            );
            let err = state
                .truncate(seq, ids.len() - 1)
                .expect_err("the slack is not saved");
            assert!(
                matches!(
                    err,
                    Error::Capacity {
                        what: "tokens of rollback",
                        ..
                    }
                ),
                "{err}"
            );
            state
                .truncate(seq, ids.len())
                .expect("what came since can go");
        }
    }
}

#[test]
fn it_is_a_safetensors_file_of_the_size_foretold() {
    let small = Small::full();
    let dir = tempfile::tempdir().expect("a directory");
    let ids = ids(41);
    let (state, seq, hidden) = run(&small, KvFormat::Packed, &ids);
    let mut state = state;
    small
        .draft(&mut state, seq, 2, 1, &hidden)
        .expect("a draft");
    let path = dir.path().join("a name with spaces");
    state.save(seq, &[], &small.model, &path).expect("saved");
    let bytes = std::fs::read(&path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("valid safetensors");
    let data: usize = file.iter().map(|(_, t)| t.data().len()).sum();
    assert_eq!(data, state.saved_bytes(ids.len()));
    assert_eq!(
        file.tensor("window.0").expect("rows").shape()[0],
        small.cfg().window_size
    );
    let entries: Vec<_> = std::fs::read_dir(dir.path())
        .expect("a directory")
        .collect();
    assert_eq!(entries.len(), 1, "nothing is left beside it");
}

#[test]
fn pictures_and_stale_keys_come_back_as_well() {
    for keys in [IndexKeys::Owner, IndexKeys::LastPublished] {
        let small = Small::load("model_full", keys);
        let dim = small.cfg().dim;
        let rows = random_bf16(5 * dim, 1.0, 7);
        let rows = Tensor::from_vec(rows, (5, dim), &Device::Cpu).expect("rows");
        let first = |seq| ForwardBatch {
            chunks: vec![Chunk {
                seq,
                token_ids: ids(19),
                images: vec![ImageSpan {
                    start: 12,
                    rows: rows.clone(),
                }],
            }],
            logits: LogitRows::Last,
            target_hidden: false,
            best: false,
        };
        let mut state = small.state(limits(KvFormat::Packed));
        let seq = state.create().expect("a slot");
        small
            .model
            .forward(&first(seq), &mut state)
            .expect("a step");
        let file = tempfile::NamedTempFile::new().expect("a file");
        state
            .save(seq, &[], &small.model, file.path())
            .expect("saved");
        let restored = state
            .restore(&small.model, file.path())
            .expect("restored")
            .seq;
        assert!(state.has_images(restored, 13).expect("live"));
        for token in [1, 2, 3, 4] {
            let one = |seq| ForwardBatch::one(seq, [token]);
            let there = small.model.forward(&one(seq), &mut state).expect("a step");
            let back = small
                .model
                .forward(&one(restored), &mut state)
                .expect("a step");
            assert_eq!(bits(&there.logits), bits(&back.logits), "{keys:?} {token}");
        }
    }
}

fn reason(err: Error) -> SavedStateError {
    match err {
        Error::SavedState { reason, .. } => reason,
        other => panic!("not about a saved state: {other}"),
    }
}

/// The file with its header changed by `edit`; its checksum is right again.
fn edited(file: &[u8], edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..8 + len]).expect("a header");
    edit(&mut header);
    let text = header.to_string().into_bytes();
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out.extend(&file[8 + len..file.len() - 8]);
    let mut hash = Fingerprint::new();
    hash.update(&out);
    out.extend(hash.finish().to_le_bytes());
    out
}

#[test]
fn every_other_file_is_an_error_of_its_own() {
    let small = Small::full();
    let dir = tempfile::tempdir().expect("a directory");
    let ids = ids(21);
    let good = std::fs::read(saved(&small, KvFormat::Packed, &ids, dir.path())).expect("a file");
    let mut state = small.state(limits(KvFormat::Packed));
    let bystander = state.create().expect("a slot");
    small
        .model
        .forward(&text(&[1, 2], bystander), &mut state)
        .expect("a step");
    let path = dir.path().join("hostile");
    let mut restore = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("written");
        let result = state.restore(&small.model, &path);
        if let Ok(restored) = &result {
            state.release(restored.seq).expect("live");
        }
        // One slot is free before and after, whatever the file was.
        let free = state.create().expect("the state is as it was");
        state.release(free).expect("live");
        result.err()
    };
    let mut refused = |bytes: &[u8]| restore(bytes).expect("an error");

    assert!(matches!(
        reason(refused(&[0xff; 400])),
        SavedStateError::NotAState
    ));
    assert!(matches!(reason(refused(b"")), SavedStateError::Damaged(_)));
    let other_format = edited(&good, |h| h["__metadata__"]["format"] = json!("pt"));
    assert!(matches!(
        reason(refused(&other_format)),
        SavedStateError::NotAState
    ));
    let newer = edited(&good, |h| h["__metadata__"]["version"] = json!("2"));
    let found = reason(refused(&newer));
    assert_eq!(
        found,
        SavedStateError::Version {
            found: "2".into(),
            expected: 1
        }
    );
    let stranger = edited(&good, |h| {
        h["__metadata__"]["fingerprint"] = json!("00000000000000ab")
    });
    assert!(matches!(
        reason(refused(&stranger)),
        SavedStateError::Fingerprint { found: 0xab, .. }
    ));

    let shape = |name: &'static str, shape: Value| edited(&good, move |h| h[name]["shape"] = shape);
    for (name, to) in [
        ("ids", json!([22])),
        ("window.0", json!([8, 2 * 66])),
        ("compressed.0.kv", json!([10])),
        ("compressed.0.index_k", json!([usize::MAX, usize::MAX])),
        ("draft.1", json!([0, 66])),
    ] {
        match reason(refused(&shape(name, to))) {
            SavedStateError::Rows { name: found, .. } => assert_eq!(found, name),
            other => panic!("{name}: {other}"),
        }
    }
    let wider = edited(&good, |h| h["window.1"]["dtype"] = json!("F64"));
    assert!(matches!(
        reason(refused(&wider)),
        SavedStateError::Rows { .. }
    ));

    // Numbers that would be taken for sizes.
    for (field, value) in [
        ("tokens", "4294967295"),
        ("tokens", "65"),
        ("pending", "4000000000"),
        ("tokens", "-1"),
        ("tokens", "99999999999999999999"),
        ("drafted", "22"),
        ("prefill", "22"),
        ("prefill", "x"),
    ] {
        let err = refused(&edited(&good, |h| h["__metadata__"][field] = json!(value)));
        let fits = matches!(
            err,
            Error::Capacity {
                what: "context length in tokens",
                ..
            }
        );
        let impossible = matches!(
            &err,
            Error::SavedState {
                reason: SavedStateError::Damaged(_),
                ..
            }
        );
        assert!(fits || impossible, "{field} {value}: {err}");
    }
    let moved = edited(&good, |h| h["window.2"]["data_offsets"] = json!([0, 1056]));
    assert!(matches!(
        reason(refused(&moved)),
        SavedStateError::Damaged(_)
    ));
    let extra = edited(&good, |h| h["more"] = h["checksum"].clone());
    assert!(matches!(
        reason(refused(&extra)),
        SavedStateError::Damaged(_)
    ));
    let fewer = edited(&good, |h| {
        h.as_object_mut().expect("a map").remove("window.3");
    });
    assert!(matches!(
        reason(refused(&fewer)),
        SavedStateError::Damaged(_)
    ));

    // Values no writer makes, under a right checksum: a token outside of the vocabulary, a code that
    // is not a number.
    let data = 8 + u64::from_le_bytes(good[..8].try_into().expect("eight bytes")) as usize;
    for (at, byte) in [(data + 3, 0xff), (data + 4 * (21 + 2) + 5, 0x7f)] {
        let mut file = good.clone();
        file[at] = byte;
        assert!(
            matches!(
                reason(refused(&edited(&file, |_| {}))),
                SavedStateError::Damaged(_)
            ),
            "{at}"
        );
    }

    // Cut off anywhere, one byte more, any byte changed.
    for len in (0..good.len())
        .step_by(97)
        .chain([good.len() - 1, good.len() - 8])
    {
        assert!(
            matches!(refused(&good[..len]), Error::SavedState { .. }),
            "cut to {len}"
        );
    }
    let mut longer = good.clone();
    longer.push(0);
    assert!(matches!(
        reason(refused(&longer)),
        SavedStateError::Damaged(_)
    ));
    for at in (0..good.len())
        .step_by(41)
        .chain([0, 7, 8, 9, data, good.len() - 1])
    {
        let mut file = good.clone();
        file[at] ^= 0x10;
        let err = refused(&file);
        assert!(
            matches!(err, Error::SavedState { .. } | Error::Capacity { .. }),
            "byte {at}: {err}"
        );
    }

    assert!(restore(&good).is_none(), "and the right one is fine");
    let missing = state
        .restore(&small.model, dir.path().join("none"))
        .expect_err("no file");
    assert!(matches!(missing, Error::Io { .. }));
    let folder = state
        .restore(&small.model, dir.path())
        .expect_err("a directory");
    assert!(matches!(
        folder,
        Error::Io { .. } | Error::SavedState { .. }
    ));
    let nowhere = dir.path().join("no/such/place");
    assert!(matches!(
        state.save(bystander, &[], &small.model, nowhere),
        Err(Error::Io { .. })
    ));
    let out = small
        .model
        .forward(&text(&[3], bystander), &mut state)
        .expect("a step");
    assert_eq!(bits(&out.logits)[0], small.fresh(&[1, 2, 3])[2]);
    let second = state.create().expect("a slot");
    let full = state.restore(&small.model, dir.path().join("saved.safetensors"));
    assert!(matches!(
        full,
        Err(Error::Capacity {
            what: "sequences",
            ..
        })
    ));
    state.release(second).expect("live");
}

#[test]
fn another_model_is_told_apart() {
    let dir = golden_dir().join("model_full");
    let cfg = Config::from_file(dir.join("config.json")).expect("config");
    let weights = || Weights::open(&dir, LoadPolicy::Read).expect("weights");
    let own = Small::new(&cfg, &weights()).model.fingerprint();
    assert_eq!(Small::new(&cfg, &weights()).model.fingerprint(), own);
    let longer = Config {
        max_position_embeddings: 99,
        ..cfg.clone()
    };
    assert_eq!(
        Small::new(&longer, &weights()).model.fingerprint(),
        own,
        "a limit, not a model"
    );
    let other = Config {
        rope_factor: 5.0,
        ..cfg.clone()
    };
    assert_ne!(Small::new(&other, &weights()).model.fingerprint(), own);
    let plain = weights();
    let tuned = plain.iter().map(|t| {
        let mut t = t.clone();
        if t.name == "norm.weight" {
            let mut bytes = t.bytes.to_vec();
            bytes[1] ^= 1;
            t.bytes = bytes.into();
        }
        t
    });
    let tuned = Weights::from_raw(tuned.collect::<Vec<_>>());
    assert_ne!(Small::new(&cfg, &tuned).model.fingerprint(), own);
}

#[test]
fn memory_at_release_shapes() {
    let text = std::fs::read_to_string(golden_dir().join("config_released.json")).expect("config");
    let both: Value = serde_json::from_str(&text).expect("JSON");
    let cfg = Config::from_json(&both["inference"].to_string()).expect("config");
    let state = |max_len: usize, kv_format: KvFormat| {
        let limits = Limits {
            max_seqs: 1,
            max_len,
            max_rollback: 64,
            kv_format,
        };
        // Pages nobody writes are not committed.
        ModelState::new(&cfg, limits, &Device::Cpu).expect("state")
    };
    let million = 1 << 20;
    let usage = |len, format| state(len, format).memory_usage();
    let per_token = |format| {
        let step = 1 << 16;
        (usage(million, format) - usage(million - step, format)) as f64 / step as f64
    };
    // 2.5 rows a token (three sources of ratio 2, one of 1), each with its index key.
    assert_eq!(per_token(KvFormat::Packed), 2.5 * (288.0 + 68.0));
    assert_eq!(per_token(KvFormat::Bf16), 2.5 * (1024.0 + 256.0));
    let gib = usage(million, KvFormat::Packed) as f64 / f64::from(1 << 30);
    assert!(gib < 0.9, "{gib} GiB");

    let state = state(million, KvFormat::Packed);
    let rings = state.saved_bytes(1000) as f64 - 1000.0 * (890.0 + 4.0);
    assert!(rings < 3.1e6, "{rings} bytes of rings");
    let per_token = (state.saved_bytes(million) as f64 - rings) / million as f64;
    assert!(per_token < 1000.0, "{per_token} bytes a token");
}

#[test]
fn synthetic_sequences_run() {
    let small = Small::full();
    for format in FORMATS {
        let mut state = small.state(limits(format));
        let seq = state.create_synthetic(small.cfg(), 50).expect("a sequence");
        assert_eq!(state.len(seq).expect("live"), 50);
        let out = small
            .model
            .forward(&text(&[1, 2, 3], seq), &mut state)
            .expect("a step");
        assert!(
            out.logits
                .to_dtype(DType::F64)
                .expect("logits")
                .sum_all()
                .is_ok()
        );
        let rows = out.logits.to_vec2::<f32>().expect("logits");
        assert!(
            rows.iter().flatten().all(|v| v.is_finite()),
            "no row is NaN"
        );
        assert!(state.create_synthetic(small.cfg(), 65).is_err());
    }
}
