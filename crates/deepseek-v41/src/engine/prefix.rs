//! Sequences kept for texts that begin with them.

use deepseek_v41_model::SequenceId;

use super::job::{Drafts, Job};

/// A kept sequence.
#[derive(Debug)]
pub(super) struct Prefix {
    pub(super) seq: SequenceId,
    /// Its tokens, text only.
    pub(super) ids: Vec<u32>,
    /// Whether the draft head has seen them all.
    pub(super) drafted: bool,
}

/// Kept sequences, the least recently used first.
///
/// There are fewer than slots, so a scan finds the longest match soon enough.
#[derive(Debug, Default)]
pub(super) struct Prefixes(Vec<Prefix>);

impl Prefixes {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = &Vec<u32>> {
        self.0.iter().map(|p| &p.ids)
    }

    pub(super) fn contains(&self, ids: &[u32]) -> bool {
        self.0.iter().any(|p| p.ids == ids)
    }

    pub(super) fn keep(&mut self, prefix: Prefix) {
        self.0.push(prefix);
    }

    /// The longest that a text begins with and can go on from: `(number, length)`.
    pub(super) fn find(&self, job: &Job<'_>) -> Option<(usize, usize)> {
        if !job.images.is_empty() {
            return None;
        }
        let drafts = matches!(job.drafts, Drafts::Head(_));
        let fits = |p: &Prefix| job.shared_with(&p.ids) == p.ids.len() && (p.drafted || !drafts);
        let found = self.0.iter().enumerate().filter(|(_, p)| fits(p));
        found
            .map(|(at, p)| (at, p.ids.len()))
            .max_by_key(|(_, len)| *len)
    }

    /// Makes one the most recently used.
    pub(super) fn touch(&mut self, at: usize) -> SequenceId {
        self.0[at..].rotate_left(1);
        self.0[self.0.len() - 1].seq
    }

    pub(super) fn take(&mut self, at: usize) -> Prefix {
        self.0.remove(at)
    }

    pub(super) fn take_oldest(&mut self) -> Option<Prefix> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }
}
