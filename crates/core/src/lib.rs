#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod argmax;
pub mod comm;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod device_error;
mod error;
mod fingerprint;
mod norm;
mod rope;
pub mod weights;

pub use argmax::{ArgmaxWork, Best, argmax, argmax_ref, argmax_sum, best};
pub use comm::{Comm, LocalComm, ThreadComm};
pub use device::{open_device, upload};
pub use device_error::DeviceError;
pub use error::{Error, Result, SavedStateError, WeightError};
pub use fingerprint::Fingerprint;
pub use norm::{RmsNorm, rms_norm, rms_norm_ref, rms_norm_row};
pub use rope::{Rope, RopeConfig, RopeTable, apply_rope, apply_rope_ref, apply_rope_row};
pub use weights::{LoadPolicy, RawTensor, Shard, StoredDtype, VarBuilder, Weights};
