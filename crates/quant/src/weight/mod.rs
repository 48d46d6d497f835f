//! Quantised weights as they are stored: bytes of the checkpoint and what they mean.

mod fp4;
#[cfg(target_arch = "x86_64")]
mod fp4_avx2;
#[cfg(target_arch = "x86_64")]
mod fp4_avx512;
mod fp8;
#[cfg(target_arch = "x86_64")]
mod fp8_avx2;
#[cfg(target_arch = "x86_64")]
mod fp8_avx512;

pub use fp4::{FP4_GROUP, Fp4Weight};
pub use fp8::{FP8_TILE, Fp8Weight};
