//! Pools of rows as attention kernels take them.

use super::{Ptr, ops::RowKind};

/// One pool of rows and, for each query, which of them it attends to.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// `[rows, D]` bf16, or the codes of packed rows.
    pub rows: Ptr<'a>,
    /// Scales of packed rows; null for bf16.
    pub scales: Ptr<'a>,
    /// `[T, n]` i32.
    pub idxs: Ptr<'a>,
    /// Rows listed for a query.
    pub n: usize,
    /// How the rows are stored.
    pub kind: RowKind,
}

impl Scope<'_> {
    /// No pool.
    pub const NONE: Self = Self {
        rows: Ptr::NULL,
        scales: Ptr::NULL,
        idxs: Ptr::NULL,
        n: 0,
        kind: RowKind::Plain,
    };

    /// As the kernels' struct: two pointers, the list, then `n` and `kind` as i32; `None` if `n` does not
    /// fit.
    pub(super) fn words(&self) -> Option<[u64; 4]> {
        let n = i32::try_from(self.n).ok()?;
        Some([
            self.rows.address(),
            self.scales.address(),
            self.idxs.address(),
            n as u64 | (self.kind as u64) << 32,
        ])
    }
}
