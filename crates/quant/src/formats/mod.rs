//! The three number formats of quantised tensors: codes to values and back.
//!
//! Each module is a pair of pure functions, `decode(u8) -> f32` (exact) and `encode(f32) -> u8`
//! (round to nearest, ties to the even code, saturating). OCP's *8-bit Floating Point* and
//! *Microscaling Formats* specifications define the codes.

pub mod e2m1;
pub mod e4m3;
pub mod e8m0;
