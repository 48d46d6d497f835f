//! One file an operation: the maths, the public function with its checks, the reference on slices,
//! candle's custom op.

mod hc_expand;
mod hc_mean;
mod hc_mixes;
mod hc_post;
mod hc_pre;
mod hc_step;
mod project;
mod rows;
mod split_sinkhorn;

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Error, Result};

pub use hc_expand::{hc_expand, hc_expand_ref};
pub use hc_mean::{hc_mean, hc_mean_ref};
pub(crate) use hc_mixes::HcMixes;
pub use hc_mixes::{hc_mixes, hc_mixes_ref};
pub use hc_post::{hc_post, hc_post_ref};
pub use hc_pre::{hc_pre, hc_pre_ref};
pub(crate) use hc_step::{Next, Open, Step, hc_step};
pub use split_sinkhorn::{SinkhornParams, split_sinkhorn, split_sinkhorn_ref};

/// Checks one operand of `op` against the shape and dtype it must have.
fn expect(op: &'static str, name: &str, xs: &Tensor, shape: &[usize], dtype: DType) -> Result<()> {
    if xs.dims() == shape && xs.dtype() == dtype {
        return Ok(());
    }
    let found = format!("{:?} {:?}", xs.dims(), xs.dtype());
    Err(Error::shape(
        op,
        format!("{name}: expected {shape:?} {dtype:?}, found {found}"),
    ))
}

/// The `[T, C, dim]` of a bf16 stream.
fn stream_dims(op: &'static str, stream: &Tensor) -> Result<(usize, usize, usize)> {
    match (stream.dims(), stream.dtype()) {
        (&[t, c, dim], DType::BF16) if c > 0 && dim > 0 => Ok((t, c, dim)),
        (dims, dtype) => Err(Error::shape(
            op,
            format!("expected a stream [T, C, dim] bf16, found {dims:?} {dtype:?}"),
        )),
    }
}
