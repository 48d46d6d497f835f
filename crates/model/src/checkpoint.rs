//! What a checkpoint may hold besides the backbone.

use deepseek_v41_core::{Result, WeightError, Weights};

/// Parts of a checkpoint that a program may leave unloaded, each as a whole: the draft head, and what reads
/// pictures.
const OPTIONAL: [&[&str]; 2] = [&["mtp."], &["vision.", "aligner.", "image_"]];

/// `mtp.N.embed.*` and `mtp.N.head.*`: the draft head shares the backbone's, of which a converter may have
/// left copies.
fn is_shared_copy(name: &str) -> bool {
    let mut parts = name.split('.');
    parts.next() == Some("mtp") && matches!(parts.nth(1), Some("embed" | "head"))
}

/// Refuses a checkpoint with tensors that no layer of the configuration has asked for, which is how
/// a misspelt name or the wrong config shows. Call it once everything wanted is loaded.
///
/// A draft head or a vision tower that was left unloaded is fine and noted in the log; one of which some
/// tensors were loaded and some were not is another than the configured one.
///
/// # Errors
/// `Error::Weight` naming the first unexpected tensor and its file.
pub fn refuse_unexpected(weights: &Weights) -> Result<()> {
    let belongs = |part: &[&str], name: &str| part.iter().any(|prefix| name.starts_with(prefix));
    let unused = weights.unused();
    let mut unexpected = unused
        .iter()
        .filter(|t| !OPTIONAL.iter().any(|part| belongs(part, &t.name)));
    if let Some(first) = unexpected.next() {
        return Err(first.error(WeightError::Unexpected));
    }
    for part in OPTIONAL {
        let all = weights.iter().filter(|t| belongs(part, &t.name)).count();
        let of_part = unused.iter().filter(|t| belongs(part, &t.name));
        let left: Vec<_> = of_part.filter(|t| !is_shared_copy(&t.name)).collect();
        let Some(first) = left.first() else { continue };
        if left.len() < all {
            return Err(first.error(WeightError::Unexpected));
        }
        let bytes: usize = left.iter().map(|t| t.bytes.len()).sum();
        tracing::info!(part = part[0], tensors = all, bytes, "not loaded");
    }
    Ok(())
}
