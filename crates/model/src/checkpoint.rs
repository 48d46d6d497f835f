//! What a checkpoint may hold besides the backbone.

use deepseek_v41_core::{Result, WeightError, Weights};

/// Parts of a checkpoint that a program may leave unloaded.
const OPTIONAL: [&str; 4] = ["mtp.", "vision.", "aligner.", "image_"];

/// Refuses a checkpoint with tensors that no layer of the configuration has asked for, which is how
/// a misspelt name or the wrong config shows. Call it once everything wanted is loaded.
///
/// Draft heads and vision weights that were left unloaded are fine and noted in the log.
///
/// # Errors
/// `Error::Weight` naming the first unexpected tensor and its file.
pub fn refuse_unexpected(weights: &Weights) -> Result<()> {
    let unused = weights.unused();
    let (optional, unexpected): (Vec<_>, Vec<_>) = unused
        .into_iter()
        .partition(|t| OPTIONAL.iter().any(|part| t.name.starts_with(part)));
    if let Some(first) = unexpected.first() {
        return Err(first.error(WeightError::Unexpected));
    }
    for part in OPTIONAL {
        let of_part = || optional.iter().filter(|t| t.name.starts_with(part));
        let bytes: usize = of_part().map(|t| t.bytes.len()).sum();
        if bytes > 0 {
            tracing::info!(part, tensors = of_part().count(), bytes, "not loaded");
        }
    }
    Ok(())
}
