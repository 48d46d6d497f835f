use deepseek_v41_core::Result;

use super::{Proposal, ProposeContext, Proposer};

/// Guesses that the text goes on as it did the last time its newest tokens occurred. Free, and good
/// where a text repeats its prompt: summaries, edits, code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLookup {
    /// Longest run of newest tokens looked for.
    pub max_ngram: usize,
    /// Shortest run that counts.
    pub min_ngram: usize,
    /// Most tokens proposed.
    pub max_tokens: usize,
}

impl Default for PromptLookup {
    fn default() -> Self {
        Self {
            max_ngram: 4,
            min_ngram: 2,
            max_tokens: 5,
        }
    }
}

impl PromptLookup {
    /// The tokens after the latest earlier occurrence of the longest known suffix of `text`.
    pub fn guess<'t>(&self, text: &'t [u32], max: usize) -> &'t [u32] {
        for n in (self.min_ngram.max(1)..=self.max_ngram.min(text.len())).rev() {
            let suffix = &text[text.len() - n..];
            let earlier = &text[..text.len() - 1];
            if let Some(at) = earlier.windows(n).rposition(|run| run == suffix) {
                let after = &text[at + n..];
                return &after[..after.len().min(max).min(self.max_tokens)];
            }
        }
        &[]
    }
}

impl Proposer for PromptLookup {
    fn propose(&mut self, ctx: ProposeContext<'_>) -> Result<Proposal> {
        let tokens = ctx.next.map_or(&[][..], |_| self.guess(ctx.text, ctx.max));
        Ok(Proposal {
            tokens: tokens.to_vec(),
            ..Proposal::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_latest_occurrence_counts() {
        let lookup = PromptLookup {
            max_ngram: 3,
            min_ngram: 1,
            max_tokens: 3,
        };
        assert_eq!(lookup.guess(&[1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 9), [9, 2, 3]);
        assert_eq!(lookup.guess(&[5, 1, 5, 2, 5], 9), [2, 5]);
        assert_eq!(lookup.guess(&[5, 1, 5, 2, 5], 1), [2]);
        assert_eq!(lookup.guess(&[1, 2, 3], 9), [0u32; 0]);
        assert_eq!(lookup.guess(&[], 9), [0u32; 0]);
        assert_eq!(lookup.guess(&[7, 7], 9), [7]);
    }
}
