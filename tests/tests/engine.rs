//! The engine: every request gets what it would get alone, whoever else is served.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, Error, Event, FinishReason, GenerateOptions, Prompt, Result, SamplingParams,
    Speculation, Usage,
    attention::KvFormat,
    engine::{Engine, EngineLimits, RequestId},
    model::{ImageSpan, Limits},
    speculative::{DraftLength, PromptLookup},
};

fn tiny() -> &'static DeepSeekV41 {
    static MODEL: OnceLock<DeepSeekV41> = OnceLock::new();
    MODEL.get_or_init(|| DeepSeekV41::tiny().expect("the embedded model"))
}

#[derive(Debug, Clone, PartialEq, Default)]
struct Answer {
    tokens: Vec<u32>,
    text: String,
    end: Option<(FinishReason, Usage)>,
    error: Option<String>,
}

impl Answer {
    fn add(&mut self, event: Result<Event>) {
        assert!(
            self.end.is_none() && self.error.is_none(),
            "nothing follows the end"
        );
        match event {
            Ok(Event::Token(token)) => self.tokens.push(token.token),
            Ok(Event::Text(text)) => self.text.push_str(&text),
            Ok(Event::Done { reason, usage }) => self.end = Some((reason, usage)),
            Err(err) => self.error = Some(err.to_string()),
        }
    }
}

fn alone(prompt: &Prompt, options: &GenerateOptions) -> Answer {
    let mut answer = Answer::default();
    let generation = tiny()
        .generate(prompt.clone(), options)
        .expect("a generation");
    generation.for_each(|event| answer.add(event));
    answer
}

fn serve(engine: &mut Engine<'_>) -> BTreeMap<RequestId, Answer> {
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    for _ in 0..10_000 {
        for update in engine.step() {
            answers.entry(update.id).or_default().add(update.event);
        }
        if engine.is_idle() {
            return answers;
        }
    }
    panic!("the engine does not come to an end");
}

fn limits(max_seqs: usize, max_len: usize) -> EngineLimits {
    EngineLimits {
        state: Limits {
            max_seqs,
            max_len,
            max_rollback: 16,
            kv_format: KvFormat::default(),
        },
        step_tokens: 48,
        ..EngineLimits::default()
    }
}

const PROMPTS: [&str; 6] = [
    "Once upon a time there was a little fox who",
    "The capital of the north is",
    "Anna had three apples and gave one to Ben. Anna had",
    "Once upon a time there was a little bear who lived in the woods and",
    "In the morning the sun",
    "A fox and a hen met at the old well. The hen said",
];

fn speculations() -> [Speculation; 4] {
    [
        Speculation::Off,
        Speculation::DraftHead(DraftLength::Full),
        Speculation::DraftHead(DraftLength::Confidence(0.4)),
        Speculation::PromptLookup(PromptLookup {
            min_ngram: 1,
            ..PromptLookup::default()
        }),
    ]
}

/// Greedy and seeded requests, with every kind of guessing, of different lengths and ends.
fn requests() -> Vec<(Prompt, GenerateOptions)> {
    let mut requests = Vec::new();
    for (i, prompt) in PROMPTS.iter().enumerate() {
        for (j, speculation) in speculations().into_iter().enumerate() {
            let sampling = match (i + j) % 3 {
                0 => SamplingParams::greedy(),
                1 => SamplingParams {
                    seed: Some((10 * i + j) as u64),
                    ..Default::default()
                },
                _ => SamplingParams {
                    temperature: 0.8,
                    top_p: 0.9,
                    repetition_penalty: 1.1,
                    seed: Some(j as u64),
                    logprobs: true,
                    top_logprobs: 2,
                    ..Default::default()
                },
            };
            let options = GenerateOptions {
                sampling,
                max_tokens: 5 + 7 * ((i + 2 * j) % 6),
                stop: if i % 2 == 0 {
                    vec!["and the".into()]
                } else {
                    Vec::new()
                },
                ignore_eos: j % 2 == 0,
                speculation,
                ..GenerateOptions::default()
            };
            requests.push((Prompt::from(*prompt), options));
        }
    }
    requests
}

fn check(engine: &mut Engine<'_>, requests: &[(Prompt, GenerateOptions)]) {
    let submit = |(prompt, options): &(Prompt, GenerateOptions)| {
        engine.submit(prompt.clone(), options).expect("a request")
    };
    let ids: Vec<_> = requests.iter().map(submit).collect();
    let answers = serve(engine);
    assert_eq!(answers.len(), requests.len());
    for (id, (prompt, options)) in ids.iter().zip(requests) {
        assert_eq!(
            answers[id],
            alone(prompt, options),
            "{prompt:?} {options:?}"
        );
    }
}

#[test]
fn every_request_gets_what_it_would_get_alone() {
    for (slots, kv_format) in [
        (1, KvFormat::Bf16),
        (3, KvFormat::Packed),
        (16, KvFormat::Bf16),
    ] {
        let mut limits = EngineLimits {
            min_prefix: 4,
            ..limits(slots, 96)
        };
        limits.state.kv_format = kv_format;
        let mut engine = Engine::new(tiny(), limits).expect("an engine");
        check(&mut engine, &requests());
        let stats = engine.stats();
        assert!(
            stats.widest <= slots && (slots == 1 || stats.widest > 1),
            "{stats:?}"
        );
        // Each prompt comes four times; forks are kept where there are slots to spare.
        assert!(stats.prefix_hits > 0 || slots < 16, "{stats:?}");
    }
}

#[test]
fn a_budget_of_one_token_is_enough() {
    let limits = EngineLimits {
        step_tokens: 1,
        ..limits(2, 96)
    };
    let mut engine = Engine::new(tiny(), limits).expect("an engine");
    check(&mut engine, &requests()[..4]);
}

#[test]
fn requests_that_lose_their_place_are_computed_again() {
    // Room for one and a half of the texts, of which four run at a time.
    let limits = EngineLimits {
        kv_tokens: 96,
        min_prefix: 1000,
        ..limits(4, 96)
    };
    let mut engine = Engine::new(tiny(), limits).expect("an engine");
    let mut requests = requests();
    for (_, options) in &mut requests {
        (options.max_tokens, options.ignore_eos) = (40, true);
        options.stop.clear();
    }
    check(&mut engine, &requests[..10]);
    assert!(engine.stats().preemptions > 0, "{:?}", engine.stats());
    // With prefixes in the way, those go first.
    let limits = EngineLimits {
        min_prefix: 2,
        ..engine.limits().clone()
    };
    let mut engine = Engine::new(tiny(), limits).expect("an engine");
    check(&mut engine, &requests[..10]);
    assert!(engine.stats().evictions > 0, "{:?}", engine.stats());
}

#[test]
fn shared_beginnings_are_run_once() {
    let rules = "You are a kind storyteller. Every story has a fox, a hen and an old well, and it \
                 ends well for all of them. Do not use long words. ";
    for speculation in [Speculation::Off, Speculation::DraftHead(DraftLength::Full)] {
        let options = GenerateOptions {
            max_tokens: 12,
            speculation,
            ..Default::default()
        };
        let ask = |what: &str| (Prompt::Text(format!("{rules}{what}")), options.clone());
        let questions = [
            "Tell me a story.",
            "Who is the hen?",
            "What is in the well?",
            "Hello!",
        ];
        let requests: Vec<_> = questions.map(ask).to_vec();
        let mut engine = Engine::new(tiny(), limits(8, 160)).expect("an engine");
        check(&mut engine, &requests);
        let stats = engine.stats();
        let shared = tiny()
            .tokenizer()
            .encode(rules, deepseek_v41::AddedTokens::AsText);
        let shared = shared.expect("ids").len();
        assert_eq!(stats.prefix_hits, 3, "{stats:?}");
        assert!(
            stats.prefix_tokens >= 3 * (shared - 3),
            "{stats:?} of {shared}"
        );
        // Once more: everything but the last tokens of the prompts is there.
        check(&mut engine, &requests[1..3]);
        assert_eq!(engine.stats().prefix_hits, 5);
        // A conversation goes on from where it ended.
        let first = alone(&requests[3].0, &options);
        let (Prompt::Text(text), before) = (&requests[3].0, engine.stats()) else {
            unreachable!()
        };
        let mut ids = vec![tiny().special_ids().bos];
        let text = tiny()
            .tokenizer()
            .encode(text, deepseek_v41::AddedTokens::AsText);
        ids.extend(text.expect("ids"));
        ids.extend(&first.tokens);
        let known = ids.len();
        ids.extend([5, 6, 7, 8, 9]);
        check(&mut engine, &[(Prompt::Ids(ids), options.clone())]);
        let reused = engine.stats().prefix_tokens - before.prefix_tokens;
        assert!(reused + 3 >= known, "{reused} of {known}");
    }
}

#[test]
fn cancelling_disturbs_nobody() {
    let requests = requests();
    let mut engine = Engine::new(tiny(), limits(3, 96)).expect("an engine");
    let ids: Vec<_> = requests[..9]
        .iter()
        .map(|(prompt, options)| engine.submit(prompt.clone(), options).expect("a request"))
        .collect();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let mut add = |updates: Vec<deepseek_v41::engine::Update>| {
        updates
            .into_iter()
            .for_each(|u| answers.entry(u.id).or_default().add(u.event));
    };
    for step in 0..3 {
        add(engine.step());
        // One that runs and one that waits.
        assert!(engine.cancel(ids[step]), "{step}");
        assert!(engine.cancel(ids[8 - step]));
        assert!(!engine.cancel(ids[step]));
    }
    while !engine.is_idle() {
        add(engine.step());
    }
    for at in 3..6 {
        assert_eq!(answers[&ids[at]], alone(&requests[at].0, &requests[at].1));
    }
    assert!((6..9).all(|at| !answers.contains_key(&ids[at])));
}

#[test]
fn an_error_ends_its_own_request_only() {
    let requests = requests();
    let mut engine = Engine::new(tiny(), limits(4, 96)).expect("an engine");
    let good: Vec<_> = requests[..4]
        .iter()
        .map(|(prompt, options)| engine.submit(prompt.clone(), options).expect("a request"))
        .collect();
    // A hook that gives up, in the middle of a verified block.
    let options = GenerateOptions {
        speculation: Speculation::DraftHead(DraftLength::Full),
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let hooked = engine.submit(PROMPTS[0], &options).expect("a request");
    let hook = |generated: &[u32], _: &mut [f32]| match generated.len() < 5 {
        true => Ok(()),
        false => Err(Error::value("hook", "enough")),
    };
    engine.sampler(hooked).expect("it waits").add_hook(hook);
    // A picture whose rows have another width: the whole pass is refused.
    let rows = Tensor::zeros((3, 7), DType::BF16, &Device::Cpu).expect("rows");
    let picture = Prompt::WithImages {
        ids: vec![0, 4094, 4094, 4094, 8],
        images: vec![ImageSpan { start: 1, rows }],
    };
    let picture = engine
        .submit(picture, &GenerateOptions::default())
        .expect("a request");
    let answers = serve(&mut engine);
    for (id, (prompt, options)) in good.iter().zip(&requests) {
        assert_eq!(answers[id], alone(prompt, options));
    }
    assert_eq!(answers[&hooked].error.as_deref(), Some("hook: enough"));
    assert_eq!(
        answers[&hooked].tokens,
        alone(&PROMPTS[0].into(), &options).tokens[..5]
    );
    assert!(answers[&picture].error.is_some() && answers[&picture].tokens.is_empty());
    // The engine is as good as new.
    check(&mut engine, &requests[4..8]);
}

#[test]
fn what_cannot_be_served_is_refused_at_once() {
    let options = GenerateOptions::default();
    let mut engine = Engine::new(tiny(), limits(2, 32)).expect("an engine");
    let vocab = tiny().config().vocab_size as u32;
    assert!(engine.submit(Vec::<u32>::new(), &options).is_err());
    assert!(engine.submit(vec![0, vocab], &options).is_err());
    assert!(matches!(
        engine.submit(vec![1; 33], &options),
        Err(Error::Capacity { .. })
    ));
    let hot = SamplingParams {
        temperature: -1.0,
        ..SamplingParams::default()
    };
    assert!(
        engine
            .submit(
                "x",
                &GenerateOptions {
                    sampling: hot,
                    ..options.clone()
                }
            )
            .is_err()
    );
    assert!(engine.is_idle());
    // Nothing wanted, and a text that fills the sequence.
    let nothing = GenerateOptions {
        max_tokens: 0,
        ..options.clone()
    };
    let nothing = engine.submit("x", &nothing).expect("a request");
    let full = GenerateOptions {
        ignore_eos: true,
        ..options.clone()
    };
    let full = engine.submit(vec![1; 30], &full).expect("a request");
    let answers = serve(&mut engine);
    assert!(matches!(
        answers[&nothing].end,
        Some((FinishReason::MaxTokens, _))
    ));
    assert!(matches!(
        answers[&full].end,
        Some((FinishReason::ContextFull, _))
    ));
    assert_eq!(answers[&full].tokens.len(), 2);
    assert!(
        Engine::new(
            tiny(),
            EngineLimits {
                kv_tokens: 31,
                ..limits(2, 32)
            }
        )
        .is_err()
    );
}

#[test]
fn prompts_and_texts_wait_for_neither() {
    // Three texts whose drafts alone are more than a step may hold.
    let limits = EngineLimits {
        step_tokens: 8,
        min_prefix: 1000,
        ..limits(6, 320)
    };
    let mut engine = Engine::new(tiny(), limits).expect("an engine");
    let long = GenerateOptions {
        max_tokens: 300,
        ignore_eos: true,
        speculation: Speculation::DraftHead(DraftLength::Full),
        ..GenerateOptions::default()
    };
    let texts: Vec<_> = PROMPTS[..3]
        .iter()
        .map(|prompt| engine.submit(*prompt, &long).expect("a request"))
        .collect();
    let mut begun = std::collections::BTreeSet::new();
    let is_token = |event: &Result<Event>| matches!(event, Ok(Event::Token(_)));
    while begun.len() < 3 {
        let updates = engine.step();
        begun.extend(updates.iter().filter(|u| is_token(&u.event)).map(|u| u.id));
    }
    let short = GenerateOptions {
        max_tokens: 1,
        ..GenerateOptions::default()
    };
    let ids = |from: u32| (from..from + 40).collect::<Vec<_>>();
    let first = engine.submit(ids(100), &short).expect("a request");
    let second = engine.submit(ids(300), &short).expect("a request");
    let mut answered = Vec::new();
    for step in 1..60 {
        let updates = engine.step();
        let gave = |id: RequestId| updates.iter().any(|u| u.id == id && is_token(&u.event));
        // No prompt delays a text by a step.
        assert!(texts.iter().all(|id| gave(*id)), "step {step}");
        let late = [first, second].into_iter().filter(|id| gave(*id));
        answered.extend(late.map(|id| (id, step)));
        if answered.len() == 2 {
            break;
        }
    }
    // First come, first served; a quarter of eight tokens a step, whatever the texts take.
    let [(a, after), (b, later)] = answered[..] else {
        panic!("prompts starve: {answered:?}")
    };
    assert_eq!((a, b), (first, second));
    assert!(after <= 20 && later <= 40, "{answered:?}");
    let stats = engine.stats();
    assert!(
        stats.accepted > 0 && stats.accepted < stats.drafted,
        "{stats:?}"
    );
}

#[test]
fn measured_speed_shares_drafts_out() {
    // With this table one token more never pays, so nothing is drafted; greedy texts stay the same.
    let slow = EngineLimits {
        sps_by_batch: vec![1e9, 8.0, 2.0, 1.0],
        ..limits(4, 96)
    };
    let options = GenerateOptions {
        max_tokens: 20,
        speculation: Speculation::DraftHead(DraftLength::Full),
        ..GenerateOptions::default()
    };
    let requests: Vec<_> = PROMPTS[..3]
        .iter()
        .map(|p| (Prompt::from(*p), options.clone()))
        .collect();
    let mut engine = Engine::new(tiny(), slow).expect("an engine");
    check(&mut engine, &requests);
    let flat = EngineLimits {
        sps_by_batch: vec![1.0; 64],
        ..limits(4, 96)
    };
    let mut fast = Engine::new(tiny(), flat).expect("an engine");
    check(&mut fast, &requests);
    assert!(fast.stats().steps < engine.stats().steps);
}

#[test]
fn one_set_of_weights_serves_many_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    fn sent<T: Send>(_: &T) {}
    shared(tiny());
    sent(&Engine::new(tiny(), limits(1, 8)).expect("an engine"));
    let requests = Arc::new(requests());
    let expected: Vec<_> = requests[..8].iter().map(|(p, o)| alone(p, o)).collect();
    let expected = Arc::new(expected);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (requests, expected) = (requests.clone(), expected.clone());
            scope.spawn(move || match thread % 2 {
                0 => {
                    let mut engine = Engine::new(tiny(), limits(3, 96)).expect("an engine");
                    check(&mut engine, &requests[thread..thread + 6]);
                }
                _ => {
                    for (i, (prompt, options)) in requests[..8].iter().enumerate() {
                        assert_eq!(alone(prompt, options), expected[i]);
                    }
                }
            });
        }
    });
}
