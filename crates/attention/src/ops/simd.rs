//! Arithmetic of the fast paths, written so that every instruction set gives the same bits.
//!
//! Kernels are generic over [`Lanes`]: lanes never mix, and each is one chain of fused multiply-adds in
//! a fixed order. Putting 8 or 16 chains side by side therefore changes the speed alone. Element-wise
//! loops are plain Rust compiled for the instruction set, which may not reassociate either. The unit
//! tests of the kernels compare everything this machine can run.

use deepseek_v41_core::cpu;

/// `W` independent f32 values.
pub(crate) trait Lanes<const W: usize>: Copy {
    fn splat(x: f32) -> Self;
    fn load(from: &[f32; W]) -> Self;
    fn store(self, to: &mut [f32; W]);
    fn mul(self, by: Self) -> Self;
    /// `self + a * b`, rounded once.
    fn add_product(self, a: Self, b: Self) -> Self;
}

impl<const W: usize> Lanes<W> for [f32; W] {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        [x; W]
    }

    #[inline(always)]
    fn load(from: &[f32; W]) -> Self {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; W]) {
        *to = self;
    }

    #[inline(always)]
    fn mul(self, by: Self) -> Self {
        std::array::from_fn(|w| self[w] * by[w])
    }

    #[inline(always)]
    fn add_product(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|w| a[w].mul_add(b[w], self[w]))
    }
}

/// An instruction set, as the vector type it uses for `W` values.
pub(crate) trait Vectors<const W: usize> {
    type Of: Lanes<W>;
}

/// Whatever the crate was compiled for.
pub(crate) struct Portable;

impl<const W: usize> Vectors<W> for Portable {
    type Of = [f32; W];
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! Vectors whose methods may only run inside functions compiled for their instruction set:
    //! [`dispatch!`](super::dispatch) names these types there and nowhere else.

    use std::arch::x86_64::*;

    use super::{Lanes, Vectors};

    pub(crate) struct Avx2;
    pub(crate) struct Avx512;

    impl Vectors<8> for Avx2 {
        type Of = __m256;
    }
    impl Vectors<16> for Avx2 {
        type Of = Pair;
    }
    impl Vectors<8> for Avx512 {
        type Of = __m256;
    }
    impl Vectors<16> for Avx512 {
        type Of = __m512;
    }

    macro_rules! lanes {
        ($vector:ty, $w:literal, $splat:ident, $load:ident, $store:ident, $mul:ident, $fma:ident) => {
            impl Lanes<$w> for $vector {
                #[inline(always)]
                fn splat(x: f32) -> Self {
                    // SAFETY: by the rule of this module the instruction set is there.
                    unsafe { $splat(x) }
                }

                #[inline(always)]
                fn load(from: &[f32; $w]) -> Self {
                    // SAFETY: as above; the array has as many values as the vector.
                    unsafe { $load(from.as_ptr()) }
                }

                #[inline(always)]
                fn store(self, to: &mut [f32; $w]) {
                    // SAFETY: as above; the array has as many values as the vector.
                    unsafe { $store(to.as_mut_ptr(), self) }
                }

                #[inline(always)]
                fn mul(self, by: Self) -> Self {
                    // SAFETY: by the rule of this module the instruction set is there.
                    unsafe { $mul(self, by) }
                }

                #[inline(always)]
                fn add_product(self, a: Self, b: Self) -> Self {
                    // SAFETY: by the rule of this module the instruction set is there.
                    unsafe { $fma(a, b, self) }
                }
            }
        };
    }

    lanes!(
        __m256,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_mul_ps,
        _mm256_fmadd_ps
    );
    lanes!(
        __m512,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_mul_ps,
        _mm512_fmadd_ps
    );

    /// 16 values in two AVX registers.
    #[derive(Clone, Copy)]
    pub(crate) struct Pair(__m256, __m256);

    impl Lanes<16> for Pair {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            let x = __m256::splat(x);
            Self(x, x)
        }

        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            let [a, b] = halves(from);
            Self(__m256::load(a), __m256::load(b))
        }

        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            let (a, b) = to.split_at_mut(8);
            if let (Some(a), Some(b)) = (a.first_chunk_mut(), b.first_chunk_mut()) {
                self.0.store(a);
                self.1.store(b);
            }
        }

        #[inline(always)]
        fn mul(self, by: Self) -> Self {
            Self(self.0.mul(by.0), self.1.mul(by.1))
        }

        #[inline(always)]
        fn add_product(self, a: Self, b: Self) -> Self {
            Self(self.0.add_product(a.0, b.0), self.1.add_product(a.1, b.1))
        }
    }

    #[inline(always)]
    fn halves(x: &[f32; 16]) -> [&[f32; 8]; 2] {
        let (chunks, _) = x.as_chunks::<8>();
        [&chunks[0], &chunks[1]]
    }
}

/// An instruction set a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Simd {
    /// Whatever the crate was compiled for.
    Portable,
    /// AVX2 and FMA, found at run time.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F and VL beside them, found at run time.
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

/// Defines `$name(simd, args…)`: `$body::<V, R, W>(args…)` compiled for the instruction set, `V` being
/// its [`Vectors`] and `R` the number of rows whose accumulators fit its registers. The body must not
/// hand closures to functions that are not inlined: those would be compiled without it.
macro_rules! dispatch {
    ($(#[$doc:meta])* fn $name:ident<$w:literal>($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        fn $name(simd: $crate::ops::simd::Simd, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                $body::<$crate::ops::simd::x86::Avx2, 4, $w>($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512vl")]
            fn avx512($($arg: $ty),*) {
                $body::<$crate::ops::simd::x86::Avx512, 8, $w>($($arg),*);
            }
            match simd {
                $crate::ops::simd::Simd::Portable => {
                    $body::<$crate::ops::simd::Portable, 4, $w>($($arg),*);
                }
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Simd::detect` returns Avx2 only where AVX2 and FMA exist.
                $crate::ops::simd::Simd::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Simd::detect` returns Avx512 only where all four features exist.
                $crate::ops::simd::Simd::Avx512 => unsafe { avx512($($arg),*) },
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

/// `x` rounded to the nearest bf16, kept as f32.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> f32 {
    cpu::widen(cpu::round_bf16(x))
}

#[cfg(test)]
mod tests {
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
}
