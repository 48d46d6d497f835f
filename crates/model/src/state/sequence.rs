//! One sequence of a state, without its cached rows.

use deepseek_v41_core::{Error, Result};

/// One sequence. Its ids are also its n-gram history, so that there is no hash state to roll back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sequence {
    pub(crate) ids: Vec<u32>,
    /// 1 inside image spans; empty as long as there is none.
    pub(crate) image_mask: Vec<u8>,
    /// How many of its tokens the draft rings have seen.
    pub(crate) drafted: usize,
    /// Length of the first chunk: the reference's stale index keys depend on it.
    pub(crate) prefill: u32,
    /// The longest the sequence has been: rows of that length have replaced older ones in the rings.
    pub(crate) high_water: usize,
    /// The rings hold nothing of lengths below this one: it was restored from a file.
    pub(crate) whole_from: usize,
    /// A step failed half-way and left the rings in an unknown state.
    pub(crate) broken: bool,
}

impl Sequence {
    /// The last `n` tokens before the end, with their image mask.
    pub(crate) fn history(&self, n: usize) -> (&[u32], Option<&[u8]>) {
        let from = self.ids.len().saturating_sub(n);
        let mask = (!self.image_mask.is_empty()).then(|| &self.image_mask[from..]);
        (&self.ids[from..], mask)
    }

    /// Refuses a sequence whose last step failed half-way.
    pub(crate) fn check_whole(&self) -> Result<()> {
        match self.broken {
            false => Ok(()),
            true => Err(Error::value(
                "sequence",
                "an earlier step failed half-way: release it and start anew",
            )),
        }
    }

    /// Whether the caches still hold what a sequence of `len` tokens needs.
    pub(super) fn check_rewind(&self, len: usize, max_rollback: usize) -> Result<()> {
        self.check_whole()?;
        if len > self.ids.len() {
            return Err(Error::value(
                "length",
                format!(
                    "{len} is past the end of a sequence of {} tokens",
                    self.ids.len()
                ),
            ));
        }
        let oldest = self
            .high_water
            .saturating_sub(max_rollback)
            .max(self.whole_from);
        if len > 0 && len < self.ids.len() && len < oldest {
            return Err(Error::Capacity {
                what: "tokens of rollback",
                needed: self.ids.len() - len,
                available: self.ids.len().saturating_sub(oldest),
            });
        }
        Ok(())
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.image_mask.truncate(len);
        self.prefill = self.prefill.min(len as u32);
        self.drafted = self.drafted.min(len);
        if len == 0 {
            // Nothing that was ever in the rings is needed any more.
            (self.high_water, self.whole_from) = (0, 0);
        }
    }

    /// Appends the tokens of a finished step.
    pub(crate) fn append(&mut self, ids: &[u32], image_mask: Option<&[u8]>) {
        if self.ids.is_empty() {
            self.prefill = ids.len() as u32;
        }
        match image_mask {
            Some(mask) => {
                self.image_mask.resize(self.ids.len(), 0);
                self.image_mask.extend_from_slice(mask);
            }
            None if !self.image_mask.is_empty() => {
                self.image_mask.resize(self.ids.len() + ids.len(), 0);
            }
            None => {}
        }
        self.ids.extend_from_slice(ids);
        self.high_water = self.high_water.max(self.ids.len());
    }
}
