//! `xs · Wᵀ` for weights that are widened to f32 on the fly.
//!
//! Output elements keep their eight lanes of sums while the columns pass by in stretches that fit the
//! cache. A few inputs stream the stored weights once and decode them in registers; many inputs share
//! the decoding through a panel of widened rows. Either way the lanes of an element see their products
//! in the order of [`super::dot`], so the path taken cannot be told from the bits.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{
    Isa, LANES, for_each_task, panel, round_bf16, should_parallelise, sum_lanes, with_scratch,
};

/// The lanes of one output element.
pub type Lanes = [f32; LANES];

/// Rows of a weight matrix `[rows, cols]` in some stored format.
pub trait WeightRows: Sync {
    /// Output features.
    fn rows(&self) -> usize;

    /// Input features.
    fn cols(&self) -> usize;

    /// Writes the values of `row` from column `k0` on, scale included, to `out`.
    ///
    /// What is written here is what a product with this weight is defined on.
    fn decode(&self, row: usize, k0: usize, out: &mut [f32]);

    /// Adds the products of a stretch of columns to the lanes of its rows and inputs.
    ///
    /// `sums[i * rows + r]` belongs to input `i` and the stretch's row `r`; column `k` goes to lane
    /// `k % 8` by a fused multiply-add, columns ascending. A stretch starts at a multiple of eight.
    ///
    /// Formats override this to decode in registers.
    fn accumulate(&self, isa: Isa, stretch: &Stretch<'_>, sums: &mut [Lanes]) {
        accumulate_by_decoding(self, isa, stretch, sums);
    }

    /// Whole products with few inputs: `totals[i * rows + r]` becomes what [`sum_lanes`] makes of the
    /// lanes that [`accumulate`](Self::accumulate) gives for zeros. `stretch` has all columns.
    ///
    /// Formats override this to keep the lanes in registers; `false`, with nothing promised of
    /// `totals`, where they do not.
    fn totals(&self, _isa: Isa, _stretch: &Stretch<'_>, _totals: &mut [f32]) -> bool {
        false
    }
}

/// Some rows and columns of a weight, and the inputs they are multiplied with.
#[derive(Debug, Clone)]
pub struct Stretch<'a> {
    /// Weight rows.
    pub rows: Range<usize>,
    /// Weight columns.
    pub cols: Range<usize>,
    /// Whole inputs, `[m, weight columns]`.
    pub xs: &'a [f32],
    /// Columns of the whole weight.
    pub k: usize,
    /// Sizes of all inputs; see [`Magnitudes`].
    pub magnitudes: Magnitudes,
}

/// The smallest and the largest magnitude among the inputs of a product, zeros left out: what a format
/// needs to know before it moves a power of two from the weights to the inputs.
///
/// Zeros alone give `1 ..= 0`; a NaN makes `most` a NaN or an infinity, and so does an infinity. Found
/// for few inputs only: of many inputs nothing is known, `0 ..= inf`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Magnitudes {
    /// The smallest magnitude above zero.
    pub least: f32,
    /// The largest.
    pub most: f32,
}

impl Magnitudes {
    const UNKNOWN: Self = Self {
        least: 0.0,
        most: f32::INFINITY,
    };

    /// Those of `xs`.
    pub fn of(isa: Isa, xs: &[f32]) -> Self {
        let (least, most) = match isa {
            Isa::Portable => bounds(xs),
            // SAFETY: both variants are only made where the processor has AVX2.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => unsafe { avx2::bounds(xs) },
        };
        Self {
            least: if most == 0 {
                1.0
            } else {
                f32::from_bits(least.wrapping_add(1))
            },
            most: f32::from_bits(most),
        }
    }
}

impl<'a> Stretch<'a> {
    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.xs.len() / self.k
    }

    /// The stretch's part of input `i`.
    pub fn input(&self, i: usize) -> &'a [f32] {
        &self.xs[i * self.k..][self.cols.clone()]
    }
}

/// The smallest and largest of the magnitudes' bits, which are ordered as the magnitudes are; the
/// smallest minus one, so that zeros are larger than everything.
#[inline(always)]
pub(super) fn bounds(xs: &[f32]) -> (u32, u32) {
    let (mut least, mut most) = (u32::MAX, 0);
    for x in xs {
        let bits = x.to_bits() & 0x7fff_ffff;
        least = least.min(bits.wrapping_sub(1));
        most = most.max(bits);
    }
    (least, most)
}

/// [`WeightRows::accumulate`] by way of [`WeightRows::decode`].
pub fn accumulate_by_decoding<W: WeightRows + ?Sized>(
    w: &W,
    isa: Isa,
    stretch: &Stretch<'_>,
    sums: &mut [Lanes],
) {
    panel::accumulate(w, isa, stretch, sums);
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

/// Inputs up to which formats decode in registers.
pub const FEW_INPUTS: usize = 8;
/// Weight rows of a task with few inputs: a band of fp8 tiles.
const FEW_ROWS: usize = 32;
/// Input values of a stretch with few inputs: 32 KB stay in the first-level cache.
const FEW_VALUES: usize = 8192;
/// Columns of a stretch with many inputs, so that a panel takes 32 KB.
const MANY_COLS: usize = 512;
/// Inputs that share a panel: their stretches and sums stay in the second-level cache.
const MANY_INPUTS: usize = 96;
/// Work below which a task is not split off, about 2 µs.
const TASK_WORK: usize = 50_000;

/// What a sum is stored as.
pub(super) trait Output: Copy + Send + Sync {
    fn store(sum: f32) -> Self;

    /// [`Output::store`] of eight sums.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn store_eight(sums: __m256, out: &mut [Self; 8]);
}

impl Output for f32 {
    #[inline(always)]
    fn store(sum: f32) -> Self {
        sum
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_eight(sums: __m256, out: &mut [Self; 8]) {
        // SAFETY: eight values, and AVX by the contract.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
    }
}

impl Output for bf16 {
    #[inline(always)]
    fn store(sum: f32) -> Self {
        round_bf16(sum)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_eight(sums: __m256, out: &mut [Self; 8]) {
        // SAFETY: sixteen bytes, and AVX2 by the contract.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), avx2::round_bf16(sums)) };
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
    unsafe fn store(&self, isa: Isa, i: usize, row0: usize, sums: Sums<'_>) {
        let (at, len) = (i * self.rows + row0, sums.len());
        assert!(row0 + len <= self.rows && at + len <= self.len);
        // SAFETY: inside the slice by the assertion; exclusive by the contract.
        let out = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) };
        match (isa, sums) {
            (Isa::Portable, Sums::Lanes(sums)) => store_ref(sums, out),
            (Isa::Portable, Sums::Totals(sums)) => store_totals_ref(sums, out),
            // SAFETY: both variants are only made where the processor has AVX2.
            #[cfg(target_arch = "x86_64")]
            (_, Sums::Lanes(sums)) => unsafe { avx2::store(sums, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            (_, Sums::Totals(sums)) => unsafe { avx2::store_totals(sums, out) },
        }
    }
}

/// What a task hands over for some rows and one input.
enum Sums<'a> {
    Lanes(&'a [Lanes]),
    Totals(&'a [f32]),
}

impl Sums<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Lanes(sums) => sums.len(),
            Self::Totals(sums) => sums.len(),
        }
    }
}

pub(super) fn store_totals_ref<O: Output>(sums: &[f32], out: &mut [O]) {
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = O::store(*sum);
    }
}

/// Adds up the lanes of each output.
pub(super) fn store_ref<O: Output>(sums: &[Lanes], out: &mut [O]) {
    for (out, lanes) in out.iter_mut().zip(sums) {
        *out = O::store(sum_lanes(lanes));
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
    if k == 0 {
        return out.fill(O::store(0.0));
    }
    let per_group = n / groups;
    let task_rows = if m <= FEW_INPUTS {
        FEW_ROWS
    } else {
        panel::ROWS
    };
    let blocks = per_group.div_ceil(task_rows);
    let out = Columns::new(out, n);
    let magnitudes = match m <= FEW_INPUTS {
        true => Magnitudes::of(isa, xs),
        false => Magnitudes::UNKNOWN,
    };
    let task = |sums: &mut [f32], task: usize| {
        let (group, block) = (task / blocks, task % blocks);
        let first = group * per_group + block * task_rows;
        let count = task_rows.min(per_group - block * task_rows);
        let xs = &xs[group * m * k..][..m * k];
        let inputs = Inputs { xs, magnitudes };
        // SAFETY: tasks cover disjoint ranges of rows.
        block_product(
            isa,
            w,
            first..first + count,
            inputs,
            sums,
            |i, sums| unsafe {
                out.store(isa, i, first, sums);
            },
        );
    };
    let tasks = groups * blocks;
    let sums = m.min(MANY_INPUTS) * task_rows * LANES;
    let work = 2 * m * n * k;
    if !should_parallelise(work) {
        return with_scratch(sums, |sums| (0..tasks).for_each(|i| task(sums, i)));
    }
    // Blocks of rows that are small go several at a time.
    let blocks = TASK_WORK.div_ceil(2 * m * k * task_rows.min(per_group));
    for_each_task(work, tasks.div_ceil(blocks), |i| {
        let part = i * blocks..tasks.min((i + 1) * blocks);
        with_scratch(sums, |sums| part.for_each(|i| task(sums, i)));
    });
}

/// The inputs of one group.
struct Inputs<'a> {
    xs: &'a [f32],
    magnitudes: Magnitudes,
}

/// Products of some rows with all inputs; `store(i, sums)` receives the rows' sums of each input.
/// `sums` is scratch.
fn block_product<W: WeightRows + ?Sized>(
    isa: Isa,
    w: &W,
    rows: Range<usize>,
    Inputs { xs, magnitudes }: Inputs<'_>,
    sums: &mut [f32],
    store: impl Fn(usize, Sums<'_>),
) {
    let (k, count) = (w.cols(), rows.len());
    let inputs = (xs.len() / k).min(MANY_INPUTS);
    let cols = if inputs <= FEW_INPUTS {
        FEW_VALUES / inputs / 32 * 32
    } else {
        MANY_COLS
    };
    if inputs <= FEW_INPUTS && k <= cols {
        let stretch = Stretch {
            rows: rows.clone(),
            cols: 0..k,
            xs,
            k,
            magnitudes,
        };
        let totals = &mut sums[..inputs * count];
        if w.totals(isa, &stretch, totals) {
            for (i, totals) in totals.chunks_exact(count).enumerate() {
                store(i, Sums::Totals(totals));
            }
            return;
        }
    }
    let sums = sums.as_chunks_mut::<LANES>().0;
    for (chunk, xs) in xs.chunks(inputs * k).enumerate() {
        let m = xs.len() / k;
        let sums = &mut sums[..m * count];
        sums.fill([0.0; LANES]);
        for k0 in (0..k).step_by(cols) {
            let cols = k0..k.min(k0 + cols);
            w.accumulate(
                isa,
                &Stretch {
                    rows: rows.clone(),
                    cols,
                    xs,
                    k,
                    magnitudes,
                },
                sums,
            );
        }
        for (i, sums) in sums.chunks_exact(count).enumerate() {
            store(chunk * inputs + i, Sums::Lanes(sums));
        }
    }
}
