//! Replayed steps against launched ones, bit for bit, and how long each takes.

use std::time::Instant;

use candle_core::Device;
use deepseek_v41::{
    DeepSeekV41, LoadOptions, Result,
    core::argmax_ref,
    model::{Chunk, ForwardBatch, Limits, LogitRows, ModelState},
};

use crate::{correctness::Report, data::Random};

/// What one run of the script gives: a row of logits and hidden states for each step.
struct Run {
    rows: Vec<Vec<u32>>,
    replayed: u64,
    steps: usize,
    /// Steps whose most likely tokens were not those of their logits.
    choices_differ: usize,
}

/// Prompts, single tokens over several widths of the indexing passes, chunks of a few, two sequences in
/// one step, and tokens taken back: always the same tokens.
fn script(model: &DeepSeekV41, replay: bool) -> Result<Run> {
    let transformer = model.transformer();
    let limits = Limits {
        max_len: 1024,
        max_seqs: 2,
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    state.set_replay(replay);
    let rng = Random::new(41);
    let ids = |n: usize| -> Vec<u32> { (0..n).map(|_| 3 + rng.below(3000) as u32).collect() };
    let (a, b) = (state.create()?, state.create()?);
    let mut rows = Vec::new();
    let mut steps = 0;
    let mut choices_differ = 0;
    let mut step = |state: &mut ModelState, chunks: Vec<Chunk>, hidden: bool| -> Result<()> {
        let batch = ForwardBatch {
            chunks,
            logits: LogitRows::All,
            target_hidden: hidden,
            best: !hidden,
        };
        let out = transformer.forward(&batch, state)?;
        let mut bits: Vec<u32> = out
            .logits
            .flatten_all()?
            .to_vec1::<f32>()?
            .into_iter()
            .map(f32::to_bits)
            .collect();
        if let Some(hidden) = out.target_hidden {
            let hidden = hidden.flatten_all()?.to_vec1::<half::bf16>()?;
            bits.extend(hidden.into_iter().map(|v| u32::from(v.to_bits())));
        }
        if let Some(codes) = out.best {
            bits.extend(codes.to_vec1::<u32>()?);
            let logits = out.logits.to_vec2::<f32>()?;
            bits.extend(logits.iter().map(|row| argmax_ref(row).code()));
            let (own, of_host) = bits.split_at(bits.len() - logits.len());
            choices_differ += usize::from(!own.ends_with(of_host));
        }
        rows.push(bits);
        steps += 1;
        Ok(())
    };
    // From the first token on, over the window's width and several groups of compressed rows.
    for _ in 0..200 {
        step(&mut state, vec![Chunk::text(a, ids(1))], false)?;
    }
    step(&mut state, vec![Chunk::text(b, ids(40))], true)?;
    for i in 0..40 {
        step(&mut state, vec![Chunk::text(b, ids(1))], true)?;
        let both = vec![Chunk::text(a, ids(1)), Chunk::text(b, ids(1))];
        step(&mut state, both, false)?;
        step(&mut state, vec![Chunk::text(a, ids(5))], i % 2 == 0)?;
        let len = state.len(a)? - 3;
        state.truncate(a, len)?;
    }
    Ok(Run {
        replayed: state.replayed(),
        rows,
        steps,
        choices_differ,
    })
}

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
pub(crate) fn tiny(gpu: &Device, r: &mut Report) -> Result<()> {
    let model = DeepSeekV41::tiny_with(&LoadOptions {
        device: gpu.clone(),
        ..LoadOptions::default()
    })?;
    let (launched, replayed) = (script(&model, false)?, script(&model, true)?);
    let differ = launched
        .rows
        .iter()
        .zip(&replayed.rows)
        .filter(|(a, b)| a != b)
        .count();
    let shape = format!("{} of {} steps replayed", replayed.replayed, replayed.steps);
    r.error("replayed steps = launched", &shape, differ as f64, 0.0);
    let differ = launched.choices_differ + replayed.choices_differ;
    r.error("most likely tokens of steps", &shape, differ as f64, 0.0);
    let few = replayed.replayed * 2 < replayed.steps as u64;
    r.error(
        "half of the steps replayed",
        &shape,
        f64::from(u8::from(few)),
        0.0,
    );
    for (replay, best) in [(false, false), (true, false), (true, true)] {
        let seconds = token(&model, replay, best)?;
        println!(
            "       tiny model, one token {}, {} read back: {:.0} µs",
            if replay { "replayed" } else { "launched" },
            if best { "the token" } else { "its logits" },
            seconds * 1e6
        );
    }
    Ok(())
}

/// Seconds of a step of one token after a prompt of 300; its logits read back, or the token alone.
fn token(model: &DeepSeekV41, replay: bool, best: bool) -> Result<f64> {
    let transformer = model.transformer();
    let limits = Limits {
        max_len: 2048,
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    state.set_replay(replay);
    let seq = state.create()?;
    let prompt: Vec<u32> = (0..300).map(|i| 3 + i * 7 % 3000).collect();
    transformer.forward(&ForwardBatch::one(seq, prompt), &mut state)?;
    let mut times = Vec::new();
    for i in 0..150 {
        let start = Instant::now();
        let batch = ForwardBatch {
            best,
            ..ForwardBatch::one(seq, vec![5 + i])
        };
        let out = transformer.forward(&batch, &mut state)?;
        match out.best {
            Some(codes) => drop(codes.to_vec1::<u32>()?),
            None => drop(out.logits.flatten_all()?.to_vec1::<f32>()?),
        }
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
