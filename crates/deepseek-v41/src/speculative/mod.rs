//! Speculative decoding: several proposed tokens verified in one pass, with the output unchanged.
//!
//! A [`Proposer`] guesses the tokens that follow; the backbone runs the last token and all guesses as
//! one chunk, which gives its distribution after each; [`accept`] keeps those guesses that leave the
//! output distributed as without them (and, taking the most probable token, equal to it token for
//! token); the sequence is cut back behind the last one kept.

mod accept;
mod draft_head;
mod lookup;
mod schedule;

use std::ops::AddAssign;

pub use accept::{Accepted, accept};
use candle_core::Tensor;
use deepseek_v41_core::Result;
use deepseek_v41_model::{ModelState, SequenceId};
pub use draft_head::DraftHead;
pub(crate) use draft_head::{DraftItem, propose_all};
pub use lookup::PromptLookup;
pub(crate) use schedule::sigmoid;
pub use schedule::{DraftLength, schedule};

use crate::sampling::Sampler;

/// Proposed tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Proposal {
    /// The tokens, to follow the last one of the text.
    pub tokens: Vec<u32>,
    /// The distribution each was drawn from, `[tokens][vocab]`; empty if they were not drawn but are
    /// simply a guess (one-hot).
    pub probs: Vec<Vec<f32>>,
    /// A logit a token for its being accepted if all before it are; empty if the proposer has none.
    pub confidence: Vec<f32>,
}

/// What a [`Proposer`] can look at.
pub struct ProposeContext<'a> {
    /// The caches, all of whose tokens are there to stay.
    pub state: &'a mut ModelState,
    /// The sequence in it.
    pub seq: SequenceId,
    /// The whole text, the token not run yet (`next`) last.
    pub text: &'a [u32],
    /// The token to propose after; `None` while a prompt is being run and nothing can be proposed.
    pub next: Option<u32>,
    /// `[n, ..]` bf16: the backbone's hidden states of the `n` tokens run since the last call, for
    /// proposers that ask for them.
    pub hidden: Option<&'a Tensor>,
    /// The sequence's sampler, for proposers that draw.
    pub sampler: &'a mut Sampler,
    /// Most tokens worth proposing.
    pub max: usize,
}

/// A source of guesses.
pub trait Proposer: Send {
    /// Whether [`ProposeContext::hidden`] has to be computed.
    fn needs_hidden(&self) -> bool {
        false
    }

    /// Proposes up to `max` tokens; none is an answer too. Called once for every pass of the backbone.
    ///
    /// # Errors
    /// Whatever makes going on impossible; a proposer that has no guess returns an empty proposal.
    fn propose(&mut self, ctx: ProposeContext<'_>) -> Result<Proposal>;
}

/// How well guesses did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Passes of the backbone after the prompt's.
    pub passes: usize,
    /// Tokens proposed and verified.
    pub drafted: usize,
    /// Tokens of those that stood.
    pub accepted: usize,
    /// For each place in a proposal how often it was verified and how often it stood.
    pub per_position: Vec<(usize, usize)>,
}

impl SpeculationStats {
    pub(crate) fn record(&mut self, drafted: usize, kept: usize) {
        self.passes += 1;
        self.drafted += drafted;
        self.accepted += kept;
        if self.per_position.len() < drafted {
            self.per_position.resize(drafted, (0, 0));
        }
        for (j, (verified, stood)) in self.per_position[..drafted].iter_mut().enumerate() {
            *verified += 1;
            *stood += usize::from(j < kept);
        }
    }

    /// Tokens that were verified for nothing.
    pub fn wasted(&self) -> usize {
        self.drafted - self.accepted
    }

    /// Drafts that stood, a pass.
    pub fn mean_accepted(&self) -> f64 {
        self.accepted as f64 / self.passes.max(1) as f64
    }
}

impl AddAssign<&Self> for SpeculationStats {
    /// The statistics of two generations together.
    fn add_assign(&mut self, other: &Self) {
        self.passes += other.passes;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        if self.per_position.len() < other.per_position.len() {
            self.per_position.resize(other.per_position.len(), (0, 0));
        }
        let places = self.per_position.iter_mut().zip(&other.per_position);
        for (own, others) in places {
            *own = (own.0 + others.0, own.1 + others.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_count_places_and_waste() {
        let mut stats = SpeculationStats::default();
        assert_eq!((stats.wasted(), stats.mean_accepted()), (0, 0.0));
        for (drafted, kept) in [(3, 3), (0, 0), (5, 1), (2, 0)] {
            stats.record(drafted, kept);
        }
        assert_eq!((stats.passes, stats.drafted, stats.accepted), (4, 10, 4));
        assert_eq!(stats.wasted(), 6);
        assert_eq!(stats.per_position, [(3, 2), (3, 1), (2, 1), (1, 0), (1, 0)]);
        assert_eq!(stats.mean_accepted(), 1.0);
        let mut both = SpeculationStats::default();
        both.record(1, 1);
        both += &stats;
        assert_eq!((both.passes, both.drafted, both.accepted), (5, 11, 5));
        assert_eq!(both.per_position[..2], [(4, 3), (3, 1)]);
    }
}
