//! Blocks of fixed length, so that the compiler keeps them in vector registers, and the loop over
//! tokens.

use deepseek_v41_core::cpu;
use half::bf16;
use rayon::prelude::*;

/// Elements handled at once: a multiple of every x86 and Arm vector width.
pub(super) const LANES: usize = 16;

/// One block in f32.
pub(super) type Block = [f32; LANES];

/// `acc += w * x`, product rounded before the addition as in the reference.
#[inline(always)]
pub(super) fn add_scaled(acc: &mut Block, w: f32, x: &Block) {
    for l in 0..LANES {
        acc[l] += w * x[l];
    }
}

/// The first block of `src`, widened.
#[inline(always)]
pub(super) fn load(src: &[bf16]) -> Block {
    let src = &src[..LANES];
    std::array::from_fn(|l| cpu::widen(src[l]))
}

/// Rounds a block into the first elements of `dst`.
#[inline(always)]
pub(super) fn store(block: &Block, dst: &mut [bf16]) {
    let dst = &mut dst[..LANES];
    for l in 0..LANES {
        dst[l] = cpu::round_bf16(block[l]);
    }
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
    let tokens = out.len() / row_len;
    if tokens > 1 && cpu::should_parallelise(tokens.saturating_mul(work)) {
        out.par_chunks_mut(row_len)
            .enumerate()
            .for_each(|(t, row)| f(t, row));
    } else {
        out.chunks_mut(row_len)
            .enumerate()
            .for_each(|(t, row)| f(t, row));
    }
}
