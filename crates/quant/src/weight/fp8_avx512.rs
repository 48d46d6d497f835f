//! [`fp8_avx2::band`] with the eight lanes of two neighbouring rows in one register.
//!
//! Every lane sees the operations it sees there, in the same order.

use std::arch::x86_64::*;

use deepseek_v41_core::cpu::{LANES, Lanes, sum_pairs_avx512};

use super::fp8_avx2::{self, Band, STEP, has_nan};

/// Pairs of rows that a step takes at once: with eight inputs their sums and codes fill the registers.
const PAIRS: usize = 2;

/// [`fp8_avx2::band`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) fn band(b: &Band<'_>, sums: &mut [Lanes]) -> Vec<usize> {
    let (done, mut nan) = by_inputs::<false>(b, sums.as_flattened_mut());
    if done < b.rows {
        let rest = Band {
            codes: &b.codes[done * b.row_bytes..],
            rows: b.rows - done,
            ..*b
        };
        let more = fp8_avx2::band(&rest, &mut sums[done..]);
        nan.extend(more.into_iter().map(|r| done + r));
    }
    nan
}

/// Whole products, `totals[c * sums_stride + r]`: `false` when a row holds a NaN code or rows do not
/// come in fours.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) fn totals(b: &Band<'_>, totals: &mut [f32]) -> bool {
    let (done, nan) = by_inputs::<true>(b, totals);
    done == b.rows && nan.is_empty()
}

/// Lanes added to `sums`, or their sums if `TOTAL`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn by_inputs<const TOTAL: bool>(b: &Band<'_>, sums: &mut [f32]) -> (usize, Vec<usize>) {
    match b.xs.len() / b.len {
        1 => sweep::<1, TOTAL>(b, sums),
        2 => sweep::<2, TOTAL>(b, sums),
        3 => sweep::<3, TOTAL>(b, sums),
        4 => sweep::<4, TOTAL>(b, sums),
        5 => sweep::<5, TOTAL>(b, sums),
        6 => sweep::<6, TOTAL>(b, sums),
        7 => sweep::<7, TOTAL>(b, sums),
        8 => sweep::<8, TOTAL>(b, sums),
        _ => (0, Vec::new()),
    }
}

/// [`by_inputs`] for `C` inputs: how many rows are done, and which of them hold a NaN code.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn sweep<const C: usize, const TOTAL: bool>(b: &Band<'_>, sums: &mut [f32]) -> (usize, Vec<usize>) {
    let mut nan = Vec::new();
    let done = b.rows / (2 * PAIRS) * (2 * PAIRS);
    for r in (0..done).step_by(2 * PAIRS) {
        if !step::<C, TOTAL>(b, r, sums) {
            nan.extend(r..r + 2 * PAIRS);
        }
    }
    (done, nan)
}

/// Rows `r0 .. r0 + 2 * PAIRS`; `false`, with their sums left alone, when one of them holds a NaN code.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn step<const C: usize, const TOTAL: bool>(b: &Band<'_>, r0: usize, sums: &mut [f32]) -> bool {
    const ROWS: usize = 2 * PAIRS;
    let (len, stride) = (b.len, b.sums_stride);
    // Values of a sum: its lanes, or itself.
    let each = if TOTAL { 1 } else { LANES };
    // All slices are checked here, once: the loop works on their pointers.
    assert!(len.is_multiple_of(STEP));
    let codes = b.codes[r0 * b.row_bytes..][..(ROWS - 1) * b.row_bytes + len].as_ptr();
    let xs = b.xs[..C * len].as_ptr();
    let sums = sums[r0 * each..][..((C - 1) * stride + ROWS) * each].as_mut_ptr();

    let sign = _mm512_set1_epi8(i8::MIN);
    let mut top = sign;
    let mut acc = [[_mm512_setzero_ps(); PAIRS]; C];
    for c in 0..if TOTAL { 0 } else { C } {
        for p in 0..PAIRS {
            // SAFETY: the lanes of two rows.
            acc[c][p] = unsafe { _mm512_loadu_ps(sums.add((c * stride + 2 * p) * LANES)) };
        }
    }
    for at in (0..len).step_by(STEP) {
        let mut both = [sign; PAIRS];
        for p in 0..PAIRS {
            let a = codes.wrapping_add(2 * p * b.row_bytes + at);
            let z = a.wrapping_add(b.row_bytes);
            // The hardware's prefetcher stumbles at the start of every row: ask for the rows after these.
            _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(ROWS * b.row_bytes).cast());
            _mm_prefetch::<_MM_HINT_T0>(z.wrapping_add(ROWS * b.row_bytes).cast());
            // SAFETY: a step of codes of either row, inside the slice above.
            let codes = unsafe {
                let a = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
                _mm512_inserti64x4::<1>(a, _mm256_loadu_si256(z.cast()))
            };
            top = _mm512_max_epu8(top, _mm512_or_si512(codes, sign));
            both[p] = in_turn(codes);
        }
        for half in 0..2 {
            let values = both.map(|codes| widen(codes, half));
            for i in 0..2 {
                for c in 0..C {
                    let x = xs.wrapping_add(c * len + at + (2 * half + i) * LANES);
                    // SAFETY: eight of the same step's inputs, inside the slice above.
                    let x = unsafe { _mm256_loadu_pd(x.cast()) };
                    let x = _mm512_castpd_ps(_mm512_broadcast_f64x4(x));
                    for p in 0..PAIRS {
                        acc[c][p] = _mm512_fmadd_ps(values[p][i], x, acc[c][p]);
                    }
                }
            }
        }
    }
    let (low, high) = (
        _mm512_castsi512_si256(top),
        _mm512_extracti64x4_epi64::<1>(top),
    );
    if has_nan(_mm256_max_epu8(low, high)) {
        return false;
    }
    for c in 0..C {
        if TOTAL {
            // SAFETY: the sums of `ROWS` rows.
            unsafe { sum_pairs_avx512(acc[c], sums.add(c * stride)) };
            continue;
        }
        for p in 0..PAIRS {
            // SAFETY: as the loads above.
            unsafe { _mm512_storeu_ps(sums.add((c * stride + 2 * p) * LANES), acc[c][p]) };
        }
    }
    true
}

/// 32 codes of one row and 32 of another as groups of eight, those of the two rows in turn.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn in_turn(both: __m512i) -> __m512i {
    _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), both)
}

/// The first or second half of such codes as `value * 2^-8`: eight columns of both rows in each register.
/// See [`fp8_avx2`] for how.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn widen(codes: __m512i, half: usize) -> [__m512; 2] {
    let codes = match half {
        0 => _mm512_castsi512_si256(codes),
        _ => _mm512_extracti64x4_epi64::<1>(codes),
    };
    let halves = _mm512_slli_epi16::<7>(_mm512_cvtepi8_epi16(codes));
    let halves = _mm512_and_si512(halves, _mm512_set1_epi16(0xbfff_u16 as i16));
    [
        _mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves)),
    ]
}
