//! Quantisers and products. Each file holds the maths, the checked public function over tensors, its
//! candle op and a plain `_ref`.

pub mod act_quant;
pub mod dequant;
pub mod fake_quant;
pub mod fp4_act_quant;
pub mod fp4_gemm;
pub mod fp8_gemm;

use candle_core::{CpuStorage, D, DType, Layout, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use half::bf16;
use rayon::prelude::*;

/// Calls `body(args)`, an `#[inline(always)]` function of plain Rust, compiled for the build's target
/// or, where the processor has it, for AVX2. Loops over independent elements only get wider by that:
/// nothing is reassociated or fused, and no bit changes.
macro_rules! widest {
    ($body:ident($($arg:ident: $ty:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*)
            }
            match deepseek_v41_core::cpu::Isa::detect() {
                // SAFETY: the variant stands for these features.
                deepseek_v41_core::cpu::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                // SAFETY: the variant stands for AVX2.
                deepseek_v41_core::cpu::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                _ => {}
            }
        }
        $body($($arg),*)
    }};
}
use widest;

/// Elements that one thread takes at a time, about 20 µs.
const PIECE: usize = 1 << 14;

/// `f` over pieces of two equally long slices, over threads where that pays. Pieces consist of whole
/// groups, so the split cannot change a bit.
fn for_pieces<A: Sync, B: Send>(
    group: usize,
    a: &[A],
    b: &mut [B],
    f: impl Fn(&[A], &mut [B]) + Sync + Send,
) {
    if a.len() >= 2 * PIECE && cpu::should_parallelise(20 * a.len()) {
        let piece = PIECE.div_ceil(group) * group;
        a.par_chunks(piece)
            .zip(b.par_chunks_mut(piece))
            .for_each(|(a, b)| f(a, b));
    } else {
        f(a, b);
    }
}

/// Elements of a bf16 tensor whose last dimension divides into groups; `[.., D]` → D.
fn check_groups(op: &'static str, xs: &Tensor, group: usize) -> Result<usize> {
    if xs.dtype() != DType::BF16 {
        return Err(Error::shape(
            op,
            format!("expected bf16, found {:?}", xs.dtype()),
        ));
    }
    let d = xs.dim(D::Minus1)?;
    if group == 0 || !d.is_multiple_of(group) {
        return Err(Error::shape(
            op,
            format!("last dimension {d} is not a multiple of {group}"),
        ));
    }
    Ok(d)
}

fn bf16_slice<'a>(
    s: &'a CpuStorage,
    l: &Layout,
    op: &'static str,
) -> candle_core::Result<&'a [bf16]> {
    cpu::contiguous::<bf16>(s, l, op)
}

/// Largest magnitude of a group, NaN if it holds a NaN or an infinity.
///
/// The reference has no answer for such input (its scale rule wraps around to `-0`). Here the whole
/// group becomes NaN, so that a broken activation cannot come back as a plausible number.
#[inline(always)]
fn group_amax(xs: &[bf16]) -> f32 {
    // Magnitudes order like their bit patterns, and NaN and infinity lie above all finite ones.
    let top = xs.iter().fold(0u16, |top, x| top.max(x.to_bits() & 0x7fff));
    if top >= 0x7f80 {
        f32::NAN
    } else {
        f32::from_bits(u32::from(top) << 16)
    }
}
