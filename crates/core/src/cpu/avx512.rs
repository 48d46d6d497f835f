//! AVX-512 kernels: one register is the eight lanes of two neighbouring rows.
//!
//! A panel for them interleaves pairs of rows, eight columns of the one and eight of the other; stored
//! rows are paired as they are loaded. Every lane sees exactly the operations it sees in AVX2.

use std::arch::x86_64::*;

use super::avx2::{self, Bf16, F32, Stored};
use super::{LANES, Lanes, Stretch};

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

/// [`super::sum_lanes`] of the eight lanes of two rows in every register: `2 * P` sums, rows in order.
///
/// # Safety
/// `out` has room for them.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn sum_pairs_avx512<const P: usize>(pairs: [__m512; P], out: *mut f32) {
    let mut p = 0;
    while p < P {
        // The second of two registers: of an odd one it is the first again.
        let (a, b) = (pairs[p], pairs[(p + 1).min(P - 1)]);
        // A quarter a row: 0+4, 1+5, 2+6, 3+7.
        let quads = _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
        );
        let halves = _mm512_add_ps(quads, _mm512_permute_ps::<0b11_10_11_10>(quads));
        let whole = _mm512_add_ps(halves, _mm512_permute_ps::<0b01_01_01_01>(halves));
        let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        let sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(first, whole));
        // SAFETY: two or four of the sums from `2 * p` on.
        unsafe {
            match p + 1 < P {
                true => _mm_storeu_ps(out.add(2 * p), sums),
                false => _mm_storel_pd(out.add(2 * p).cast(), _mm_castps_pd(sums)),
            }
        }
        p += 2;
    }
}

/// Eight numbers of each of two rows.
pub(super) trait StoredPair: Stored {
    /// # Safety
    /// `a` and `b` point to eight numbers each; the processor has AVX-512F.
    unsafe fn load_pair(a: *const u8, b: *const u8) -> __m512;
}

impl StoredPair for Bf16 {
    #[inline(always)]
    unsafe fn load_pair(a: *const u8, b: *const u8) -> __m512 {
        // SAFETY: sixteen bytes each and AVX-512F, by the contract.
        unsafe {
            let a = _mm256_castsi128_si256(_mm_loadu_si128(a.cast()));
            let both = _mm256_inserti128_si256::<1>(a, _mm_loadu_si128(b.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)))
        }
    }
}

impl StoredPair for F32 {
    #[inline(always)]
    unsafe fn load_pair(a: *const u8, b: *const u8) -> __m512 {
        // SAFETY: 32 bytes each and AVX-512F, by the contract.
        unsafe {
            let a = _mm512_castpd256_pd512(_mm256_loadu_pd(a.cast()));
            _mm512_castpd_ps(_mm512_insertf64x4::<1>(a, _mm256_loadu_pd(b.cast())))
        }
    }
}

/// [`avx2::stored`] from the stretch's first row on.
#[target_feature(enable = "avx512f")]
pub(super) fn stored<S: StoredPair>(
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    sums: &mut [Lanes],
) {
    let done = by_inputs::<S, false>(w, row_bytes, stretch, sums.as_flattened_mut());
    avx2::stored::<S>(w, row_bytes, stretch, done, sums);
}

/// Whole products, `totals[i * rows + r]`; `false` unless rows come in pairs and columns in eights.
#[target_feature(enable = "avx512f")]
pub(super) fn stored_totals<S: StoredPair>(
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    totals: &mut [f32],
) -> bool {
    let rows = stretch.rows.len();
    rows.is_multiple_of(2)
        && stretch.cols.len().is_multiple_of(LANES)
        && by_inputs::<S, true>(w, row_bytes, stretch, totals) == rows
}

/// Rows in pairs: lanes added to `sums`, or their sums if `TOTAL`. Returns how many rows are done.
#[target_feature(enable = "avx512f")]
fn by_inputs<S: StoredPair, const TOTAL: bool>(
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    sums: &mut [f32],
) -> usize {
    // Enough sums in flight to hide the latency of an addition, few enough to stay in registers.
    match stretch.inputs() {
        1 => stored_sweep::<S, 4, 1, TOTAL>(w, row_bytes, stretch, sums),
        2 => stored_sweep::<S, 4, 2, TOTAL>(w, row_bytes, stretch, sums),
        3 => stored_sweep::<S, 4, 3, TOTAL>(w, row_bytes, stretch, sums),
        4 => stored_sweep::<S, 4, 4, TOTAL>(w, row_bytes, stretch, sums),
        5 => stored_sweep::<S, 2, 5, TOTAL>(w, row_bytes, stretch, sums),
        6 => stored_sweep::<S, 2, 6, TOTAL>(w, row_bytes, stretch, sums),
        7 => stored_sweep::<S, 2, 7, TOTAL>(w, row_bytes, stretch, sums),
        8 => stored_sweep::<S, 2, 8, TOTAL>(w, row_bytes, stretch, sums),
        _ => 0,
    }
}

/// [`by_inputs`] for `C` inputs, `P` pairs of rows at a time.
#[target_feature(enable = "avx512f")]
fn stored_sweep<S: StoredPair, const P: usize, const C: usize, const TOTAL: bool>(
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    sums: &mut [f32],
) -> usize {
    let mut r = 0;
    while r + 2 <= stretch.rows.len() {
        let w = &w[r * row_bytes..];
        let sums = &mut sums[r * if TOTAL { 1 } else { LANES }..];
        if r + 2 * P <= stretch.rows.len() {
            stored_step::<S, P, C, TOTAL>(w, row_bytes, stretch, sums);
            r += 2 * P;
        } else {
            stored_step::<S, 1, C, TOTAL>(w, row_bytes, stretch, sums);
            r += 2;
        }
    }
    r
}

/// The first `P` pairs of rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn stored_step<S: StoredPair, const P: usize, const C: usize, const TOTAL: bool>(
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    sums: &mut [f32],
) {
    let (len, k, stride) = (stretch.cols.len(), stretch.k, stretch.rows.len());
    // Values of a sum: its lanes, or itself.
    let each = if TOTAL { 1 } else { LANES };
    // All slices are checked here, once: the loop works on their pointers.
    let w = &w[..(2 * P - 1) * row_bytes + len * S::BYTES];
    let xs = &stretch.xs[stretch.cols.start..][..(C - 1) * k + len];
    let sums = &mut sums[..((C - 1) * stride + 2 * P) * each];
    let mut acc = [[_mm512_setzero_ps(); P]; C];
    for c in 0..if TOTAL { 0 } else { C } {
        for p in 0..P {
            // SAFETY: the lanes of two rows.
            acc[c][p] = unsafe { _mm512_loadu_ps(sums.as_ptr().add((c * stride + 2 * p) * LANES)) };
        }
    }
    let whole = len / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        let w = w.as_ptr().wrapping_add(at * S::BYTES);
        let mut pairs = [_mm512_setzero_ps(); P];
        for p in 0..P {
            let (a, b) = (2 * p * row_bytes, (2 * p + 1) * row_bytes);
            // The hardware's prefetcher stumbles at the start of every row: ask for the rows after these.
            _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(2 * P * row_bytes + a).cast());
            _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(2 * P * row_bytes + b).cast());
            // SAFETY: `at + 8 <= len` numbers of both rows; the features are this function's.
            pairs[p] = unsafe { S::load_pair(w.wrapping_add(a), w.wrapping_add(b)) };
        }
        for c in 0..C {
            // SAFETY: eight values of input `c`.
            let eight = unsafe { _mm256_loadu_pd(xs.as_ptr().add(c * k + at).cast()) };
            let x = _mm512_castpd_ps(_mm512_broadcast_f64x4(eight));
            for p in 0..P {
                acc[c][p] = _mm512_fmadd_ps(pairs[p], x, acc[c][p]);
            }
        }
    }
    if TOTAL {
        for c in 0..C {
            // SAFETY: the sums of `2 * P` rows.
            unsafe { sum_pairs_avx512(acc[c], sums.as_mut_ptr().add(c * stride)) };
        }
        return;
    }
    for c in 0..C {
        for p in 0..P {
            // SAFETY: as the loads above.
            unsafe {
                _mm512_storeu_ps(
                    sums.as_mut_ptr().add((c * stride + 2 * p) * LANES),
                    acc[c][p],
                )
            };
        }
        let sums = sums.as_chunks_mut::<LANES>().0;
        for r in 0..if whole < len { 2 * P } else { 0 } {
            let (w, x) = (&w[r * row_bytes..], &xs[c * k..]);
            let (w, x) = (&w[whole * S::BYTES..len * S::BYTES], &x[whole..len]);
            avx2::add_rest::<S>(w, x, &mut sums[c * stride + r]);
        }
    }
}
