//! Operations of the tower: each with its formula, a reference over slices and a custom op.

mod attention;
mod cells;
mod elementwise;
mod exp;
mod linear;
mod rope;

pub use attention::{full_attention, full_attention_ref};
pub use cells::{merge_cells, merge_cells_ref};
pub use elementwise::{add, add_ref, gelu, gelu_ref, swiglu, swiglu_ref};
pub use linear::{Linear, linear_ref};
pub use rope::{Rope2d, Rope2dTable, apply_rope_2d, apply_rope_2d_ref};

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Error, Result};

/// `xs` as a contiguous bf16 tensor on the CPU.
fn cpu_bf16(xs: &Tensor, op: &'static str) -> Result<Tensor> {
    if xs.dtype() != DType::BF16 {
        return Err(Error::shape(
            op,
            format!("expected bf16, found {:?}", xs.dtype()),
        ));
    }
    if !xs.device().is_cpu() {
        return Err(Error::Unsupported {
            what: format!("{op} runs on the CPU only"),
        });
    }
    Ok(xs.contiguous()?)
}
