//! `xs · Wᵀ` for weights that are widened to f32 on the fly.
//!
//! One input row streams the weights once and decodes them in registers ([`WeightRows::dot_rows`]).
//! More rows share the work of decoding: a panel of some weight rows and columns is widened into a
//! buffer that stays in cache, and every input row is multiplied with it. Either way the eight lanes
//! of an output element see their products in the order of [`super::dot`].

use half::bf16;
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{Isa, LANES, dot_with, round_bf16, should_parallelise, sum_lanes, with_scratch};

/// Rows of a weight matrix `[rows, cols]` in some stored format.
pub trait WeightRows: Sync {
    /// Output features.
    fn rows(&self) -> usize;

    /// Input features.
    fn cols(&self) -> usize;

    /// Writes the values of `row` from column `k0` on, scale included, to `out`.
    ///
    /// The values must be exact in f32: what is widened here is what the product is defined on.
    fn decode(&self, row: usize, k0: usize, out: &mut [f32]);

    /// `out[i] = dot(row0 + i, x)`, bit for bit [`super::dot`] of the decoded row.
    ///
    /// Formats override it to decode in registers.
    fn dot_rows(&self, isa: Isa, row0: usize, x: &[f32], out: &mut [f32]) {
        dot_rows_by_decoding(self, isa, row0, x, out);
    }
}

/// [`WeightRows::dot_rows`] by way of [`WeightRows::decode`].
pub fn dot_rows_by_decoding<W: WeightRows + ?Sized>(
    w: &W,
    isa: Isa,
    row0: usize,
    x: &[f32],
    out: &mut [f32],
) {
    with_scratch(x.len(), |row| {
        for (i, out) in out.iter_mut().enumerate() {
            w.decode(row0 + i, 0, row);
            *out = dot_with(isa, row, x);
        }
    });
}

/// `out[m, n] = dot(xs[m, :], w[n, :])`, bit for bit [`super::dot`] of the decoded row, for any `m`.
///
/// `xs: [m, cols]`, `out: [m, rows]`.
///
/// # Panics
/// The lengths do not fit; callers check shapes.
pub fn matmul<W: WeightRows + ?Sized>(w: &W, xs: &[f32], m: usize, out: &mut [f32]) {
    run(Isa::detect(), w, 1, xs, m, out);
}

/// [`matmul`] with each element rounded once to bf16.
///
/// # Panics
/// As [`matmul`].
pub fn matmul_bf16<W: WeightRows + ?Sized>(w: &W, xs: &[f32], m: usize, out: &mut [bf16]) {
    run(Isa::detect(), w, 1, xs, m, out);
}

/// [`matmul`] by the kernels of one instruction set.
///
/// # Panics
/// As [`matmul`].
pub fn matmul_with<W: WeightRows + ?Sized>(isa: Isa, w: &W, xs: &[f32], m: usize, out: &mut [f32]) {
    run(isa, w, 1, xs, m, out);
}

/// A block-diagonal product: row `n` of the weight belongs to group `n / (rows / groups)` and meets
/// that group's inputs only.
///
/// `xs: [groups, m, cols]`, `out: [m, rows]`.
///
/// # Panics
/// As [`matmul`], or `rows` does not divide by `groups`.
pub fn grouped_matmul_bf16<W: WeightRows + ?Sized>(
    w: &W,
    groups: usize,
    xs: &[f32],
    m: usize,
    out: &mut [bf16],
) {
    run(Isa::detect(), w, groups, xs, m, out);
}

/// Weight rows of one task. A multiple of the fp8 tile, so that a task sees whole tiles.
const ROWS: usize = 32;
/// Columns of a panel: 32 × 256 f32 fill most of a first-level cache.
const COLS: usize = 256;
/// Input rows that share a panel: their columns and their sums stay in the second-level cache.
const INPUTS: usize = 96;
/// Work below which a task is not split off, about 20 µs.
const TASK_WORK: usize = 200_000;

/// What a sum is stored as.
trait Output: Copy + Send + Sync {
    fn store(sum: f32) -> Self;
}

impl Output for f32 {
    #[inline(always)]
    fn store(sum: f32) -> Self {
        sum
    }
}

impl Output for bf16 {
    #[inline(always)]
    fn store(sum: f32) -> Self {
        round_bf16(sum)
    }
}

/// The output `[m, rows]`, of which each task writes its own columns.
struct Columns<'a, O> {
    start: *mut O,
    rows: usize,
    len: usize,
    _out: std::marker::PhantomData<&'a mut [O]>,
}

// SAFETY: tasks write disjoint columns, and `O` itself may move between threads.
unsafe impl<O: Send> Sync for Columns<'_, O> {}

impl<'a, O: Output> Columns<'a, O> {
    fn new(out: &'a mut [O], rows: usize) -> Self {
        Self {
            start: out.as_mut_ptr(),
            rows,
            len: out.len(),
            _out: std::marker::PhantomData,
        }
    }

    /// # Safety
    /// No other thread writes columns `row0 .. row0 + sums.len()` of input `i`.
    unsafe fn store(&self, i: usize, row0: usize, sums: &[f32]) {
        let at = i * self.rows + row0;
        assert!(row0 + sums.len() <= self.rows && at + sums.len() <= self.len);
        // SAFETY: inside the slice by the assertion; exclusive by the contract.
        let out = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), sums.len()) };
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = O::store(*sum);
        }
    }
}

fn run<W: WeightRows + ?Sized, O: Output>(
    isa: Isa,
    w: &W,
    groups: usize,
    xs: &[f32],
    m: usize,
    out: &mut [O],
) {
    let (n, k) = (w.rows(), w.cols());
    assert!(
        groups > 0 && n.is_multiple_of(groups),
        "{n} rows in {groups} groups"
    );
    assert_eq!(xs.len(), groups * m * k, "input length");
    assert_eq!(out.len(), m * n, "output length");
    if m == 0 || n == 0 {
        return;
    }
    let per_group = n / groups;
    let blocks = per_group.div_ceil(ROWS);
    let out = Columns::new(out, n);
    let task = |task: usize| {
        let (group, block) = (task / blocks, task % blocks);
        let first = group * per_group + block * ROWS;
        let count = ROWS.min(per_group - block * ROWS);
        let xs = &xs[group * m * k..][..m * k];
        if m == 1 {
            let mut sums = [0f32; ROWS];
            w.dot_rows(isa, first, xs, &mut sums[..count]);
            // SAFETY: tasks cover disjoint ranges of rows.
            unsafe { out.store(0, first, &sums[..count]) };
        } else {
            // SAFETY: as above.
            panel_product(isa, w, first, count, xs, m, |i, sums| unsafe {
                out.store(i, first, sums);
            });
        }
    };
    let tasks = groups * blocks;
    if should_parallelise(2 * m * n * k) {
        let task_work = 2 * m * k * ROWS.min(per_group);
        let min_len = TASK_WORK.div_ceil(task_work.max(1));
        (0..tasks)
            .into_par_iter()
            .with_min_len(min_len)
            .for_each(task);
    } else {
        (0..tasks).for_each(task);
    }
}

/// Products of `count <= ROWS` weight rows with `m` inputs; `store(i, sums)` receives each input's.
fn panel_product<W: WeightRows + ?Sized>(
    isa: Isa,
    w: &W,
    first: usize,
    count: usize,
    xs: &[f32],
    m: usize,
    store: impl Fn(usize, &[f32]),
) {
    let k = w.cols();
    let inputs = INPUTS.min(m);
    let sums_stride = ROWS * LANES;
    with_scratch(ROWS * COLS + inputs * sums_stride, |scratch| {
        let (panel, sums) = scratch.split_at_mut(ROWS * COLS);
        for (chunk, xs) in xs.chunks(inputs * k.max(1)).enumerate() {
            let m = xs.len() / k.max(1);
            sums[..m * sums_stride].fill(0.0);
            for k0 in (0..k).step_by(COLS) {
                let len = COLS.min(k - k0);
                for (r, row) in panel.chunks_exact_mut(COLS).take(count).enumerate() {
                    w.decode(first + r, k0, &mut row[..len]);
                }
                let mut i = 0;
                while i < m {
                    // Threes fill the registers; four are better as two twos than as three and one.
                    let c = if m - i == 4 { 2 } else { (m - i).min(3) };
                    let sums = &mut sums[i * sums_stride..][..c * sums_stride];
                    let xs = &xs[i * k..][..c * k];
                    panel_step(isa, panel, count, xs, k, k0, len, sums);
                    i += c;
                }
            }
            for i in 0..m {
                let mut out = [0f32; ROWS];
                let lanes = sums[i * sums_stride..][..sums_stride]
                    .as_chunks::<LANES>()
                    .0;
                for (out, lanes) in out.iter_mut().zip(lanes) {
                    *out = sum_lanes(lanes);
                }
                store(chunk * inputs + i, &out[..count]);
            }
        }
    });
}

/// Adds columns `k0 .. k0 + len` to the sums of `count` panel rows and up to three inputs.
fn panel_step(
    isa: Isa,
    panel: &[f32],
    count: usize,
    xs: &[f32],
    k: usize,
    k0: usize,
    len: usize,
    sums: &mut [f32],
) {
    let inputs = xs.len() / k;
    let sums_stride = ROWS * LANES;
    assert!(count <= ROWS && len <= COLS && k0 + len <= k);
    assert!(panel.len() >= count * COLS && sums.len() == inputs * sums_stride);
    match isa {
        Isa::Portable => {
            for (xs, sums) in xs.chunks_exact(k).zip(sums.chunks_exact_mut(sums_stride)) {
                let x = &xs[k0..k0 + len];
                let rows = panel
                    .chunks_exact(COLS)
                    .zip(sums.as_chunks_mut::<LANES>().0);
                for (row, lanes) in rows.take(count) {
                    for (w, x) in row[..len].chunks(LANES).zip(x.chunks(LANES)) {
                        for (lane, (w, x)) in lanes.iter_mut().zip(w.iter().zip(x)) {
                            *lane = w.mul_add(*x, *lane);
                        }
                    }
                }
            }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            let (panel, sums) = (panel.as_ptr(), sums.as_mut_ptr());
            let x = xs[k0..].as_ptr();
            // SAFETY: the assertions above: `count` rows of `len <= COLS` in the panel, `inputs`
            // rows of `k` with `k0 + len <= k`, and their sums. `Avx2` is only made where the
            // processor has it.
            unsafe {
                match inputs {
                    1 => avx2::panel::<1>(panel, COLS, count, x, k, len, sums, sums_stride),
                    2 => avx2::panel::<2>(panel, COLS, count, x, k, len, sums, sums_stride),
                    3 => avx2::panel::<3>(panel, COLS, count, x, k, len, sums, sums_stride),
                    _ => unreachable!("at most three inputs a step"),
                }
            }
        }
    }
}
