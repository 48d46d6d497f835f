//! The inner loop: a tile of rows times a panel of columns.
//!
//! Every output keeps [`LANES`] partial sums, as [`cpu::dot`](deepseek_v41_core::cpu::dot) does: one
//! vector register on AVX2, half of one on AVX-512. So the bits do not depend on the tile.

use deepseek_v41_core::cpu;
use half::bf16;

use crate::simd::Isa;

/// Partial sums an output.
pub(super) const LANES: usize = deepseek_v41_core::cpu::LANES;
/// Rows of a tile: with [`COLS`] columns the sums fill 24 of AVX-512's 32 registers.
pub(super) const ROWS: usize = 6;
/// Columns of a panel.
pub(super) const COLS: usize = 8;

/// A whole number of cache lines, so that no vector load straddles two: that alone is a third of the
/// speed.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Aligned<T>(pub(super) T);

/// [`LANES`] elements along K of a tile's rows.
pub(super) type RowStep = Aligned<[[f32; LANES]; ROWS]>;
/// [`LANES`] elements along K of a panel's columns.
pub(super) type ColStep = Aligned<[[f32; LANES]; COLS]>;
/// Partial sums of one tile.
pub(super) type Acc = Aligned<[[[f32; LANES]; COLS]; ROWS]>;

/// Zeros, of rows.
pub(super) const ZERO_ROWS: RowStep = Aligned([[0.0; LANES]; ROWS]);
/// Zeros, of columns.
pub(super) const ZERO_COLS: ColStep = Aligned([[0.0; LANES]; COLS]);
/// Sums before the first step.
pub(super) const ZERO_ACC: Acc = Aligned([[[0.0; LANES]; COLS]; ROWS]);

/// `acc[r][c][l] = fma(x[s][r][l], w[s][c][l], acc[r][c][l])` for every step `s` in order; `fresh` sums
/// start from zero whatever `acc` holds.
pub(super) fn accumulate(isa: Isa, x: &[RowStep], w: &[ColStep], acc: &mut Acc, fresh: bool) {
    match isa {
        Isa::Portable => portable(x, w, acc, fresh),
        // SAFETY: `Isa` values other than `Portable` come from `Isa::detect`, which found the features.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(x, w, acc, fresh) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(x, w, acc, fresh) },
    }
}

fn portable(x: &[RowStep], w: &[ColStep], Aligned(acc): &mut Acc, fresh: bool) {
    if fresh {
        *acc = ZERO_ACC.0;
    }
    for (Aligned(x), Aligned(w)) in x.iter().zip(w) {
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
fn avx2(x: &[RowStep], w: &[ColStep], Aligned(acc): &mut Acc, fresh: bool) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    // A quarter of the tile at a time: 12 sums, 3 row vectors and 1 column vector are 16 registers.
    const R: usize = ROWS / 2;
    const C: usize = COLS / 2;
    for (r0, c0) in [(0, 0), (0, C), (R, 0), (R, C)] {
        let mut sums = [[_mm256_setzero_ps(); C]; R];
        for r in 0..if fresh { 0 } else { R } {
            for c in 0..C {
                // SAFETY: eight floats of an array of eight.
                sums[r][c] = unsafe { _mm256_loadu_ps(acc[r0 + r][c0 + c].as_ptr()) };
            }
        }
        for (Aligned(x), Aligned(w)) in x.iter().zip(w) {
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
fn avx512(x: &[RowStep], w: &[ColStep], Aligned(acc): &mut Acc, fresh: bool) {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_loadu_pd, _mm512_broadcast_f64x4, _mm512_castpd_ps,
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    // Tiles follow each other in memory: the next one is on its way while this one is used.
    let ahead = x.len();
    // One register holds the lanes of two neighbouring columns.
    const C: usize = COLS / 2;
    let mut sums = [[_mm512_setzero_ps(); C]; ROWS];
    for r in 0..if fresh { 0 } else { ROWS } {
        for c in 0..C {
            // SAFETY: columns 2c and 2c + 1 are 16 adjacent floats of the array.
            sums[r][c] = unsafe { _mm512_loadu_ps(acc[r].as_ptr().add(2 * c).cast()) };
        }
    }
    for (Aligned(x), Aligned(w)) in x.iter().zip(w) {
        let next = std::ptr::from_ref(x).wrapping_add(ahead).cast::<i8>();
        for line in 0..size_of::<RowStep>() / 64 {
            // A hint only: an address past the last tile does no harm.
            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line));
        }
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

/// Asks for the cache line of `byte`.
pub(super) fn prefetch(byte: &u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint without an effect on memory; every x86-64 machine has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(byte).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = byte;
}

/// Widens one weight row, bf16 in the file's (little-endian) order, into column `c` of a panel, with
/// zeros behind its end.
pub(super) fn widen(isa: Isa, bytes: &[u8], c: usize, panel: &mut [ColStep]) {
    let (whole, rest) = bytes.as_chunks::<{ 2 * LANES }>();
    match isa {
        Isa::Portable => {
            for (Aligned(step), b) in panel.iter_mut().zip(whole) {
                step[c] = widen_lanes(b);
            }
        }
        // SAFETY: `Isa` values other than `Portable` come from `Isa::detect`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { widen_avx2(whole, c, panel) },
    }
    if let Some(Aligned(step)) = panel.get_mut(whole.len()) {
        let mut last = [0u8; 2 * LANES];
        last[..rest.len()].copy_from_slice(rest);
        step[c] = widen_lanes(&last);
    }
}

/// A bf16 is the upper half of an f32.
fn widen_lanes(b: &[u8; 2 * LANES]) -> [f32; LANES] {
    std::array::from_fn(|l| {
        f32::from_bits(u32::from(u16::from_le_bytes([b[2 * l], b[2 * l + 1]])) << 16)
    })
}

// Left to itself the compiler widens several steps at once and scatters them: half the speed.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn widen_avx2(bytes: &[[u8; 2 * LANES]], c: usize, panel: &mut [ColStep]) {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_slli_epi32,
        _mm256_storeu_ps,
    };
    for (Aligned(step), b) in panel.iter_mut().zip(bytes) {
        // SAFETY: 16 bytes of an array of 16.
        let words = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(b.as_ptr().cast()) });
        let values = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
        // SAFETY: eight floats into an array of eight.
        unsafe { _mm256_storeu_ps(step[c].as_mut_ptr(), values) };
    }
}

/// `bf16(sum of lanes + bias)` of every output of a tile, lanes added in the order of [`cpu::dot`].
pub(super) fn finish(isa: Isa, acc: &Acc, bias: &[f32; COLS], out: &mut [[bf16; COLS]; ROWS]) {
    match isa {
        Isa::Portable => {
            for (out, acc) in out.iter_mut().zip(&acc.0) {
                for c in 0..COLS {
                    out[c] = cpu::round_bf16(cpu::sum_lanes(&acc[c]) + bias[c]);
                }
            }
        }
        // SAFETY: `Isa` values other than `Portable` come from `Isa::detect`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { finish_avx2(acc, bias, out) },
    }
}

/// Eight columns at once: [`cpu::sum_lanes`], `((0+4)+(2+6)) + ((1+5)+(3+7))`, and
/// [`cpu::round_bf16`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn finish_avx2(Aligned(acc): &Acc, bias: &[f32; COLS], out: &mut [[bf16; COLS]; ROWS]) {
    use std::arch::x86_64::{
        __m256, _CMP_UNORD_Q, _mm_packus_epi32, _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps,
        _mm256_and_si256, _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps,
        _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_extracti128_si256, _mm256_loadu_ps,
        _mm256_permute2f128_ps, _mm256_set1_epi32, _mm256_shuffle_ps, _mm256_srli_epi32,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };
    // SAFETY: eight floats of an array of eight.
    let bias = unsafe { _mm256_loadu_ps(bias.as_ptr()) };
    let nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0_0000));
    for (out, acc) in out.iter_mut().zip(acc) {
        // Columns c and c + 4, one in each half: lanes l + (l + 4).
        let quads = |c: usize| -> __m256 {
            // SAFETY: eight floats of an array of eight, both times.
            let (a, b) = unsafe {
                (
                    _mm256_loadu_ps(acc[c].as_ptr()),
                    _mm256_loadu_ps(acc[c + 4].as_ptr()),
                )
            };
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            let high = _mm256_permute2f128_ps::<0x31>(a, b);
            _mm256_add_ps(low, high)
        };
        // Of two columns: both sums of even lanes, then both of odd ones.
        let pairs = |a: __m256, b: __m256| {
            _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
        };
        let (low, high) = (pairs(quads(0), quads(1)), pairs(quads(2), quads(3)));
        let even = _mm256_shuffle_ps::<0b01_00_01_00>(low, high);
        let odd = _mm256_shuffle_ps::<0b11_10_11_10>(low, high);
        let sum = _mm256_add_ps(_mm256_add_ps(even, odd), bias);

        let bits = _mm256_castps_si256(sum);
        let tie = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(tie, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, half));
        let rounded = _mm256_blendv_ps(rounded, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(sum, sum));
        let words = _mm256_srli_epi32::<16>(_mm256_castps_si256(rounded));
        let (a, b) = (
            _mm256_castsi256_si128(words),
            _mm256_extracti128_si256::<1>(words),
        );
        // SAFETY: 16 bytes into an array of eight bf16.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_packus_epi32(a, b)) };
    }
}
