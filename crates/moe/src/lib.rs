#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]

mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod experts;
mod gate;
mod moe;
mod ops;

pub use config::{MoeConfig, ScoreFunc};
pub use experts::{Expert, Experts};
pub use gate::{Gate, Routing};
pub use moe::Moe;
pub use ops::{
    GateParams, Groups, group_tokens, route_weights_ref, scores_ref, select_ref, swiglu_ref,
    topk_gate, topk_gate_ref,
};
