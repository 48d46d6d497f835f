//! CUDA: opening a device, loading kernels, launching them.
//!
//! Operations with more operands than candle's custom ops take are device branches in their public
//! functions: operands are borrowed ([`Held`]), outputs allocated ([`Out`]), a kernel launched on the
//! device's stream ([`Launch`]). Nothing here waits for the device; memory is freed in stream order.
//!
//! What is global is what the driver's objects are: loaded modules and their kernels, one entry for each GPU and
//! module (loading one twice would cost its upload again and gain nothing), what is known of each opened
//! device, and the number of [`StreamUser`]s of each stream. A thread knows whether its launches are captured.

mod blas;
mod device;
mod graph;
mod launch;
mod mapped;
mod modules;
pub mod ops;
pub mod sample;
mod scope;
mod scratch;
mod staged;
mod tensors;

use std::{
    collections::HashMap,
    sync::{Mutex, OnceLock, PoisonError},
};

use candle_core::cuda_backend::cudarc::driver::DriverError;
pub use deepseek_v41_kernels as kernels;

pub(crate) use self::device::open;
pub use self::{
    blas::Blas,
    device::{capability, is_hopper, multiprocessors, open_baseline},
    graph::{Graph, StreamUser},
    launch::{Launch, MAX_GRID_YZ},
    mapped::Mapped,
    modules::clusters_at_once,
    scope::Scope,
    scratch::{Scratch, beside, join},
    staged::Staged,
    tensors::{Held, Out, Ptr, bf16_weight, bytes_to_device, contiguous, fits_bf16},
};
use crate::{DeviceError, Error};

fn lock<K, V>(cell: &OnceLock<Mutex<HashMap<K, V>>>) -> std::sync::MutexGuard<'_, HashMap<K, V>> {
    // A panic while holding it cannot leave a map half-written: entries are inserted whole.
    cell.get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// A driver error as ours.
pub fn driver(what: &str, e: DriverError) -> Error {
    Error::device(what, DeviceError::from_text(&e.to_string()))
}
