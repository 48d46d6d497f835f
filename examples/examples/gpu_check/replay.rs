//! Replayed steps against launched ones, bit for bit, and how long each takes.

use std::time::Instant;

use candle_core::Device;
use deepseek_v41::{
    DeepSeekV41, Error, LoadOptions, Result,
    attention::KvFormat,
    core::argmax_ref,
    model::{Chunk, ForwardBatch, Limits, LogitRows, ModelState},
};

use crate::{correctness::Report, data::Random, drafts};

/// What one run of the script gives: a row of logits and hidden states for each step.
struct Run {
    /// The file of the sequence put away.
    saved: Vec<u8>,
    rows: Vec<Vec<u32>>,
    replayed: u64,
    steps: usize,
    /// Steps whose most likely tokens were not those of their logits.
    choices_differ: usize,
}

/// Prompts, single tokens over several widths of the indexing passes, chunks of a few, two sequences in
/// one step, tokens taken back, a fork, a sequence put away and brought back: always the same tokens.
fn script(model: &DeepSeekV41, replay: bool, kv_format: KvFormat) -> Result<Run> {
    let transformer = model.transformer();
    let limits = Limits {
        max_len: 1024,
        max_seqs: 2,
        kv_format,
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
    state.release(b)?;
    let c = state.fork(a, state.len(a)? - 2)?;
    for _ in 0..10 {
        step(&mut state, vec![Chunk::text(c, ids(1))], false)?;
    }
    let file = std::env::temp_dir().join(format!("gpu_check-{}.state", std::process::id()));
    state.save(c, &[], transformer, &file)?;
    state.release(c)?;
    let d = state.restore(transformer, &file)?.seq;
    for _ in 0..10 {
        let both = vec![Chunk::text(a, ids(1)), Chunk::text(d, ids(1))];
        step(&mut state, both, false)?;
    }
    let saved = std::fs::read(&file).map_err(|e| Error::io(&file, e))?;
    std::fs::remove_file(&file).map_err(|e| Error::io(&file, e))?;
    Ok(Run {
        saved,
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
    let launched = script(&model, false, KvFormat::Bf16)?;
    for (name, format, replay) in [
        ("replayed steps = launched", KvFormat::Bf16, true),
        ("packed steps = bf16", KvFormat::Packed, false),
        ("packed, replayed = bf16, launched", KvFormat::Packed, true),
    ] {
        let run = script(&model, replay, format)?;
        let pairs = launched.rows.iter().zip(&run.rows);
        let differ = pairs.filter(|(a, b)| a != b).count();
        let shape = format!("{} of {} steps replayed", run.replayed, run.steps);
        r.error(name, &shape, differ as f64, 0.0);
        let differ = launched.choices_differ + run.choices_differ;
        r.error("most likely tokens of steps", &shape, differ as f64, 0.0);
        let differs = |differs: bool| f64::from(u8::from(differs));
        r.error(
            "the same file",
            name,
            differs(launched.saved != run.saved),
            0.0,
        );
        if replay {
            let few = run.replayed * 2 < run.steps as u64;
            r.error("half of the steps replayed", &shape, differs(few), 0.0);
        }
    }
    for (replay, best) in [(false, false), (true, false), (true, true)] {
        let seconds = token(&model, replay, best)?;
        println!(
            "       tiny model, one token {}, {} read back: {:.0} µs",
            if replay { "replayed" } else { "launched" },
            if best { "the token" } else { "its logits" },
            seconds * 1e6
        );
    }
    drafts::tiny(&model, r)
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
