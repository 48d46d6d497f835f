//! What the examples of conversations and pictures share. They and their end-to-end tests are a package of
//! their own because the prompt library and the image decoders take a while to compile.

use std::path::Path;

use deepseek_v41::{DeepSeekV41, Result};

pub mod respond;

/// The checkpoint in a directory, or the embedded model.
///
/// # Errors
/// As [`DeepSeekV41::load`].
pub fn open(dir: Option<&Path>) -> Result<DeepSeekV41> {
    match dir {
        Some(dir) => DeepSeekV41::load(dir),
        None => DeepSeekV41::tiny(),
    }
}
