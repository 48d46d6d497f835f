//! The steps from logits to a distribution.

use std::{cmp::Ordering, collections::HashMap};

use deepseek_v41_core::{Best, Error, Result, best};

use super::{SamplingParams, TokenHistory};

/// Refuses logits from which no token can be chosen.
///
/// Returns the index of the largest, the lowest among equals.
pub(super) fn check(logits: &[f32]) -> Result<usize> {
    match best(logits) {
        Best::Token(token) => Ok(token as usize),
        Best::Unusable(i) => {
            let v = logits.get(i as usize).copied().unwrap_or(f32::NAN);
            Err(Error::value("logits", format!("{v} at token {i}")))
        }
        Best::Impossible => Err(Error::value(
            "logits",
            format!("no token of {} is possible", logits.len()),
        )),
    }
}

/// Bias, then penalties.
pub(super) fn edit(
    logits: &mut [f32],
    params: &SamplingParams,
    history: TokenHistory<'_>,
) -> Result<()> {
    let vocab = logits.len();
    let outside = |what: &str, token: u32| {
        Error::value(
            format!("{what} token {token}"),
            format!("the vocabulary has {vocab}"),
        )
    };
    for &(token, bias) in &params.logit_bias {
        *logits
            .get_mut(token as usize)
            .ok_or_else(|| outside("logit_bias", token))? += bias;
    }
    if !params.has_penalties() {
        return Ok(());
    }
    let mut counts: HashMap<u32, u32> = HashMap::new();
    for &token in history.prompt {
        counts.entry(token).or_insert(0);
    }
    for &token in history.generated {
        *counts.entry(token).or_insert(0) += 1;
    }
    for (token, count) in counts {
        let logit = logits
            .get_mut(token as usize)
            .ok_or_else(|| outside("history", token))?;
        let r = params.repetition_penalty;
        *logit = if *logit > 0.0 { *logit / r } else { *logit * r };
        if count > 0 {
            *logit -= params.frequency_penalty * count as f32 + params.presence_penalty;
        }
    }
    Ok(())
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub token: u32,
    /// Relative to the best candidate until the end, when they sum to 1.
    pub prob: f32,
}

/// Temperature (above 0) and filters over checked logits whose largest is `best`.
///
/// Candidates come out in token order.
pub(super) fn candidates(
    logits: &[f32],
    best: usize,
    params: &SamplingParams,
    out: &mut Vec<Candidate>,
) {
    let (max, temperature) = (logits[best], params.temperature);
    out.clear();
    for (token, &logit) in logits.iter().enumerate() {
        // Subtracting first keeps a tiny temperature from overflowing.
        let prob = ((logit - max) / temperature).exp();
        if prob > 0.0 {
            out.push(Candidate {
                token: token as u32,
                prob,
            });
        }
    }
    let k = if params.top_k == 0 {
        out.len()
    } else {
        params.top_k.min(out.len())
    };
    let descending = |a: &Candidate, b: &Candidate| -> Ordering {
        // Logits decide, not probabilities: distinct logits can round to equal ones.
        let (x, y) = (logits[a.token as usize], logits[b.token as usize]);
        y.total_cmp(&x).then(a.token.cmp(&b.token))
    };
    if k < out.len() {
        out.select_nth_unstable_by(k - 1, descending);
        out.truncate(k);
    }
    if params.top_p < 1.0 {
        out.sort_unstable_by(descending);
        let total: f64 = out.iter().map(|c| f64::from(c.prob)).sum();
        let enough = total * f64::from(params.top_p);
        let mut sum = 0.0;
        let kept = out.iter().position(|c| {
            sum += f64::from(c.prob);
            sum >= enough
        });
        out.truncate(kept.map_or(out.len(), |last| last + 1));
    }
    if params.min_p > 0.0 {
        // The best candidate's is exactly 1.
        out.retain(|c| c.prob >= params.min_p);
    }
    out.sort_unstable_by_key(|c| c.token);
    let total: f64 = out.iter().map(|c| f64::from(c.prob)).sum();
    for c in out.iter_mut() {
        c.prob = (f64::from(c.prob) / total) as f32;
    }
}

/// The distribution tokens are drawn from, over the whole vocabulary: every step but the draw.
///
/// Temperature 0 puts everything on one token. This is what the acceptance rule of speculative
/// decoding compares between draft and target.
///
/// # Errors
/// Unusable parameters or logits; see the [module documentation](super).
pub fn probs(
    logits: &[f32],
    params: &SamplingParams,
    history: TokenHistory<'_>,
) -> Result<Vec<f32>> {
    params.validate()?;
    let mut best = check(logits)?;
    let mut edited = Vec::new();
    let mut logits = logits;
    if params.edits_logits() {
        edited.extend_from_slice(logits);
        edit(&mut edited, params, history)?;
        best = check(&edited)?;
        logits = &edited;
    }
    Ok(distribution(logits, best, params))
}

pub(super) fn distribution(logits: &[f32], best: usize, params: &SamplingParams) -> Vec<f32> {
    let mut dense = vec![0.0; logits.len()];
    if params.temperature == 0.0 {
        dense[best] = 1.0;
        return dense;
    }
    let mut kept = Vec::new();
    candidates(logits, best, params, &mut kept);
    for c in kept {
        dense[c.token as usize] = c.prob;
    }
    dense
}
