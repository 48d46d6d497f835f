//! What a request can ask for, and what it cannot.
#![allow(clippy::unwrap_used)]

mod common;

use common::{
    requests::{ANSWER, answer, chat, prepare, run},
    tiny,
};
use deepseek_v41::{
    Error, GenerateOptions, SamplingParams,
    chat::{
        ChatError,
        recipe::{anthropic::MessagesRequest, openai::ResponsesRequest},
    },
};
use deepseek_v41_examples_chat::respond::Protocol;
use serde_json::{Value, json};

#[test]
fn controls_are_not_ignored() {
    let options = |extra: Value| prepare(&chat(extra)).unwrap().options(10, 4096).unwrap();
    let asked = options(
        json!({"temperature": 0.5, "seed": 7, "top_k": 3, "min_p": 0.1, "max_tokens": 9,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "logprobs": true, "top_logprobs": 2}),
    );
    let sampling = SamplingParams {
        temperature: 0.5,
        top_k: 3,
        min_p: 0.1,
        repetition_penalty: 1.5,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        seed: Some(7),
        logprobs: true,
        top_logprobs: 2,
        ..SamplingParams::default()
    };
    assert_eq!(
        asked,
        GenerateOptions {
            sampling,
            max_tokens: 9,
            ..GenerateOptions::default()
        }
    );
    // The service's rules while thinking.
    let thinking = options(json!({"thinking": {"type": "enabled"}, "top_p": 0.1}));
    assert_eq!(
        (thinking.sampling.temperature, thinking.sampling.top_p),
        (1.0, 0.95)
    );

    // And they arrive: temperature 0 is top-k 1, and a seed makes an answer come again.
    let content = |extra: Value| {
        let whole = answer(Protocol::Chat, &chat(extra));
        whole["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        content(json!({"temperature": 2, "top_k": 1, "seed": 5})),
        ANSWER
    );
    let drawn = |seed: u64| content(json!({"temperature": 2, "seed": seed, "max_tokens": 24}));
    assert_eq!(drawn(3), drawn(3));
    assert!((0..8).any(|seed| drawn(seed) != drawn(3)));
}

#[test]
fn log_probabilities_are_reported() {
    let whole = answer(
        Protocol::Chat,
        &chat(json!({"logprobs": true, "top_logprobs": 2})),
    );
    let tokens = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    let text: String = tokens
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(text, ANSWER);
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(top[0]["logprob"], token["logprob"]);
    }
}

#[test]
fn numeric_efforts() {
    let request = |effort: Value| {
        let mut request = chat(json!({"reasoning_effort": effort}));
        request.as_object_mut().unwrap().remove("thinking");
        request
    };
    let text = |effort: Value| prepare(&request(effort)).unwrap().prompt.text;
    assert!(text(json!(42)).contains("Reasoning Effort: 42 (range"));
    assert!(text(json!("low")).contains("Reasoning Effort: 50 (range"));
    // A protocol's name, which the prompt format does not have: as the library reads it.
    assert!(text(json!("medium")).contains("Reasoning Effort: 75 (range"));
    for wrong in [json!(0), json!(101), json!(-1), json!(1.5), json!(true)] {
        let err = prepare(&request(wrong)).unwrap_err();
        assert!(matches!(err, ChatError::Effort { .. }), "{err}");
    }
    let err = prepare(&request(json!("somewhat"))).unwrap_err();
    assert!(matches!(err, ChatError::Json(_)), "{err}");
    // In the other protocols.
    let template = tiny().chat_template();
    let options = || template.conversion_options(["tiny"]);
    let request = json!({"model": "tiny", "input": "q", "reasoning": {"effort": 7}}).to_string();
    let prepared = template
        .prepare_json::<ResponsesRequest>(&request, options())
        .unwrap();
    assert!(prepared.prompt.text.contains("Reasoning Effort: 7 (range"));
    let request = json!({"model": "tiny", "max_tokens": 5, "output_config": {"effort": 7},
        "messages": [{"role": "user", "content": "q"}]})
    .to_string();
    let prepared = template
        .prepare_json::<MessagesRequest>(&request, options())
        .unwrap();
    assert!(prepared.prompt.text.contains("Reasoning Effort: 7 (range"));
}

#[test]
fn what_is_no_request() {
    let refused = |request: Value| run(Protocol::Chat, &request).unwrap_err();
    assert!(matches!(refused(json!([1])), ChatError::Json(_)));
    assert!(matches!(
        refused(json!({"model": "tiny"})),
        ChatError::Json(_)
    ));
    assert!(matches!(
        refused(chat(json!({"messages": []}))),
        ChatError::Request(_)
    ));
    assert!(matches!(
        refused(chat(json!({"model": "another"}))),
        ChatError::Request(_)
    ));
    assert!(matches!(
        refused(chat(json!({"model": "DeepSeek-V4-Pro"}))),
        ChatError::Request(_)
    ));
    assert!(matches!(
        refused(chat(json!({"temperature": 3}))),
        ChatError::Request(_)
    ));
    assert!(matches!(
        refused(chat(json!({"top_k": "many"}))),
        ChatError::Json(_)
    ));
    let penalty = refused(chat(json!({"repetition_penalty": 0})));
    assert!(
        matches!(penalty, ChatError::Model(Error::Value { .. })),
        "{penalty}"
    );
    // Grounding tokens in an answer are control tokens, which this tokenizer lacks.
    let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "<｜ref｜>"},
        {"role": "user", "content": "q"}]);
    assert!(matches!(
        refused(chat(json!({ "messages": messages }))),
        ChatError::Encoding(_)
    ));
    // Longer than the context.
    let options = prepare(&chat(json!({}))).unwrap().options(100, 50);
    assert!(matches!(options, Err(ChatError::Request(_))));
}

#[test]
fn stop_sequences_end_the_content() {
    let whole = answer(Protocol::Chat, &chat(json!({"stop": ["that", "lamp t"]})));
    assert_eq!(whole["choices"][0]["message"]["content"], "A lantern is a ");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let whole = answer(Protocol::Chat, &chat(json!({"max_tokens": 3})));
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
}
