//! Operations of the tower: each with its formula, a reference over slices and a custom op.

mod attention;
mod cells;
mod elementwise;
mod exp;
mod linear;
mod rope;

pub use attention::{PatchRuns, full_attention, full_attention_ref};
pub use cells::{merge_cells, merge_cells_ref};
pub use elementwise::{add, add_ref, gelu, gelu_ref, swiglu, swiglu_ref};
pub(crate) use linear::Products;
pub use linear::{Linear, linear_ref};
pub use rope::{Rope2d, Rope2dTable, apply_rope_2d, apply_rope_2d_ref};

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Error, Result};

/// `xs` as a contiguous bf16 tensor where this crate computes.
fn dense_bf16(xs: &Tensor, op: &'static str) -> Result<Tensor> {
    if xs.dtype() != DType::BF16 {
        return Err(Error::shape(
            op,
            format!("expected bf16, found {:?}", xs.dtype()),
        ));
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return dense_on_cuda(xs);
    }
    if !xs.device().is_cpu() {
        return Err(Error::Unsupported {
            what: format!("{op} on a device of this kind"),
        });
    }
    Ok(xs.contiguous()?)
}

/// Kernels read 16 bytes at a time, so a view must begin at such a multiple.
#[cfg(feature = "cuda")]
fn dense_on_cuda(xs: &Tensor) -> Result<Tensor> {
    const VALUES: usize = 8;
    let xs = xs.contiguous()?;
    match xs.layout().start_offset() % VALUES {
        0 => Ok(xs),
        _ => Ok(xs.force_contiguous()?),
    }
}
