//! What the operations on streams share: blocks that stay in cache, wider instructions where the
//! processor has them, and the loop over tokens.

use deepseek_v41_core::cpu;
use half::bf16;

/// Elements of every copy handled before moving on: with four copies 5 KB of f32, well inside a
/// first-level cache, and long enough for the compiler to vectorise loops over it.
pub(super) const BLOCK: usize = 256;

/// One block in f32.
pub(super) type Block = [f32; BLOCK];

/// `acc += w * x`, product rounded before the addition as in the reference.
#[inline(always)]
pub(super) fn add_scaled(acc: &mut [f32], w: f32, x: &[bf16]) {
    for (a, x) in acc.iter_mut().zip(x) {
        *a += w * cpu::widen(*x);
    }
}

/// Rounds a block into `out`.
#[inline(always)]
pub(super) fn round(block: &[f32], out: &mut [bf16]) {
    for (o, v) in out.iter_mut().zip(block) {
        *o = cpu::round_bf16(*v);
    }
}

/// Splits `dim` elements into blocks: first element and length of each.
#[inline(always)]
pub(super) fn blocks(dim: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..dim)
        .step_by(BLOCK)
        .map(move |d| (d, BLOCK.min(dim - d)))
}

/// Calls `f(token, row)` for every row of `out`, over threads when `work` (operations a token) makes
/// that worthwhile. Rows never share a reduction, so the split cannot change a bit.
pub(super) fn for_each_token<T: Send>(
    out: &mut [T],
    row_len: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    if row_len == 0 {
        return;
    }
    let work = (out.len() / row_len).saturating_mul(work);
    cpu::for_each_piece(work, out, row_len, f);
}

/// Defines `$name(isa, args…)`, which runs the safe and inlined `$body(args…)` compiled for `isa`.
///
/// The bodies use no fused multiply-add, and the compiler does not invent any: wider registers
/// change how many elements are worked on at a time and not one bit of a result.
macro_rules! for_isa {
    ($vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        #[allow(unsafe_code)]
        $vis fn $name(isa: deepseek_v41_core::cpu::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa` names AVX2 only on processors that have it.
                deepseek_v41_core::cpu::Isa::Avx2 | deepseek_v41_core::cpu::Isa::Avx512 => unsafe {
                    avx2($($arg),*)
                },
                _ => $body($($arg),*),
            }
        }
    };
}
pub(super) use for_isa;
