#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
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
