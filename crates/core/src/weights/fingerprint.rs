//! Which checkpoint this is.

use rayon::prelude::*;

use super::{RawTensor, Weights};
use crate::fingerprint::Fingerprint;

/// Most tensors whose bytes are looked at.
const SAMPLED_TENSORS: usize = 4096;
/// Pieces of a tensor that are looked at, spread evenly, and their length in bytes.
const PIECES: usize = 4;
const PIECE: usize = 64;

impl Weights {
    /// A hash that tells checkpoints apart: over the name, dtype and shape of every tensor, and over
    /// 256 bytes of each of up to about 4096 tensors (of all, if there are no more).
    ///
    /// That is cheap on a mapped checkpoint of any size, which would otherwise have to be read from
    /// the disk whole: at most 16 thousand pages. Training changes every tensor, so a sample finds
    /// another training run; a change of single values elsewhere goes unnoticed.
    pub fn fingerprint(&self) -> u64 {
        let tensors: Vec<&RawTensor> = self.iter().collect();
        let stride = tensors.len().div_ceil(SAMPLED_TENSORS).max(1) as u64;
        // In parallel because what takes time is waiting for pages.
        let hashes: Vec<u64> = tensors.par_iter().map(|t| of_tensor(t, stride)).collect();
        let mut all = Fingerprint::new();
        hashes.iter().for_each(|h| all.update(&h.to_le_bytes()));
        all.finish()
    }
}

fn of_tensor(tensor: &RawTensor, stride: u64) -> u64 {
    let mut hash = Fingerprint::new();
    hash.update_framed(tensor.name.as_bytes());
    // By name and not by number: every n-th tensor could always be the same one of each expert.
    let sampled = hash.finish().is_multiple_of(stride);
    hash.update_framed(format!("{:?}", tensor.dtype).as_bytes());
    for dim in &tensor.shape {
        hash.update(&(*dim as u64).to_le_bytes());
    }
    hash.update_framed(&[]);
    if sampled {
        let bytes = &tensor.bytes;
        let last = bytes.len().saturating_sub(PIECE);
        for i in 0..PIECES {
            let at = last * i / (PIECES - 1);
            hash.update_framed(&bytes[at..bytes.len().min(at + PIECE)]);
        }
    }
    hash.finish()
}
