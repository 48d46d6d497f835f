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
pub(super) const ROWS: usize = 8;

/// Columns after which the next token has its turn: eight weight rows of them, 16 KB, stay in the first
/// cache meanwhile. A single token streams whole rows.
const STRETCH: usize = 512;

const LANES: usize = 8;
type Lanes = [f64; LANES];

/// `1 / sqrt(mean(x²) + eps)`.
pub(super) fn rstd(isa: Isa, x: &[f32], eps: f32) -> f64 {
    let mut lanes = [[0.0; LANES]];
    add_products(isa, x, &[Row::Values(x)], &mut lanes);
    1.0 / (sum(&lanes[0]) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// Products of weight rows `first .. first + ROWS` (or as many as there are) with `xs: [m, cols]`;
/// `sums: [m]`.
pub(super) fn project(isa: Isa, w: &F32Rows, first: usize, xs: &[f32], sums: &mut [[f64; ROWS]]) {
    let cols = w.cols();
    let mut lanes = vec![[[0.0; LANES]; ROWS]; sums.len()];
    let stretch = if sums.len() == 1 { cols } else { STRETCH };
    for k in (0..cols).step_by(stretch) {
        let n = stretch.min(cols - k);
        let rows: [Row<'_>; ROWS] = std::array::from_fn(|r| {
            // Past the last row: the first again, whose sums nobody reads.
            let row = if first + r < w.rows() {
                first + r
            } else {
                first
            };
            Row::Stored(&w.bytes()[(row * cols + k) * 4..][..n * 4])
        });
        for (x, lanes) in xs.chunks_exact(cols).zip(&mut lanes) {
            add_products(isa, &x[k..k + n], &rows, lanes);
        }
    }
    for (sums, lanes) in sums.iter_mut().zip(&lanes) {
        *sums = std::array::from_fn(|r| sum(&lanes[r]));
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

/// `lanes[r][k % 8] += x[k] * w[r][k]` for every `k` of `x`. Rows are as long as `x`.
fn add_products<const R: usize>(isa: Isa, x: &[f32], w: &[Row<'_>; R], lanes: &mut [Lanes; R]) {
    assert!(
        w.iter().all(|w| w.len() == x.len()),
        "rows as long as the input"
    );
    let done = match isa {
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code)]
        // SAFETY: `Isa` names it only on processors that have AVX-512F; the rows are as long as `x`.
        Isa::Avx512 => unsafe { x86::add_products_avx512(x, w, lanes) },
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code)]
        // SAFETY: as above, for AVX2 and FMA.
        Isa::Avx2 => unsafe { x86::add_products_avx2(x, w, lanes) },
        _ => 0,
    };
    for (w, lanes) in w.iter().zip(lanes) {
        for (k, x) in x.iter().enumerate().skip(done) {
            lanes[k % LANES] += f64::from(*x) * f64::from(w.get(k));
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

    /// One register is the eight lanes of a row. Returns how many columns are done.
    ///
    /// # Safety
    /// Every row is at least as long as `x`.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn add_products_avx512<const R: usize>(
        x: &[f32],
        w: &[Row<'_>; R],
        lanes: &mut [Lanes; R],
    ) -> usize {
        let whole = x.len() / LANES * LANES;
        let w = w.map(|w| w.as_ptr());
        // SAFETY: a row of lanes is eight f64.
        let mut acc = lanes
            .each_ref()
            .map(|l| unsafe { _mm512_loadu_pd(l.as_ptr()) });
        for k in (0..whole).step_by(LANES) {
            // SAFETY: `k + 8 <= whole`, within `x` and within the rows.
            let x = unsafe { _mm512_cvtps_pd(_mm256_loadu_ps(x.as_ptr().add(k))) };
            for r in 0..R {
                // SAFETY: as above.
                let w = unsafe { _mm512_cvtps_pd(_mm256_loadu_ps(w[r].add(k))) };
                acc[r] = _mm512_fmadd_pd(x, w, acc[r]);
            }
        }
        for (lanes, acc) in lanes.iter_mut().zip(acc) {
            // SAFETY: as for the load.
            unsafe { _mm512_storeu_pd(lanes.as_mut_ptr(), acc) };
        }
        whole
    }

    /// Two registers are the eight lanes of a row; four rows at a time fit. Returns how many columns
    /// are done.
    ///
    /// # Safety
    /// Every row is at least as long as `x`.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn add_products_avx2<const R: usize>(
        x: &[f32],
        w: &[Row<'_>; R],
        lanes: &mut [Lanes; R],
    ) -> usize {
        for (w, lanes) in w.chunks(4).zip(lanes.chunks_mut(4)) {
            match (<&[_; 4]>::try_from(w), <&mut [_; 4]>::try_from(&mut *lanes)) {
                // SAFETY: as this function's.
                (Ok(w), Ok(lanes)) => unsafe { add_rows_avx2(x, w, lanes) },
                _ => {
                    for (w, lanes) in w.iter().zip(lanes) {
                        // SAFETY: as this function's.
                        unsafe { add_rows_avx2(x, &[*w], std::array::from_mut(lanes)) }
                    }
                }
            }
        }
        x.len() / LANES * LANES
    }

    /// # Safety
    /// As [`add_products_avx2`].
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_rows_avx2<const R: usize>(x: &[f32], w: &[Row<'_>; R], lanes: &mut [Lanes; R]) {
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
            let xs: Vec<f32> = (0..3 * cols).map(value).collect();
            for isa in Isa::available() {
                for first in (0..rows).step_by(ROWS) {
                    let mut sums = [[0.0; ROWS]; 3];
                    project(isa, &weight, first, &xs, &mut sums);
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
