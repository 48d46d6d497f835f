//! The embedded model's passes over one sequence: what `n` tokens of text cost against one, and what a
//! draft and a round of speculative decoding cost against the tokens they give.
//!
//! All passes take turns, so that what else the machine does falls on all alike; the table has the fastest
//! and the median of the turns. Criterion's own measurements follow.
//!
//! Run: `cargo bench -p deepseek-v41-benches --bench passes`; `RAYON_NUM_THREADS=1` for one thread.
#![allow(clippy::print_stdout, reason = "a table beside criterion's own output")]

use std::time::{Duration, Instant};

use candle_core::Tensor;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41::{
    DeepSeekV41, Event, GenerateOptions, Result, Speculation,
    attention::KvFormat,
    model::{DraftRequest, ForwardBatch, Limits, LogitRows, ModelState, SequenceId},
    speculative::DraftLength,
    tokenizer::AddedTokens,
};

/// Tokens of context.
const CONTEXT: usize = 256;
/// Tokens a pass: plain decoding, and one token with drafts.
const SIZES: [usize; 5] = [1, 2, 3, 4, 6];
const TURNS: usize = 200;
/// Tokens whose hidden states a draft is fed: what a round keeps.
const COMMITTED: usize = 4;
/// Beginnings that the model goes on from.
const PROMPTS: [&str; 4] = [
    "One snowy day, a fox and a snail",
    "<｜User｜>What is the capital of France?<｜Assistant｜></think>",
    "<｜User｜>What is 7 + 8?<｜Assistant｜><think>",
    "Once upon a time",
];

/// A text of the model's own, and the caches of its first [`CONTEXT`] tokens.
struct Text<'m> {
    model: &'m DeepSeekV41,
    state: ModelState,
    seq: SequenceId,
    ids: Vec<u32>,
    hidden: Tensor,
}

impl<'m> Text<'m> {
    fn new(model: &'m DeepSeekV41) -> Result<Self> {
        let options = GenerateOptions {
            max_tokens: CONTEXT + 16,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let mut ids = model
            .tokenizer()
            .encode(PROMPTS[0], AddedTokens::Recognise)?;
        for event in &mut model.generate(PROMPTS[0], &options)? {
            if let Event::Token(token) = event? {
                ids.push(token.token);
            }
        }
        let limits = Limits {
            max_seqs: 1,
            max_len: CONTEXT + 32,
            max_rollback: 16,
            kv_format: KvFormat::Bf16,
        };
        let mut state = ModelState::new(model.config(), limits, model.transformer().device())?;
        let seq = state.create()?;
        let mut batch = ForwardBatch::one(seq, ids[..CONTEXT].to_vec());
        batch.target_hidden = true;
        let out = model.transformer().forward(&batch, &mut state)?;
        let hidden = out.target_hidden.expect("asked for");
        let request = DraftRequest {
            seq,
            committed: CONTEXT,
            next: None,
        };
        let head = model.draft_head()?;
        head.draft(&[request], &hidden, &mut state, &mut |_, _, _| Ok(0))?;
        let hidden = hidden.narrow(0, CONTEXT - COMMITTED, COMMITTED)?;
        Ok(Self {
            model,
            state,
            seq,
            ids,
            hidden,
        })
    }

    /// Runs the next `n` tokens of the text, with the logits of all and the hidden states a draft needs,
    /// and takes them back.
    fn pass(&mut self, n: usize) -> Result<Duration> {
        let mut batch = ForwardBatch::one(self.seq, self.ids[CONTEXT..CONTEXT + n].to_vec());
        batch.logits = LogitRows::All;
        batch.target_hidden = n > 1;
        let start = Instant::now();
        self.model.transformer().forward(&batch, &mut self.state)?;
        self.state.truncate(self.seq, CONTEXT)?;
        Ok(start.elapsed())
    }

    /// Feeds the newest four tokens to the draft head and drafts a block.
    fn draft(&mut self) -> Result<Duration> {
        self.state.truncate(self.seq, CONTEXT - COMMITTED)?;
        let newest = self.ids[CONTEXT - COMMITTED..CONTEXT].to_vec();
        let batch = ForwardBatch::one(self.seq, newest);
        self.model.transformer().forward(&batch, &mut self.state)?;
        let request = DraftRequest {
            seq: self.seq,
            committed: COMMITTED,
            next: Some(self.ids[CONTEXT]),
        };
        let start = Instant::now();
        let head = self.model.draft_head()?;
        let most_probable = |_: usize, _: usize, logits: &[f32]| {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            Ok(logits.iter().position(|v| *v == max).unwrap_or(0) as u32)
        };
        head.draft(&[request], &self.hidden, &mut self.state, &mut {
            most_probable
        })?;
        Ok(start.elapsed())
    }
}

fn decoding(
    model: &DeepSeekV41,
    prompt: &str,
    speculation: Speculation,
) -> Result<(Duration, f64)> {
    let options = GenerateOptions {
        max_tokens: 65,
        ignore_eos: true,
        speculation,
        ..GenerateOptions::default()
    };
    let mut ids = vec![model.special_ids().bos];
    ids.extend(model.tokenizer().encode(prompt, AddedTokens::Recognise)?);
    let mut generation = model.generate(ids, &options)?;
    let mut start = None;
    for event in &mut generation {
        if let (Event::Token(_), None) = (event?, start) {
            // The first token comes out of the prompt's pass.
            start = Some(Instant::now());
        }
    }
    let accepted = generation.speculation().mean_accepted();
    Ok((start.map_or(Duration::ZERO, |s| s.elapsed()), accepted))
}

/// In microseconds.
fn fastest_and_median(turns: &mut [Duration]) -> [f64; 2] {
    turns.sort_unstable();
    [turns[0], turns[turns.len() / 2]].map(|t| t.as_secs_f64() * 1e6)
}

fn print_passes(text: &mut Text<'_>) -> Result<()> {
    let mut turns = vec![Vec::with_capacity(TURNS); SIZES.len() + 1];
    for _ in 0..TURNS {
        for (i, n) in SIZES.into_iter().enumerate() {
            turns[i].push(text.pass(n)?);
        }
        turns[SIZES.len()].push(text.draft()?);
    }
    let us: Vec<[f64; 2]> = turns.iter_mut().map(|t| fastest_and_median(t)).collect();
    println!(
        "{:<10} {:>10} {:>8} {:>10} {:>8}",
        "pass of", "fastest us", "x one", "median us", "x one"
    );
    let names = SIZES.iter().map(usize::to_string);
    for (name, [fastest, median]) in names.chain(["draft".into()]).zip(&us) {
        let [f, m] = [fastest / us[0][0], median / us[0][1]];
        println!("{name:<10} {fastest:>10.0} {f:>8.2} {median:>10.0} {m:>8.2}");
    }
    println!();
    Ok(())
}

fn print_decoding(model: &DeepSeekV41) -> Result<()> {
    const ROUNDS: usize = 10;
    let ways = [
        Speculation::Off,
        Speculation::DraftHead(DraftLength::Full),
        Speculation::DraftHead(DraftLength::Confidence(0.3)),
        Speculation::DraftHead(DraftLength::Confidence(0.5)),
    ];
    println!("tokens/s of 64 tokens, and how much more than plain; fastest of {ROUNDS}");
    println!(
        "{:<26} {:>8} {:>14} {:>14} {:>14} {:>9}",
        "prompt", "plain", "all drafts", "p >= 0.3", "p >= 0.5", "accepted"
    );
    let mut totals = vec![0.0; ways.len()];
    for prompt in PROMPTS {
        let (mut times, mut accepted) = (vec![Vec::new(); ways.len()], vec![0.0; ways.len()]);
        for _ in 0..ROUNDS {
            for (i, way) in ways.iter().enumerate() {
                let (time, kept) = decoding(model, prompt, way.clone())?;
                times[i].push(time);
                accepted[i] = kept;
            }
        }
        let us: Vec<f64> = times.iter_mut().map(|t| fastest_and_median(t)[0]).collect();
        totals
            .iter_mut()
            .zip(&us)
            .for_each(|(total, us)| *total += us);
        let name: String = prompt
            .chars()
            .rev()
            .take(25)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        let cell = |i: usize| format!("{:.0} {:.2}x", 64e6 / us[i], us[0] / us[i]);
        println!(
            "{name:<26} {:>8.0} {:>14} {:>14} {:>14} {:>9.2}",
            64e6 / us[0],
            cell(1),
            cell(2),
            cell(3),
            accepted[1]
        );
    }
    let cell = |i: usize| format!("{:.2}x", totals[0] / totals[i]);
    println!(
        "{:<26} {:>8} {:>14} {:>14} {:>14}",
        "together",
        "",
        cell(1),
        cell(2),
        cell(3)
    );
    Ok(())
}

fn bench(c: &mut Criterion) {
    let model = DeepSeekV41::tiny().expect("the embedded model");
    let mut text = Text::new(&model).expect("a text");
    print_passes(&mut text).expect("a table");
    print_decoding(&model).expect("a table");
    let mut group = c.benchmark_group("passes");
    group.sample_size(50);
    for n in SIZES {
        group.throughput(Throughput::Elements(n as u64));
        group.bench_function(format!("{n}"), |b| {
            b.iter_custom(|turns| (0..turns).map(|_| text.pass(n).expect("a pass")).sum());
        });
    }
    group.bench_function("draft", |b| {
        b.iter_custom(|turns| (0..turns).map(|_| text.draft().expect("a draft")).sum());
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
