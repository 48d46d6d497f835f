//! AVX-512 kernels: one register is the eight lanes of two neighbouring rows.
//!
//! A panel for them interleaves pairs of rows, eight columns of the one and eight of the other, so
//! that every lane sees exactly the operations it sees in AVX2.

use std::arch::x86_64::*;

use super::LANES;

/// Rows that a step takes at once: four registers of pairs for each input.
pub(super) const ROWS: usize = 8;

/// [`super::avx2::panel`] for an interleaved panel: pair `p` of rows lies at `w + 2 * p * len`.
///
/// # Safety
/// As [`super::avx2::panel`]; `rows` is a multiple of [`ROWS`], `len` of eight.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn panel<const C: usize>(
    w: *const f32,
    len: usize,
    rows: usize,
    xs: *const f32,
    x_stride: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    for r in (0..rows).step_by(ROWS) {
        let (w, sums) = (w.wrapping_add(r * len), sums.wrapping_add(r * LANES));
        // SAFETY: eight rows from `r` on exist, see the contract.
        unsafe { step::<C>(w, len, xs, x_stride, sums, sums_stride) };
    }
}

/// # Safety
/// As [`panel`], for [`ROWS`] rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn step<const C: usize>(
    w: *const f32,
    len: usize,
    xs: *const f32,
    x_stride: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    const PAIRS: usize = ROWS / 2;
    let at = |c: usize, p: usize| sums.wrapping_add((c * sums_stride + 2 * p) * LANES);
    let mut acc = [[_mm512_setzero_ps(); PAIRS]; C];
    for c in 0..C {
        for p in 0..PAIRS {
            // SAFETY: the sums of two rows, see the contract.
            acc[c][p] = unsafe { _mm512_loadu_ps(at(c, p)) };
        }
    }
    for k in (0..len).step_by(LANES) {
        let mut x = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: eight values of input `c`, as `len` is a multiple of eight.
            let eight = unsafe { _mm256_loadu_pd(xs.wrapping_add(c * x_stride + k).cast()) };
            x[c] = _mm512_castpd_ps(_mm512_broadcast_f64x4(eight));
        }
        for p in 0..PAIRS {
            // SAFETY: eight values of both rows of pair `p`.
            let w = unsafe { _mm512_loadu_ps(w.wrapping_add(2 * (p * len + k))) };
            for c in 0..C {
                acc[c][p] = _mm512_fmadd_ps(w, x[c], acc[c][p]);
            }
        }
    }
    for c in 0..C {
        for p in 0..PAIRS {
            // SAFETY: as the loads above.
            unsafe { _mm512_storeu_ps(at(c, p), acc[c][p]) };
        }
    }
}
