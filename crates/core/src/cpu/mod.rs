//! CPU primitives shared by the operations of every crate.
//!
//! The one rule here: an output element is reduced over its own row's data in a fixed order, so that
//! its bits do not depend on how many rows, columns or threads take part.

mod dot;
mod matmul;

use candle_core::{CpuStorage, Layout, WithDType};
pub use dot::{LANES, dot};
pub use matmul::{Bf16Rows, F32Rows, WeightRows, matmul, matmul_bf16};

/// Below this many floating-point operations waking other threads costs more than it saves.
const PARALLEL_WORK: usize = 400_000;

/// Whether `work` (about the number of floating-point operations) is worth spreading over threads.
///
/// Never changes a result, only where it is computed.
pub fn should_parallelise(work: usize) -> bool {
    work >= PARALLEL_WORK && rayon::current_num_threads() > 1
}

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
        Some((start, end)) => Ok(&data[start..end]),
        None => Err(candle_core::Error::RequiresContiguous { op }.bt()),
    }
}
