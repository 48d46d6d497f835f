//! One file an operation: the maths, the public function with its checks, the reference on slices.

mod group_tokens;
mod swiglu;
mod topk_gate;

use candle_core::{Storage, Tensor, WithDType};
use deepseek_v41_core::{Error, Result, cpu};

pub use group_tokens::{Groups, group_tokens};
pub use swiglu::swiglu_ref;
pub(crate) use topk_gate::at_token;
pub use topk_gate::{
    GateParams, route_weights_ref, scores_ref, select_ref, topk_gate, topk_gate_ref,
};

/// Runs `f` on the elements of a CPU tensor.
///
/// The operations of this crate give several results of different dtypes, or read more tensors than
/// candle's custom ops take, so they borrow slices themselves.
pub(crate) fn with_slice<T: WithDType, R>(
    op: &'static str,
    xs: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    if xs.dtype() != T::DTYPE {
        return Err(Error::shape(
            op,
            format!("expected {:?}, found {:?}", T::DTYPE, xs.dtype()),
        ));
    }
    let xs = xs.contiguous()?;
    let (storage, layout) = xs.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(cpu::contiguous(storage, layout, op)?),
        _ => Err(Error::Unsupported {
            what: format!("{op} on {:?}: use the CPU", xs.device()),
        }),
    }
}
