//! Choosing an instruction set at run time.
//!
//! Everything here computes the same bits on every instruction set: vector code only does several
//! independent elements at once, and each element keeps its own order of fused multiply-adds.

/// Instruction sets the kernels of this crate are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    /// Plain loops, compiled for the build's target.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL, beside AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The widest set this machine has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            return if wide { Self::Avx512 } else { Self::Avx2 };
        }
        Self::Portable
    }

    /// Every set this machine has, for tests that compare them.
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

/// Calls `body(args)`, an `#[inline(always)]` function of plain Rust without a result, compiled for the
/// build's target and for each wider instruction set.
macro_rules! simd_dispatch {
    ($body:ident($($arg:ident: $ty:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*)
            }
            match $crate::simd::Isa::detect() {
                $crate::simd::Isa::Portable => {}
                // SAFETY: `detect` has found the features.
                $crate::simd::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                $crate::simd::Isa::Avx512 => return unsafe { avx512($($arg),*) },
            }
        }
        $body($($arg),*)
    }};
}
