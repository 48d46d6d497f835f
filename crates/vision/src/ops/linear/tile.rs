//! The inner loop: a tile of rows times a panel of columns.
//!
//! Every output keeps [`LANES`] partial sums, as [`cpu::dot`](deepseek_v41_core::cpu::dot) does: one
//! vector register on AVX2, half of one on AVX-512. So the bits do not depend on the tile.

use crate::simd::Isa;

/// Partial sums an output.
pub(super) const LANES: usize = deepseek_v41_core::cpu::LANES;
/// Rows of a tile: with [`COLS`] columns the sums fill 24 of AVX-512's 32 registers.
pub(super) const ROWS: usize = 6;
/// Columns of a panel.
pub(super) const COLS: usize = 8;

/// Partial sums of one tile.
pub(super) type Acc = [[[f32; LANES]; COLS]; ROWS];
/// Sums before the first step.
pub(super) const ZERO: Acc = [[[0.0; LANES]; COLS]; ROWS];

/// `acc[r][c][l] = fma(x[s][r][l], w[s][c][l], acc[r][c][l])` for every step `s` in order.
pub(super) fn accumulate(
    isa: Isa,
    x: &[[[f32; LANES]; ROWS]],
    w: &[[[f32; LANES]; COLS]],
    acc: &mut Acc,
) {
    match isa {
        Isa::Portable => portable(x, w, acc),
        // SAFETY: `Isa` values other than `Portable` come from `Isa::detect`, which found the features.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(x, w, acc) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(x, w, acc) },
    }
}

fn portable(x: &[[[f32; LANES]; ROWS]], w: &[[[f32; LANES]; COLS]], acc: &mut Acc) {
    for (x, w) in x.iter().zip(w) {
        for r in 0..ROWS {
            for c in 0..COLS {
                for l in 0..LANES {
                    acc[r][c][l] = x[r][l].mul_add(w[c][l], acc[r][c][l]);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(x: &[[[f32; LANES]; ROWS]], w: &[[[f32; LANES]; COLS]], acc: &mut Acc) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    // A quarter of the tile at a time: 12 sums, 3 row vectors and 1 column vector are 16 registers.
    const R: usize = ROWS / 2;
    const C: usize = COLS / 2;
    for (r0, c0) in [(0, 0), (0, C), (R, 0), (R, C)] {
        let mut sums = [[_mm256_setzero_ps(); C]; R];
        for r in 0..R {
            for c in 0..C {
                // SAFETY: eight floats of an array of eight.
                sums[r][c] = unsafe { _mm256_loadu_ps(acc[r0 + r][c0 + c].as_ptr()) };
            }
        }
        for (x, w) in x.iter().zip(w) {
            let mut xs = [_mm256_setzero_ps(); R];
            for r in 0..R {
                // SAFETY: eight floats of an array of eight.
                xs[r] = unsafe { _mm256_loadu_ps(x[r0 + r].as_ptr()) };
            }
            for c in 0..C {
                // SAFETY: eight floats of an array of eight.
                let wc = unsafe { _mm256_loadu_ps(w[c0 + c].as_ptr()) };
                for r in 0..R {
                    sums[r][c] = _mm256_fmadd_ps(xs[r], wc, sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                // SAFETY: eight floats of an array of eight.
                unsafe { _mm256_storeu_ps(acc[r0 + r][c0 + c].as_mut_ptr(), sums[r][c]) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512(x: &[[[f32; LANES]; ROWS]], w: &[[[f32; LANES]; COLS]], acc: &mut Acc) {
    use std::arch::x86_64::{
        _mm256_loadu_pd, _mm512_broadcast_f64x4, _mm512_castpd_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    // One register holds the lanes of two neighbouring columns.
    const C: usize = COLS / 2;
    let mut sums = [[_mm512_setzero_ps(); C]; ROWS];
    for r in 0..ROWS {
        for c in 0..C {
            // SAFETY: columns 2c and 2c + 1 are 16 adjacent floats of the array.
            sums[r][c] = unsafe { _mm512_loadu_ps(acc[r].as_ptr().add(2 * c).cast()) };
        }
    }
    for (x, w) in x.iter().zip(w) {
        let mut ws = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: columns 2c and 2c + 1 are 16 adjacent floats of the array.
            ws[c] = unsafe { _mm512_loadu_ps(w.as_ptr().add(2 * c).cast()) };
        }
        for r in 0..ROWS {
            // SAFETY: 32 bytes of an array of eight floats.
            let row = unsafe { _mm256_loadu_pd(x[r].as_ptr().cast()) };
            let row = _mm512_castpd_ps(_mm512_broadcast_f64x4(row));
            for c in 0..C {
                sums[r][c] = _mm512_fmadd_ps(row, ws[c], sums[r][c]);
            }
        }
    }
    for r in 0..ROWS {
        for c in 0..C {
            // SAFETY: as for the loads above.
            unsafe { _mm512_storeu_ps(acc[r].as_mut_ptr().add(2 * c).cast(), sums[r][c]) };
        }
    }
}
