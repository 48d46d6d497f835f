//! The best columns of rows of scores.

use candle_core::CudaDevice;
use deepseek_v41_core::{
    Result,
    cuda::{Launch, Out, Ptr, kernels, multiprocessors},
};

use crate::stored::COUNTED;

/// Columns that one block selects from.
const ONE_BLOCK: usize = 32_768;
/// Columns of one part of a longer row.
const PART: usize = 8192;
/// Parts of all rows for each multiprocessor up to which they are counted and chosen in one launch.
const AT_ONCE: usize = 2;

/// A `[T, columns]` matrix of sortable 16-bit scores, and how its columns become rows of a pool.
pub(super) struct Scores<'a> {
    pub(super) keys: Ptr<'a>,
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) ld: usize,
    pub(super) spans: Ptr<'a>,
    pub(super) blocks: Ptr<'a>,
    pub(super) per_row: usize,
    pub(super) block: usize,
}

/// Scores of long rows by their high bits.
pub(super) struct Counts<'a> {
    space: Space<'a>,
    /// Whether they are there already.
    pub(super) done: bool,
}

/// Zeros that a selection leaves zero.
enum Space<'a> {
    /// Of [`RowPlanes::counts`](crate::RowPlanes).
    Kept(Ptr<'a>),
    /// `[rows, 2048]` u32, and two words by which blocks wait for each other.
    Own(Out<u32>),
}

impl<'a> Counts<'a> {
    /// Where a selection of `k` from `s` needs them; in `kept` if that has room for it.
    pub(super) fn of(
        dev: &CudaDevice,
        s: &Scores<'_>,
        k: usize,
        kept: Option<Ptr<'a>>,
    ) -> Result<Option<Self>> {
        if k == 0 || s.n <= ONE_BLOCK {
            return Ok(None);
        }
        let space = match kept {
            Some(kept) if s.rows <= COUNTED => Space::Kept(kept),
            _ => Space::Own(Out::zeros(dev, 2048 * s.rows + 2)?),
        };
        Ok(Some(Self { space, done: false }))
    }

    /// `[rows, 2048]` u32.
    pub(super) fn hist(&self) -> Ptr<'_> {
        match &self.space {
            Space::Kept(kept) => *kept,
            Space::Own(own) => own.ptr(),
        }
    }

    /// The two words.
    fn turns(&self, rows: usize) -> Ptr<'_> {
        let rows = match &self.space {
            Space::Kept(_) => COUNTED,
            Space::Own(_) => rows,
        };
        self.hist().offset(4 * 2048 * rows)
    }
}

/// The `k` best columns of each row as ascending pool rows, -1 at the tail.
pub(super) fn select(
    dev: &CudaDevice,
    s: &Scores<'_>,
    k: usize,
    out: Ptr<'_>,
    counts: Option<Counts<'_>>,
) -> Result<()> {
    let finish = |launch: Launch<'_>, grid: (usize, usize, usize), block: usize| {
        // SAFETY: scores [rows, ld], out [rows, k], workspaces as the kernels ask.
        unsafe { launch.launch(grid, block, 0) }
    };
    let Some(counts) = counts else {
        let launch = Launch::new(dev, kernels::TOPK_ROWS, "topk_rows")
            .ptr(s.keys)
            .ptr(s.spans)
            .ptr(s.blocks)
            .ptr(out)
            .int(s.n)
            .long(s.ld)
            .int(k)
            .int(s.per_row)
            .int(s.block);
        return finish(launch, (s.rows, 1, 1), 1024);
    };
    let (hist, done) = (counts.hist(), counts.done);
    let parts = s.n.div_ceil(PART);
    let grid = (parts, s.rows, 1);
    let part = Out::<u32>::new(dev, 33 * parts * s.rows)?;
    if parts * s.rows <= AT_ONCE * multiprocessors(dev)? {
        let launch = Launch::new(dev, kernels::TOPK_ROWS, "topk_part_once")
            .ptr(s.keys)
            .ptr(hist)
            .ptr(part.ptr())
            .ptr(counts.turns(s.rows))
            .ptr(s.spans)
            .ptr(s.blocks)
            .ptr(out)
            .int(s.n)
            .long(s.ld)
            .int(k)
            .int(s.per_row)
            .int(s.block)
            .int(usize::from(done));
        // SAFETY: scores [rows, ld], out [rows, k], histograms, zeroed counter, counts [rows, parts, 33];
        // so few blocks are on the device at once.
        return unsafe { launch.launch_cooperative(grid, 256, 0) };
    }
    let header = Out::<u32>::new(dev, 2 * s.rows)?;
    if !done {
        let launch = Launch::new(dev, kernels::TOPK_ROWS, "topk_part_hist")
            .ptr(s.keys)
            .ptr(hist)
            .int(s.n)
            .long(s.ld);
        finish(launch, grid, 256)?;
    }
    let launch = Launch::new(dev, kernels::TOPK_ROWS, "topk_part_count")
        .ptr(s.keys)
        .ptr(hist)
        .ptr(part.ptr())
        .ptr(header.ptr())
        .int(s.n)
        .long(s.ld)
        .int(k);
    finish(launch, grid, 256)?;
    let launch = Launch::new(dev, kernels::TOPK_ROWS, "topk_part_write")
        .ptr(s.keys)
        .ptr(hist)
        .ptr(part.ptr())
        .ptr(header.ptr())
        .ptr(s.spans)
        .ptr(s.blocks)
        .ptr(out)
        .int(s.n)
        .long(s.ld)
        .int(k)
        .int(s.per_row)
        .int(s.block);
    finish(launch, grid, 256)
}
