//! A trained tiny model, fed the official code's greedy tokens: the most likely token of every step, and
//! the saved logits.

use std::path::Path;

use candle_core::Device;
use deepseek_v41::{
    DeepSeekV41, Error, LoadOptions, Result,
    model::{ForwardBatch, IndexKeys, Limits, ModelState},
};
use deepseek_v41_examples::expected::Expected;
use serde::Deserialize;

use crate::{
    read_json,
    report::{Check, Report},
    tolerance::{CLEAR_MARGIN, TINY_LOGITS_EACH, TINY_LOGITS_MEDIAN},
};

/// Steps between saved logits.
const SAVED_EVERY: usize = 8;

#[derive(Deserialize)]
struct Recording {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    prompt_ids: Vec<u32>,
    reference: Run,
    own_index_k: Run,
}

#[derive(Deserialize)]
struct Run {
    greedy_ids: Vec<u32>,
    margin: Vec<f32>,
}

/// Compares with `expected.json` and `expected.safetensors` of `dir`. The model is the one in `dir`, or
/// the embedded one where there is none.
pub(crate) fn run(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    let path = dir.join("expected.json");
    let recording: Recording = serde_json::from_value(read_json(&path)?)
        .map_err(|e| Error::checkpoint(&path, format!("not a recording: {e}")))?;
    let saved = Expected::open(&dir.join("expected.safetensors"))?;
    for (mode, index_keys) in [
        ("reference", IndexKeys::LastPublished),
        ("own_index_k", IndexKeys::Owner),
    ] {
        let options = LoadOptions {
            device: device.clone(),
            index_keys,
            ..LoadOptions::default()
        };
        let model = match dir.join("config.json").is_file() {
            true => DeepSeekV41::load_with(dir, &options)?,
            false => DeepSeekV41::tiny_with(&options)?,
        };
        for prompt in &recording.prompts {
            let run = if mode == "reference" {
                &prompt.reference
            } else {
                &prompt.own_index_k
            };
            let case = format!("{}.{mode}", prompt.name);
            match compare(&model, prompt, run, &saved, &case) {
                Ok(checks) => report.compared(format!("tiny/{case}"), checks),
                Err(error) => report.failed(format!("tiny/{case}"), error),
            }
        }
    }
    report.skipped("tiny drafts".into(), "drafts are not compared yet");
    if dir.join("expected_picture.json").is_file() {
        report.skipped("tiny picture".into(), "pictures are not compared yet");
    }
    Ok(())
}

fn compare(
    model: &DeepSeekV41,
    prompt: &Prompt,
    run: &Run,
    saved: &Expected,
    case: &str,
) -> Result<Vec<Check>> {
    let transformer = model.transformer();
    let steps = run.greedy_ids.len();
    let limits = Limits {
        max_len: prompt.prompt_ids.len() + steps,
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    let seq = state.create()?;
    let key = format!("{case}.logits");
    let (mut clear, mut wrong) = (0, 0);
    let mut errors = Vec::new();
    for step in 0..steps {
        let ids = match step {
            0 => prompt.prompt_ids.clone(),
            _ => vec![run.greedy_ids[step - 1]],
        };
        let out = transformer.forward(&ForwardBatch::one(seq, ids), &mut state)?;
        let logits = out.logits.flatten_all()?.to_vec1::<f32>()?;
        // A step between two nearly equal tokens may go either way.
        if run.margin.get(step).is_some_and(|m| *m >= CLEAR_MARGIN) {
            clear += 1;
            wrong += usize::from(most_likely(&logits) != run.greedy_ids[step]);
        }
        if step % SAVED_EVERY == 0 {
            let want = saved.rows(&key, &[], &[step / SAVED_EVERY])?;
            errors.push(deepseek_v41_examples::golden_model::rel_rms(
                &out.logits,
                &want,
            )?);
        }
    }
    errors.sort_by(f64::total_cmp);
    let median = errors.get(errors.len() / 2).copied().unwrap_or(f64::NAN);
    let worst = errors.last().copied().unwrap_or(f64::NAN);
    let check = |what: &str, values, error, allowed, unit: &str| Check {
        what: what.into(),
        values,
        error,
        allowed,
        unit: unit.into(),
    };
    Ok(vec![
        check(
            "most likely token of clear steps",
            clear,
            wrong as f64,
            0.0,
            "differing",
        ),
        check(
            "saved logits, median",
            errors.len(),
            median,
            TINY_LOGITS_MEDIAN,
            "relative rms",
        ),
        check(
            "saved logits, worst",
            errors.len(),
            worst,
            TINY_LOGITS_EACH,
            "relative rms",
        ),
    ])
}

/// The lowest index among equals.
fn most_likely(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best as u32
}
