//! Any history of a sequence leaves it as a fresh run of its tokens would, bit for bit.

mod state_common;

use candle_core::Tensor;
use deepseek_v41_attention::KvFormat;
use deepseek_v41_core::Error;
use deepseek_v41_model::{Chunk, ForwardBatch, Limits, LogitRows, ModelState, SequenceId};
use proptest::prelude::*;
use state_common::{FORMATS, Small, bits, text};

const SLOTS: usize = 4;
const MAX_LEN: usize = 72;
/// Smaller than the window of 16 and odd, so that rings wrap at every offset.
const ROLLBACK: usize = 5;

/// A step of a history; numbers are reduced to what is possible when it is run.
#[derive(Debug, Clone)]
enum Op {
    Create,
    /// Tokens for a sequence, cut into chunks of at most `chunk`.
    Append {
        seq: usize,
        len: usize,
        chunk: usize,
    },
    /// Tokens for all sequences in one batch.
    AppendAll {
        len: usize,
    },
    Truncate {
        seq: usize,
        back: usize,
    },
    Fork {
        seq: usize,
        back: usize,
    },
    SaveRestore {
        seq: usize,
    },
    /// Drafts, verifies them in one pass and takes all but `keep` of them back.
    Speculate {
        seq: usize,
        drafts: usize,
        keep: usize,
    },
    Release {
        seq: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..SLOTS;
    prop_oneof![
        1 => Just(Op::Create),
        4 => (seq.clone(), 1..30usize, 1..12usize)
            .prop_map(|(seq, len, chunk)| Op::Append { seq, len, chunk }),
        2 => (1..4usize).prop_map(|len| Op::AppendAll { len }),
        4 => (seq.clone(), 0..ROLLBACK + 3).prop_map(|(seq, back)| Op::Truncate { seq, back }),
        3 => (seq.clone(), 0..ROLLBACK + 3).prop_map(|(seq, back)| Op::Fork { seq, back }),
        2 => seq.clone().prop_map(|seq| Op::SaveRestore { seq }),
        4 => (seq.clone(), 1..5usize, 0..5usize)
            .prop_map(|(seq, drafts, keep)| Op::Speculate { seq, drafts, keep }),
        1 => seq.prop_map(|seq| Op::Release { seq }),
    ]
}

/// What a sequence should be.
#[derive(Clone)]
struct Expected {
    id: SequenceId,
    ids: Vec<u32>,
    /// Hidden state of every token, `[1, ..]` each.
    hidden: Vec<Tensor>,
    /// The shortest it may become.
    oldest: usize,
    high_water: usize,
}

struct History<'m> {
    small: &'m Small,
    state: ModelState,
    sequences: Vec<Expected>,
    next_token: u32,
}

impl<'m> History<'m> {
    fn new(small: &'m Small, kv_format: KvFormat) -> Self {
        let limits = Limits {
            max_seqs: SLOTS,
            max_len: MAX_LEN,
            max_rollback: ROLLBACK,
            kv_format,
        };
        Self {
            small,
            state: small.state(limits),
            sequences: Vec::new(),
            next_token: 1,
        }
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        let vocab = self.small.cfg().vocab_size as u32;
        let next = |last: u32| (last * 131 + 17) % vocab;
        (0..n)
            .map(|_| {
                self.next_token = next(self.next_token);
                self.next_token
            })
            .collect()
    }

    /// Runs chunks of several sequences at once and compares every row.
    fn forward(&mut self, chunks: Vec<(usize, Vec<u32>)>) {
        let chunk =
            |(at, ids): &(usize, Vec<u32>)| Chunk::text(self.sequences[*at].id, ids.clone());
        let batch = ForwardBatch {
            chunks: chunks.iter().map(chunk).collect(),
            logits: LogitRows::All,
            target_hidden: true,
            best: false,
        };
        let out = self
            .small
            .model
            .forward(&batch, &mut self.state)
            .expect("a step");
        let (rows, hidden) = (bits(&out.logits), out.target_hidden.expect("hidden states"));
        let mut row = 0;
        for (at, ids) in chunks {
            let sequence = &mut self.sequences[at];
            let start = sequence.ids.len();
            sequence.ids.extend(&ids);
            sequence.high_water = sequence.high_water.max(sequence.ids.len());
            sequence.oldest = sequence
                .oldest
                .max(sequence.high_water.saturating_sub(ROLLBACK));
            let fresh = self.small.fresh(&sequence.ids);
            for pos in start..sequence.ids.len() {
                assert_eq!(rows[row], fresh[pos], "logits at {pos}");
                sequence
                    .hidden
                    .push(hidden.narrow(0, row, 1).expect("a row"));
                row += 1;
            }
        }
    }

    fn may_become(sequence: &Expected, len: usize) -> bool {
        len == 0 || len == sequence.ids.len() || len >= sequence.oldest
    }

    fn cut(sequence: &mut Expected, len: usize) {
        sequence.ids.truncate(len);
        sequence.hidden.truncate(len);
        if len == 0 {
            (sequence.oldest, sequence.high_water) = (0, 0);
        }
    }

    fn apply(&mut self, op: &Op) {
        if let Op::Create = op {
            match (self.state.create(), self.sequences.len() < SLOTS) {
                (Ok(id), true) => self.sequences.push(Expected {
                    id,
                    ids: Vec::new(),
                    hidden: Vec::new(),
                    oldest: 0,
                    high_water: 0,
                }),
                (Err(Error::Capacity { .. }), false) => {}
                (other, _) => panic!("create: {other:?}"),
            }
            return;
        }
        let n = self.sequences.len();
        if n == 0 {
            return;
        }
        match *op {
            Op::Create => {}
            Op::Append { seq, len, chunk } => {
                let at = seq % n;
                let room = MAX_LEN - self.sequences[at].ids.len();
                let ids = self.tokens(len.min(room));
                ids.chunks(chunk)
                    .for_each(|chunk| self.forward(vec![(at, chunk.to_vec())]));
            }
            Op::AppendAll { len } => {
                let mut chunks = Vec::new();
                for at in 0..n {
                    let room = MAX_LEN - self.sequences[at].ids.len();
                    let ids = self.tokens((len + at).min(room));
                    chunks.push((at, ids));
                }
                self.forward(chunks);
            }
            Op::Truncate { seq, back } => {
                let sequence = &mut self.sequences[seq % n];
                let len = sequence.ids.len().saturating_sub(back);
                match (
                    self.state.truncate(sequence.id, len),
                    Self::may_become(sequence, len),
                ) {
                    (Ok(()), true) => Self::cut(sequence, len),
                    (
                        Err(Error::Capacity {
                            what: "tokens of rollback",
                            ..
                        }),
                        false,
                    ) => {}
                    (other, may) => panic!("truncate to {len}, possible {may}: {other:?}"),
                }
            }
            Op::Fork { seq, back } => {
                let mut copy = self.sequences[seq % n].clone();
                let len = copy.ids.len().saturating_sub(back);
                let possible = Self::may_become(&copy, len) && n < SLOTS;
                match (self.state.fork(copy.id, len), possible) {
                    (Ok(id), true) => {
                        copy.id = id;
                        Self::cut(&mut copy, len);
                        self.sequences.push(copy);
                    }
                    (Err(Error::Capacity { .. }), false) => {}
                    (other, may) => panic!("fork at {len}, possible {may}: {other:?}"),
                }
            }
            Op::SaveRestore { seq } => {
                let sequence = &mut self.sequences[seq % n];
                // A text that fills its sequence has no token left to run.
                let pending: &[u32] = if sequence.ids.len() < MAX_LEN {
                    &[3]
                } else {
                    &[]
                };
                let file = tempfile::NamedTempFile::new().expect("a file");
                let model = &self.small.model;
                self.state
                    .save(sequence.id, pending, model, file.path())
                    .expect("saved");
                self.state.release(sequence.id).expect("a live sequence");
                let restored = self.state.restore(model, file.path()).expect("restored");
                assert_eq!(restored.pending, pending);
                sequence.id = restored.seq;
                let len = sequence.ids.len();
                (sequence.oldest, sequence.high_water) = (len, len);
            }
            Op::Speculate { seq, drafts, keep } => self.speculate(seq % n, drafts, keep),
            Op::Release { seq } => {
                let gone = self.sequences.remove(seq % n).id;
                self.state.release(gone).expect("a live sequence");
                assert!(self.state.len(gone).is_err(), "the id is stale");
            }
        }
    }

    fn speculate(&mut self, at: usize, drafts: usize, keep: usize) {
        let sequence = &self.sequences[at];
        let (id, len) = (sequence.id, sequence.ids.len());
        if len == 0 || len + 1 + drafts > MAX_LEN {
            return;
        }
        let next = self.tokens(1)[0];
        let sequence = &self.sequences[at];
        let drafted = self.state.drafted(id).expect("a live sequence");
        let unseen = &sequence.hidden[drafted..];
        let hidden = match unseen {
            [] => sequence.hidden[0].narrow(0, 0, 0).expect("no rows"),
            rows => Tensor::cat(rows, 0).expect("rows"),
        };
        let draft = self
            .small
            .draft(&mut self.state, id, unseen.len(), next, &hidden)
            .expect("a draft");
        let expected = self.small.fresh_draft(&sequence.ids, next);
        assert_eq!(draft.tokens, expected.tokens);
        assert_eq!(float_bits(&draft.logits), float_bits(&expected.logits));
        assert_eq!(draft.confidence, expected.confidence);
        let mut ids = vec![next];
        ids.extend(&draft.tokens[..drafts.min(draft.tokens.len())]);
        let end = len + 1 + keep.min(ids.len() - 1);
        self.forward(vec![(at, ids)]);
        self.state.truncate(id, end).expect("within the slack");
        Self::cut(&mut self.sequences[at], end);
    }
}

fn float_bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter()
        .map(|row| row.iter().map(|v| v.to_bits()).collect())
        .collect()
}

#[test]
fn any_history_equals_a_fresh_run() {
    let small = Small::full();
    let config = ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..Default::default()
    };
    let histories = proptest::collection::vec(op(), 8..28);
    proptest!(config, |(ops in histories, packed in any::<bool>())| {
        let mut history = History::new(&small, FORMATS[usize::from(packed)]);
        history.apply(&Op::Create);
        ops.iter().for_each(|op| history.apply(op));
    });
}

#[test]
fn a_long_life_of_one_sequence() {
    // Rings of 21 rows wrap several times, with rollbacks at every offset.
    let small = Small::full();
    for format in FORMATS {
        let mut history = History::new(&small, format);
        history.apply(&Op::Create);
        while history.sequences[0].ids.len() + 6 < MAX_LEN {
            history.apply(&Op::Append {
                seq: 0,
                len: 3,
                chunk: 2,
            });
            history.apply(&Op::Speculate {
                seq: 0,
                drafts: 4,
                keep: history.next_token as usize % 5,
            });
            history.apply(&Op::Truncate { seq: 0, back: 1 });
        }
        history.apply(&Op::SaveRestore { seq: 0 });
        history.apply(&Op::Append {
            seq: 0,
            len: 9,
            chunk: 4,
        });
    }
}

#[test]
fn rewinding_past_the_slack_says_how_far_it_goes() {
    let small = Small::full();
    let mut history = History::new(&small, KvFormat::Bf16);
    history.apply(&Op::Create);
    history.apply(&Op::Append {
        seq: 0,
        len: 20,
        chunk: 20,
    });
    let id = history.sequences[0].id;
    let err = history
        .state
        .truncate(id, 20 - ROLLBACK - 1)
        .expect_err("past the slack");
    assert_eq!(err.to_string(), "tokens of rollback: 6 needed, 5 available");
    assert!(
        history.state.truncate(id, 21).is_err(),
        "a sequence does not grow this way"
    );
    assert_eq!(history.state.len(id).expect("live"), 20);
    // All of it goes at once: nothing before it is needed.
    history.state.truncate(id, 0).expect("to the start");
    let out = small
        .model
        .forward(&text(&[5, 6, 7], id), &mut history.state)
        .expect("a step");
    assert_eq!(bits(&out.logits), small.fresh(&[5, 6, 7]));
}
