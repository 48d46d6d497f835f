//! Packed e2m1 codes to f32 in AVX2 registers, and products of one input row with them.
//!
//! The value of a code times its scale always fits a bf16, so two byte shuffles over 16-entry tables,
//! one per scale byte, give its high and its low byte: no multiplication by the scale is left, and
//! the extreme scale bytes (subnormal, overflowing, NaN) need no care.

use std::arch::x86_64::*;

use deepseek_v41_core::cpu::{LANES, Lanes, Stretch};

use super::FP4_GROUP;
use crate::formats::{e2m1, e8m0};

/// By scale byte: the high bytes of the 16 codes' bf16 values, then the low bytes.
#[repr(align(32))]
pub(super) struct Tables(pub(super) [[u8; 32]; 256]);

pub(super) static TABLES: Tables = tables();

const fn tables() -> Tables {
    let mut tables = [[0u8; 32]; 256];
    let mut scale = 0;
    while scale < 256 {
        let mut code = 0;
        while code < 16 {
            let value = e2m1::VALUES[code] * e8m0::decode(scale as u8);
            // The sign of a NaN is left to whoever evaluates the product: fix it.
            let bits = if value.is_nan() {
                0x7fc0
            } else {
                value.to_bits() >> 16
            };
            tables[scale][code] = (bits >> 8) as u8;
            tables[scale][code + 16] = bits as u8;
            code += 1;
        }
        scale += 1;
    }
    Tables(tables)
}

/// Bytes of a group of 16 in the order in which [`widen`] takes their nibbles: each 32-bit word holds
/// bytes `i, i + 4, i, i + 4`, whose low nibbles are columns `2i` and `2i + 8` and whose high nibbles
/// are the columns after those.
#[rustfmt::skip]
pub(super) const SELECT: [i8; 32] = [
    0, 4, 0, 4, 1, 5, 1, 5, 8, 12, 8, 12, 9, 13, 9, 13,
    2, 6, 2, 6, 3, 7, 3, 7, 10, 14, 10, 14, 11, 15, 11, 15,
];

#[inline]
#[target_feature(enable = "avx2,fma")]
fn select() -> __m256i {
    // Opaque to the optimiser, which would otherwise merge this shuffle with the broadcast before it
    // into a third, slower one instead of broadcasting by the load.
    // SAFETY: 32 bytes.
    std::hint::black_box(unsafe { _mm256_loadu_si256(SELECT.as_ptr().cast()) })
}

/// The values of one group, columns in order.
///
/// # Safety
/// `packed` points to 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn widen(packed: *const u8, scale: u8, select: __m256i) -> [__m256; FP4_GROUP / LANES] {
    let table = TABLES.0[usize::from(scale)].as_ptr();
    // SAFETY: a table has 32 bytes and is aligned to 32; `packed` has 16, see the contract.
    let (high, low, packed) = unsafe {
        (
            _mm256_broadcastsi128_si256(_mm_load_si128(table.cast())),
            _mm256_broadcastsi128_si256(_mm_load_si128(table.add(16).cast())),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(packed.cast())),
        )
    };
    let bytes = _mm256_shuffle_epi8(packed, select);
    // Low nibbles in the even 16-bit words, high nibbles in the odd ones.
    let nibbles = _mm256_blend_epi16::<0xaa>(bytes, _mm256_srli_epi16::<4>(bytes));
    let codes = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    let (high, low) = (
        _mm256_shuffle_epi8(high, codes),
        _mm256_shuffle_epi8(low, codes),
    );
    // bf16 pairs: columns `i` and `i + 8` share a 32-bit word.
    let first = _mm256_unpacklo_epi8(low, high);
    let second = _mm256_unpackhi_epi8(low, high);
    let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(first)),
        _mm256_castsi256_ps(_mm256_and_si256(first, upper)),
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(second)),
        _mm256_castsi256_ps(_mm256_and_si256(second, upper)),
    ]
}

/// Writes the values of whole groups.
#[target_feature(enable = "avx2,fma")]
pub(super) fn decode(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    let select = select();
    let len = packed.len();
    let groups = packed.as_chunks::<{ FP4_GROUP / 2 }>().0.iter().zip(scales);
    for ((packed, scale), out) in groups.zip(out.as_chunks_mut::<FP4_GROUP>().0) {
        // The same row's next stretch, which a panel comes back for.
        _mm_prefetch::<_MM_HINT_T0>(packed.as_ptr().wrapping_add(len).cast());
        // SAFETY: 16 bytes.
        let values = unsafe { widen(packed.as_ptr(), *scale, select) };
        for (values, out) in values.into_iter().zip(out.as_chunks_mut::<LANES>().0) {
            // SAFETY: eight floats.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
        }
    }
}

/// [`WeightRows::accumulate`] for up to eight inputs, from row `first` of the stretch on. `packed` and
/// `scales` are the whole weight's.
///
/// [`WeightRows::accumulate`]: deepseek_v41_core::cpu::WeightRows::accumulate
#[target_feature(enable = "avx2,fma")]
pub(super) fn accumulate(
    packed: &[u8],
    scales: &[u8],
    s: &Stretch<'_>,
    first: usize,
    sums: &mut [Lanes],
) {
    // Enough sums in flight to hide the latency of an addition, few enough to stay in registers.
    match s.inputs() {
        1 => sweep::<4, 1>(packed, scales, s, first, sums),
        2 => sweep::<4, 2>(packed, scales, s, first, sums),
        3 => sweep::<2, 3>(packed, scales, s, first, sums),
        4 => sweep::<2, 4>(packed, scales, s, first, sums),
        5 => sweep::<1, 5>(packed, scales, s, first, sums),
        6 => sweep::<1, 6>(packed, scales, s, first, sums),
        7 => sweep::<1, 7>(packed, scales, s, first, sums),
        m => {
            assert_eq!(m, 8);
            sweep::<1, 8>(packed, scales, s, first, sums);
        }
    }
}

/// [`accumulate`] for `C` inputs, `R` rows at a time.
#[target_feature(enable = "avx2,fma")]
fn sweep<const R: usize, const C: usize>(
    packed: &[u8],
    scales: &[u8],
    s: &Stretch<'_>,
    first: usize,
    sums: &mut [Lanes],
) {
    let mut r = first;
    while r < s.rows.len() {
        if r + R <= s.rows.len() {
            step::<R, C>(packed, scales, s, r, sums);
            r += R;
        } else {
            step::<1, C>(packed, scales, s, r, sums);
            r += 1;
        }
    }
}

/// Rows `r0 .. r0 + R` of the stretch.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn step<const R: usize, const C: usize>(
    packed: &[u8],
    scales: &[u8],
    s: &Stretch<'_>,
    r0: usize,
    sums: &mut [Lanes],
) {
    const BYTES: usize = FP4_GROUP / 2;
    let (rows, k) = (s.rows.len(), s.k);
    let row_groups = k / FP4_GROUP;
    let (first, groups) = (s.cols.start / FP4_GROUP, s.cols.len() / FP4_GROUP);
    // All slices below are checked here, once: the loop works on their pointers.
    let start = (s.rows.start + r0) * row_groups + first;
    let span = (R - 1) * row_groups + groups;
    let scales = scales[start..][..span].as_ptr();
    let packed = packed[start * BYTES..][..span * BYTES].as_ptr();
    let xs = s.xs[s.cols.start..][..(C - 1) * k + groups * FP4_GROUP].as_ptr();
    let sums = &mut sums[r0..][..(C - 1) * rows + R];

    let select = select();
    let mut acc = [[_mm256_setzero_ps(); R]; C];
    for c in 0..C {
        for r in 0..R {
            // SAFETY: eight lanes.
            acc[c][r] = unsafe { _mm256_loadu_ps(sums[c * rows + r].as_ptr()) };
        }
    }
    for g in 0..groups {
        // The hardware's prefetcher stumbles at the start of every row: ask for the rows after these,
        // each in turn, as their bytes will be read.
        let ahead = (R + g % R) * row_groups + g / R * R;
        _mm_prefetch::<_MM_HINT_T0>(packed.wrapping_add(ahead * BYTES).cast());
        for r in 0..R {
            // SAFETY: group `g` of row `r`, inside the slices above.
            let values = unsafe {
                let at = r * row_groups + g;
                widen(packed.add(at * BYTES), *scales.add(at), select)
            };
            for i in 0..values.len() {
                for c in 0..C {
                    // SAFETY: eight inputs of the same group, inside the slice above.
                    let x = unsafe { _mm256_loadu_ps(xs.add(c * k + g * FP4_GROUP + i * LANES)) };
                    acc[c][r] = _mm256_fmadd_ps(values[i], x, acc[c][r]);
                }
            }
        }
    }
    for c in 0..C {
        for r in 0..R {
            // SAFETY: eight lanes.
            unsafe { _mm256_storeu_ps(sums[c * rows + r].as_mut_ptr(), acc[c][r]) };
        }
    }
}
