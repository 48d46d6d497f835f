//! AVX2 kernels: one register is the eight lanes of one output element.
//!
//! Every function here performs the operations of its portable twin in the same order per lane, so
//! the bits are equal. The registers of several outputs are in flight at once because a fused
//! multiply-add takes four cycles and a lane's additions must stay in sequence.

use std::arch::x86_64::*;

use super::LANES;

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

/// Adds one stretch of `k` to the sums of `rows` panel rows and `C` inputs.
///
/// # Safety
/// `panel` holds `rows` rows of `len` elements at stride `stride`, `x` holds `C` rows of `len` at
/// stride `x_stride`, and `sums` holds for each input `rows` times eight lanes, at stride
/// `sums_stride`.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn panel<const C: usize>(
    panel: *const f32,
    stride: usize,
    rows: usize,
    x: *const f32,
    x_stride: usize,
    len: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let mut r = 0;
    while r < rows {
        let (w, s) = (panel.wrapping_add(r * stride), sums.wrapping_add(r * LANES));
        // SAFETY: the rows from `r` on exist, see the contract.
        unsafe {
            if r + 4 <= rows {
                step::<4, C>(w, stride, x, x_stride, len, s, sums_stride);
                r += 4;
            } else {
                step::<1, C>(w, stride, x, x_stride, len, s, sums_stride);
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
    w_stride: usize,
    x: *const f32,
    x_stride: usize,
    len: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let mut acc = [[_mm256_setzero_ps(); R]; C];
    for c in 0..C {
        for r in 0..R {
            // SAFETY: the sums of `R` rows and `C` inputs exist, see the contract.
            acc[c][r] = unsafe { _mm256_loadu_ps(sums.wrapping_add(c * sums_stride + r * LANES)) };
        }
    }
    // SAFETY: handed on.
    acc = unsafe { accumulate(w, w_stride, x, x_stride, len, acc) };
    for c in 0..C {
        for r in 0..R {
            // SAFETY: as the loads above.
            unsafe { _mm256_storeu_ps(sums.wrapping_add(c * sums_stride + r * LANES), acc[c][r]) };
        }
    }
}

/// `out[i] = dot(row i, x)` for rows of f32 end to end.
///
/// # Safety
/// `w` holds `out.len()` rows of `x.len()` little-endian f32, of any alignment.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dot_rows_f32(w: *const u8, x: &[f32], out: &mut [f32]) {
    let (k, w) = (x.len(), w.cast::<f32>());
    let mut rows = out.chunks_exact_mut(4);
    let mut r = 0;
    for out in rows.by_ref() {
        let zero = [[_mm256_setzero_ps(); 4]];
        // SAFETY: rows `r..r + 4` exist.
        let [sums] = unsafe { accumulate(w.wrapping_add(r * k), k, x.as_ptr(), 0, k, zero) };
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum_lanes(sum);
        }
        r += 4;
    }
    for out in rows.into_remainder() {
        let zero = [[_mm256_setzero_ps()]];
        // SAFETY: row `r` exists.
        let [[sum]] = unsafe { accumulate(w.wrapping_add(r * k), 0, x.as_ptr(), 0, k, zero) };
        *out = sum_lanes(sum);
        r += 1;
    }
}

/// `out[i] = dot(row i, x)` for rows of bf16 end to end.
///
/// # Safety
/// `w` holds `out.len()` rows of `x.len()` little-endian bf16, of any alignment.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dot_rows_bf16(w: *const u8, x: &[f32], out: &mut [f32]) {
    let row_bytes = 2 * x.len();
    let mut rows = out.chunks_exact_mut(4);
    let mut w = w;
    for out in rows.by_ref() {
        // SAFETY: four more rows exist.
        let sums = unsafe { bf16_sums::<4>(w, row_bytes, x) };
        out.copy_from_slice(&sums);
        w = w.wrapping_add(4 * row_bytes);
    }
    for out in rows.into_remainder() {
        // SAFETY: one more row exists.
        let [sum] = unsafe { bf16_sums::<1>(w, row_bytes, x) };
        *out = sum;
        w = w.wrapping_add(row_bytes);
    }
}

/// # Safety
/// `w` holds `R` rows of `x.len()` bf16, `row_bytes` apart.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_sums<const R: usize>(w: *const u8, row_bytes: usize, x: &[f32]) -> [f32; R] {
    let mut acc = [_mm256_setzero_ps(); R];
    let mut chunks = x.chunks_exact(LANES);
    let mut at = w;
    for x in chunks.by_ref() {
        // SAFETY: a slice of eight.
        let x = unsafe { _mm256_loadu_ps(x.as_ptr()) };
        for r in 0..R {
            // SAFETY: eight more bf16 of row `r`, as there are eight more inputs.
            let bits = unsafe { _mm_loadu_si128(at.wrapping_add(r * row_bytes).cast()) };
            let w = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits));
            acc[r] = _mm256_fmadd_ps(_mm256_castsi256_ps(w), x, acc[r]);
        }
        at = at.wrapping_add(2 * LANES);
    }
    let tail = chunks.remainder();
    let mut out = [0f32; R];
    for r in 0..R {
        let mut lanes = [0f32; LANES];
        // SAFETY: eight lanes.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), acc[r]) };
        for (l, x) in tail.iter().enumerate() {
            // SAFETY: the row goes on as long as the input does.
            let bits: u16 = unsafe {
                at.wrapping_add(r * row_bytes + 2 * l)
                    .cast::<u16>()
                    .read_unaligned()
            };
            lanes[l] = f32::from_bits(u32::from(bits) << 16).mul_add(*x, lanes[l]);
        }
        out[r] = super::sum_lanes(&lanes);
    }
    out
}
