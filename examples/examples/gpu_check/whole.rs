//! Whole models on the GPU: golden recordings, and the embedded model against itself on the CPU.

use std::{collections::HashMap, path::Path, time::Instant};

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, Event, GenerateOptions, LoadOptions, Result, SamplingParams, Speculation,
    model::{ForwardBatch, Limits, ModelState, Probe},
    moe::Routing,
    speculative::{DraftLength, PromptLookup},
};
use deepseek_v41_examples::golden_model::{GoldenModel, Mode};

use crate::{
    correctness::{Report, distance},
    data::values,
};

/// In models this small one flipped rounding before an fp8 layer moves logits by per cents, whichever
/// device made it: two valid runs of the official code, selections replayed, are up to 0.08 apart. What
/// this catches is a wrong kernel, which is off by 1; the CPU's own distance is printed beside it.
const MODEL: f64 = 0.25;

/// Tokens of a text in which the first steps of each layout, launched and captured, count for little.
const LONG: usize = 1024;

/// How far the mean number of drafts that stand may be from the CPU's.
const ACCEPTED: f64 = 0.1;

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
/// Recorded runs of the official code, selections replayed: how far the GPU is from them.
pub(crate) fn golden(dir: &Path, gpu: &Device, r: &mut Report) -> Result<()> {
    for name in ["text", "dense", "bf16", "full", "fp8x"] {
        let path = dir.join(format!("model_{name}"));
        let worst = |device: &Device| -> Result<Option<f64>> {
            let model = GoldenModel::load(&path, Mode::Reference, device)?;
            let rows = model.text_rows()?;
            if rows.is_empty() {
                return Ok(None);
            }
            let steps = model.run(&rows, true)?.logits;
            let worst = steps.iter().copied().fold(0.0, f64::max);
            if device.is_cuda() {
                let far = steps.iter().filter(|e| **e > 5e-3).count();
                println!(
                    "       golden {name}: {far} of {} steps above 0.005",
                    steps.len()
                );
            }
            Ok(Some(worst))
        };
        let op = format!("golden {name} logits");
        match (worst(&Device::Cpu)?, worst(gpu)) {
            (Some(cpu), Ok(Some(error))) => {
                r.error(&op, &format!("the CPU {cpu:.1e}"), error, MODEL)
            }
            (_, Err(err)) => r.group(&op, "", |_| Err(err)),
            // A recording of pictures alone.
            _ => {}
        }
    }
    Ok(())
}

fn load(device: &Device) -> Result<DeepSeekV41> {
    DeepSeekV41::tiny_with(&LoadOptions {
        device: device.clone(),
        ..LoadOptions::default()
    })
}

/// A continuation.
struct Text {
    tokens: Vec<u32>,
    /// Tokens a second after the first.
    rate: f64,
    /// Drafts that stood, a pass.
    accepted: f64,
}

fn generate(model: &DeepSeekV41, speculation: Speculation, n: usize) -> Result<Text> {
    let options = GenerateOptions {
        max_tokens: n,
        ignore_eos: true,
        speculation,
        ..GenerateOptions::default()
    };
    let (mut tokens, mut start) = (Vec::new(), Instant::now());
    let mut events = model.generate("Once upon a time", &options)?;
    for event in events.by_ref() {
        if let Event::Token(token) = event? {
            if tokens.is_empty() {
                start = Instant::now();
            }
            tokens.push(token.token);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Text {
        rate: (tokens.len().saturating_sub(1)) as f64 / seconds,
        accepted: events.speculation().mean_accepted(),
        tokens,
    })
}

/// The text of a seed, its tokens chosen where the logits are or, with a hook that does nothing, on the host.
fn drawn(model: &DeepSeekV41, sampling: &SamplingParams, on_host: bool) -> Result<(Vec<u32>, f64)> {
    let options = GenerateOptions {
        sampling: sampling.clone(),
        max_tokens: 128,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let mut generation = model.generate("Once upon a time", &options)?;
    if on_host {
        let nothing = |_: &[u32], _: &mut [f32]| -> Result<()> { Ok(()) };
        generation.sampler().add_hook(nothing);
    }
    let (mut tokens, start) = (Vec::new(), Instant::now());
    for event in generation {
        if let Event::Token(token) = event? {
            tokens.push(token.token);
        }
    }
    let rate = tokens.len() as f64 / start.elapsed().as_secs_f64();
    Ok((tokens, rate))
}

/// Texts drawn on both sides of the bus.
#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
fn draws(model: &DeepSeekV41, r: &mut Report) -> Result<()> {
    for (temperature, top_k, top_p, min_p) in [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (1.0, 0, 0.95, 0.0),
        (0.8, 40, 0.9, 0.05),
    ] {
        let sampling = SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed: Some(17),
            ..SamplingParams::default()
        };
        let (own, rate) = drawn(model, &sampling, false)?;
        let (host, host_rate) = drawn(model, &sampling, true)?;
        let name = format!("t {temperature} k {top_k} p {top_p} min {min_p}");
        println!(
            "       tiny, {name}: {rate:.0} tokens a second, {host_rate:.0} chosen on the host"
        );
        let differ = own.iter().zip(&host).filter(|(a, b)| a != b).count();
        let differ = differ + own.len().abs_diff(host.len());
        r.error("tiny text = chosen on the host", &name, differ as f64, 0.0);
    }
    Ok(())
}

/// Which experts and rows one device chose, and how often the other one agreed.
#[derive(Default)]
struct Choices {
    step: usize,
    experts: HashMap<(usize, usize), Tensor>,
    rows: HashMap<(usize, usize), Tensor>,
    /// Where the recorded choices are replayed, once they are.
    replayed_on: Option<Device>,
    /// Tokens with the same choice, of how many.
    experts_equal: (usize, usize),
    rows_equal: (usize, usize),
}

impl Choices {
    fn replay(&self, kept: &HashMap<(usize, usize), Tensor>, layer: usize) -> Option<Tensor> {
        let device = self.replayed_on.as_ref()?;
        kept.get(&(self.step, layer))?.to_device(device).ok()
    }
}

/// Tokens that chose the same, in whatever order.
fn equal_choices(a: &Tensor, b: &Tensor) -> Result<(usize, usize)> {
    let sets = |t: &Tensor| -> Result<Vec<Vec<i64>>> {
        let t = t.to_device(&Device::Cpu)?.to_dtype(DType::I64)?;
        let mut rows = t.to_vec2::<i64>()?;
        for row in &mut rows {
            row.retain(|v| *v >= 0);
            row.sort_unstable();
        }
        Ok(rows)
    };
    let (a, b) = (sets(a)?, sets(b)?);
    let equal = a.iter().zip(&b).filter(|(a, b)| a == b).count();
    Ok((equal, a.len()))
}

impl Probe for Choices {
    fn wants_streams(&self) -> bool {
        false
    }

    fn routed(&mut self, layer: usize, own: &Routing) {
        let at = (self.step, layer);
        match self.experts.get(&at).filter(|_| self.replayed_on.is_some()) {
            Some(kept) => {
                let (equal, all) = equal_choices(kept, &own.experts).unwrap_or((0, 1));
                self.experts_equal.0 += equal;
                self.experts_equal.1 += all;
            }
            None => {
                self.experts.insert(at, own.experts.clone());
            }
        }
    }

    fn replay_experts(&mut self, layer: usize) -> Option<Tensor> {
        self.replay(&self.experts, layer)
    }

    fn wants_selections(&self) -> bool {
        true
    }

    fn selected(&mut self, layer: usize, own: &Tensor) {
        let at = (self.step, layer);
        match self.rows.get(&at).filter(|_| self.replayed_on.is_some()) {
            Some(kept) => {
                let (equal, all) = equal_choices(kept, own).unwrap_or((0, 1));
                self.rows_equal.0 += equal;
                self.rows_equal.1 += all;
            }
            None => {
                self.rows.insert(at, own.clone());
            }
        }
    }

    fn replay_selection(&mut self, layer: usize) -> Option<Tensor> {
        self.replay(&self.rows, layer)
    }
}

/// Greedy choices of a row of logits.
fn best(logits: &[f64]) -> usize {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best
}

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
pub(crate) fn tiny(gpu: &Device, r: &mut Report) -> Result<()> {
    let (cpu, gpu_model) = (load(&Device::Cpu)?, load(gpu)?);
    let Text {
        tokens: text,
        rate: cpu_rate,
        ..
    } = generate(&cpu, Speculation::Off, 128)?;
    // The CPU's text fed to both, a prompt and then token by token. The GPU replays the CPU's choices: two
    // experts or rows that score about the same are chosen differently now and then, and what such a step
    // says is not comparable.
    let mut choices = Choices::default();
    let mut logits = |model: &DeepSeekV41| -> Result<Vec<Vec<f64>>> {
        let transformer = model.transformer();
        let mut state = ModelState::new(
            transformer.config(),
            Limits {
                max_len: 256,
                ..Limits::default()
            },
            transformer.device(),
        )?;
        let seq = state.create()?;
        let mut out = Vec::new();
        for ids in [text[..64].to_vec()]
            .into_iter()
            .chain(text[64..].iter().map(|t| vec![*t]))
        {
            let batch = ForwardBatch::one(seq, ids);
            choices.step = out.len();
            let step = transformer.forward_probed(&batch, &mut state, &mut choices)?;
            out.push(values(&step.logits)?);
        }
        choices.replayed_on = Some(gpu.clone());
        Ok(out)
    };
    let (a, b) = (logits(&cpu)?, logits(&gpu_model)?);
    let mut errors: Vec<f64> = a.iter().zip(&b).map(|(a, b)| distance(a, b)).collect();
    r.error("tiny logits, prompt", "64 tokens", errors[0], 0.1);
    let large: Vec<String> = errors
        .iter()
        .enumerate()
        .filter(|(_, e)| **e > 0.1)
        .map(|(i, e)| format!("{i}: {e:.2}"))
        .collect();
    println!("       steps above 0.1: {}", large.join(", "));
    println!(
        "       tiny, own choices: {} of {} lists of experts and {} of {} of rows as on the CPU",
        choices.experts_equal.0,
        choices.experts_equal.1,
        choices.rows_equal.0,
        choices.rows_equal.1
    );
    errors.sort_by(f64::total_cmp);
    let shape = format!("{} steps", errors.len());
    r.error(
        "tiny logits, median",
        &shape,
        errors[errors.len() / 2],
        5e-2,
    );
    r.error(
        "tiny logits, worst",
        &shape,
        errors[errors.len() - 1],
        MODEL,
    );
    let differ = a.iter().zip(&b).filter(|(a, b)| best(a) != best(b)).count();
    r.error(
        "tiny most likely tokens",
        &shape,
        differ as f64 / a.len() as f64,
        0.05,
    );

    let Text {
        tokens: plain,
        rate,
        ..
    } = generate(&gpu_model, Speculation::Off, 128)?;
    let same = plain.iter().zip(&text).take_while(|(a, b)| a == b).count();
    let shape = format!("{same} of {} tokens", text.len());
    r.holds("tiny greedy text = the CPU's", &shape, plain == text);
    println!("       tiny decode: {rate:.0} tokens a second, {cpu_rate:.0} on the CPU");
    let plain_long = generate(&gpu_model, Speculation::Off, LONG)?;
    println!(
        "       the same over {LONG} tokens: {:.0} tokens a second",
        plain_long.rate
    );
    draws(&gpu_model, r)?;
    for (name, speculation) in [
        (
            "prompt lookup",
            Speculation::PromptLookup(PromptLookup::default()),
        ),
        ("draft head", Speculation::DraftHead(DraftLength::Full)),
    ] {
        let here = generate(&gpu_model, speculation.clone(), 128)?;
        let agree = here
            .tokens
            .iter()
            .zip(&plain)
            .take_while(|(a, b)| a == b)
            .count();
        println!(
            "       tiny decode, {name}: {:.0} tokens a second, {agree} of {} as without",
            here.rate,
            plain.len()
        );
        r.holds(
            &format!("tiny {name} = plain"),
            "128 tokens",
            here.tokens == plain,
        );
        let long = generate(&gpu_model, speculation.clone(), LONG)?;
        let gain = long.rate / plain_long.rate;
        println!(
            "       the same over {LONG} tokens: {:.0} tokens a second, {gain:.2} times plain, {:.2} drafts stand a pass",
            long.rate, long.accepted
        );
        let there = generate(&cpu, speculation, 128)?;
        let shape = format!("{:.2}, {:.2} on the CPU", here.accepted, there.accepted);
        let error = (here.accepted - there.accepted).abs() / there.accepted.max(f64::MIN_POSITIVE);
        r.error(&format!("tiny {name}, accepted"), &shape, error, ACCEPTED);
    }
    Ok(())
}
