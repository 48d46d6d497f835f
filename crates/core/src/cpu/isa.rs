//! Which instructions the fast paths may use.

/// An instruction set that has its own kernels. All give the same bits; only the time differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust with fused multiply-adds.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL and VBMI (Ice Lake, Zen 4 and later), beside everything [`Isa::Avx2`] stands for.
    /// Kernels that have no use for more than eight lanes run their AVX2 form.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best one this processor has. The answer is cached by the standard library.
    #[inline]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            return if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi")
            {
                Self::Avx512
            } else {
                Self::Avx2
            };
        }
        Self::Portable
    }

    /// Every one this processor has, for tests that compare them.
    pub fn available() -> Vec<Self> {
        match Self::detect() {
            Self::Portable => vec![Self::Portable],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => vec![Self::Portable, Self::Avx2],
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => vec![Self::Portable, Self::Avx2, Self::Avx512],
        }
    }
}
