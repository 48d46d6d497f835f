//! CPU primitives shared by the operations of every crate.
//!
//! The one rule here: an output element is reduced over its own row's data in a fixed order, so that
//! its bits do not depend on how many rows, columns or threads take part.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod convert;
mod dot;
mod isa;
mod matmul;
mod panel;
mod pool;
mod rows;
mod scratch;

#[cfg(target_arch = "x86_64")]
pub use avx512::sum_pairs_avx512;
use candle_core::{CpuStorage, Layout, WithDType};
pub use convert::{round_bf16, widen, widen_slice};
pub use dot::{LANES, dot, dot_ref, dot_with, sum_lanes};
pub use isa::Isa;
pub use matmul::{
    FEW_INPUTS, Lanes, Magnitudes, Stretch, WeightRows, accumulate_by_decoding,
    grouped_matmul_bf16, matmul, matmul_bf16, matmul_with,
};
pub use pool::{for_each_piece, for_each_task, in_pool, should_parallelise, spin, team_size};
pub use rows::{Bf16Rows, F32Rows};
pub use scratch::with_scratch;

/// The elements of a contiguous CPU tensor, as a custom op receives them.
///
/// # Errors
/// The tensor is not contiguous or of another dtype.
pub fn contiguous<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> candle_core::Result<&'a [T]> {
    let data = storage.as_slice::<T>()?;
    match layout.contiguous_offsets() {
        // A view without elements may start past the end of its storage.
        Some((start, end)) if start == end => Ok(&data[..0]),
        Some((start, end)) => Ok(&data[start..end]),
        None => Err(candle_core::Error::RequiresContiguous { op }.bt()),
    }
}
