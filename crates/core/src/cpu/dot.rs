//! The reduction every matrix product of the workspace is defined by.

/// Lanes of partial sums: element `k` is added to lane `k % LANES`.
pub const LANES: usize = 8;

/// `sum(a[k] * b[k])` in the workspace's fixed order.
///
/// Lane `l` accumulates `k = l, l + 8, l + 16, …` with fused multiply-adds, then the lanes are added
/// as `((0+4)+(2+6)) + ((1+5)+(3+7))`. Products of bf16, fp8 and fp4 values are exact in f32, so for
/// those a separate multiply and add give the same bits.
///
/// The shorter of the two slices decides the length.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut a8 = a.chunks_exact(LANES);
    let mut b8 = b.chunks_exact(LANES);
    for (a, b) in a8.by_ref().zip(b8.by_ref()) {
        for l in 0..LANES {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    for (l, (a, b)) in a8.remainder().iter().zip(b8.remainder()).enumerate() {
        lanes[l] = a.mul_add(*b, lanes[l]);
    }
    sum_lanes(&lanes)
}

/// The fixed tree over the lanes.
pub(crate) fn sum_lanes(l: &[f32; LANES]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}
