//! Steps and limits that make no sense: a refused step leaves every sequence as it was.

#![allow(clippy::unwrap_used)]

use std::sync::OnceLock;

use deepseek_v41::{
    DeepSeekV41,
    model::{Chunk, ForwardBatch, Limits, LogitRows, ModelState, SequenceId},
};
use deepseek_v41_testing::assert_outcome;

fn tiny() -> &'static DeepSeekV41 {
    static MODEL: OnceLock<DeepSeekV41> = OnceLock::new();
    MODEL.get_or_init(|| DeepSeekV41::tiny().unwrap())
}

#[test]
fn limits() {
    let d = Limits::default();
    for (limits, want) in [
        (Limits { max_seqs: 0, ..d }, "max_seqs"),
        (Limits { max_len: 0, ..d }, "max_len"),
        (Limits { max_len: 1, ..d }, ""),
        (
            Limits {
                max_len: usize::MAX,
                ..d
            },
            "context length",
        ),
        (
            Limits {
                max_seqs: usize::MAX,
                ..d
            },
            "cannot be addressed",
        ),
        (
            Limits {
                max_seqs: 1 << 20,
                ..d
            },
            "cannot be addressed",
        ),
        (
            Limits {
                max_rollback: usize::MAX,
                ..d
            },
            "cannot be addressed",
        ),
    ] {
        assert_outcome(&format!("{limits:?}"), tiny().session(limits), want);
    }
}

#[test]
fn batches() {
    let transformer = tiny().transformer();
    let limits = Limits {
        max_seqs: 2,
        max_len: 64,
        ..Limits::default()
    };
    let fresh = |limits| ModelState::new(transformer.config(), limits, transformer.device());
    let mut state = fresh(limits).unwrap();
    let (a, b) = (state.create().unwrap(), state.create().unwrap());
    let text = |seq: SequenceId, ids: &[u32]| Chunk::text(seq, ids);
    let several = |chunks| ForwardBatch {
        chunks,
        ..ForwardBatch::default()
    };
    let asking = |logits, ids: &[u32]| ForwardBatch {
        logits,
        target_hidden: true,
        ..ForwardBatch::one(a, ids)
    };
    let vocab = "outside of the vocabulary";
    for (batch, want, rows, len) in [
        (ForwardBatch::default(), "", 0, 0),
        (several(vec![text(a, &[])]), "", 0, 0),
        (asking(LogitRows::All, &[]), "", 0, 0),
        (
            several(vec![text(a, &[1]), text(a, &[2])]),
            "takes part twice",
            0,
            0,
        ),
        (several(vec![text(a, &[1]), text(b, &[])]), "", 1, 1),
        (asking(LogitRows::Newest(0), &[1, 2]), "", 0, 3),
        (asking(LogitRows::Newest(usize::MAX), &[1, 2]), "", 2, 5),
        (several(vec![text(a, &[1; 60])]), "context length", 0, 5),
        (several(vec![text(a, &[1, 70_000])]), vocab, 0, 5),
        (several(vec![text(a, &[1]), text(b, &[9999])]), vocab, 0, 5),
        (several(vec![text(a, &[1])]), "", 1, 6),
    ] {
        let case = format!("{batch:?}");
        let out = transformer.forward(&batch, &mut state);
        if let Ok(out) = &out {
            assert_eq!(out.logits.dims(), [rows, 4096], "{case}");
        }
        assert_outcome(&case, out, want);
        assert_eq!(state.len(a).unwrap(), len, "{case}");
        assert_eq!(state.len(b).unwrap(), 0, "{case}");
    }
    state.release(b).unwrap();
    let gone = transformer.forward(&ForwardBatch::one(b, vec![1]), &mut state);
    assert_outcome("released", gone, "not a live sequence");
    let mut other = fresh(limits).unwrap();
    let foreign = transformer.forward(&ForwardBatch::one(a, vec![1]), &mut other);
    assert_outcome("of another state", foreign, "not a live sequence");
    assert_outcome("truncate", state.truncate(a, usize::MAX), "past the end");
    assert_outcome("fork", state.fork(a, usize::MAX), "past the end");
}
