//! Whatever goes wrong, weights and other sequences stay usable.

mod state_common;

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result};
use deepseek_v41_model::{
    Chunk, DraftRequest, ForwardBatch, ImageSpan, Limits, LogitRows, Probe, ProbePoint,
};
use state_common::{FORMATS, Small, argmax, bits, text};

/// Fails when it is shown this value.
struct FailAt(usize, ProbePoint);

impl Probe for FailAt {
    fn value(&mut self, layer: usize, point: ProbePoint, _: &Tensor) -> Result<()> {
        match (layer, point) == (self.0, self.1) {
            true => Err(Error::value("probe", "stop here")),
            false => Ok(()),
        }
    }
}

fn limits(kv_format: deepseek_v41_attention::KvFormat) -> Limits {
    Limits {
        max_seqs: 3,
        max_len: 40,
        max_rollback: 6,
        kv_format,
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    let small = Small::full();
    let vocab = small.cfg().vocab_size as u32;
    let mut state = small.state(limits(FORMATS[0]));
    let (a, b) = (
        state.create().expect("a slot"),
        state.create().expect("a slot"),
    );
    small
        .model
        .forward(&text(&[1, 2, 3], a), &mut state)
        .expect("a step");
    let rows = Tensor::zeros(
        (2, small.cfg().dim),
        candle_core::DType::BF16,
        small.model.device(),
    );
    let span = ImageSpan {
        start: 3,
        rows: rows.expect("rows"),
    };
    let image = Chunk {
        seq: a,
        token_ids: vec![1, 2, 3, 4],
        images: vec![span],
    };
    let refused = [
        (
            "a token outside of the vocabulary",
            vec![Chunk::text(b, [1]), Chunk::text(a, [4, vocab])],
        ),
        (
            "more than the state holds",
            vec![Chunk::text(b, [1]), Chunk::text(a, vec![1; 38])],
        ),
        (
            "one sequence twice",
            vec![Chunk::text(a, [4]), Chunk::text(a, [5])],
        ),
        (
            "a picture past the chunk's end",
            vec![Chunk::text(b, [1]), image],
        ),
    ];
    for (why, chunks) in refused {
        let batch = ForwardBatch {
            chunks,
            ..ForwardBatch::default()
        };
        small.model.forward(&batch, &mut state).expect_err(why);
        assert_eq!(
            (state.len(a).ok(), state.len(b).ok()),
            (Some(3), Some(0)),
            "{why}"
        );
    }
    let out = small
        .model
        .forward(&text(&[4, 5], a), &mut state)
        .expect("a step");
    assert_eq!(bits(&out.logits), small.fresh(&[1, 2, 3, 4, 5])[3..]);
}

#[test]
fn a_pass_that_fails_half_way_costs_only_its_own_sequences() {
    let small = Small::full();
    let layers = small.cfg().n_layers;
    let points = [
        ProbePoint::Engram,
        ProbePoint::Attn,
        ProbePoint::Ffn,
        ProbePoint::Stream,
        ProbePoint::PreMix,
    ];
    for format in FORMATS {
        let mut state = small.state(limits(format));
        let bystander = state.create().expect("a slot");
        let mut ids = vec![9, 8, 7];
        small
            .model
            .forward(&text(&ids, bystander), &mut state)
            .expect("a step");
        let failures = (0..layers).flat_map(|layer| points.map(|point| (layer, point)));
        let engram = &small.cfg().engram_layer_ids;
        for (layer, point) in failures {
            if point == ProbePoint::Engram && !engram.contains(&layer) {
                continue;
            }
            let (a, b) = (
                state.create().expect("a slot"),
                state.create().expect("a slot"),
            );
            let batch = ForwardBatch {
                chunks: vec![Chunk::text(a, vec![11; 20]), Chunk::text(b, [1, 2])],
                ..ForwardBatch::default()
            };
            let mut probe = FailAt(layer, point);
            small
                .model
                .forward_probed(&batch, &mut state, &mut probe)
                .expect_err("the probe's");
            // The two are lost, and say so until they are released.
            for lost in [a, b] {
                assert!(small.model.forward(&text(&[1], lost), &mut state).is_err());
                assert!(state.truncate(lost, 0).is_err());
                assert!(state.fork(lost, 0).is_err());
                let file = tempfile::NamedTempFile::new().expect("a file");
                assert!(state.save(lost, &[], &small.model, file.path()).is_err());
                state.release(lost).expect("a live sequence");
            }
            // Others are not, and what the failed pass left in the slots disturbs nobody.
            if ids.len() < 36 {
                ids.push(ids.len() as u32);
                let last = ids[ids.len() - 1];
                let out = small
                    .model
                    .forward(&text(&[last], bystander), &mut state)
                    .expect("a step");
                assert_eq!(bits(&out.logits)[0], small.fresh(&ids)[ids.len() - 1]);
            }
        }
        let again = state.create().expect("a slot");
        let out = small
            .model
            .forward(&text(&[5, 6, 7], again), &mut state)
            .expect("a step");
        assert_eq!(bits(&out.logits), small.fresh(&[5, 6, 7]));
    }
}

#[test]
fn a_draft_that_fails_can_be_made_again() {
    let small = Small::full();
    let head = small.head.as_ref().expect("a draft head");
    let mut state = small.state(limits(FORMATS[1]));
    let seq = state.create().expect("a slot");
    let ids: Vec<u32> = (20..39).collect();
    let out = small
        .model
        .forward(&text(&ids, seq), &mut state)
        .expect("a step");
    let hidden = out.target_hidden.expect("hidden states");
    let request = DraftRequest {
        seq,
        committed: ids.len(),
        next: Some(4),
    };
    // Refused before anything is written: the rows do not continue where the rings end.
    let short = DraftRequest {
        committed: 3,
        ..request
    };
    let mut choose = |_: usize, _: usize, row: &[f32]| Ok(argmax(row));
    head.draft(&[short], &hidden, &mut state, &mut choose)
        .expect_err("too few rows");
    assert_eq!(state.drafted(seq).expect("live"), 0);
    // Stopped in the middle of the block, at every place in it.
    let mut committed = ids.len();
    for stop in 0..head.block_size() {
        let rows = hidden.narrow(0, 0, committed).expect("rows");
        let mut choose = |_: usize, place: usize, row: &[f32]| match place == stop {
            true => Err(Error::value("choice", "none")),
            false => Ok(argmax(row)),
        };
        let request = DraftRequest {
            committed,
            ..request
        };
        head.draft(&[request], &rows, &mut state, &mut choose)
            .expect_err("the caller's");
        committed = 0;
    }
    let none = hidden.narrow(0, 0, 0).expect("no rows");
    let draft = small.draft(&mut state, seq, 0, 4, &none).expect("a draft");
    assert_eq!(draft, small.fresh_draft(&ids, 4));
}

#[test]
fn ids_die_with_their_sequence() {
    let small = Small::full();
    let mut state = small.state(limits(FORMATS[0]));
    let old = state.create().expect("a slot");
    state.release(old).expect("live");
    let new = state.create().expect("the same slot");
    assert_ne!(old, new);
    assert!(state.release(old).is_err());
    assert!(state.truncate(old, 0).is_err());
    assert!(state.fork(old, 0).is_err());
    let batch = ForwardBatch {
        logits: LogitRows::Last,
        ..ForwardBatch::one(old, [1])
    };
    assert!(small.model.forward(&batch, &mut state).is_err());
    let other = small.state(limits(FORMATS[0]));
    assert!(other.len(new).is_err(), "of another state");
}
