//! Greedy text of the golden models, guessed ahead and not.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use candle_core::{Device, Tensor};
use deepseek_v41::{
    model::{DraftRequest, ForwardBatch, Limits, LogitRows, ModelState, SequenceId},
    speculative::accept,
};
use deepseek_v41_examples::golden_model::{GoldenModel, Mode};
use deepseek_v41_testing::golden_dir;

/// Tokens of a text behind its prompt.
const TOKENS: usize = 40;

fn argmax(row: &[f32]) -> u32 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|v| *v == most).unwrap() as u32
}

fn one_hot(len: usize, token: u32) -> Vec<f32> {
    let mut row = vec![0.0; len];
    row[token as usize] = 1.0;
    row
}

/// One sequence of a golden model.
struct Text<'m> {
    model: &'m GoldenModel,
    state: ModelState,
    seq: SequenceId,
}

impl<'m> Text<'m> {
    fn new(model: &'m GoldenModel) -> Self {
        let limits = Limits {
            max_len: 96,
            ..Limits::default()
        };
        let transformer = model.transformer();
        let mut state =
            ModelState::new(transformer.config(), limits, transformer.device()).unwrap();
        let seq = state.create().unwrap();
        Self { model, state, seq }
    }

    /// The logits of the newest `rows` tokens, and the hidden states of all.
    fn run(&mut self, ids: Vec<u32>, rows: usize) -> (Vec<Vec<f32>>, Tensor) {
        let batch = ForwardBatch {
            logits: LogitRows::Newest(rows),
            target_hidden: true,
            ..ForwardBatch::one(self.seq, ids)
        };
        let transformer = self.model.transformer();
        let out = transformer.forward(&batch, &mut self.state).unwrap();
        (out.logits.to_vec2().unwrap(), out.target_hidden.unwrap())
    }
}

fn plain(model: &GoldenModel, prompt: &[u32]) -> Vec<u32> {
    let mut text = Text::new(model);
    let (rows, _) = text.run(prompt.to_vec(), 1);
    let mut tokens = vec![argmax(&rows[0])];
    while tokens.len() < TOKENS {
        let (rows, _) = text.run(vec![tokens[tokens.len() - 1]], 1);
        tokens.push(argmax(&rows[0]));
    }
    tokens
}

/// The same in rounds. Weights of these models are random, so that their head is hardly ever right: in
/// every second round some of its drafts are replaced by what `known` goes on with.
fn guessed(model: &GoldenModel, prompt: &[u32], known: &[u32]) -> (Vec<u32>, usize) {
    let mut text = Text::new(model);
    let head = model.draft_head().unwrap();
    let (rows, mut hidden) = text.run(prompt.to_vec(), 1);
    let (mut tokens, mut kept) = (vec![argmax(&rows[0])], 0);
    for round in 0.. {
        if tokens.len() >= TOKENS {
            break;
        }
        let next = tokens[tokens.len() - 1];
        let request = DraftRequest {
            seq: text.seq,
            committed: hidden.dims()[0],
            next: Some(next),
        };
        let mut most_probable = |_: usize, _: usize, row: &[f32]| Ok(argmax(row));
        let drafts = head.draft(&[request], &hidden, &mut text.state, &mut most_probable);
        let mut drafts = drafts.unwrap().remove(0).unwrap().tokens;
        if round % 2 == 1 {
            let right = drafts.iter_mut().zip(&known[tokens.len()..]);
            right.take(1 + round % 5).for_each(|(d, k)| *d = *k);
        }
        let start = text.state.len(text.seq).unwrap();
        let run = [&[next], &drafts[..]].concat();
        let (rows, states) = text.run(run, drafts.len() + 1);
        let vocab = rows[0].len();
        let proposed: Vec<_> = drafts.iter().map(|d| one_hot(vocab, *d)).collect();
        let accepted = accept(
            &drafts,
            |j| Ok(&proposed[j]),
            |j| Ok(one_hot(vocab, argmax(&rows[j]))),
            || 0.5,
        );
        let accepted = accepted.unwrap();
        tokens.extend(&drafts[..accepted.kept]);
        tokens.push(argmax(&accepted.next));
        let end = start + 1 + accepted.kept;
        text.state.truncate(text.seq, end).unwrap();
        hidden = states.narrow(0, 0, 1 + accepted.kept).unwrap();
        kept += accepted.kept;
    }
    tokens.truncate(TOKENS);
    (tokens, kept)
}

#[test]
fn greedy_text_of_golden_models_is_the_same_guessed_ahead() {
    for name in ["bf16", "fp8x", "full"] {
        let dir = golden_dir().join(format!("model_{name}"));
        // Of the other mode's keys the result depends on how a text is cut into chunks.
        let model = GoldenModel::load(&dir, Mode::OwnKeys, &Device::Cpu).unwrap();
        let vocab = model.transformer().config().vocab_size as u32;
        for seed in 0..3u32 {
            let prompt: Vec<u32> = (0..11 + seed).map(|i| (i * i * 7 + seed) % vocab).collect();
            let known = plain(&model, &prompt);
            let (tokens, kept) = guessed(&model, &prompt, &known);
            assert_eq!(tokens, known, "{name} {seed}");
            assert!(kept >= TOKENS / 4, "{name} {seed}: {kept} drafts stood");
        }
    }
}
