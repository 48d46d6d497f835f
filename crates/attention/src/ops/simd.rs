//! Arithmetic of the fast paths, written so that every instruction set gives the same bits.
//!
//! The kernels are plain Rust over arrays whose lanes never mix: each element is one chain of
//! [`f32::mul_add`] in a fixed order. The compiler may put lanes side by side in vectors of any
//! width, but it may not reassociate, so compiling the same body with AVX2 + FMA, with AVX-512 or
//! with neither changes the speed alone. The unit tests of the kernels compare them all.

/// An instruction set a kernel body is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Simd {
    /// Whatever the crate was compiled for.
    Portable,
    /// AVX2 and FMA, found at run time.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F and VL, found at run time.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Simd {
    /// The widest instruction set of this machine.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Every instruction set this machine can run.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        match Self::detect() {
            Self::Portable => vec![Self::Portable],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => vec![Self::Portable, Self::Avx2],
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => vec![Self::Portable, Self::Avx2, Self::Avx512],
        }
    }
}

/// Defines `$name(simd, args…)`: `$body::<R>(args…)` compiled for the given instruction set, where
/// `R` is the number of rows whose accumulators fit its registers.
macro_rules! dispatch {
    ($(#[$doc:meta])* fn $name:ident<const W: usize>($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        fn $name<const W: usize>(simd: $crate::ops::simd::Simd, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<const W: usize>($($arg: $ty),*) {
                $body::<4, W>($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512vl")]
            fn avx512<const W: usize>($($arg: $ty),*) {
                $body::<8, W>($($arg),*);
            }
            match simd {
                $crate::ops::simd::Simd::Portable => $body::<4, W>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Simd::detect` returns Avx2 only where AVX2 and FMA exist.
                $crate::ops::simd::Simd::Avx2 => unsafe { avx2::<W>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Simd::detect` returns Avx512 only where all four features exist.
                $crate::ops::simd::Simd::Avx512 => unsafe { avx512::<W>($($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch;

/// `e^x`, within 1.2 ulp of the true value (tested against f64), the same bits on every machine.
///
/// Above 88.73 it is infinity, below -104 zero, subnormal results are rounded once, NaN stays NaN.
/// libm's `exp` differs between systems in the last bit, and a selection or a rounding to bf16
/// downstream would turn that into a visible difference.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts; the high one has 9 trailing zero bits, so n * LN2_HI is exact.
    const LN2_HI: f32 = 0.693_145_75;
    const LN2_LO: f32 = 1.428_606_8e-6;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;

    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    // e^r = 1 + r + r^2 q(r), |r| <= ln(2) / 2: the series' next term is below 2^-27.
    let q = (1.0f32 / 5040.0).mul_add(r, 1.0 / 720.0);
    let q = q.mul_add(r, 1.0 / 120.0);
    let q = q.mul_add(r, 1.0 / 24.0);
    let q = q.mul_add(r, 1.0 / 6.0);
    let q = q.mul_add(r, 0.5);
    let y = (r * r).mul_add(q, r) + 1.0;
    // 2^n in two factors: one alone cannot reach the subnormal results, nor overflow at n = 128.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    y * pow2(half) * pow2(n.wrapping_sub(half))
}

/// `2^n` for a normal result.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `x` rounded to the nearest bf16, ties to even, kept as f32. NaN stays NaN.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // A NaN's payload could carry into the exponent and leave infinity or zero.
    f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { rounded })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn exp_error_is_as_stated() {
        let mut worst = 0f64;
        // Every 97th float between -103 and 88, both signs.
        for bits in (0u32..=0x42d0_0000).step_by(97) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                if !(-103.0..=88.7).contains(&x) {
                    continue;
                }
                let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
                let ulp =
                    f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
                worst = worst.max((got - want).abs() / ulp);
            }
        }
        assert!(worst <= 1.2, "worst error {worst} ulp");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(88.72).is_finite());
        assert!(exp(88.73).is_infinite());
    }

    #[test]
    fn round_bf16_is_the_conversion() {
        for bits in (0u32..=u32::MAX).step_by(65_521) {
            for bits in [bits, bits & 0xffff_0000, (bits & 0xffff_0000) | 0x8000] {
                let x = f32::from_bits(bits);
                let (got, want) = (round_bf16(x), bf16::from_f32(x).to_f32());
                assert!(
                    got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                    "{x}"
                );
            }
        }
    }
}
