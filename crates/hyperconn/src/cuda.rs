//! The operations of this crate on a GPU.

mod mixes;
mod parts;
mod step;
mod weights;

pub(crate) use self::{
    mixes::{mixes, split_sinkhorn},
    parts::{hc_expand, hc_post, hc_post_packed, hc_pre},
    step::{Open, Step, fuses, step},
    weights::DeviceMix,
};

/// Copies of the stream that the fused kernel is written for.
const FUSED_COPIES: usize = 4;
/// Coefficients of a token at that number.
pub(crate) const FUSED_WIDTH: usize = (2 + FUSED_COPIES) * FUSED_COPIES;
