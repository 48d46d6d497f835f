//! A trained tiny model, fed the official code's greedy tokens: the most likely token of every step, and
//! the saved logits.

mod picture;

use std::path::Path;

use candle_core::{Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, Error, LoadOptions, Result,
    model::{DSpark, DraftRequest, ForwardBatch, IndexKeys, Limits, ModelState},
};
use deepseek_v41_examples::expected::Expected;
use serde::Deserialize;

use crate::{
    read_json,
    report::{Check, Report},
    tolerance::{
        CLEAR_MARGIN, TINY_CONFIDENCE, TINY_DRAFT_ROUNDS, TINY_DRAFTS, TINY_LOGITS_EACH,
        TINY_LOGITS_MEDIAN,
    },
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
    #[serde(default)]
    draft_ids: Vec<Vec<u32>>,
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
        let model = load(dir, &options)?;
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
    if dir.join("expected_picture.json").is_file() {
        picture::run(dir, device, report);
    }
    Ok(())
}

/// The model in `dir`, or the embedded one where there is none.
fn load(dir: &Path, options: &LoadOptions) -> Result<DeepSeekV41> {
    match dir.join("config.json").is_file() {
        true => DeepSeekV41::load_with(dir, options),
        false => DeepSeekV41::tiny_with(options),
    }
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
    let mut drafts = Drafts::new(model, run, saved, case)?;
    let (mut clear, mut wrong) = (0, 0);
    let mut errors = Vec::new();
    for step in 0..steps {
        let ids = match step {
            0 => prompt.prompt_ids.clone(),
            _ => vec![run.greedy_ids[step - 1]],
        };
        let committed = ids.len();
        let batch = ForwardBatch {
            target_hidden: drafts.is_some(),
            ..ForwardBatch::one(seq, ids)
        };
        let out = transformer.forward(&batch, &mut state)?;
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
        if let (Some(drafts), Some(hidden)) = (&mut drafts, &out.target_hidden) {
            let next = (step > 0).then_some(run.greedy_ids[step]);
            let request = DraftRequest {
                seq,
                committed,
                next,
            };
            drafts.step(step, request, hidden, &mut state)?;
        }
    }
    errors.sort_by(f64::total_cmp);
    let median = errors.get(errors.len() / 2).copied().unwrap_or(f64::NAN);
    let worst = errors.last().copied().unwrap_or(f64::NAN);
    let mut checks = vec![
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
    ];
    if let Some(drafts) = drafts {
        checks.extend(drafts.checks());
    }
    Ok(checks)
}

fn check(what: &str, values: usize, error: f64, allowed: f64, unit: &str) -> Check {
    Check {
        what: what.into(),
        values,
        error,
        allowed,
        unit: unit.into(),
    }
}

/// Drafts after every step against the recorded ones.
struct Drafts<'a> {
    head: &'a DSpark,
    recorded: &'a [Vec<u32>],
    /// `[rounds, block]`
    confidence: Vec<f32>,
    rounds: usize,
    equal_rounds: usize,
    drafts: usize,
    in_prefix: usize,
    distances: Vec<f64>,
}

impl<'a> Drafts<'a> {
    /// `None` where the recording or the checkpoint has no drafts.
    fn new(
        model: &'a DeepSeekV41,
        run: &'a Run,
        saved: &Expected,
        case: &str,
    ) -> Result<Option<Self>> {
        let key = format!("{case}.draft_confidence");
        let (Ok(head), false, true) = (
            model.draft_head(),
            run.draft_ids.is_empty(),
            saved.contains(&key),
        ) else {
            return Ok(None);
        };
        Ok(Some(Self {
            head,
            recorded: &run.draft_ids,
            confidence: saved.floats(&key)?,
            rounds: 0,
            equal_rounds: 0,
            drafts: 0,
            in_prefix: 0,
            distances: Vec::new(),
        }))
    }

    fn step(
        &mut self,
        step: usize,
        request: DraftRequest,
        hidden: &Tensor,
        state: &mut ModelState,
    ) -> Result<()> {
        let mut choose = |_: usize, _: usize, logits: &[f32]| Ok(most_likely(logits));
        let drafts = self.head.draft(&[request], hidden, state, &mut choose)?;
        let Some(draft) = drafts.into_iter().next().flatten() else {
            return Ok(());
        };
        // A recorded round begins with the token it follows.
        let Some(want) = self.recorded.get(step - 1).and_then(|ids| ids.get(1..)) else {
            return Ok(());
        };
        let same = draft
            .tokens
            .iter()
            .zip(want)
            .take_while(|(a, b)| a == b)
            .count();
        self.rounds += 1;
        self.equal_rounds += usize::from(same == want.len());
        self.drafts += want.len();
        self.in_prefix += same;
        let confidence = self
            .confidence
            .chunks(want.len())
            .nth(step - 1)
            .unwrap_or(&[]);
        let pairs = draft.confidence.iter().zip(confidence);
        self.distances
            .extend(pairs.map(|(a, b)| f64::from((a - b).abs())));
        Ok(())
    }

    fn checks(mut self) -> Vec<Check> {
        let differing = |equal: usize, all: usize| 1.0 - equal as f64 / all.max(1) as f64;
        self.distances.sort_by(f64::total_cmp);
        let n = self.distances.len();
        let median = self.distances.get(n / 2).copied().unwrap_or(f64::NAN);
        let (rounds, drafts) = (self.rounds, self.drafts);
        let (by_round, by_draft) = (
            differing(self.equal_rounds, rounds),
            differing(self.in_prefix, drafts),
        );
        vec![
            check(
                "rounds of drafts",
                rounds,
                by_round,
                TINY_DRAFT_ROUNDS,
                "share differing",
            ),
            check(
                "drafts in equal prefixes",
                drafts,
                by_draft,
                TINY_DRAFTS,
                "share behind",
            ),
            check("confidence, median", n, median, TINY_CONFIDENCE, "absolute"),
        ]
    }
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
