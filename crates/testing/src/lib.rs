//! Golden data, tolerances and generators shared by the tests of the workspace.

mod compare;
mod golden;
mod random;

pub use compare::{assert_bits_eq, assert_close, assert_outcome, bf16_ulp_distance, rel_rms};
pub use golden::{Golden, golden_dir};
pub use random::{random_bf16, random_f32, seed_of, with_threads};
