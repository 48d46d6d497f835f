//! An exponential that vectorises.

/// `exp(x)` within 2 ulp for `x` in -87..=88, 0 below, `inf` above; NaN stays NaN.
///
/// Written without branches or library calls so that loops over it become vector code, and with fused
/// multiply-adds only, so that it has the same bits everywhere.
///
/// `exp(x) = 2^n * exp(r)` with `n = round(x / ln 2)`, `|r| <= ln 2 / 2`, and a degree 6 polynomial.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest integer in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts; products of the first with |n| < 256 are exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Past these the result is 0 or inf anyway; the clamp keeps n in range. NaN passes through.
    let c = if x < -87.5 { -87.5 } else { x };
    let c = if c > 88.5 { 88.5 } else { c };
    let shifted = c.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HI, c);
    let r = n.mul_add(-LN2_LO, r);
    // exp(r) = 1 + r + r^2 q(r), with q fitted for the smallest relative error (3e-9).
    let mut p = 1.381_446_1e-3f32;
    p = p.mul_add(r, 8.368_781e-3);
    p = p.mul_add(r, 4.166_839_3e-2);
    p = p.mul_add(r, 1.666_652e-1);
    p = p.mul_add(r, 0.499_999_94);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    // n runs from -126 to 128: two factors, so that neither leaves the normal range.
    let half = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) >> 1;
    let rest = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_sub(half);
    let pow2 = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let y = p * pow2(half) * pow2(rest);
    let y = if x < -87.5 { 0.0 } else { y };
    if x > 88.5 { f32::INFINITY } else { y }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn close_to_the_library() {
        let mut worst = 0f64;
        let mut x = -87.0f32;
        while x < 88.0 {
            let exact = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
            x += 1.3e-4;
        }
        assert!(worst < 2.4e-7, "{worst}");
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1000.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
