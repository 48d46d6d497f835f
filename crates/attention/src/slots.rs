//! From an index of a sequence (a position, a compressed row) to a physical row of a pool.

use std::ops::Range;

use deepseek_v41_core::{Error, Result};

/// The rows of a pool that belong to one sequence, and the rule that hands them out.
///
/// Kernels take physical rows only; rings and, later, pages are a mapping above them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotMap {
    /// Index `i` lies in row `base + i % capacity`: the last `capacity` indices are there.
    Ring {
        /// First row.
        base: u32,
        /// Number of rows, at least 1.
        capacity: u32,
    },
    /// Index `i` lies in row `base + i`: the first `capacity` indices are there.
    Linear {
        /// First row.
        base: u32,
        /// Number of rows.
        capacity: u32,
    },
}

impl SlotMap {
    /// The physical row of `index`.
    ///
    /// # Errors
    /// [`Error::Capacity`] past the end of a linear map, or for an empty ring.
    pub fn row(&self, index: u32) -> Result<u32> {
        match *self {
            Self::Ring { base, capacity } if capacity > 0 => Ok(base + index % capacity),
            Self::Linear { base, capacity } if index < capacity => Ok(base + index),
            _ => Err(Error::Capacity {
                what: "rows of a sequence",
                needed: index as usize + 1,
                available: self.capacity() as usize,
            }),
        }
    }

    /// Every physical row of this map.
    pub fn rows(&self) -> Range<u32> {
        let (Self::Ring { base, capacity } | Self::Linear { base, capacity }) = *self;
        base..base + capacity
    }

    /// How many indices it can hold at a time.
    pub fn capacity(&self) -> u32 {
        let (Self::Ring { capacity, .. } | Self::Linear { capacity, .. }) = *self;
        capacity
    }
}

/// How large the pools of one model are; the same for all of its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheGeometry {
    /// Positions of the sliding window (`window_size`).
    pub window: usize,
    /// How many of its newest tokens a sequence can lose again without being computed anew.
    pub max_rollback: usize,
    /// Longest sequence, in tokens.
    pub max_len: usize,
    /// Sequences held at a time; their slots are `0..max_seqs`.
    pub max_seqs: usize,
}

impl CacheGeometry {
    /// Checks that every pool these numbers imply can be addressed.
    ///
    /// # Errors
    /// [`Error::Config`] for zeros, or when a pool has more rows than a row number (i32) can name.
    pub fn validate(&self, ratios: &[usize]) -> Result<()> {
        let fields = [
            ("window_size", self.window),
            ("max_seqs", self.max_seqs),
            ("max_len", self.max_len),
        ];
        for (field, value) in fields {
            if value == 0 {
                return Err(Error::config(field, "expected at least 1, found 0"));
            }
        }
        if ratios.contains(&0) {
            return Err(Error::config(
                "compress_ratios",
                "a ratio of 0 has no compressed rows",
            ));
        }
        // Room for the rounding below: no intermediate of these methods can then overflow.
        let limit = i32::MAX as usize / 2;
        let widest_ratio = ratios.iter().copied().max().unwrap_or(1);
        let rows = [
            self.window.checked_add(self.max_rollback),
            widest_ratio
                .checked_mul(2)
                .and_then(|r| r.checked_add(self.max_rollback)),
            Some(self.max_len),
        ];
        let fits = rows.into_iter().all(|rows| {
            rows.and_then(|rows| rows.checked_mul(self.max_seqs))
                .is_some_and(|n| n <= limit)
        });
        if fits {
            Ok(())
        } else {
            Err(Error::config(
                "max_len",
                format!(
                    "{self:?} needs pools of more than {limit} rows, which cannot be addressed"
                ),
            ))
        }
    }

    /// Rows of one sequence's window ring.
    ///
    /// `max_rollback` rows more than the window: after losing that many of the newest tokens, the
    /// window before them is still whole, so a rewind copies nothing.
    pub fn ring_capacity(&self) -> usize {
        self.window + self.max_rollback
    }

    /// Rows of one sequence's ring of open-group entries at `ratio`: a group and the slack, rounded
    /// up to whole groups.
    pub fn pending_capacity(&self, ratio: usize) -> usize {
        (ratio + self.max_rollback).next_multiple_of(ratio)
    }

    /// Compressed rows of one sequence at `ratio`.
    pub fn compressed_capacity(&self, ratio: usize) -> usize {
        self.max_len / ratio
    }

    /// Where positions of sequence slot `slot` lie in a window pool.
    pub fn ring(&self, slot: u32) -> SlotMap {
        let capacity = self.ring_capacity() as u32;
        SlotMap::Ring {
            base: slot * capacity,
            capacity,
        }
    }

    /// Where positions of `slot` lie in the pool of open-group entries at `ratio`.
    pub fn pending(&self, slot: u32, ratio: usize) -> SlotMap {
        let capacity = self.pending_capacity(ratio) as u32;
        SlotMap::Ring {
            base: slot * capacity,
            capacity,
        }
    }

    /// Where compressed rows of `slot` lie in a compressed pool at `ratio`.
    pub fn compressed(&self, slot: u32, ratio: usize) -> SlotMap {
        let capacity = self.compressed_capacity(ratio) as u32;
        SlotMap::Linear {
            base: slot * capacity,
            capacity,
        }
    }

    /// Refuses a slot outside of `0..max_seqs`.
    pub(crate) fn check_slot(&self, slot: u32) -> Result<()> {
        if (slot as usize) < self.max_seqs {
            return Ok(());
        }
        Err(Error::Capacity {
            what: "sequence slots",
            needed: slot as usize + 1,
            available: self.max_seqs,
        })
    }
}
