//! Guessing ahead on the embedded model: every way of guessing ends texts where plain decoding does, and
//! drawn texts come from the same distribution.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    sync::{Arc, Mutex, OnceLock},
};

use deepseek_v41::{
    DeepSeekV41, Event, FinishReason, GenerateOptions, Result, SamplingParams, Session,
    Speculation, Usage,
    model::Limits,
    speculative::{
        DraftLength, PromptLookup, Proposal, ProposeContext, Proposer, SpeculationStats,
    },
};

const PROMPT: &str = "Once upon a time there was a little fox who";

fn tiny() -> &'static DeepSeekV41 {
    static MODEL: OnceLock<DeepSeekV41> = OnceLock::new();
    MODEL.get_or_init(|| DeepSeekV41::tiny().unwrap())
}

fn session() -> Session<'static> {
    let limits = Limits {
        max_len: 256,
        ..Limits::default()
    };
    tiny().session(limits).unwrap()
}

fn guessing() -> [Speculation; 3] {
    [
        Speculation::DraftHead(DraftLength::Full),
        Speculation::DraftHead(DraftLength::Confidence(0.5)),
        Speculation::PromptLookup(PromptLookup {
            min_ngram: 1,
            ..PromptLookup::default()
        }),
    ]
}

/// All that a text ends with.
#[derive(Debug, PartialEq)]
struct Ended {
    tokens: Vec<u32>,
    text: String,
    reason: FinishReason,
    usage: Usage,
    /// Tokens of the session afterwards.
    len: usize,
}

/// Continues [`PROMPT`]; `proposer`, if there is one, guesses instead of the options'.
fn ended(
    options: &GenerateOptions,
    proposer: Option<Knowing>,
    places: &mut SpeculationStats,
) -> Ended {
    let mut session = session();
    let mut generation = session.generate(PROMPT, options).unwrap();
    if let Some(proposer) = proposer {
        generation = generation.with_proposer(proposer);
    }
    let (mut tokens, mut text, mut end) = (Vec::new(), String::new(), None);
    for event in &mut generation {
        match event.unwrap() {
            Event::Token(token) => tokens.push(token.token),
            Event::Text(piece) => text.push_str(&piece),
            Event::Done { reason, usage } => end = Some((reason, usage)),
        }
    }
    *places += generation.speculation();
    drop(generation);
    let (reason, usage) = end.unwrap();
    let len = session.len().unwrap();
    Ended {
        tokens,
        text,
        reason,
        usage,
        len,
    }
}

/// Proposes a text it knows, or, if `wrong`, another token at every place.
#[derive(Clone)]
struct Knowing {
    tokens: Vec<u32>,
    prompt: usize,
    wrong: bool,
}

impl Proposer for Knowing {
    fn propose(&mut self, ctx: ProposeContext<'_>) -> Result<Proposal> {
        if ctx.next.is_none() {
            return Ok(Proposal::default());
        }
        let at = ctx.text.len() - self.prompt;
        let known = self.tokens.get(at..).unwrap_or_default();
        let other = |t: &u32| if self.wrong { (*t + 1) % 4000 } else { *t };
        Ok(Proposal {
            tokens: known.iter().take(ctx.max.min(5)).map(other).collect(),
            ..Proposal::default()
        })
    }
}

fn greedy(n: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: n,
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

fn plain(n: usize) -> Ended {
    ended(&greedy(n), None, &mut SpeculationStats::default())
}

fn knowing(text: &Ended, wrong: bool) -> Knowing {
    Knowing {
        tokens: text.tokens.clone(),
        prompt: text.usage.prompt_tokens,
        wrong,
    }
}

#[test]
fn a_stop_token_ends_the_text_at_every_place_of_a_draft() {
    let whole = plain(24);
    let mut places = SpeculationStats::default();
    for &stop in &whole.tokens {
        let mut options = GenerateOptions {
            stop_ids: vec![stop],
            ..greedy(24)
        };
        let want = ended(&options, None, &mut SpeculationStats::default());
        assert_eq!(want.reason, FinishReason::StopToken(stop));
        let first = whole.tokens.iter().position(|t| *t == stop).unwrap();
        assert_eq!(want.tokens, whole.tokens[..=first]);
        for way in guessing() {
            options.speculation = way;
            let got = ended(&options, None, &mut SpeculationStats::default());
            assert_eq!(got, want, "{options:?}");
        }
        options.speculation = Speculation::Off;
        let got = ended(&options, Some(knowing(&whole, false)), &mut places);
        assert_eq!(got, want, "{stop}");
    }
    // Ends lay at places within drafts, not only behind them.
    assert!(places.wasted() > 0 && places.accepted > 0, "{places:?}");
}

#[test]
fn a_stop_string_across_tokens_ends_the_text_within_a_draft() {
    let whole = plain(24);
    let pieces: Vec<char> = whole.text.chars().collect();
    let mut across = 0;
    for at in (0..pieces.len().saturating_sub(6)).step_by(3) {
        let stop: String = pieces[at..at + 6].iter().collect();
        let mut options = GenerateOptions {
            stop: vec![stop.clone()],
            ..greedy(24)
        };
        let want = ended(&options, None, &mut SpeculationStats::default());
        assert_eq!(want.reason, FinishReason::StopString(stop.clone()));
        assert_eq!(Some(want.text.len()), whole.text.find(&stop));
        across += usize::from(want.tokens.len() > 1);
        for way in guessing() {
            options.speculation = way;
            let got = ended(&options, None, &mut SpeculationStats::default());
            assert_eq!(got, want, "{stop:?} {options:?}");
        }
    }
    assert!(across > 5, "{across}");
}

#[test]
fn guesses_that_are_all_right_or_all_wrong_change_only_the_number_of_passes() {
    let whole = plain(31);
    for (wrong, passes, accepted) in [(false, 5, 25), (true, 30, 0)] {
        let mut stats = SpeculationStats::default();
        let got = ended(&greedy(31), Some(knowing(&whole, wrong)), &mut stats);
        assert_eq!(got, whole, "wrong: {wrong}");
        // The first token comes out of the prompt's pass; then six a pass, or one.
        assert_eq!(
            (stats.passes, stats.accepted),
            (passes, accepted),
            "{stats:?}"
        );
        assert_eq!(stats.drafted, stats.accepted + stats.wasted());
        let verified: usize = stats.per_position.iter().map(|(v, _)| v).sum();
        let stood: usize = stats.per_position.iter().map(|(_, s)| s).sum();
        assert_eq!((verified, stood), (stats.drafted, stats.accepted));
    }
}

#[test]
fn measured_speeds_decide_how_many_drafts_are_verified() {
    let measured = |sps_by_batch: Vec<f64>| GenerateOptions {
        speculation: Speculation::DraftHead(DraftLength::Measured { sps_by_batch }),
        ..greedy(24)
    };
    let whole = plain(24);
    // Any number of tokens in the same time: every draft pays. Twice the time for each: none does.
    let flat = vec![100.0; 8];
    let steep = (0..8).map(|n| 100.0 / 2f64.powi(n)).collect();
    let mut drafted = Vec::new();
    for table in [flat, steep] {
        let mut stats = SpeculationStats::default();
        assert_eq!(ended(&measured(table), None, &mut stats), whole);
        drafted.push((stats.drafted, stats.passes));
    }
    let [(all, passes), (none, alone)] = drafted[..] else {
        unreachable!()
    };
    // Only the last passes have fewer drafts than a block, for want of room.
    assert!(
        all > 4 * passes.saturating_sub(2) && passes < 23,
        "{drafted:?}"
    );
    assert_eq!((none, alone), (0, 23));
}

#[test]
fn drawn_texts_have_the_distribution_of_plain_ones() {
    const SEEDS: u64 = 800;
    let mut session = session();
    let count = |session: &mut Session<'_>, speculation: &Speculation, first: u64| {
        let mut counts: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
        for seed in first..first + SEEDS {
            session.truncate(0).unwrap();
            let options = GenerateOptions {
                sampling: SamplingParams {
                    temperature: 2.0,
                    top_k: 4,
                    // Of the target alone, so that drafts are often refused.
                    repetition_penalty: 1.5,
                    seed: Some(seed),
                    ..SamplingParams::default()
                },
                max_tokens: 4,
                ignore_eos: true,
                speculation: speculation.clone(),
                ..GenerateOptions::default()
            };
            let generation = session
                .generate("One day a fox and a hen and a bear", &options)
                .unwrap();
            let token = |event: Result<Event>| match event.unwrap() {
                Event::Token(token) => Some(token.token),
                _ => None,
            };
            // The first token comes out of the prompt's pass: those after it are guessed.
            let text: Vec<u32> = generation.filter_map(token).skip(1).take(2).collect();
            *counts.entry(text).or_default() += 1.0;
        }
        counts
    };
    let plain = count(&mut session, &Speculation::Off, 0);
    assert!(plain.len() >= 6, "{plain:?}");
    let [head, _, lookup] = guessing();
    for (i, way) in [head, lookup].into_iter().enumerate() {
        let drawn = count(&mut session, &way, SEEDS * (i as u64 + 1));
        // Two samples of the same size: sum (a - b)^2 / (a + b), texts that are rare in both together.
        let (mut chi, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
        let mut add = |a: f64, b: f64| {
            chi += (a - b) * (a - b) / (a + b);
            cells += 1;
        };
        let texts: Vec<&Vec<u32>> = plain.keys().chain(drawn.keys()).collect();
        let unique: std::collections::BTreeSet<_> = texts.into_iter().collect();
        for text in unique {
            let of = |counts: &BTreeMap<Vec<u32>, f64>| counts.get(text).copied().unwrap_or(0.0);
            let (a, b) = (of(&plain), of(&drawn));
            if a + b < 20.0 {
                rare = (rare.0 + a, rare.1 + b);
            } else {
                add(a, b);
            }
        }
        if rare.0 + rare.1 >= 20.0 {
            add(rare.0, rare.1);
        }
        // Mean n, variance 2n for n degrees of freedom: four standard deviations, seeds are fixed.
        let freedom = f64::from(cells - 1);
        let limit = freedom + 4.0 * (2.0 * freedom).sqrt();
        assert!(
            chi <= limit && cells >= 4,
            "{way:?}: {chi} of {limit}, {cells} cells"
        );
    }
}

#[test]
fn progress_is_reported_after_every_piece_and_can_end_the_prompt() {
    let ids: Vec<u32> = (100..150).collect();
    for speculation in [Speculation::Off, Speculation::DraftHead(DraftLength::Full)] {
        let options = GenerateOptions {
            prefill_chunk: 16,
            speculation,
            ..greedy(6)
        };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let run = |session: &mut Session<'_>, ids: Vec<u32>, stop_at: usize| {
            let seen = seen.clone();
            let generation = session.generate(ids, &options).unwrap();
            let generation = generation.on_prefill(move |done, total| {
                seen.lock().unwrap().push((done, total));
                match done >= stop_at {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            generation.map(|event| event.unwrap()).collect::<Vec<_>>()
        };
        let mut session = self::session();
        // A break behind the last piece comes too late to end anything.
        let whole = run(&mut session, ids.clone(), 50);
        assert_eq!(
            std::mem::take(&mut *seen.lock().unwrap()),
            [(16, 50), (32, 50), (48, 50), (50, 50)]
        );
        assert!(matches!(
            whole.last(),
            Some(Event::Done {
                reason: FinishReason::MaxTokens,
                ..
            })
        ));
        session.truncate(0).unwrap();
        let cut = run(&mut session, ids.clone(), 32);
        assert_eq!(
            std::mem::take(&mut *seen.lock().unwrap()),
            [(16, 50), (32, 50)]
        );
        let usage = Usage {
            prompt_tokens: 50,
            completion_tokens: 0,
        };
        assert_eq!(
            cut,
            [Event::Done {
                reason: FinishReason::Cancelled,
                usage
            }]
        );
        assert_eq!(session.len().unwrap(), 32);
        // What was run stays, and the rest goes on from there to the same text.
        let rest = run(&mut session, ids[32..].to_vec(), usize::MAX);
        let tokens = |events: &[Event]| -> Vec<Event> {
            let done = |e: &&Event| !matches!(e, Event::Done { .. });
            events.iter().filter(done).cloned().collect()
        };
        assert_eq!(tokens(&rest), tokens(&whole));
        seen.lock().unwrap().clear();
    }
}
