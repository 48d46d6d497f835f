//! AVX2 kernels: one register is the eight lanes of one output element.
//!
//! Every function here performs the operations of its portable twin in the same order per lane, so
//! the bits are equal. The registers of several outputs are in flight at once because a fused
//! multiply-add takes four cycles and a lane's additions must stay in sequence.

use std::arch::x86_64::*;

use super::matmul::Output;
use super::{LANES, Lanes, Stretch};

/// [`super::dot_ref`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let len = a.len().min(b.len());
    let zero = [[_mm256_setzero_ps()]];
    // SAFETY: both slices hold `len` elements.
    let [[sum]] = unsafe { accumulate(a.as_ptr(), 0, b.as_ptr(), 0, len, zero) };
    sum_lanes(sum)
}

/// [`super::sum_lanes`] of a register.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn sum_lanes(v: __m256) -> f32 {
    // (0+4, 1+5, 2+6, 3+7), then its halves, then the two that remain.
    let quads = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let pairs = _mm_add_ps(quads, _mm_movehl_ps(quads, quads));
    _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)))
}

/// [`sum_lanes`] of eight outputs at once, a third of the instructions for each.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum_eight(v: [__m256; 8]) -> __m256 {
    // Outputs `a` and `b`, four values each: 0+4, 1+5, 2+6, 3+7.
    let quads = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    // Of two such pairs of outputs the sums of the even and of the odd lanes, side by side.
    let halves = |a, b| {
        let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
    };
    let a = halves(quads(v[0], v[4]), quads(v[1], v[5]));
    let b = halves(quads(v[2], v[6]), quads(v[3], v[7]));
    let (even, odd) = (
        _mm256_shuffle_ps::<0x88>(a, b),
        _mm256_shuffle_ps::<0xdd>(a, b),
    );
    _mm256_add_ps(even, odd)
}

/// [`super::matmul::store_ref`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn store<O: Output>(sums: &[Lanes], out: &mut [O]) {
    let ((eights, rest), (outs, out_rest)) = (sums.as_chunks::<8>(), out.as_chunks_mut::<8>());
    for (sums, out) in eights.iter().zip(outs) {
        // SAFETY: eight lanes each; the features are this function's.
        unsafe {
            let sums = sums.each_ref().map(|lanes| _mm256_loadu_ps(lanes.as_ptr()));
            O::store_eight(sum_eight(sums), out);
        }
    }
    super::matmul::store_ref(rest, out_rest);
}

/// [`super::matmul::store_totals_ref`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn store_totals<O: Output>(sums: &[f32], out: &mut [O]) {
    let ((eights, rest), (outs, out_rest)) = (sums.as_chunks::<8>(), out.as_chunks_mut::<8>());
    for (sums, out) in eights.iter().zip(outs) {
        // SAFETY: eight values; the features are this function's.
        unsafe { O::store_eight(_mm256_loadu_ps(sums.as_ptr()), out) };
    }
    super::matmul::store_totals_ref(rest, out_rest);
}

/// [`super::round_bf16`] of eight values.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn round_bf16(x: __m256) -> __m128i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    let words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    _mm_packus_epi32(
        _mm256_castsi256_si128(words),
        _mm256_extracti128_si256::<1>(words),
    )
}

/// [`super::matmul::bounds`].
#[target_feature(enable = "avx2")]
pub(super) fn bounds(xs: &[f32]) -> (u32, u32) {
    super::matmul::bounds(xs)
}

/// `8 - n` on starts with `n` set lanes.
static TAIL_MASK: [i32; 2 * LANES] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

#[inline]
#[target_feature(enable = "avx2,fma")]
fn tail_mask(n: usize) -> __m256i {
    debug_assert!(n < LANES);
    // SAFETY: `n < 8`, so the eight values lie inside the table.
    unsafe { _mm256_loadu_si256(TAIL_MASK.as_ptr().add(LANES - n).cast()) }
}

/// `sums[c][r] += w_r · x_c`, lane by lane, over `len` elements.
///
/// # Safety
/// Row `r < R` at `w + r * w_stride` and row `c < C` at `x + c * x_stride` hold `len` elements each;
/// they need not be aligned.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn accumulate<const R: usize, const C: usize>(
    w: *const f32,
    w_stride: usize,
    x: *const f32,
    x_stride: usize,
    len: usize,
    mut sums: [[__m256; R]; C],
) -> [[__m256; R]; C] {
    let whole = len / LANES * LANES;
    let mut k = 0;
    while k < whole {
        let mut xs = [_mm256_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: `k + 8 <= len`, see the contract.
            xs[c] = unsafe { _mm256_loadu_ps(x.wrapping_add(c * x_stride + k)) };
        }
        for r in 0..R {
            // SAFETY: as above.
            let ws = unsafe { _mm256_loadu_ps(w.wrapping_add(r * w_stride + k)) };
            for c in 0..C {
                sums[c][r] = _mm256_fmadd_ps(ws, xs[c], sums[c][r]);
            }
        }
        k += LANES;
    }
    if whole < len {
        let mask = tail_mask(len - whole);
        for r in 0..R {
            // SAFETY: masked loads touch only the `len - whole` elements that exist.
            let ws = unsafe { _mm256_maskload_ps(w.wrapping_add(r * w_stride + whole), mask) };
            for c in 0..C {
                // SAFETY: as above.
                let xs = unsafe { _mm256_maskload_ps(x.wrapping_add(c * x_stride + whole), mask) };
                // Lanes past the end keep their sum untouched: adding 0 would turn -0 into +0.
                let sum = _mm256_fmadd_ps(ws, xs, sums[c][r]);
                sums[c][r] = _mm256_blendv_ps(sums[c][r], sum, _mm256_castsi256_ps(mask));
            }
        }
    }
    sums
}

/// Adds a panel's products to the sums of its rows and `C` inputs.
///
/// # Safety
/// `w` holds `rows` rows of `len` values end to end, `xs` holds `C` inputs of `len` at stride
/// `x_stride`, and `sums` holds eight lanes for each row, inputs at `sums_stride` times eight.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn panel<const C: usize>(
    w: *const f32,
    len: usize,
    rows: usize,
    xs: *const f32,
    x_stride: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let mut r = 0;
    while r < rows {
        let (w, sums) = (w.wrapping_add(r * len), sums.wrapping_add(r * LANES));
        // SAFETY: the rows from `r` on exist, see the contract.
        unsafe {
            if r + 4 <= rows {
                step::<4, C>(w, len, xs, x_stride, sums, sums_stride);
                r += 4;
            } else {
                step::<1, C>(w, len, xs, x_stride, sums, sums_stride);
                r += 1;
            }
        }
    }
}

/// # Safety
/// As [`panel`], with `R` rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn step<const R: usize, const C: usize>(
    w: *const f32,
    len: usize,
    xs: *const f32,
    x_stride: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let at = |c: usize, r: usize| sums.wrapping_add((c * sums_stride + r) * LANES);
    let mut acc = [[_mm256_setzero_ps(); R]; C];
    for c in 0..C {
        for r in 0..R {
            // SAFETY: the sums of `R` rows and `C` inputs exist, see the contract.
            acc[c][r] = unsafe { _mm256_loadu_ps(at(c, r)) };
        }
    }
    // SAFETY: handed on.
    acc = unsafe { accumulate(w, len, xs, x_stride, len, acc) };
    for c in 0..C {
        for r in 0..R {
            // SAFETY: as the loads above.
            unsafe { _mm256_storeu_ps(at(c, r), acc[c][r]) };
        }
    }
}

/// A stored number type that widens to f32 eight at a time.
pub(super) trait Stored {
    /// Bytes of one number.
    const BYTES: usize;

    /// # Safety
    /// `at` points to eight numbers; the processor has AVX2.
    unsafe fn load(at: *const u8) -> __m256;

    /// # Safety
    /// `at` points to one number.
    unsafe fn load_one(at: *const u8) -> f32;
}

pub(super) struct Bf16;

impl Stored for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: sixteen bytes and AVX2, by the contract.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_one(at: *const u8) -> f32 {
        // SAFETY: two bytes, by the contract.
        let bits = u16::from_le(unsafe { at.cast::<u16>().read_unaligned() });
        f32::from_bits(u32::from(bits) << 16)
    }
}

pub(super) struct F32;

impl Stored for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: 32 bytes and AVX, by the contract.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_one(at: *const u8) -> f32 {
        // SAFETY: four bytes, by the contract.
        f32::from_bits(u32::from_le(unsafe { at.cast::<u32>().read_unaligned() }))
    }
}

/// Adds the products of rows of stored numbers, `row_bytes` apart and starting at the stretch's first
/// column, to `sums[i * rows + r]`, from row `first` of the stretch on.
#[target_feature(enable = "avx2,fma")]
pub(super) fn stored<S: Stored>(
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    first: usize,
    sums: &mut [Lanes],
) {
    let (rows, m) = (stretch.rows.len(), stretch.inputs());
    let mut r = first;
    while r < rows {
        let four = rows - r >= 4;
        let w = &w[r * row_bytes..];
        let mut i = 0;
        while i < m {
            let xs = &stretch.xs[i * stretch.k + stretch.cols.start..];
            let (len, k) = (stretch.cols.len(), stretch.k);
            let sums = &mut sums[i * rows + r..];
            i += match (four, m - i) {
                (true, 1) => stored_step::<S, 4, 1>(w, row_bytes, xs, k, len, sums, rows),
                (true, _) => stored_step::<S, 4, 2>(w, row_bytes, xs, k, len, sums, rows),
                (false, _) => stored_step::<S, 1, 1>(w, row_bytes, xs, k, len, sums, rows),
            };
        }
        r += if four { 4 } else { 1 };
    }
}

/// The first `R` rows and `C` inputs of [`stored`]; returns `C`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn stored_step<S: Stored, const R: usize, const C: usize>(
    w: &[u8],
    row_bytes: usize,
    xs: &[f32],
    x_stride: usize,
    len: usize,
    sums: &mut [Lanes],
    sums_stride: usize,
) -> usize {
    assert!(w.len() >= (R - 1) * row_bytes + len * S::BYTES);
    assert!(xs.len() >= (C - 1) * x_stride + len);
    let mut acc = [[_mm256_setzero_ps(); R]; C];
    for c in 0..C {
        for r in 0..R {
            // SAFETY: eight lanes.
            acc[c][r] = unsafe { _mm256_loadu_ps(sums[c * sums_stride + r].as_ptr()) };
        }
    }
    let whole = len / LANES * LANES;
    let mut at = 0;
    while at < whole {
        let mut x = [_mm256_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: `at + 8 <= len`, and `C` inputs of `len` by the assertion.
            x[c] = unsafe { _mm256_loadu_ps(xs.as_ptr().add(c * x_stride + at)) };
        }
        for r in 0..R {
            let w = w.as_ptr().wrapping_add(r * row_bytes + at * S::BYTES);
            // SAFETY: likewise for `R` rows; the features are this function's.
            let w = unsafe { S::load(w) };
            for c in 0..C {
                acc[c][r] = _mm256_fmadd_ps(w, x[c], acc[c][r]);
            }
        }
        at += LANES;
    }
    for c in 0..C {
        for r in 0..R {
            let lanes = &mut sums[c * sums_stride + r];
            // SAFETY: eight lanes.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), acc[c][r]) };
            let (w, x) = (&w[r * row_bytes..], &xs[c * x_stride..]);
            add_rest::<S>(&w[whole * S::BYTES..len * S::BYTES], &x[whole..len], lanes);
        }
    }
    C
}

/// The columns after the last whole group of eight.
#[inline]
pub(super) fn add_rest<S: Stored>(w: &[u8], x: &[f32], lanes: &mut Lanes) {
    for ((w, x), lane) in w.chunks_exact(S::BYTES).zip(x).zip(lanes) {
        // SAFETY: one number.
        *lane = unsafe { S::load_one(w.as_ptr()) }.mul_add(*x, *lane);
    }
}
