//! The embedded trained model against what the official code said with the same weights.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use candle_core::Tensor;
use deepseek_v41::{
    DeepSeekV41, Event, GenerateOptions, LoadOptions, Prompt, Speculation,
    model::{DraftRequest, ForwardBatch, IndexKeys, Limits, ModelState},
    speculative::{DraftLength, PromptLookup, SpeculationStats},
};
use deepseek_v41_testing::{Golden, golden_dir};
use serde_json::Value;

/// One recorded prompt in one key mode.
struct Recorded {
    name: String,
    prompt: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    margin: Vec<f64>,
    draft_ids: Vec<Vec<u32>>,
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as u32)
        .collect()
}

fn recorded(mode: &str) -> Vec<Recorded> {
    let path = golden_dir().join("../tiny/expected.json");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let prompts = json["prompts"].as_array().unwrap().iter();
    let prompts = prompts.map(|p| Recorded {
        name: p["name"].as_str().unwrap().to_owned(),
        prompt: p["prompt"].as_str().unwrap().to_owned(),
        prompt_ids: ids(&p["prompt_ids"]),
        greedy_ids: ids(&p[mode]["greedy_ids"]),
        margin: p[mode]["margin"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_f64().unwrap())
            .collect(),
        draft_ids: p[mode]["draft_ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(ids)
            .collect(),
    });
    prompts.collect()
}

fn tiny(index_keys: IndexKeys) -> DeepSeekV41 {
    DeepSeekV41::tiny_with(&LoadOptions {
        index_keys,
        ..LoadOptions::default()
    })
    .unwrap()
}

fn argmax(row: &[f32]) -> u32 {
    let best = row
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.unwrap().0 as u32
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
fn teacher_forced_steps_and_drafts_follow_the_official_code() {
    let saved = Golden::open("../tiny/expected");
    for (mode, keys) in [
        ("reference", IndexKeys::LastPublished),
        ("own_index_k", IndexKeys::Owner),
    ] {
        let model = tiny(keys);
        let mut logit_distances = Vec::new();
        for case in recorded(mode) {
            let transformer = model.transformer();
            let limits = Limits {
                max_len: 512,
                ..Limits::default()
            };
            let mut state = ModelState::new(model.config(), limits, transformer.device()).unwrap();
            let seq = state.create().unwrap();
            let logits = saved.f32(&format!("{}.{mode}.logits", case.name));
            let confidence = saved.f32(&format!("{}.{mode}.draft_confidence", case.name));
            let mut chunk = case.prompt_ids.clone();
            let (mut equal_rounds, mut in_prefix, mut drafted) = (0, 0, 0);
            let mut confidence_distances = Vec::new();
            for (step, &next) in case.greedy_ids.iter().enumerate() {
                let committed = chunk.len();
                let batch = ForwardBatch {
                    target_hidden: true,
                    ..ForwardBatch::one(seq, chunk)
                };
                let out = transformer.forward(&batch, &mut state).unwrap();
                let row = out.logits.to_vec2::<f32>().unwrap().remove(0);
                if case.margin[step] >= 0.15 {
                    assert_eq!(argmax(&row), next, "{} {mode} step {step}", case.name);
                }
                if step % 8 == 0 {
                    let want = &logits[step / 8 * row.len()..][..row.len()];
                    let distance = deepseek_v41_testing::rel_rms(&row, want);
                    assert!(
                        distance <= 0.3,
                        "{} {mode} step {step}: {distance}",
                        case.name
                    );
                    logit_distances.push(distance);
                }
                let hidden: Tensor = out.target_hidden.unwrap();
                let draft = (step > 0).then_some(next);
                let request = DraftRequest {
                    seq,
                    committed,
                    next: draft,
                };
                let mut choose = |_: usize, _: usize, row: &[f32]| Ok(argmax(row));
                let head = model.draft_head().unwrap();
                let drafts = head
                    .draft(&[request], &hidden, &mut state, &mut choose)
                    .unwrap();
                if let Some(draft) = &drafts[0] {
                    let want = &case.draft_ids[step - 1][1..];
                    let same = draft
                        .tokens
                        .iter()
                        .zip(want)
                        .take_while(|(a, b)| a == b)
                        .count();
                    equal_rounds += usize::from(same == want.len());
                    in_prefix += same;
                    drafted += want.len();
                    let want = &confidence[(step - 1) * want.len()..][..want.len()];
                    for (a, b) in draft.confidence.iter().zip(want) {
                        confidence_distances.push(f64::from((a - b).abs()));
                    }
                }
                chunk = vec![next];
            }
            let place = format!("{} {mode}", case.name);
            assert!(
                equal_rounds >= 52,
                "{place}: {equal_rounds} of 63 draft rounds are equal"
            );
            let share = in_prefix as f64 / drafted as f64;
            assert!(
                share >= 0.88,
                "{place}: {share} of the drafts are in equal prefixes"
            );
            assert!(median(confidence_distances) <= 0.3, "{place}: confidences");
        }
        let median = median(logit_distances);
        assert!(median <= 0.03, "{mode}: median distance {median}");
    }
}

fn generate(
    model: &DeepSeekV41,
    case: &Recorded,
    speculation: Speculation,
) -> (Vec<u32>, String, SpeculationStats) {
    let options = GenerateOptions {
        max_tokens: 64,
        ignore_eos: true,
        speculation,
        ..GenerateOptions::default()
    };
    let prompt = Prompt::Rendered(case.prompt.clone());
    let mut generation = model.generate(prompt, &options).unwrap();
    let (mut tokens, mut text) = (Vec::new(), String::new());
    for event in &mut generation {
        match event.unwrap() {
            Event::Token(token) => tokens.push(token.token),
            Event::Text(piece) => text.push_str(&piece),
            Event::Done { usage, .. } => assert_eq!(usage.prompt_tokens, case.prompt_ids.len()),
        }
    }
    (tokens, text, generation.speculation().clone())
}

#[test]
fn own_keys_answer_the_long_question_right() {
    let model = tiny(IndexKeys::Owner);
    let cases = recorded("own_index_k");
    let long = cases.iter().find(|c| c.name == "long").unwrap();
    let (_, text, _) = generate(&model, long, Speculation::Off);
    assert!(text.contains("Oscar"), "{text}");
}

#[test]
fn guessing_ahead_changes_no_token_and_accepts_as_recorded() {
    let model = tiny(IndexKeys::Owner);
    let (mut passes, mut accepted) = (0, 0);
    for case in recorded("own_index_k") {
        let (plain, text, _) = generate(&model, &case, Speculation::Off);
        let ways = [
            Speculation::DraftHead(DraftLength::Full),
            Speculation::DraftHead(DraftLength::AtMost(2)),
            Speculation::DraftHead(DraftLength::Confidence(0.5)),
            Speculation::PromptLookup(PromptLookup::default()),
        ];
        for (i, way) in ways.into_iter().enumerate() {
            let name = format!("{} {way:?}", case.name);
            let (tokens, guessed, stats) = generate(&model, &case, way);
            assert_eq!(tokens, plain, "{name}");
            assert_eq!(guessed, text, "{name}");
            if i == 0 {
                passes += stats.passes;
                accepted += stats.accepted;
            }
        }
    }
    // The official decoding loop accepts 3.05 of 5 on these prompts.
    let mean = accepted as f64 / passes as f64;
    assert!(
        (mean / 3.05 - 1.0).abs() <= 0.1,
        "{mean} drafts accepted a pass"
    );
}

#[test]
fn a_longer_draft_than_the_head_makes_is_refused() {
    let model = tiny(IndexKeys::Owner);
    let options = GenerateOptions {
        speculation: Speculation::DraftHead(DraftLength::AtMost(7)),
        ..GenerateOptions::default()
    };
    let err = model.generate("Once", &options).err().unwrap().to_string();
    assert!(err.contains('7') && err.contains('5'), "{err}");
}
