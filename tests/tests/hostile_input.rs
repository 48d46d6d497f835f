//! Input that nobody should send: each is refused by an error that says what is wrong, or has a stated
//! answer.

#![allow(clippy::unwrap_used)]

use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, Event, FinishReason, GenerateOptions, Prompt, Result, SamplingParams, Speculation,
    model::ImageSpan,
    speculative::{DraftLength, PromptLookup},
};
use deepseek_v41_testing::assert_outcome;

fn tiny() -> &'static DeepSeekV41 {
    static MODEL: OnceLock<DeepSeekV41> = OnceLock::new();
    MODEL.get_or_init(|| DeepSeekV41::tiny().unwrap())
}

fn few() -> GenerateOptions {
    GenerateOptions {
        max_tokens: 4,
        ..GenerateOptions::default()
    }
}

/// Tokens of at most ten events, and how the text ended if it did.
fn run(
    prompt: impl Into<Prompt>,
    options: &GenerateOptions,
) -> Result<(usize, Option<FinishReason>)> {
    let (mut tokens, mut end) = (0, None);
    for event in tiny().generate(prompt, options)?.take(20) {
        match event? {
            Event::Token(_) => tokens += 1,
            Event::Done { reason, .. } => end = Some(reason),
            Event::Text(_) => {}
        }
    }
    Ok((tokens, end))
}

fn rows(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

#[test]
fn prompts() {
    const IMAGE: u32 = 4094;
    let dim = tiny().config().dim;
    let span = |start, rows| ImageSpan { start, rows };
    let good = |start, n| span(start, rows(&[n, dim], DType::BF16));
    let with = |ids: &[u32], images| Prompt::WithImages {
        ids: ids.to_vec(),
        images,
    };
    let one = [0, IMAGE];
    let two = [0, IMAGE, IMAGE];
    let nan = (rows(&[1, dim], DType::BF16) * f64::NAN).unwrap();
    let nothing = "has no tokens";
    for (case, prompt, want) in [
        ("no ids", Prompt::Ids(vec![]), nothing),
        ("nothing rendered", Prompt::Rendered(String::new()), nothing),
        ("an empty text begins with a token", "".into(), ""),
        ("controls", "\0\u{1}\u{feff}\u{10ffff}".into(), ""),
        (
            "huge id",
            vec![0, u32::MAX].into(),
            "outside of the vocabulary",
        ),
        ("next id", vec![0, 4096].into(), "outside of the vocabulary"),
        ("no picture", one.to_vec().into(), "no picture for it"),
        ("too long", vec![5; 2_000_000].into(), "context length"),
        (
            "no room",
            with(&[0, 5], vec![good(2, 3)]),
            "a picture of 3 rows",
        ),
        (
            "far away",
            with(&[0, 5], vec![good(usize::MAX, 1)]),
            "a picture of 1 rows",
        ),
        (
            "cut off",
            with(&one, vec![good(1, 5)]),
            "a picture of 5 rows",
        ),
        (
            "over text",
            with(&[0, 5, 6], vec![good(1, 1)]),
            "token 5 is text",
        ),
        ("without rows", with(&[0, 5], vec![good(1, 0)]), ""),
        (
            "behind all, without rows",
            with(&[0, 5], vec![good(2, 0)]),
            "",
        ),
        (
            "wide",
            with(&one, vec![span(1, rows(&[1, dim + 1], DType::BF16))]),
            "257",
        ),
        (
            "f32",
            with(&one, vec![span(1, rows(&[1, dim], DType::F32))]),
            "BF16, found F32",
        ),
        (
            "flat",
            with(&one, vec![span(1, rows(&[1], DType::BF16))]),
            "image span",
        ),
        (
            "scalar",
            with(&one, vec![span(1, rows(&[], DType::BF16))]),
            "no picture",
        ),
        (
            "order",
            with(&two, vec![good(2, 1), good(1, 1)]),
            "image span",
        ),
        (
            "overlap",
            with(&two, vec![good(1, 2), good(2, 1)]),
            "image span",
        ),
        (
            "twice",
            with(&one, vec![good(1, 1), good(1, 1)]),
            "image span",
        ),
        ("NaN", with(&[0, IMAGE, 5], vec![span(1, nan)]), "NaN"),
    ] {
        assert_outcome(case, run(prompt, &few()), want);
    }
}

#[test]
fn options() {
    let plain = few();
    let sampling = |params: SamplingParams| GenerateOptions {
        sampling: SamplingParams {
            seed: Some(1),
            ..params
        },
        ..few()
    };
    let guess = |speculation| GenerateOptions {
        speculation,
        ..few()
    };
    let d = SamplingParams::default;
    let all = |bias: f32| (0..4096).map(|id| (id, bias)).collect::<Vec<_>>();
    let no_token = "no token of 4096 is possible";
    let lookup = |max_ngram, max_tokens| {
        guess(Speculation::PromptLookup(PromptLookup {
            max_ngram,
            min_ngram: 0,
            max_tokens,
        }))
    };
    let head = |length| guess(Speculation::DraftHead(length));
    let speeds = |sps_by_batch| DraftLength::Measured { sps_by_batch };
    for (case, options, want) in [
        (
            "no chunk",
            GenerateOptions {
                prefill_chunk: 0,
                ..plain.clone()
            },
            "",
        ),
        (
            "all in a chunk",
            GenerateOptions {
                prefill_chunk: usize::MAX,
                ..plain.clone()
            },
            "",
        ),
        (
            "no tokens",
            GenerateOptions {
                max_tokens: 0,
                ..plain.clone()
            },
            "",
        ),
        (
            "every token",
            GenerateOptions {
                max_tokens: usize::MAX,
                ..plain.clone()
            },
            "",
        ),
        (
            "empty stop",
            GenerateOptions {
                stop: vec![String::new()],
                ..plain.clone()
            },
            "",
        ),
        (
            "long stop",
            GenerateOptions {
                stop: vec!["z".repeat(100_000); 9],
                ..plain.clone()
            },
            "",
        ),
        (
            "stop nowhere",
            GenerateOptions {
                stop_ids: vec![u32::MAX],
                ..plain
            },
            "",
        ),
        (
            "NaN",
            sampling(SamplingParams {
                temperature: f32::NAN,
                ..d()
            }),
            "temperature",
        ),
        (
            "coldest",
            sampling(SamplingParams {
                temperature: 1e-45,
                ..d()
            }),
            "",
        ),
        (
            "hottest",
            sampling(SamplingParams {
                temperature: f32::MAX,
                ..d()
            }),
            "",
        ),
        (
            "top_k",
            sampling(SamplingParams {
                top_k: usize::MAX,
                ..d()
            }),
            "",
        ),
        (
            "top_p",
            sampling(SamplingParams {
                top_p: 1e-45,
                ..d()
            }),
            "",
        ),
        ("min_p", sampling(SamplingParams { min_p: 1.0, ..d() }), ""),
        (
            "infinite",
            sampling(SamplingParams {
                repetition_penalty: 1e-45,
                ..d()
            }),
            "inf at token",
        ),
        (
            "penalty",
            sampling(SamplingParams {
                presence_penalty: f32::MAX,
                ..d()
            }),
            "",
        ),
        (
            "outside",
            sampling(SamplingParams {
                logit_bias: vec![(5000, 1.0)],
                ..d()
            }),
            "5000",
        ),
        (
            "nothing left",
            sampling(SamplingParams {
                logit_bias: all(f32::NEG_INFINITY),
                ..d()
            }),
            no_token,
        ),
        (
            "all low",
            sampling(SamplingParams {
                logit_bias: all(f32::MIN),
                ..d()
            }),
            "",
        ),
        (
            "logprobs",
            sampling(SamplingParams {
                logprobs: true,
                top_logprobs: usize::MAX,
                ..d()
            }),
            "",
        ),
        ("no lookup", lookup(0, 0), ""),
        ("lookup of all", lookup(usize::MAX, usize::MAX), ""),
        ("no drafts", head(DraftLength::AtMost(0)), ""),
        ("NaN drafts", head(DraftLength::Confidence(f32::NAN)), ""),
        ("no speeds", head(speeds(vec![])), ""),
        ("NaN speeds", head(speeds(vec![f64::NAN; 9])), ""),
    ] {
        let text = "Once upon a time there was a time there was a";
        assert_outcome(case, run(text, &options), want);
    }
}
