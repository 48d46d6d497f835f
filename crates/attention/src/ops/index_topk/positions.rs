//! Which positions a query has to look at, in pieces that may be scored apart.

use std::ops::Range;

use super::{BlockRows, Scoring, Wanted};

/// Positions of a unit at least, where no candidate blocks set its length.
const UNIT: usize = 64;

/// The positions one query has to look at, in units: blocks of consecutive positions that are never
/// cut apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query<'a> {
    pub(super) t: usize,
    pub(super) base: u32,
    pub(super) visible: usize,
    unit: usize,
    /// Units to visit, all of them if `None`.
    ids: Option<&'a [i32]>,
}

impl<'a> Query<'a> {
    pub(super) fn new(
        t: usize,
        scoring: &Scoring<'_>,
        wanted: Wanted,
        candidates: Option<BlockRows<'a>>,
    ) -> Self {
        let span = scoring.spans[t];
        let visible = span.visible as usize;
        let (unit, ids) = match candidates {
            // Whole blocks, so that one part sees all of a block; several, to have less to do per unit.
            None => (
                wanted.block.saturating_mul(UNIT.div_ceil(wanted.block)),
                None,
            ),
            Some(c) => {
                let ids = &c.ids[t * c.width..][..c.width];
                // Ascending ids: what lies past the visible positions, and the -1 tail, is a suffix.
                let used = ids
                    .iter()
                    .take_while(|&&id| id >= 0 && (id as usize).saturating_mul(c.block) < visible);
                (c.block, Some(&ids[..used.count()]))
            }
        };
        Self {
            t,
            base: span.base,
            visible,
            unit,
            ids,
        }
    }

    pub(super) fn units(&self) -> usize {
        self.ids
            .map_or(self.visible.div_ceil(self.unit), <[i32]>::len)
    }

    /// Upper bound of the number of positions.
    pub(super) fn positions(&self) -> usize {
        self.units().saturating_mul(self.unit).min(self.visible)
    }

    /// Positions of unit `i`.
    pub(super) fn unit(&self, i: usize) -> Range<usize> {
        let id = self.ids.map_or(i, |ids| ids[i] as usize);
        let start = id * self.unit;
        start..start.saturating_add(self.unit).min(self.visible)
    }

    /// At most `count` runs of units of about equal length, each of `min_part` positions or more.
    pub(super) fn parts(
        &self,
        count: usize,
        min_part: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let units = self.units();
        let least = min_part.div_ceil(self.unit);
        let step = units.div_ceil(count).max(least);
        (0..units)
            .step_by(step)
            .map(move |start| start..(start + step).min(units))
    }
}
