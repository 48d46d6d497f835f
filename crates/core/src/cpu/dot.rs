//! The reduction every matrix product of the workspace is defined by.

use super::Isa;
#[cfg(target_arch = "x86_64")]
use super::avx2;

/// Lanes of partial sums: element `k` is added to lane `k % LANES`.
pub const LANES: usize = 8;

/// `sum(a[k] * b[k])` in the workspace's fixed order.
///
/// Lane `l` accumulates `k = l, l + 8, l + 16, …` with fused multiply-adds, then the lanes are added
/// as `((0+4)+(2+6)) + ((1+5)+(3+7))`. Products of bf16, fp8 and fp4 values are exact in f32, so for
/// those a separate multiply and add give the same bits.
///
/// The shorter of the two slices decides the length.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_with(Isa::detect(), a, b)
}

/// [`dot`] by the kernels of one instruction set.
#[inline]
pub fn dot_with(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    match isa {
        Isa::Portable => dot_ref(a, b),
        // SAFETY: both variants are only made on processors that have the features.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { avx2::dot(a, b) },
    }
}

/// The definition of [`dot`], in plain Rust.
pub fn dot_ref(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    accumulate(a, b, &mut lanes);
    sum_lanes(&lanes)
}

/// Adds products to the lanes, in order.
pub(super) fn accumulate(a: &[f32], b: &[f32], lanes: &mut [f32; LANES]) {
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = a.mul_add(*b, *lane);
        }
    }
}

/// The fixed tree over the lanes.
#[inline(always)]
pub fn sum_lanes(l: &[f32; LANES]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}
