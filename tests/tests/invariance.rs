//! A row of a pass depends on its own sequence alone, bit for bit: not on how its text was cut into
//! chunks, who shares the batch, how many threads there are, or how the caches store their rows.

use candle_core::{Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, LoadPolicy, Weights,
    attention::KvFormat,
    engram::TokenMap,
    model::{
        Chunk, Config, DraftRequest, ForwardBatch, Limits, LogitRows, ModelState, SequenceId,
        Transformer,
    },
};
use deepseek_v41_testing::{golden_dir, with_threads};
use proptest::prelude::*;

const GOLDEN: [&str; 5] = [
    "model_text",
    "model_full",
    "model_dense",
    "model_bf16",
    "model_fp8x",
];

/// A golden checkpoint. What the token map says does not matter here.
fn golden(name: &str) -> Transformer {
    let dir = golden_dir().join(name);
    let cfg = Config::from_file(dir.join("config.json")).expect("config");
    let weights = Weights::open(&dir, LoadPolicy::Read).expect("weights");
    let map = cfg.engram().map(|engram| {
        let n = engram.compressed_vocab_size as u32;
        let ids = (0..cfg.vocab_size as u32).map(|id| id % n).collect();
        TokenMap::new(ids, engram.compressed_vocab_size, engram.pad_id).expect("map")
    });
    Transformer::new(&cfg, map, weights.var_builder(&Device::Cpu)).expect("transformer")
}

/// Runs `check` on every golden model with texts of 40 tokens (several windows), and on the tiny one
/// with texts longer than its window of 64.
fn for_each_model(check: impl Fn(&str, &Transformer, usize)) {
    for name in GOLDEN {
        check(name, &golden(name), 40);
    }
    let tiny = DeepSeekV41::tiny().expect("the embedded model");
    check("tiny", tiny.transformer(), 150);
}

fn ids(model: &Transformer, n: usize, seed: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size;
    (0..n)
        .map(|i| ((i * i * 7 + i * 31 + seed * 101 + 3) % vocab) as u32)
        .collect()
}

fn bits(logits: &Tensor) -> Vec<Vec<u32>> {
    let rows = logits.to_vec2::<f32>().expect("logits");
    rows.iter()
        .map(|row| row.iter().map(|v| v.to_bits()).collect())
        .collect()
}

struct Run<'m> {
    model: &'m Transformer,
    state: ModelState,
}

impl<'m> Run<'m> {
    fn new(model: &'m Transformer, max_seqs: usize, kv_format: KvFormat) -> Self {
        let limits = Limits {
            max_seqs,
            max_len: 200,
            max_rollback: 3,
            kv_format,
        };
        let state = ModelState::new(model.config(), limits, model.device()).expect("state");
        Self { model, state }
    }

    fn create(&mut self) -> SequenceId {
        self.state.create().expect("a slot")
    }

    /// Logits after every token of the chunks.
    fn step(&mut self, chunks: &[(SequenceId, &[u32])]) -> Vec<Vec<u32>> {
        let batch = ForwardBatch {
            chunks: chunks
                .iter()
                .map(|(seq, ids)| Chunk::text(*seq, *ids))
                .collect(),
            logits: LogitRows::All,
            target_hidden: false,
            best: false,
        };
        bits(
            &self
                .model
                .forward(&batch, &mut self.state)
                .expect("a step")
                .logits,
        )
    }
}

/// Logits after every token of a text that is run in chunks of these lengths.
fn chunked(model: &Transformer, text: &[u32], lens: &[usize], format: KvFormat) -> Vec<Vec<u32>> {
    let mut run = Run::new(model, 1, format);
    let seq = run.create();
    let (mut rows, mut at, mut lens) = (Vec::new(), 0, lens.iter().cycle());
    while at < text.len() {
        let end = (at + lens.next().expect("a cycle")).min(text.len());
        rows.extend(run.step(&[(seq, &text[at..end])]));
        at = end;
    }
    rows
}

#[test]
fn one_pass_equals_any_chunking_and_token_by_token() {
    for_each_model(|name, model, n| {
        let text = ids(model, n, 1);
        let whole = chunked(model, &text, &[n], KvFormat::Bf16);
        assert_eq!(whole.len(), n);
        for format in [KvFormat::Bf16, KvFormat::Packed] {
            assert!(
                chunked(model, &text, &[1], format) == whole,
                "{name} {format:?} one by one"
            );
        }
        let config = ProptestConfig {
            cases: 6,
            failure_persistence: None,
            ..Default::default()
        };
        let lens = proptest::collection::vec(1..n / 2, 1..6);
        proptest!(config, |(lens in lens, packed in any::<bool>())| {
            let format = if packed { KvFormat::Packed } else { KvFormat::Bf16 };
            prop_assert!(chunked(model, &text, &lens, format) == whole, "{name} {lens:?}");
        });
    });
}

#[test]
fn a_batch_equals_each_of_its_sequences_alone() {
    // In three parts, where a step has few tokens.
    with_threads(3, || for_each_model(batch_equals_alone));
}

fn batch_equals_alone(name: &str, model: &Transformer, n: usize) {
    // Of different lengths and at different positions: one begins while others go on.
    let texts = [ids(model, n, 2), ids(model, n - 7, 3), ids(model, n / 2, 4)];
    let alone = texts
        .each_ref()
        .map(|t| chunked(model, t, &[t.len()], KvFormat::Bf16));
    let mut run = Run::new(model, 3, KvFormat::Bf16);
    let seqs = [run.create(), run.create(), run.create()];
    let (mut at, mut rows) = ([0; 3], [const { Vec::new() }; 3]);
    for step in 0.. {
        let mut chunks = Vec::new();
        for i in 0..3 {
            // The third joins late, the second has empty chunks now and then.
            let len = [5, [1, 9, 0][step % 3], if step < 3 { 0 } else { 4 }][i];
            let end = (at[i] + len).min(texts[i].len());
            chunks.push((i, at[i], end));
            at[i] = end;
        }
        chunks.rotate_left(step % 3);
        let batch: Vec<_> = chunks
            .iter()
            .map(|(i, a, b)| (seqs[*i], &texts[*i][*a..*b]))
            .collect();
        let mut out = run.step(&batch).into_iter();
        for (i, a, b) in chunks {
            rows[i].extend(out.by_ref().take(b - a));
        }
        if (0..3).all(|i| at[i] == texts[i].len()) {
            break;
        }
    }
    for i in 0..3 {
        assert!(rows[i] == alone[i], "{name}: sequence {i}");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for_each_model(|name, model, n| {
        let text = ids(model, n, 5);
        let run = |lens: &[usize]| chunked(model, &text, lens, KvFormat::Bf16);
        let one = with_threads(1, || run(&[n]));
        for threads in [2, 3, 7] {
            assert!(
                with_threads(threads, || run(&[n])) == one,
                "{name}, {threads} threads"
            );
            // Small steps run in as many parts as there are threads.
            for lens in [&[11, 1][..], &[2, 5, 15, 3]] {
                assert!(
                    with_threads(threads, || run(lens)) == one,
                    "{name}, {threads} threads, cut"
                );
            }
        }
    });
}

/// Tokens, the bits of their logits and confidences of a block drafted after `text`, which is shown to
/// the head in steps of `lens`.
fn drafted(model: &DeepSeekV41, text: &[u32], lens: &[usize]) -> (Vec<u32>, Vec<Vec<u32>>) {
    let mut run = Run::new(model.transformer(), 1, KvFormat::Bf16);
    let seq = run.create();
    let head = model.draft_head().expect("a draft head");
    let (mut at, mut lens) = (0, lens.iter().cycle());
    loop {
        let end = (at + lens.next().expect("a cycle")).min(text.len() - 1);
        let mut batch = ForwardBatch::one(seq, &text[at..end]);
        batch.target_hidden = true;
        let out = run.model.forward(&batch, &mut run.state).expect("a step");
        let request = DraftRequest {
            seq,
            committed: end - at,
            next: Some(text[end]),
        };
        let hidden = out.target_hidden.expect("asked for");
        let mut choose = |_: usize, _: usize, logits: &[f32]| {
            let best = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a });
            Ok(best.expect("a vocabulary") as u32)
        };
        let drafts = head.draft(&[request], &hidden, &mut run.state, &mut choose);
        at = end;
        if at + 1 == text.len() {
            let draft = drafts.expect("a draft").remove(0).expect("one block");
            let rows = draft.logits.iter().chain([&draft.confidence]);
            let bits = rows.map(|row| row.iter().map(|v| v.to_bits()).collect());
            return (draft.tokens, bits.collect());
        }
    }
}

#[test]
fn drafts_do_not_depend_on_threads_or_chunks() {
    let tiny = DeepSeekV41::tiny().expect("the embedded model");
    let text = ids(tiny.transformer(), 90, 6);
    let one = with_threads(1, || drafted(&tiny, &text, &[90]));
    for threads in [1, 2, 3, 7] {
        for lens in [&[90][..], &[20, 1, 6, 3]] {
            let drafts = with_threads(threads, || drafted(&tiny, &text, lens));
            assert!(drafts == one, "{threads} threads, steps of {lens:?}");
        }
    }
}
