//! Communication between tensor-parallel ranks.

mod local;
mod thread;

use std::fmt::Debug;

use candle_core::Tensor;
pub use local::LocalComm;
pub use thread::ThreadComm;

use crate::Result;

/// The collectives a sharded layer needs. One object per rank, passed to the layers that shard.
///
/// Every rank must make the same calls in the same order.
pub trait Comm: Debug + Send + Sync {
    /// This rank, `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Elementwise sum over the ranks, in rank order, so that every rank gets the same bits.
    ///
    /// # Errors
    /// Shapes or dtypes differ between ranks, or the transport fails.
    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor>;

    /// The ranks' tensors concatenated along `dim`, in rank order.
    ///
    /// # Errors
    /// Shapes do not fit, or the transport fails.
    fn all_gather(&self, xs: &Tensor, dim: usize) -> Result<Tensor>;
}
