//! The projection behind the mixes, in f64.
//!
//! Coefficients scale whole rows of the stream before those are rounded to bf16, so their last bits
//! show in everything after: sums of 20480 products in f32 would be another formula's. In f64 the
//! products of two f32 are exact.
//!
//! A sum has eight lanes, element `k` in lane `k % 8` in ascending order, and a fixed tree over them:
//! the same bits for any number of rows, tokens or threads that are worked on at a time.

use deepseek_v41_core::cpu::{F32Rows, Isa, WeightRows};

/// Weight rows worked on together, so that an input is widened once for all of them.
pub(super) const ROWS: usize = 4;

/// Tokens worked on together, so that a weight is widened once for all of them: with AVX-512 their sums
/// fill the registers.
const TOKENS: usize = 6;

/// Columns after which the next token has its turn where the sums of one token fill the registers: four
/// weight rows of them, 8 KB, stay in the first cache meanwhile. A single token streams whole rows.
const STRETCH: usize = 512;

const LANES: usize = 8;
type Lanes = [f64; LANES];

/// `1 / sqrt(mean(x²) + eps)`.
pub(super) fn rstd(isa: Isa, x: &[f32], eps: f32) -> f64 {
    let mut lanes = [[[0.0; LANES]]];
    add_products(isa, x, x.len(), &[Row::Values(x)], &mut lanes);
    1.0 / (sum(&lanes[0][0]) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// Products of weight rows `first .. first + ROWS` (or as many as there are) with `xs: [m, cols]`;
/// `sums: [m]`.
pub(super) fn project(isa: Isa, w: &F32Rows, first: usize, xs: &[f32], sums: &mut [[f64; ROWS]]) {
    let cols = w.cols();
    let rows: [Row<'_>; ROWS] = std::array::from_fn(|r| {
        // Past the last row: the first again, whose sums nobody reads.
        let row = if first + r < w.rows() {
            first + r
        } else {
            first
        };
        Row::Stored(&w.bytes()[row * cols * 4..][..cols * 4])
    });
    for (xs, sums) in xs.chunks(TOKENS * cols).zip(sums.chunks_mut(TOKENS)) {
        let mut lanes = [[[0.0; LANES]; ROWS]; TOKENS];
        add_products(isa, xs, cols, &rows, &mut lanes[..sums.len()]);
        for (sums, lanes) in sums.iter_mut().zip(&lanes) {
            *sums = lanes.each_ref().map(sum);
        }
    }
}

fn sum(l: &Lanes) -> f64 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// Part of a row of f32 values: as the checkpoint stores them, at any alignment, or in memory.
#[derive(Clone, Copy)]
enum Row<'a> {
    Stored(&'a [u8]),
    Values(&'a [f32]),
}

impl Row<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Stored(bytes) => bytes.len() / 4,
            Self::Values(values) => values.len(),
        }
    }

    fn part(&self, k: usize, n: usize) -> Self {
        match self {
            Self::Stored(bytes) => Self::Stored(&bytes[4 * k..4 * (k + n)]),
            Self::Values(values) => Self::Values(&values[k..k + n]),
        }
    }

    fn get(&self, k: usize) -> f32 {
        match self {
            Self::Stored(b) => {
                f32::from_le_bytes([b[4 * k], b[4 * k + 1], b[4 * k + 2], b[4 * k + 3]])
            }
            Self::Values(values) => values[k],
        }
    }

    /// Where the values start; not necessarily aligned.
    #[cfg(target_arch = "x86_64")]
    fn as_ptr(&self) -> *const f32 {
        match self {
            Self::Stored(bytes) => bytes.as_ptr().cast(),
            Self::Values(values) => values.as_ptr(),
        }
    }
}

/// `lanes[t][r][k % 8] += xs[t][k] * w[r][k]` for every token and column; `xs: [tokens, cols]`, rows of
/// `cols` values.
fn add_products<const R: usize>(
    isa: Isa,
    xs: &[f32],
    cols: usize,
    w: &[Row<'_>; R],
    lanes: &mut [[Lanes; R]],
) {
    assert!(
        w.iter().all(|w| w.len() == cols) && xs.len() == lanes.len() * cols,
        "rows as long as the inputs"
    );
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        #[allow(unsafe_code)]
        // SAFETY: `Isa` names it only on processors that have AVX-512F; the lengths were checked.
        let done = unsafe { x86::add_products_avx512(xs, cols, w, lanes) };
        return add_rest(xs, cols, w, lanes, done);
    }
    let stretch = if lanes.len() == 1 { cols } else { STRETCH };
    for k in (0..cols).step_by(stretch.max(1)) {
        let n = stretch.min(cols - k);
        let w = w.each_ref().map(|w| w.part(k, n));
        for (x, lanes) in xs.chunks_exact(cols).zip(&mut *lanes) {
            let x = &x[k..k + n];
            let done = match isa {
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code)]
                // SAFETY: `Isa` names it only on processors that have AVX2 and FMA; the rows are as
                // long as `x`.
                Isa::Avx2 => unsafe { x86::add_products_avx2(x, &w, lanes) },
                _ => 0,
            };
            add_rest(x, n, &w, std::slice::from_mut(lanes), done);
        }
    }
}

/// The columns from `done` on.
fn add_rest<const R: usize>(
    xs: &[f32],
    cols: usize,
    w: &[Row<'_>; R],
    lanes: &mut [[Lanes; R]],
    done: usize,
) {
    for (x, lanes) in xs.chunks_exact(cols.max(1)).zip(lanes) {
        for (w, lanes) in w.iter().zip(lanes) {
            for k in done..cols {
                lanes[k % LANES] += f64::from(x[k]) * f64::from(w.get(k));
            }
        }
    }
}

/// The whole groups of eight columns. Fused multiply-adds: products are exact in f64, so there is no
/// rounding to leave out.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, Lanes, Row};

    /// One register is the eight lanes of a row and token. Returns how many columns are done.
    ///
    /// # Safety
    /// `xs: [tokens, cols]` for as many tokens as `lanes`, and rows of `cols` values.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn add_products_avx512<const R: usize>(
        xs: &[f32],
        cols: usize,
        w: &[Row<'_>; R],
        lanes: &mut [[Lanes; R]],
    ) -> usize {
        macro_rules! by_tokens {
            ($($t:literal)*) => {
                match lanes.len() {
                    // SAFETY: as this function's.
                    $($t => unsafe { add_tokens_avx512::<R, $t>(xs, cols, w, lanes) },)*
                    _ => return 0,
                }
            };
        }
        by_tokens!(1 2 3 4 5 6);
        cols / LANES * LANES
    }

    /// # Safety
    /// As [`add_products_avx512`], for `T` tokens.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add_tokens_avx512<const R: usize, const T: usize>(
        xs: &[f32],
        cols: usize,
        w: &[Row<'_>; R],
        lanes: &mut [[Lanes; R]],
    ) {
        let (w, xs) = (w.map(|w| w.as_ptr()), xs.as_ptr());
        let mut acc = [[_mm512_setzero_pd(); R]; T];
        for t in 0..T {
            for r in 0..R {
                // SAFETY: a row of lanes is eight f64.
                acc[t][r] = unsafe { _mm512_loadu_pd(lanes[t][r].as_ptr()) };
            }
        }
        for k in (0..cols / LANES * LANES).step_by(LANES) {
            let mut ws = [_mm512_setzero_pd(); R];
            for r in 0..R {
                // SAFETY: `k + 8 <= cols`, within the row.
                ws[r] = unsafe { _mm512_cvtps_pd(_mm256_loadu_ps(w[r].add(k))) };
            }
            for t in 0..T {
                // SAFETY: likewise within the token's input.
                let x = unsafe { _mm512_cvtps_pd(_mm256_loadu_ps(xs.add(t * cols + k))) };
                for r in 0..R {
                    acc[t][r] = _mm512_fmadd_pd(x, ws[r], acc[t][r]);
                }
            }
        }
        for t in 0..T {
            for r in 0..R {
                // SAFETY: as for the load.
                unsafe { _mm512_storeu_pd(lanes[t][r].as_mut_ptr(), acc[t][r]) };
            }
        }
    }

    /// Two registers are the eight lanes of a row. Returns how many columns are done.
    ///
    /// # Safety
    /// Every row is at least as long as `x`.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn add_products_avx2<const R: usize>(
        x: &[f32],
        w: &[Row<'_>; R],
        lanes: &mut [Lanes; R],
    ) -> usize {
        let w = w.map(|w| w.as_ptr());
        // SAFETY: a row of lanes is two halves of four f64.
        let load = |l: &Lanes, half: usize| unsafe { _mm256_loadu_pd(l.as_ptr().add(4 * half)) };
        let mut acc = lanes.each_ref().map(|l| [load(l, 0), load(l, 1)]);
        for k in (0..x.len() / LANES * LANES).step_by(LANES) {
            for half in 0..2 {
                let at = k + 4 * half;
                // SAFETY: `at + 4` is within `x` and within the rows.
                let x = unsafe { _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr().add(at))) };
                for r in 0..R {
                    // SAFETY: as above.
                    let w = unsafe { _mm256_cvtps_pd(_mm_loadu_ps(w[r].add(at))) };
                    acc[r][half] = _mm256_fmadd_pd(x, w, acc[r][half]);
                }
            }
        }
        for (lanes, acc) in lanes.iter_mut().zip(acc) {
            for half in 0..2 {
                // SAFETY: as for the load.
                unsafe { _mm256_storeu_pd(lanes.as_mut_ptr().add(4 * half), acc[half]) };
            }
        }
        x.len() / LANES * LANES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lane by lane, element by element: what every instruction set must give.
    fn plain(x: &[f32], w: &[f32]) -> f64 {
        let mut lanes = [0.0; LANES];
        for (k, (x, w)) in x.iter().zip(w).enumerate() {
            lanes[k % LANES] += f64::from(*x) * f64::from(*w);
        }
        sum(&lanes)
    }

    #[test]
    fn every_isa_keeps_the_order() {
        for (rows, cols) in [(1, 1), (3, 7), (8, 512), (15, 515), (24, 1100)] {
            let value = |i: usize| ((i * 7919) % 1013) as f32 / 97.0 - 5.0;
            let w: Vec<f32> = (0..rows * cols).map(|i| value(i + 5) / 3.0).collect();
            // One byte in front, so that no row is aligned.
            let bytes: Vec<u8> = std::iter::once(0)
                .chain(w.iter().flat_map(|v| v.to_le_bytes()))
                .collect();
            let bytes = bytes::Bytes::from(bytes).slice(1..);
            let weight = F32Rows::new(bytes, rows, cols).expect("lengths fit");
            let xs: Vec<f32> = (0..8 * cols).map(value).collect();
            let isas = Isa::available();
            for (isa, tokens) in isas.iter().flat_map(|isa| (1..=8).map(|t| (*isa, t))) {
                let xs = &xs[..tokens * cols];
                for first in (0..rows).step_by(ROWS) {
                    let mut sums = vec![[0.0; ROWS]; tokens];
                    project(isa, &weight, first, xs, &mut sums);
                    for (x, sums) in xs.chunks_exact(cols).zip(sums) {
                        for r in first..rows.min(first + ROWS) {
                            let expected = plain(x, &w[r * cols..(r + 1) * cols]);
                            assert_eq!(sums[r - first].to_bits(), expected.to_bits());
                        }
                    }
                }
                let x = &xs[..cols];
                let mean = plain(x, x) / cols as f64;
                assert_eq!(rstd(isa, x, 0.5), 1.0 / (mean + 0.5).sqrt());
            }
        }
    }
}
