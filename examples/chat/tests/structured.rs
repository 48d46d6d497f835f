//! Constrained text: whatever is sampled, and also when guesses are taken back.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use deepseek_v41::{
    DeepSeekV41, Event, FinishReason, GenerateOptions, SamplingParams, Speculation,
    grammar::Grammar,
    speculative::{DraftLength, PromptLookup},
};
use serde_json::{Value, json};

fn text(
    model: &DeepSeekV41,
    grammar: &Grammar,
    options: &GenerateOptions,
) -> (String, FinishReason) {
    let mut generation = model.generate("Once upon a time", options).unwrap();
    generation.sampler().add_hook(grammar.hook().unwrap());
    let (mut text, mut end) = (String::new(), None);
    for event in generation {
        match event.unwrap() {
            Event::Text(piece) => text.push_str(&piece),
            Event::Done { reason, .. } => end = Some(reason),
            Event::Token(_) => {}
        }
    }
    (text, end.unwrap())
}

#[test]
fn every_text_is_a_value_of_the_schema() {
    let model = DeepSeekV41::tiny().unwrap();
    let schema = json!({
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": false,
        // White space would be valid for as long as the model likes.
        "x-guidance": {"whitespace_flexible": false},
    });
    let grammar = Grammar::json_schema(&model, schema).unwrap();
    for seed in 0..3 {
        for speculation in [
            Speculation::Off,
            Speculation::DraftHead(DraftLength::Full),
            Speculation::PromptLookup(PromptLookup::default()),
        ] {
            let options = GenerateOptions {
                sampling: SamplingParams {
                    seed: Some(seed),
                    ..SamplingParams::default()
                },
                max_tokens: 100,
                speculation,
                ..GenerateOptions::default()
            };
            let (text, reason) = text(&model, &grammar, &options);
            assert!(
                matches!(reason, FinishReason::StopToken(_)),
                "{reason:?}: {text}"
            );
            let value: Value = serde_json::from_str(&text).unwrap();
            assert!(value["n"].as_u64().is_some_and(|n| n <= 9), "{text}");
            assert!(value["ok"].is_boolean(), "{text}");
        }
    }
}

#[test]
fn greedy_text_is_the_same_with_guesses() {
    let model = DeepSeekV41::tiny().unwrap();
    let grammar = Grammar::lark(&model, "start: (\"fox\" | \"owl\" | \" \")+".into()).unwrap();
    let options = |speculation| GenerateOptions {
        max_tokens: 24,
        speculation,
        ..GenerateOptions::default()
    };
    let plain = text(&model, &grammar, &options(Speculation::Off));
    let guessed = text(
        &model,
        &grammar,
        &options(Speculation::DraftHead(DraftLength::Full)),
    );
    assert_eq!(plain, guessed);
}

#[test]
fn what_cannot_be_compiled_is_an_error() {
    let model = DeepSeekV41::tiny().unwrap();
    assert!(Grammar::lark(&model, "start: (".into()).is_err());
    assert!(Grammar::json_schema(&model, json!({"type": "no such type"})).is_err());
}
