//! [`fp4_avx2::accumulate`] with the eight lanes of two neighbouring rows in one register.
//!
//! Every lane sees the operations it sees there, in the same order.

use std::arch::x86_64::*;

use deepseek_v41_core::cpu::{LANES, Lanes, Stretch, sum_pairs_avx512};

use super::{
    FP4_GROUP,
    fp4_avx2::{self, SELECT, TABLES},
};

/// Bytes of a group.
const BYTES: usize = FP4_GROUP / 2;

/// [`fp4_avx2::accumulate`] from the stretch's first row on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(super) fn accumulate(packed: &[u8], scales: &[u8], s: &Stretch<'_>, sums: &mut [Lanes]) {
    let done = by_inputs::<false>(packed, scales, s, sums.as_flattened_mut());
    if done < s.rows.len() {
        fp4_avx2::accumulate(packed, scales, s, done, sums);
    }
}

/// Whole products, `totals[c * rows + r]`; `false` unless rows come in pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(super) fn totals(packed: &[u8], scales: &[u8], s: &Stretch<'_>, totals: &mut [f32]) -> bool {
    s.rows.len().is_multiple_of(2) && by_inputs::<true>(packed, scales, s, totals) == s.rows.len()
}

/// Lanes added to `sums`, or their sums if `TOTAL`; returns how many rows are done.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn by_inputs<const TOTAL: bool>(
    packed: &[u8],
    scales: &[u8],
    s: &Stretch<'_>,
    sums: &mut [f32],
) -> usize {
    // Enough sums in flight to hide the latency of an addition, few enough to stay in registers.
    match s.inputs() {
        1 => sweep::<2, 1, TOTAL>(packed, scales, s, sums),
        2 => sweep::<4, 2, TOTAL>(packed, scales, s, sums),
        3 => sweep::<4, 3, TOTAL>(packed, scales, s, sums),
        4 => sweep::<2, 4, TOTAL>(packed, scales, s, sums),
        5 => sweep::<2, 5, TOTAL>(packed, scales, s, sums),
        6 => sweep::<3, 6, TOTAL>(packed, scales, s, sums),
        7 => sweep::<2, 7, TOTAL>(packed, scales, s, sums),
        8 => sweep::<2, 8, TOTAL>(packed, scales, s, sums),
        _ => 0,
    }
}

/// [`by_inputs`] for `C` inputs, `P` pairs of rows at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn sweep<const P: usize, const C: usize, const TOTAL: bool>(
    packed: &[u8],
    scales: &[u8],
    s: &Stretch<'_>,
    sums: &mut [f32],
) -> usize {
    let (rows, mut r) = (s.rows.len(), 0);
    while r + 2 * P <= rows {
        step::<P, C, TOTAL>(packed, scales, s, r, sums);
        r += 2 * P;
    }
    while r + 2 <= rows {
        step::<1, C, TOTAL>(packed, scales, s, r, sums);
        r += 2;
    }
    r
}

/// Rows `r0 .. r0 + 2 * P` of the stretch.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
fn step<const P: usize, const C: usize, const TOTAL: bool>(
    packed: &[u8],
    scales: &[u8],
    s: &Stretch<'_>,
    r0: usize,
    sums: &mut [f32],
) {
    // Values of a sum: its lanes, or itself.
    let each = if TOTAL { 1 } else { LANES };
    let (stride, k) = (s.rows.len(), s.k);
    let row_groups = k / FP4_GROUP;
    let (first, groups) = (s.cols.start / FP4_GROUP, s.cols.len() / FP4_GROUP);
    // All slices below are checked here, once: the loop works on their pointers.
    let start = (s.rows.start + r0) * row_groups + first;
    let span = (2 * P - 1) * row_groups + groups;
    let scales = scales[start..][..span].as_ptr();
    let packed = packed[start * BYTES..][..span * BYTES].as_ptr();
    let xs = s.xs[s.cols.start..][..(C - 1) * k + groups * FP4_GROUP].as_ptr();
    let sums = sums[r0 * each..][..((C - 1) * stride + 2 * P) * each].as_mut_ptr();

    let mut acc = [[_mm512_setzero_ps(); P]; C];
    for c in 0..if TOTAL { 0 } else { C } {
        for p in 0..P {
            // SAFETY: the lanes of two rows.
            acc[c][p] = unsafe { _mm512_loadu_ps(sums.add((c * stride + 2 * p) * LANES)) };
        }
    }
    for g in 0..groups {
        let mut values = [[_mm512_setzero_ps(); FP4_GROUP / LANES]; P];
        for p in 0..P {
            let (a, b) = (2 * p * row_groups + g, (2 * p + 1) * row_groups + g);
            // The hardware's prefetcher stumbles at the start of every row: ask for the rows after these.
            for at in [a, b] {
                let ahead = packed.wrapping_add((2 * P * row_groups + at) * BYTES);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            }
            // SAFETY: group `g` of both rows, inside the slices above.
            values[p] = unsafe {
                let packed = [packed.add(a * BYTES), packed.add(b * BYTES)];
                widen(packed, [*scales.add(a), *scales.add(b)])
            };
        }
        for i in 0..FP4_GROUP / LANES {
            for c in 0..C {
                // SAFETY: eight inputs of the same group, inside the slice above.
                let x =
                    unsafe { _mm256_loadu_pd(xs.add(c * k + g * FP4_GROUP + i * LANES).cast()) };
                let x = _mm512_castpd_ps(_mm512_broadcast_f64x4(x));
                for p in 0..P {
                    acc[c][p] = _mm512_fmadd_ps(values[p][i], x, acc[c][p]);
                }
            }
        }
    }
    for c in 0..C {
        if TOTAL {
            // SAFETY: the sums of `2 * P` rows.
            unsafe { sum_pairs_avx512(acc[c], sums.add(c * stride)) };
            continue;
        }
        for p in 0..P {
            // SAFETY: as the loads above.
            unsafe { _mm512_storeu_ps(sums.add((c * stride + 2 * p) * LANES), acc[c][p]) };
        }
    }
}

/// The values of one group of two rows, columns in order: eight columns of both in each register. See
/// [`fp4_avx2`] for how.
///
/// # Safety
/// Both of `packed` point to 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
unsafe fn widen(packed: [*const u8; 2], scales: [u8; 2]) -> [__m512; FP4_GROUP / LANES] {
    let tables = scales.map(|scale| TABLES.0[usize::from(scale)].as_ptr());
    // SAFETY: 16 bytes each: a table has 32, `packed` 16 by the contract.
    let (packed, high, low, select) = unsafe {
        (
            two_rows(packed),
            two_rows(tables),
            two_rows(tables.map(|table| table.add(16))),
            _mm512_broadcast_i64x4(_mm256_loadu_si256(SELECT.as_ptr().cast())),
        )
    };
    let bytes = _mm512_shuffle_epi8(packed, select);
    // Low nibbles in the even 16-bit words, high nibbles in the odd ones.
    let nibbles = _mm512_mask_srli_epi16::<4>(bytes, ODD, bytes);
    let codes = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
    let (high, low) = (
        _mm512_shuffle_epi8(high, codes),
        _mm512_shuffle_epi8(low, codes),
    );
    // bf16 pairs: columns `i` and `i + 8` share a 32-bit word.
    let first = _mm512_unpacklo_epi8(low, high);
    let second = _mm512_unpackhi_epi8(low, high);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
        _mm512_castsi512_ps(_mm512_maskz_mov_epi16(ODD, first)),
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)),
        _mm512_castsi512_ps(_mm512_maskz_mov_epi16(ODD, second)),
    ]
}

/// The odd 16-bit words.
const ODD: u32 = 0xaaaa_aaaa;

/// 16 bytes in both halves of the lower register half, 16 others in both of the upper one.
///
/// # Safety
/// Both pointers point to 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
unsafe fn two_rows([a, b]: [*const u8; 2]) -> __m512i {
    // SAFETY: by the contract.
    let (a, b) = unsafe { (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast())) };
    _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(a), 0xff00, b)
}
