//! CUDA: opening a device, loading kernels, launching them.
//!
//! Operations with more operands than candle's custom ops take are device branches in their public
//! functions: operands are borrowed ([`Held`]), outputs allocated ([`Out`]), a kernel launched on the
//! device's stream ([`Launch`]). Nothing here waits for the device; memory is freed in stream order.
//!
//! Loaded modules are kept for the life of the process, one entry for each device and module: loading
//! one twice would cost its upload again and gain nothing. Beside them only the number of [`StreamUser`]s
//! is global.

mod blas;
mod device;
mod graph;
mod launch;
mod mapped;
mod modules;
pub mod ops;
mod staged;
mod tensors;

use std::{
    collections::HashMap,
    sync::{Mutex, OnceLock, PoisonError},
};

use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};
pub use deepseek_v41_kernels as kernels;

pub(crate) use self::device::open;
use self::modules::function;
pub use self::{
    blas::Blas,
    device::{capability, is_hopper, multiprocessors},
    graph::{Graph, StreamUser},
    launch::{Launch, MAX_GRID_YZ},
    mapped::Mapped,
    staged::Staged,
    tensors::{Held, Out, Ptr, bf16_weight, bytes_to_device, contiguous, fits_bf16},
};
use crate::Error;

fn lock<K, V>(cell: &OnceLock<Mutex<HashMap<K, V>>>) -> std::sync::MutexGuard<'_, HashMap<K, V>> {
    // A panic while holding it cannot leave a map half-written: entries are inserted whole.
    cell.get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// A driver error as ours, with what to do where that is known.
pub fn driver(what: &str, e: DriverError) -> Error {
    let hint = match e.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "; the GPU's memory is full: lower max_len, max_seqs or the chunk length, or use another GPU"
        }
        sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            "; a kernel read outside of its tensors, the process cannot use this GPU any more"
        }
        _ => "",
    };
    Error::device(what, format!("{e}{hint}"))
}
