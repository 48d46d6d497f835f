//! From "the experts of each token" to "the tokens of each expert".

use std::ops::Range;

/// The (token, slot) pairs of a routing, by expert. A pair is `token * k + slot`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Groups {
    first: usize,
    starts: Vec<u32>,
    pairs: Vec<u32>,
}

/// Sorts the pairs of `experts: [T, k]` by expert, tokens ascending within one. Pairs whose expert
/// is outside of `range` (another rank's) are left out.
///
/// Reference: `torch.where(indices == i)` for each `i`, in one pass.
pub fn group_tokens(experts: &[u32], range: Range<usize>) -> Groups {
    let local = |e: &u32| {
        (*e as usize)
            .checked_sub(range.start)
            .filter(|e| *e < range.len())
    };
    let mut starts = vec![0u32; range.len() + 1];
    for e in experts.iter().filter_map(local) {
        starts[e + 1] += 1;
    }
    for e in 0..range.len() {
        starts[e + 1] += starts[e];
    }
    let mut next = starts.clone();
    let mut pairs = vec![0; starts[range.len()] as usize];
    for (pair, e) in experts.iter().enumerate() {
        if let Some(e) = local(e) {
            pairs[next[e] as usize] = pair as u32;
            next[e] += 1;
        }
    }
    Groups {
        first: range.start,
        starts,
        pairs,
    }
}

impl Groups {
    /// The experts that got tokens, ascending, each with its pairs.
    pub fn active(&self) -> impl Iterator<Item = (usize, &[u32])> {
        self.starts
            .windows(2)
            .enumerate()
            .filter(|(_, w)| w[0] < w[1])
            .map(|(e, w)| (self.first + e, &self.pairs[w[0] as usize..w[1] as usize]))
    }

    /// Pairs over all experts of the range.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether no expert of the range got a token.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }
}
