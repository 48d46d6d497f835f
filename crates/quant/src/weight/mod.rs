//! Quantised weights as they are stored: bytes of the checkpoint and what they mean.

mod fp4;
mod fp8;

pub use fp4::{FP4_GROUP, Fp4Weight};
pub use fp8::{FP8_TILE, Fp8Weight};
