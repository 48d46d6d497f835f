//! e4m3 codes to f32 in AVX2 registers, and products of one input row with them.
//!
//! An e4m3 code shifted into an f16 (4 of its 5 exponent bits, 3 of its 10 mantissa bits) is the
//! same number times 2^-8, subnormals included, and `vcvtph2ps` widens it. Only NaN codes come out
//! wrong, as a finite number, and are looked for separately.
//!
//! Moving a power of two from one factor of a product to the other changes no bit as long as every
//! factor stays a normal number. So rows that share their tiles' scales take them, and the 2^8, from
//! the input, once for all of them. Where a number would leave that range the functions say so and
//! the caller decodes the row instead.

use std::arch::x86_64::*;

use deepseek_v41_core::cpu::{LANES, Lanes, Magnitudes, Stretch};

use crate::formats::e8m0;

/// Codes that a row advances by at a time; tiles are multiples of it.
pub(super) const STEP: usize = 32;

/// What a shifted code lacks.
pub(super) const SHIFT: f32 = 256.0;

/// The largest scale byte whose product with [`SHIFT`] is finite.
const LAST_BYTE: u8 = 254 - 8;

/// Sixteen codes as two registers of `value * 2^-8`.
///
/// # Safety
/// `codes` points to 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(codes: *const u8) -> [__m256; 2] {
    // SAFETY: 16 bytes, see the contract.
    let signed = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(codes.cast()) });
    // Sign-extended `ssss sssss eeee mmm`, shifted by 7: `s s eeee mmm 0000000`. The second s stands
    // where f16 has its fifth exponent bit, which is zero here.
    let mask = _mm256_set1_epi16(0xbfff_u16 as i16);
    let half = _mm256_and_si256(_mm256_slli_epi16::<7>(signed), mask);
    [
        _mm256_cvtph_ps(_mm256_castsi256_si128(half)),
        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)),
    ]
}

/// Whether a byte of `codes | 0x80`, or a running maximum of such, is the NaN code.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn has_nan(top: __m256i) -> bool {
    _mm256_movemask_epi8(_mm256_cmpeq_epi8(top, _mm256_set1_epi8(-1))) != 0
}

/// Writes `value * scale` of whole steps of codes that start at a step's boundary, one scale per
/// `tile` codes counted from `k0`; returns the first step that takes the codec, or the number of steps.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode(
    codes: &[u8],
    scales: &[u8],
    steps_per_tile: usize,
    first_step: usize,
    out: &mut [f32],
) -> usize {
    let out_len = out.len();
    let (codes, _) = codes.as_chunks::<STEP>();
    let (out, _) = out.as_chunks_mut::<STEP>();
    for (i, (codes, out)) in codes.iter().zip(out.iter_mut()).enumerate() {
        let scale = scales[(first_step + i) / steps_per_tile];
        // A panel takes a stretch of every row in turn: the next visit's codes are not in sight of the
        // hardware's prefetcher.
        _mm_prefetch::<_MM_HINT_T0>(codes.as_ptr().wrapping_add(out_len).cast());
        // SAFETY: 32 bytes.
        let bytes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
        if scale > LAST_BYTE || has_nan(_mm256_or_si256(bytes, _mm256_set1_epi8(i8::MIN))) {
            return i;
        }
        let factor = _mm256_set1_ps(e8m0::decode(scale) * SHIFT);
        for (codes, out) in codes
            .as_chunks::<16>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<16>().0)
        {
            // SAFETY: 16 codes.
            let values = unsafe { widen(codes.as_ptr()) };
            for (values, out) in values.into_iter().zip(out.as_chunks_mut::<LANES>().0) {
                // SAFETY: eight floats.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(values, factor)) };
            }
        }
    }
    out.len()
}

/// The inputs of a stretch with `scale * 2^8` folded in, end to end; `false`, with nothing promised of
/// `out`, unless every product of an input of such magnitudes with a code stays a normal number. `scales`
/// are those of the tiles, each `tile` columns, from the one that holds the stretch's first column on.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fold_scales(s: &Stretch<'_>, scales: &[u8], tile: usize, out: &mut [f32]) -> bool {
    // Shifted codes lie in 2^-17 .. 2^1, so 2^±100 leaves room on both sides.
    const LOW: f32 = f32::from_bits((127 - 100) << 23);
    const HIGH: f32 = f32::from_bits((127 + 100) << 23);
    let (len, Magnitudes { least, most }) = (s.cols.len(), s.magnitudes);
    // The first tile may begin before the stretch.
    let (mut at, mut end) = (0, tile - s.cols.start % tile);
    for byte in scales {
        if at >= len {
            break;
        }
        // Infinite above LAST_BYTE and NaN for 255: then one of the comparisons does not hold.
        let factor = e8m0::decode(*byte) * SHIFT;
        if !(least * factor >= LOW && most * factor <= HIGH) {
            return false;
        }
        let cols = at..end.min(len);
        let xs = s.xs[s.cols.start..].chunks(s.k);
        for (x, out) in xs.zip(out.chunks_exact_mut(len)) {
            let (x, out) = (&x[cols.clone()], &mut out[cols.clone()]);
            let ((x, x_rest), (out, rest)) = (x.as_chunks::<STEP>(), out.as_chunks_mut::<STEP>());
            for (out, x) in out.iter_mut().zip(x) {
                for i in 0..STEP {
                    out[i] = x[i] * factor;
                }
            }
            for (out, x) in rest.iter_mut().zip(x_rest) {
                *out = x * factor;
            }
        }
        (at, end) = (end, end + tile);
    }
    true
}

/// Adds the products of rows of `len` codes, `row_bytes` apart, with up to eight inputs of `len` values
/// end to end, scales folded in, to `sums[c * sums_stride + r]`. Returns which rows hold a NaN code and
/// kept their sums, if any.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn band(b: &Band<'_>, sums: &mut [Lanes]) -> Vec<usize> {
    // Enough sums in flight to hide the latency of an addition, few enough to stay in registers.
    match b.xs.len() / b.len {
        1 => sweep::<4, 1>(b, sums),
        2 => sweep::<2, 2>(b, sums),
        3 => sweep::<2, 3>(b, sums),
        4 => sweep::<2, 4>(b, sums),
        5 => sweep::<1, 5>(b, sums),
        6 => sweep::<1, 6>(b, sums),
        7 => sweep::<1, 7>(b, sums),
        m => {
            assert_eq!(m, 8);
            sweep::<1, 8>(b, sums)
        }
    }
}

/// Rows that share their scales, from a stretch's first column on, and its inputs.
pub(super) struct Band<'a> {
    /// Codes from the first row's first column on.
    pub(super) codes: &'a [u8],
    /// From one row to the next.
    pub(super) row_bytes: usize,
    pub(super) rows: usize,
    /// Columns, a multiple of [`STEP`].
    pub(super) len: usize,
    /// Inputs with the scales folded in, `[m, len]`.
    pub(super) xs: &'a [f32],
    /// From one input's sums to the next.
    pub(super) sums_stride: usize,
}

/// [`band`] for `C` inputs, `R` rows at a time.
#[target_feature(enable = "avx2,fma,f16c")]
fn sweep<const R: usize, const C: usize>(b: &Band<'_>, sums: &mut [Lanes]) -> Vec<usize> {
    let mut nan = Vec::new();
    let mut r = 0;
    while r < b.rows {
        let (count, done) = if r + R <= b.rows {
            (R, step::<R, C>(b, r, sums))
        } else {
            (1, step::<1, C>(b, r, sums))
        };
        if !done {
            nan.extend(r..r + count);
        }
        r += count;
    }
    nan
}

/// Rows `r0 .. r0 + R`; `false`, with their sums left alone, when one of them holds a NaN code.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn step<const R: usize, const C: usize>(b: &Band<'_>, r0: usize, sums: &mut [Lanes]) -> bool {
    let len = b.len;
    // All slices are checked here, once: the loop works on their pointers.
    assert!(len.is_multiple_of(STEP));
    let codes = b.codes[r0 * b.row_bytes..][..(R - 1) * b.row_bytes + len].as_ptr();
    let xs = b.xs[..C * len].as_ptr();
    let sums = &mut sums[r0..][..(C - 1) * b.sums_stride + R];

    let sign = _mm256_set1_epi8(i8::MIN);
    let mut top = sign;
    let mut acc = [[_mm256_setzero_ps(); R]; C];
    for c in 0..C {
        for r in 0..R {
            // SAFETY: eight lanes.
            acc[c][r] = unsafe { _mm256_loadu_ps(sums[c * b.sums_stride + r].as_ptr()) };
        }
    }
    let mut at = 0;
    while at < len {
        for r in 0..R {
            // The hardware's prefetcher stumbles at the start of every row: ask for the same columns
            // of the rows after these.
            let ahead = codes.wrapping_add((R + r) * b.row_bytes + at);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
        for r in 0..R {
            let codes = codes.wrapping_add(r * b.row_bytes + at);
            // SAFETY: a step of codes of row `r`, inside the slice above.
            let bytes = unsafe { _mm256_loadu_si256(codes.cast()) };
            top = _mm256_max_epu8(top, _mm256_or_si256(bytes, sign));
            for half in [0, 16] {
                // SAFETY: 16 of the 32 codes.
                let values = unsafe { widen(codes.wrapping_add(half)) };
                for (i, values) in values.into_iter().enumerate() {
                    for c in 0..C {
                        let x = xs.wrapping_add(c * len + at + half + i * LANES);
                        // SAFETY: eight of the same step's inputs, inside the slice above.
                        let x = unsafe { _mm256_loadu_ps(x) };
                        acc[c][r] = _mm256_fmadd_ps(values, x, acc[c][r]);
                    }
                }
            }
        }
        at += STEP;
    }
    if has_nan(top) {
        return false;
    }
    for c in 0..C {
        for r in 0..R {
            // SAFETY: eight lanes.
            unsafe { _mm256_storeu_ps(sums[c * b.sums_stride + r].as_mut_ptr(), acc[c][r]) };
        }
    }
    true
}
