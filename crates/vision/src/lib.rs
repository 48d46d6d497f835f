#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod simd;

mod aligner;
mod config;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "kernel launches")]
mod cuda;
mod encoder;
mod error;
mod grid;
mod limits;
pub mod ops;
mod preprocess;
mod span;
mod vit;

pub use aligner::Aligner;
pub use config::{GridConfig, VisionConfig};
pub use encoder::VisionEncoder;
pub use error::ImageError;
pub use grid::{ImageGrid, plan_image_grid, span_len};
pub use limits::Limits;
pub use preprocess::{
    ImagePatches, ImageProcessor, RgbImage, fit_to_grid, normalise, resize_bicubic,
    resize_bicubic_ref,
};
pub use span::{ExpandedPrompt, TokenType, expand_image_tokens, span_types};
pub use vit::{VisionBlock, Vit};
