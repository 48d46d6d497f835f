#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![deny(unsafe_code)]

mod config;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "kernel launches")]
pub mod cuda;
mod engram;
pub mod hash;
pub mod layout;
pub mod lookback;
pub mod ops;
pub mod pcg64;
pub mod shard;
mod table;
mod token_map;

pub use config::EngramConfig;
pub use engram::Engram;
pub use hash::{EngramHashes, NgramWindow, engram_hash};
pub use layout::{EngramLayout, LayerLayout};
pub use table::{EngramTable, SCALE_BLOCK};
pub use token_map::TokenMap;
