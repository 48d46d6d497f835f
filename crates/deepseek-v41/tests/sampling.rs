//! Sampling: greedy, filters, penalties, reproducibility, and the distribution of the draws.
#![allow(clippy::unwrap_used)]

use deepseek_v41::{
    Error, Result, Sampler, SamplingParams, TokenHistory,
    sampling::{Sampled, probs},
};
use proptest::prelude::*;

const NONE: TokenHistory<'static> = TokenHistory {
    prompt: &[],
    generated: &[],
};
const INF: f32 = f32::INFINITY;

fn sample(params: SamplingParams, logits: &[f32]) -> Result<Sampled> {
    Sampler::new(params)?.sample(logits, NONE)
}

fn seeded(seed: u64) -> SamplingParams {
    SamplingParams {
        seed: Some(seed),
        ..Default::default()
    }
}

fn kept(params: &SamplingParams, logits: &[f32]) -> Vec<usize> {
    let p = probs(logits, params, NONE).unwrap();
    assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    (0..p.len()).filter(|&i| p[i] > 0.0).collect()
}

fn assert_near(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn greedy_takes_the_lowest_of_the_largest() {
    for (logits, token) in [
        (&[0.0, 3.0, 3.0, -INF][..], 1),
        (&[-5.0], 0),
        (&[-INF, -1e30, -INF], 1),
    ] {
        assert_eq!(
            sample(SamplingParams::greedy(), logits).unwrap().token,
            token
        );
        assert_eq!(
            probs(logits, &SamplingParams::greedy(), NONE).unwrap()[token as usize],
            1.0
        );
    }
    // -0 and 0 are equal.
    assert_eq!(
        sample(SamplingParams::greedy(), &[-0.0, 0.0])
            .unwrap()
            .token,
        0
    );
}

#[test]
fn impossible_logits_never_become_a_token() {
    for params in [
        SamplingParams::greedy(),
        seeded(1),
        SamplingParams {
            top_k: 1,
            ..seeded(1)
        },
    ] {
        for logits in [
            &[][..],
            &[f32::NAN],
            &[1.0, f32::NAN, 2.0],
            &[-INF, -INF],
            &[1.0, INF],
        ] {
            let result = sample(params.clone(), logits);
            assert!(
                matches!(result, Err(Error::Value { .. })),
                "{logits:?}: {result:?}"
            );
            assert!(probs(logits, &params, NONE).is_err());
        }
        // A bias or a hook that rules everything out, or that hides or makes a NaN.
        let bias = SamplingParams {
            logit_bias: vec![(0, -INF), (1, -INF)],
            ..params.clone()
        };
        assert!(sample(bias, &[1.0, 2.0]).is_err());
        for (logits, value) in [
            (&[1.0, 2.0], f32::NAN),
            (&[1.0, f32::NAN], 0.0),
            (&[1.0, 2.0], -INF),
        ] {
            let mut sampler = Sampler::new(params.clone()).unwrap();
            sampler.add_hook(move |_: &[u32], logits: &mut [f32]| {
                logits.fill(value);
                Ok(())
            });
            assert!(sampler.sample(logits, NONE).is_err());
        }
    }
}

#[test]
fn unusable_parameters_are_named() {
    let refuse = |name: &str, params: SamplingParams| match Sampler::new(params) {
        Err(Error::Value { what, .. }) => assert!(what.contains(name), "{what}"),
        other => panic!("{name}: {other:?}"),
    };
    let d = SamplingParams::default;
    for t in [-0.1, f32::NAN, INF] {
        refuse(
            "temperature",
            SamplingParams {
                temperature: t,
                ..d()
            },
        );
    }
    for p in [0.0, 1.1, f32::NAN] {
        refuse("top_p", SamplingParams { top_p: p, ..d() });
    }
    for p in [-0.1, 1.1, f32::NAN] {
        refuse("min_p", SamplingParams { min_p: p, ..d() });
    }
    for r in [0.0, -1.0, INF, f32::NAN] {
        refuse(
            "repetition_penalty",
            SamplingParams {
                repetition_penalty: r,
                ..d()
            },
        );
    }
    refuse(
        "presence_penalty",
        SamplingParams {
            presence_penalty: INF,
            ..d()
        },
    );
    refuse(
        "frequency_penalty",
        SamplingParams {
            frequency_penalty: f32::NAN,
            ..d()
        },
    );
    refuse(
        "logit_bias",
        SamplingParams {
            logit_bias: vec![(3, f32::NAN)],
            ..d()
        },
    );
    refuse(
        "logit_bias",
        SamplingParams {
            logit_bias: vec![(3, INF)],
            ..d()
        },
    );
    refuse(
        "top_logprobs",
        SamplingParams {
            top_logprobs: 2,
            ..d()
        },
    );
    let unknown = serde_json::from_str::<SamplingParams>("{\"temprature\": 1}");
    assert!(unknown.is_err(), "misspelt parameters are not ignored");
    let parsed: SamplingParams =
        serde_json::from_str("{\"temperature\": 0.5, \"logit_bias\": [[1, -2]]}").unwrap();
    assert_eq!(
        parsed,
        SamplingParams {
            temperature: 0.5,
            logit_bias: vec![(1, -2.0)],
            ..d()
        }
    );
}

#[test]
fn filters_keep_what_they_say() {
    // Probabilities .4 .1 .3 .2
    let logits = [0.4f32.ln(), 0.1f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let d = SamplingParams::default;
    assert_eq!(kept(&d(), &logits), [0, 1, 2, 3]);
    assert_near(&probs(&logits, &d(), NONE).unwrap(), &[0.4, 0.1, 0.3, 0.2]);
    assert_eq!(kept(&SamplingParams { top_k: 2, ..d() }, &logits), [0, 2]);
    assert_eq!(
        kept(&SamplingParams { top_k: 99, ..d() }, &logits),
        [0, 1, 2, 3]
    );
    assert_eq!(
        kept(&SamplingParams { top_p: 0.65, ..d() }, &logits),
        [0, 2]
    );
    assert_eq!(
        kept(&SamplingParams { top_p: 0.75, ..d() }, &logits),
        [0, 2, 3]
    );
    assert_eq!(kept(&SamplingParams { top_p: 1e-9, ..d() }, &logits), [0]);
    assert_eq!(kept(&SamplingParams { min_p: 0.6, ..d() }, &logits), [0, 2]);
    assert_eq!(kept(&SamplingParams { min_p: 1.0, ..d() }, &logits), [0]);
    // top_p is of what top_k left: .4 of .7 alone reaches one half.
    assert_eq!(
        kept(
            &SamplingParams {
                top_k: 2,
                top_p: 0.5,
                ..d()
            },
            &logits
        ),
        [0]
    );
    // Ties keep the lower index.
    assert_eq!(kept(&SamplingParams { top_k: 2, ..d() }, &[1.0; 5]), [0, 1]);
    assert_eq!(
        kept(&SamplingParams { top_p: 0.5, ..d() }, &[1.0; 4]),
        [0, 1]
    );
    // Distinct logits whose probabilities round to the same number are still ordered.
    let close = [16_777_214.0, 16_777_216.0];
    assert_eq!(
        kept(
            &SamplingParams {
                top_k: 1,
                temperature: 1e30,
                ..d()
            },
            &close
        ),
        [1]
    );
}

#[test]
fn a_tiny_temperature_is_greedy_and_a_huge_one_uniform() {
    let logits = [1e30, -1e30, 3.0, 1e30];
    let cold = SamplingParams {
        temperature: f32::MIN_POSITIVE,
        ..Default::default()
    };
    assert_near(&probs(&logits, &cold, NONE).unwrap(), &[0.5, 0.0, 0.0, 0.5]);
    let hot = SamplingParams {
        temperature: f32::MAX,
        ..Default::default()
    };
    assert_near(
        &probs(&[1.0, -INF, 5.0], &hot, NONE).unwrap(),
        &[0.5, 0.0, 0.5],
    );
}

#[test]
fn penalties_and_bias() {
    let logits = [2.0, -2.0, 1.0, 0.5];
    let history = TokenHistory {
        prompt: &[1, 2],
        generated: &[0, 0, 2],
    };
    let edited = |params: SamplingParams, expected: [f32; 4]| {
        let direct = probs(&expected, &SamplingParams::default(), NONE).unwrap();
        assert_near(&probs(&logits, &params, history).unwrap(), &direct);
    };
    let d = SamplingParams::default;
    edited(
        SamplingParams {
            repetition_penalty: 2.0,
            ..d()
        },
        [1.0, -4.0, 0.5, 0.5],
    );
    edited(
        SamplingParams {
            presence_penalty: 0.25,
            ..d()
        },
        [1.75, -2.0, 0.75, 0.5],
    );
    edited(
        SamplingParams {
            frequency_penalty: 0.25,
            ..d()
        },
        [1.5, -2.0, 0.75, 0.5],
    );
    edited(
        SamplingParams {
            logit_bias: vec![(3, 1.0), (0, -INF)],
            ..d()
        },
        [-INF, -2.0, 1.0, 1.5],
    );
    // Bias comes first, then repetition, then the others.
    let all = SamplingParams {
        logit_bias: vec![(1, 4.0)],
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..d()
    };
    edited(all, [0.0, 1.0, -0.25, 0.5]);
    let outside = TokenHistory {
        prompt: &[4],
        generated: &[],
    };
    let penalty = SamplingParams {
        repetition_penalty: 2.0,
        ..d()
    };
    assert!(matches!(
        probs(&logits, &penalty, outside),
        Err(Error::Value { .. })
    ));
    let bias = SamplingParams {
        logit_bias: vec![(4, 1.0)],
        ..d()
    };
    assert!(matches!(
        probs(&logits, &bias, NONE),
        Err(Error::Value { .. })
    ));
}

#[test]
fn hooks_see_the_tokens_and_have_the_last_word() {
    let params = SamplingParams {
        logit_bias: vec![(2, 100.0)],
        ..SamplingParams::greedy()
    };
    let mut sampler = Sampler::new(params).unwrap();
    sampler.add_hook(|generated: &[u32], logits: &mut [f32]| {
        assert_eq!(generated, [7, 8]);
        assert_eq!(logits[2], 101.0);
        logits[2] = f32::NEG_INFINITY;
        Ok(())
    });
    let history = TokenHistory {
        prompt: &[1],
        generated: &[7, 8],
    };
    assert_eq!(sampler.sample(&[3.0, 2.0, 1.0], history).unwrap().token, 0);
    assert_eq!(
        sampler.probs(&[3.0, 2.0, 1.0], history).unwrap(),
        [1.0, 0.0, 0.0]
    );
    sampler.add_hook(|_: &[u32], _: &mut [f32]| Err(Error::value("grammar", "dead end")));
    assert!(
        sampler
            .sample(&[3.0, 2.0, 1.0], history)
            .unwrap_err()
            .to_string()
            .contains("dead end")
    );
}

#[test]
fn logprobs_are_the_models_own() {
    let logits = [0.4f32.ln(), 0.1f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let params = SamplingParams {
        logprobs: true,
        top_logprobs: 2,
        temperature: 0.3,
        logit_bias: vec![(1, 50.0)],
        ..seeded(3)
    };
    let sampled = sample(params.clone(), &logits).unwrap();
    assert_eq!(sampled.token, 1);
    assert_near(&[sampled.logprob.unwrap()], &[0.1f32.ln()]);
    let tops: Vec<u32> = sampled.top_logprobs.iter().map(|t| t.token).collect();
    assert_eq!(tops, [0, 2]);
    assert_near(&[sampled.top_logprobs[1].logprob], &[0.3f32.ln()]);
    // More than there are; ties; impossible tokens.
    let sampled = sample(
        SamplingParams {
            top_logprobs: 9,
            ..params
        },
        &[-INF, 1.0, 1.0],
    )
    .unwrap();
    let tops: Vec<u32> = sampled.top_logprobs.iter().map(|t| t.token).collect();
    assert_eq!(tops, [1, 2, 0]);
    assert_eq!(sampled.top_logprobs[2].logprob, -INF);
    assert_eq!(sample(seeded(1), &[1.0]).unwrap().logprob, None);
}

#[test]
fn a_seed_repeats_and_seeds_differ() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
    let run = |seed| -> Vec<u32> {
        let mut sampler = Sampler::new(seeded(seed)).unwrap();
        (0..40)
            .map(|_| sampler.sample(&logits, NONE).unwrap().token)
            .collect()
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
    // What the stream gives is part of the interface.
    assert_eq!(run(0)[..6], FIRST_DRAWS);
}

const FIRST_DRAWS: [u32; 6] = [11, 42, 13, 46, 48, 19];

/// Pearson's chi-squared over 20 000 draws stays below the 99.99 % quantile for its degrees of freedom.
#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..16).map(|i| ((i * 5) % 16) as f32 * 0.2).collect();
    for (params, quantile) in [
        (seeded(11), 44.3),
        (
            SamplingParams {
                temperature: 0.5,
                ..seeded(12)
            },
            44.3,
        ),
        (
            SamplingParams {
                top_k: 8,
                ..seeded(13)
            },
            29.9,
        ),
        (
            SamplingParams {
                min_p: 0.2,
                top_p: 0.9,
                ..seeded(14)
            },
            29.9,
        ),
    ] {
        let expected = probs(&logits, &params, NONE).unwrap();
        let mut sampler = Sampler::new(params).unwrap();
        let draws = 20_000;
        let mut by_logits = [0u32; 16];
        let mut by_weights = [0u32; 16];
        for _ in 0..draws {
            by_logits[sampler.sample(&logits, NONE).unwrap().token as usize] += 1;
            by_weights[sampler.draw(&expected).unwrap() as usize] += 1;
        }
        for counts in [by_logits, by_weights] {
            let mut chi = 0.0;
            for (count, p) in counts.into_iter().zip(&expected) {
                let e = f64::from(*p) * f64::from(draws);
                assert!(e > 0.0 || count == 0);
                if e > 0.0 {
                    chi += (f64::from(count) - e).powi(2) / e;
                }
            }
            assert!(chi < quantile, "{chi}");
        }
    }
}

#[test]
fn draws_refuse_what_is_no_distribution() {
    let mut sampler = Sampler::new(seeded(1)).unwrap();
    for weights in [&[][..], &[0.0, 0.0], &[0.5, -0.5], &[f32::NAN, 1.0], &[INF]] {
        assert!(matches!(sampler.draw(weights), Err(Error::Value { .. })));
    }
    assert_eq!(sampler.draw(&[0.0, 1e-30, 0.0]).unwrap(), 1);
    assert!(
        (0..100)
            .map(|_| sampler.uniform())
            .all(|u| (0.0..1.0).contains(&u))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn only_kept_tokens_are_drawn_and_top_1_is_greedy(
        logits in prop::collection::vec(prop_oneof![-20f32..20.0, Just(1.0), Just(-INF)], 1..40),
        (temperature, top_k, top_p, min_p) in (0.05f32..4.0, 0usize..50, 0.01f32..=1.0, 0f32..=1.0),
        seed in any::<u64>(),
    ) {
        prop_assume!(logits.iter().any(|v| v.is_finite()));
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..seeded(seed) };
        let p = probs(&logits, &params, NONE).unwrap();
        prop_assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-4);
        let greedy = sample(SamplingParams::greedy(), &logits).unwrap().token;
        prop_assert!(p[greedy as usize] > 0.0);
        if top_k > 0 {
            prop_assert!(p.iter().filter(|p| **p > 0.0).count() <= top_k);
        }
        let mut sampler = Sampler::new(params.clone()).unwrap();
        prop_assert_eq!(&sampler.probs(&logits, NONE).unwrap(), &p);
        for _ in 0..5 {
            prop_assert!(p[sampler.sample(&logits, NONE).unwrap().token as usize] > 0.0);
        }
        prop_assert_eq!(sample(SamplingParams { top_k: 1, ..params }, &logits).unwrap().token, greedy);
    }
}
