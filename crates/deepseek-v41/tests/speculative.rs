//! Accepting guesses: the official decisions, the schedule, and that sampling stays what it was.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use deepseek_v41::{
    SamplingParams, TokenHistory,
    sampling::probs,
    speculative::{DraftLength, accept, schedule},
};
use deepseek_v41_testing::{Golden, golden_dir};
use proptest::prelude::*;

/// Rows of a recorded `[n, vocab]` array as distributions at a temperature; 0 gives one-hot rows.
fn distributions(golden: &Golden, key: &str, temperature: f32) -> Vec<Vec<f32>> {
    let params = SamplingParams {
        temperature,
        ..SamplingParams::default()
    };
    let vocab = golden.shape(key)[1];
    let rows = golden.f32(key);
    rows.chunks(vocab)
        .map(|row| probs(row, &params, TokenHistory::default()).unwrap())
        .collect()
}

#[test]
fn decisions_match_the_official_ones() {
    let golden = Golden::open("ops_draft");
    for case in 0..8 {
        for temperature in ["0.0", "0.8"] {
            let key = |part: &str| format!("accept_{case}_t{temperature}.{part}");
            let t = temperature.parse().unwrap();
            let drafts: Vec<u32> = golden
                .i64(&key("tokens"))
                .iter()
                .map(|v| *v as u32)
                .collect();
            let draft = distributions(&golden, &key("draft_logits"), t);
            let target = distributions(&golden, &key("target_logits"), t);
            let mut u = golden.f32(&key("u")).into_iter().map(f64::from);
            let got = accept(
                &drafts,
                |j| Ok(&draft[j]),
                |j| Ok(target[j].clone()),
                || u.next().expect("one draw a decision"),
            )
            .unwrap();
            assert_eq!(
                got.kept as i64,
                golden.i64(&key("accepted"))[0],
                "{}",
                key("")
            );
            deepseek_v41_testing::assert_close(
                &got.next,
                &golden.f32(&key("next_dist")),
                1e-5,
                1e-4,
            );
        }
    }
}

#[test]
fn the_schedule_is_the_official_one() {
    let text = std::fs::read_to_string(golden_dir().join("dspark_schedule.json")).unwrap();
    let cases: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let floats = |v: &serde_json::Value| -> Vec<f64> {
            v.as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_f64().unwrap())
                .collect()
        };
        let lengths = |key: &str| -> Vec<usize> {
            floats(&case[key]).into_iter().map(|v| v as usize).collect()
        };
        let confidence: Vec<Vec<f64>> = case["confidence"]
            .as_array()
            .unwrap()
            .iter()
            .map(floats)
            .collect();
        let sps = floats(&case["sps_by_batch"]);
        assert_eq!(schedule(&confidence, &sps), lengths("lengths"));
        let by_threshold: Vec<usize> = confidence
            .iter()
            .map(|row| {
                let logits: Vec<f32> = row.iter().map(|p| (p / (1.0 - p)).ln() as f32).collect();
                DraftLength::Confidence(0.7).choose(&logits)
            })
            .collect();
        assert_eq!(by_threshold, lengths("threshold_0.7"));
    }
}

#[test]
fn a_schedule_without_a_table_or_requests_admits_nothing() {
    assert_eq!(schedule(&[vec![0.9, 0.9]], &[]), [0]);
    assert_eq!(schedule(&[], &[1.0]), [0usize; 0]);
    assert_eq!(schedule(&[vec![0.9]], &[9.0, 1.0, 1.0]), [1]);
    assert_eq!(DraftLength::Confidence(0.0).choose(&[-50.0, -50.0]), 2);
    assert_eq!(DraftLength::AtMost(1).choose(&[0.0, 0.0]), 1);
}

/// A small deterministic generator, so that the counts below are the same on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64) / (1u64 << 31) as f64
    }

    fn draw(&mut self, p: &[f32]) -> u32 {
        let (u, mut sum) = (self.next(), 0.0);
        for (i, p) in p.iter().enumerate() {
            sum += f64::from(*p);
            if u < sum {
                return i as u32;
            }
        }
        p.len() as u32 - 1
    }
}

fn normalised(weights: &[u32]) -> Vec<f32> {
    let sum: u32 = weights.iter().sum();
    weights.iter().map(|w| *w as f32 / sum as f32).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Whatever the draft distributions are, the first two tokens are distributed as by drawing from
    /// the target alone.
    #[test]
    fn the_output_is_distributed_as_the_target(
        target in prop::collection::vec(prop::collection::vec(1u32..20, 4), 3),
        draft in prop::collection::vec(prop::collection::vec(0u32..20, 4), 2),
        seed in any::<u64>(),
    ) {
        prop_assume!(draft.iter().all(|row| row.iter().sum::<u32>() > 0));
        let target: Vec<_> = target.iter().map(|row| normalised(row)).collect();
        let draft: Vec<_> = draft.iter().map(|row| normalised(row)).collect();
        let (mut rng, n) = (Rng(seed), 20_000);
        let mut counts = [0f64; 16];
        for _ in 0..n {
            let drafts = [rng.draw(&draft[0]), rng.draw(&draft[1])];
            let mut u = [rng.next(), rng.next()].into_iter();
            let accepted = accept(
                &drafts,
                |j| Ok(&draft[j]),
                |j| Ok(target[j].clone()),
                || u.next().expect("two decisions"),
            ).unwrap();
            let next = rng.draw(&accepted.next);
            let first = if accepted.kept > 0 { drafts[0] } else { next };
            let second = match accepted.kept {
                0 => rng.draw(&target[1]),
                1 => next,
                _ => drafts[1],
            };
            counts[(first * 4 + second) as usize] += 1.0;
        }
        let mut chi2 = 0.0;
        for (i, count) in counts.iter().enumerate() {
            let expected = f64::from(target[0][i / 4]) * f64::from(target[1][i % 4]) * f64::from(n);
            chi2 += (count - expected).powi(2) / expected;
        }
        // 15 degrees of freedom: 50 is passed by chance once in 100 000 runs.
        prop_assert!(chi2 < 50.0, "chi-squared {}", chi2);
    }
}

#[test]
fn a_draft_outside_of_the_vocabulary_is_an_error() {
    let p = [0.5, 0.5];
    assert!(accept(&[2], |_| Ok(&p), |_| Ok(p.to_vec()), || 0.0).is_err());
}

#[test]
fn nothing_drafted_gives_the_target_itself() {
    let got = accept(&[], |_| Ok(&[]), |_| Ok(vec![0.25, 0.75]), || 0.0).unwrap();
    assert_eq!((got.kept, got.next), (0, vec![0.25, 0.75]));
}
