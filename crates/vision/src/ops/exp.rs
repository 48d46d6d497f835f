//! An exponential that vectorises.

/// `exp(x)` within 2 ulp for `x` in -87.3..=88.3, 0 below, `inf` above; NaN stays NaN.
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
    /// The smallest result is a normal number: n = -126.
    const LOW: f32 = -87.3;
    /// n = 128, whose power of two has the bits of infinity.
    const HIGH: f32 = 88.8;
    // Comparisons with NaN are false: it passes through.
    let c = if x < LOW { LOW } else { x };
    let c = if c > HIGH { HIGH } else { c };
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
    let pow2 = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
    if x < LOW { 0.0 } else { p * pow2 }
}

/// `x` rounded to bf16 and widened again: the bits of `half`'s conversions, as code that vectorises.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    // Rounding could carry a NaN into the sign; a NaN keeps its upper half, made quiet.
    f32::from_bits(if x.is_nan() {
        (bits | 0x0040_0000) & 0xffff_0000
    } else {
        rounded
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::{exp, round_to_bf16};

    proptest! {
        #[test]
        fn rounds_as_half_does(bits: u32) {
            let x = f32::from_bits(bits);
            prop_assert_eq!(round_to_bf16(x).to_bits(), bf16::from_f32(x).to_f32().to_bits());
        }
    }

    #[test]
    fn close_to_the_library() {
        let mut worst = 0f64;
        let mut x = -87.0f32;
        while x < 88.3 {
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
