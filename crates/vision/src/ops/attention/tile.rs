//! The inner loop of both products: a few rows times a panel of [`WIDTH`] columns.
//!
//! Each output is one chain of fused multiply-adds along `k`, ascending, on every instruction set.

use crate::simd::Isa;

/// Columns of a panel.
pub(super) const WIDTH: usize = 64;
/// Rows at a time: with [`WIDTH`] columns the sums fill 24 of AVX-512's 32 registers.
pub(super) const ROWS: usize = 6;

/// A row of a panel, on its own cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Row(pub(super) [f32; WIDTH]);

impl Row {
    /// A row of zeros.
    pub(super) const ZERO: Self = Self([0.0; WIDTH]);
}

/// `out[r][j] = fma(a[r][k], b[k][j], out[r][j])` for every `k` in order.
///
/// `a` holds the rows `stride` apart, each with at least `b.len()` values; there are `out.len()` rows,
/// at most [`ROWS`].
pub(super) fn accumulate(isa: Isa, a: &[f32], stride: usize, b: &[Row], out: &mut [Row]) {
    assert!(out.len() <= ROWS && (out.is_empty() || a.len() >= (out.len() - 1) * stride + b.len()));
    match isa {
        Isa::Portable => portable(a, stride, b, out),
        // SAFETY: `Isa` values other than `Portable` come from `Isa::detect`, which found the features;
        // the lengths are asserted above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(a, stride, b, out) },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => match <&mut [Row; ROWS]>::try_from(&mut *out) {
            // SAFETY: as above; `out` has ROWS rows.
            Ok(out) => unsafe { avx512(a, stride, b, out) },
            // SAFETY: as above.
            Err(_) => unsafe { avx2(a, stride, b, out) },
        },
    }
}

fn portable(a: &[f32], stride: usize, b: &[Row], out: &mut [Row]) {
    for (k, b) in b.iter().enumerate() {
        for (r, out) in out.iter_mut().enumerate() {
            let a = a[r * stride + k];
            for (o, b) in out.0.iter_mut().zip(&b.0) {
                *o = a.mul_add(*b, *o);
            }
        }
    }
}

/// # Safety
/// `a` holds `b.len()` values from each `r * stride` on, `r < out.len()`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(a: &[f32], stride: usize, b: &[Row], out: &mut [Row]) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    // Two vectors of columns at a time: 12 sums, 2 column vectors and the row value fit 16 registers.
    const STEP: usize = 16;
    let rows = out.len();
    for j in (0..WIDTH).step_by(STEP) {
        let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
        for r in 0..rows {
            // SAFETY: j + 16 <= WIDTH.
            unsafe {
                sums[r][0] = _mm256_loadu_ps(out[r].0.as_ptr().add(j));
                sums[r][1] = _mm256_loadu_ps(out[r].0.as_ptr().add(j + 8));
            }
        }
        for (k, b) in b.iter().enumerate() {
            // SAFETY: j + 16 <= WIDTH.
            let (b0, b1) = unsafe {
                (
                    _mm256_loadu_ps(b.0.as_ptr().add(j)),
                    _mm256_loadu_ps(b.0.as_ptr().add(j + 8)),
                )
            };
            for r in 0..ROWS {
                // Missing rows repeat the last one; their sums are dropped.
                let row = r.min(rows - 1);
                // SAFETY: promised by the caller.
                let v = _mm256_set1_ps(unsafe { *a.get_unchecked(row * stride + k) });
                sums[r][0] = _mm256_fmadd_ps(v, b0, sums[r][0]);
                sums[r][1] = _mm256_fmadd_ps(v, b1, sums[r][1]);
            }
        }
        for r in 0..rows {
            // SAFETY: j + 16 <= WIDTH.
            unsafe {
                _mm256_storeu_ps(out[r].0.as_mut_ptr().add(j), sums[r][0]);
                _mm256_storeu_ps(out[r].0.as_mut_ptr().add(j + 8), sums[r][1]);
            }
        }
    }
}

/// # Safety
/// `a` holds `b.len()` values from each `r * stride` on, `r < ROWS`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(a: &[f32], stride: usize, b: &[Row], out: &mut [Row; ROWS]) {
    use std::arch::x86_64::{
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    const VECS: usize = WIDTH / 16;
    let mut sums = [[_mm512_setzero_ps(); VECS]; ROWS];
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: 16 v + 16 <= WIDTH.
            sums[r][v] = unsafe { _mm512_loadu_ps(out[r].0.as_ptr().add(16 * v)) };
        }
    }
    for (k, b) in b.iter().enumerate() {
        let mut bs = [_mm512_setzero_ps(); VECS];
        for v in 0..VECS {
            // SAFETY: 16 v + 16 <= WIDTH.
            bs[v] = unsafe { _mm512_loadu_ps(b.0.as_ptr().add(16 * v)) };
        }
        for r in 0..ROWS {
            // SAFETY: promised by the caller.
            let value = _mm512_set1_ps(unsafe { *a.get_unchecked(r * stride + k) });
            for v in 0..VECS {
                sums[r][v] = _mm512_fmadd_ps(value, bs[v], sums[r][v]);
            }
        }
    }
    for r in 0..ROWS {
        for v in 0..VECS {
            // SAFETY: 16 v + 16 <= WIDTH.
            unsafe { _mm512_storeu_ps(out[r].0.as_mut_ptr().add(16 * v), sums[r][v]) };
        }
    }
}
