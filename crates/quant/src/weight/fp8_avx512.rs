//! [`fp8_avx2::band`] with the eight lanes of two neighbouring rows in one register.
//!
//! Every lane sees the operations it sees there, in the same order. Codes are widened by table instead:
//! their values fit a bf16, of which two lookups give the high and the low byte.

use std::arch::x86_64::*;

use deepseek_v41_core::cpu::{LANES, Lanes, sum_pairs_avx512};

use super::fp8_avx2::{self, Band, STEP};
use crate::formats::e4m3;

/// [`fp8_avx2::band`], for which no NaN code is special.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
pub(super) fn band(b: &Band<'_>, sums: &mut [Lanes]) -> Vec<usize> {
    let done = by_inputs::<false>(b, sums.as_flattened_mut());
    if done == b.rows {
        return Vec::new();
    }
    let rest = Band {
        codes: &b.codes[done * b.row_bytes..],
        rows: b.rows - done,
        ..*b
    };
    let nan = fp8_avx2::band(&rest, &mut sums[done..]);
    nan.into_iter().map(|r| done + r).collect()
}

/// Whole products, `totals[c * sums_stride + r]`: `false` when rows do not come in pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
pub(super) fn totals(b: &Band<'_>, totals: &mut [f32]) -> bool {
    by_inputs::<true>(b, totals) == b.rows
}

/// Rows in pairs: lanes added to `sums`, or their sums if `TOTAL`. Returns how many rows are done.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
fn by_inputs<const TOTAL: bool>(b: &Band<'_>, sums: &mut [f32]) -> usize {
    // Enough sums in flight to hide the latency of an addition, few enough to stay in registers.
    match b.xs.len() / b.len {
        1 => sweep::<4, 1, TOTAL>(b, sums),
        2 => sweep::<4, 2, TOTAL>(b, sums),
        3 => sweep::<4, 3, TOTAL>(b, sums),
        4 => sweep::<2, 4, TOTAL>(b, sums),
        5 => sweep::<2, 5, TOTAL>(b, sums),
        6 => sweep::<3, 6, TOTAL>(b, sums),
        7 => sweep::<2, 7, TOTAL>(b, sums),
        8 => sweep::<2, 8, TOTAL>(b, sums),
        _ => 0,
    }
}

/// [`by_inputs`] for `C` inputs, `P` pairs of rows at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
fn sweep<const P: usize, const C: usize, const TOTAL: bool>(
    b: &Band<'_>,
    sums: &mut [f32],
) -> usize {
    let widen = Widen::new();
    let mut r = 0;
    while r + 2 * P <= b.rows {
        step::<P, C, TOTAL>(b, &widen, r, sums);
        r += 2 * P;
    }
    while r + 2 <= b.rows {
        step::<1, C, TOTAL>(b, &widen, r, sums);
        r += 2;
    }
    r
}

/// Rows `r0 .. r0 + 2 * P`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
fn step<const P: usize, const C: usize, const TOTAL: bool>(
    b: &Band<'_>,
    widen: &Widen,
    r0: usize,
    sums: &mut [f32],
) {
    let (len, stride) = (b.len, b.sums_stride);
    // Values of a sum: its lanes, or itself.
    let each = if TOTAL { 1 } else { LANES };
    // All slices are checked here, once: the loop works on their pointers.
    assert!(len.is_multiple_of(STEP));
    let codes = b.codes[r0 * b.row_bytes..][..(2 * P - 1) * b.row_bytes + len].as_ptr();
    let xs = b.xs[..C * len].as_ptr();
    let sums = sums[r0 * each..][..((C - 1) * stride + 2 * P) * each].as_mut_ptr();

    let mut acc = [[_mm512_setzero_ps(); P]; C];
    for c in 0..if TOTAL { 0 } else { C } {
        for p in 0..P {
            // SAFETY: the lanes of two rows.
            acc[c][p] = unsafe { _mm512_loadu_ps(sums.add((c * stride + 2 * p) * LANES)) };
        }
    }
    for at in (0..len).step_by(STEP) {
        let mut values = [[_mm512_setzero_ps(); STEP / LANES]; P];
        for p in 0..P {
            let a = codes.wrapping_add(2 * p * b.row_bytes + at);
            let z = a.wrapping_add(b.row_bytes);
            // The hardware's prefetcher stumbles at the start of every row: ask for the rows after these.
            _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(2 * P * b.row_bytes).cast());
            _mm_prefetch::<_MM_HINT_T0>(z.wrapping_add(2 * P * b.row_bytes).cast());
            // SAFETY: a step of codes of either row, inside the slice above.
            let codes = unsafe {
                let a = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
                _mm512_inserti64x4::<1>(a, _mm256_loadu_si256(z.cast()))
            };
            values[p] = widen.values(codes);
        }
        for i in 0..STEP / LANES {
            for c in 0..C {
                let x = xs.wrapping_add(c * len + at + i * LANES);
                // SAFETY: eight of the same step's inputs, inside the slice above.
                let x = unsafe { _mm256_loadu_pd(x.cast()) };
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

/// The bf16 values times 2^-8 of the codes without their sign: high bytes, then low bytes.
#[repr(align(64))]
struct Table([[u8; 128]; 2]);

static TABLE: Table = table();

const fn table() -> Table {
    let mut table = [[0u8; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let value = e4m3::decode(code as u8);
        // A NaN's payload is left to whoever evaluates the product: fix it.
        let bits = if value.is_nan() {
            0x7fc0
        } else {
            (value / fp8_avx2::SHIFT).to_bits() >> 16
        };
        table[0][code] = (bits >> 8) as u8;
        table[1][code] = bits as u8;
        code += 1;
    }
    Table(table)
}

/// Where the bytes of [`widen`] come from: those of 32 codes of one row, then 32 of another.
const ORDER: [i8; 64] = {
    let mut order = [0; 64];
    let mut at = 0;
    while at < 64 {
        // Unpacked, a byte of lane `at / 16` ends in register `2 * (q / 8) + q % 2` as value `q % 8 / 2`.
        let (lane, q) = (at / 16, at % 16);
        let column = LANES * (2 * (q / 8) + q % 2) + 4 * (lane % 2) + q % 8 / 2;
        order[at] = (STEP * (lane / 2) + column) as i8;
        at += 1;
    }
    order
};

/// What turns codes into values, in registers.
struct Widen {
    order: __m512i,
    high: [__m512i; 2],
    low: [__m512i; 2],
}

impl Widen {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
    fn new() -> Self {
        // SAFETY: 64 bytes each, of which a table's row has 128.
        let load = |bytes: *const u8| unsafe { _mm512_loadu_si512(bytes.cast()) };
        let table = TABLE.0.each_ref().map(|half| {
            let half = half.as_ptr();
            [load(half), load(half.wrapping_add(64))]
        });
        Self {
            order: load(ORDER.as_ptr().cast()),
            high: table[0],
            low: table[1],
        }
    }

    /// 32 codes of one row and 32 of another as `value * 2^-8`: eight columns of both in each register.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c")]
    fn values(&self, codes: __m512i) -> [__m512; STEP / LANES] {
        let codes = _mm512_permutexvar_epi8(self.order, codes);
        let of = |[first, second]: [__m512i; 2]| _mm512_permutex2var_epi8(first, codes, second);
        let low = of(self.low);
        // high | codes & 0x80
        let sign = _mm512_set1_epi8(i8::MIN);
        let high = _mm512_ternarylogic_epi32::<0xf8>(of(self.high), codes, sign);
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let first = _mm512_unpacklo_epi8(low, high);
        let second = _mm512_unpackhi_epi8(low, high);
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
            _mm512_castsi512_ps(_mm512_and_si512(first, upper)),
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)),
            _mm512_castsi512_ps(_mm512_and_si512(second, upper)),
        ]
    }
}
