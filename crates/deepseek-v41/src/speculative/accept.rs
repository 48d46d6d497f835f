//! Which drafted tokens stand, and what follows them.

use deepseek_v41_core::{Error, Result};

/// How far drafts are accepted.
#[derive(Debug, Clone, PartialEq)]
pub struct Accepted {
    /// Number of drafted tokens that stand.
    pub kept: usize,
    /// The distribution the token after them is drawn from, `[vocab]`.
    pub next: Vec<f32>,
}

/// Decides on drafts so that the tokens that come out are distributed exactly as if each had been
/// drawn from the target model.
///
/// `drafts[j]` was drawn from `draft_probs(j)`; `target_probs(j)` is the target's distribution after
/// the first `j` drafts and is asked for `j = 0, 1, …` in order, no further than needed; `uniform` are
/// draws from `[0, 1)`, one a decision. Draft `j` stands while `u < min(1, p_target / max(p_draft,
/// 1e-8))`. After the first that does not, the next token is drawn from `max(p_target - p_draft, 0)`
/// renormalised, or from `p_target` where less than 1e-8 is left of it; after all of them from the
/// target's own distribution.
///
/// With one-hot distributions (greedy decoding) this keeps drafts while they are the target's choice.
///
/// # Errors
/// Those of the callbacks; [`Error::Value`] when a draft is no token of a distribution.
pub fn accept<'d>(
    drafts: &[u32],
    mut draft_probs: impl FnMut(usize) -> Result<&'d [f32]>,
    mut target_probs: impl FnMut(usize) -> Result<Vec<f32>>,
    mut uniform: impl FnMut() -> f64,
) -> Result<Accepted> {
    for (kept, &draft) in drafts.iter().enumerate() {
        let (mut target, proposed) = (target_probs(kept)?, draft_probs(kept)?);
        let at = draft as usize;
        let (Some(&t), Some(&d)) = (target.get(at), proposed.get(at)) else {
            return Err(Error::value(
                "draft",
                format!("{draft} is outside of the vocabulary"),
            ));
        };
        if uniform() < f64::from(t / d.max(1e-8)) {
            continue;
        }
        let mass: f64 = target
            .iter()
            .zip(proposed)
            .map(|(t, d)| f64::from((t - d).max(0.0)))
            .sum();
        if mass > 1e-8 {
            for (t, d) in target.iter_mut().zip(proposed) {
                *t = (f64::from((*t - d).max(0.0)) / mass) as f32;
            }
        }
        return Ok(Accepted { kept, next: target });
    }
    Ok(Accepted {
        kept: drafts.len(),
        next: target_probs(drafts.len())?,
    })
}
