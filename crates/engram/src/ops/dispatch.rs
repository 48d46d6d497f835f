//! One body, compiled for the baseline and for AVX2.

/// Defines `$name(isa, args…)`, which runs the safe and inlined `$body(args…)` compiled for `isa`.
///
/// The bodies use no fused multiply-add, and the compiler does not invent any: wider registers
/// change how many elements are worked on at a time and not one bit of a result.
macro_rules! dispatch {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        #[inline(never)]
        #[allow(unsafe_code)]
        fn $name(isa: deepseek_v41_core::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::detect` and `Isa::available` name AVX2 only where the processor has it.
                deepseek_v41_core::cpu::Isa::Avx2 | deepseek_v41_core::cpu::Isa::Avx512 => unsafe {
                    avx2($($arg),*)
                },
                _ => $body($($arg),*),
            }
        }
    };
}
pub(crate) use dispatch;
