#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![deny(unsafe_code)]

mod config;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "kernel launches")]
mod cuda;
mod flow;
mod hyperconn;
mod mix;
mod ops;
mod weights;

pub use config::{HyperConnConfig, Site};
pub use flow::Flow;
pub use hyperconn::HyperConn;
pub use mix::{Mix, PreMix};
pub use ops::{
    SinkhornParams, hc_expand, hc_expand_ref, hc_mean, hc_mean_ref, hc_mixes, hc_mixes_ref,
    hc_post, hc_post_ref, hc_pre, hc_pre_ref, split_sinkhorn, split_sinkhorn_ref,
};
pub use weights::MixWeights;
