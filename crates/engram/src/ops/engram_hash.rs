//! Terms → table rows.
//!
//! With `x_s` the compressed id `s` tokens back (pad where blocked) and `m_s` the layer's multipliers:
//!
//! mixed_1 = x_0 * m_0, mixed_(s+1) = mixed_s xor x_s * m_s
//! row of column (order - 2, head) = mixed_order mod prime + offset
//!
//! Products stay below 2^63 by the choice of the multipliers, and so does their xor: plain u64.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use rayon::prelude::*;

use crate::layout::{EngramLayout, LayerLayout};

const OP: &str = "engram_hash";
/// Tokens one parallel task hashes.
const TOKENS_PER_TASK: usize = 64;

/// `terms: [T, max_ngram_size]` u32 compressed ids → `[layers, T, columns]` u32 table rows.
///
/// # Errors
/// Another shape or dtype.
pub fn engram_hash_terms(terms: &Tensor, layout: &EngramLayout) -> Result<Tensor> {
    let n = layout.max_ngram_size();
    if terms.dtype() != DType::U32 || terms.rank() != 2 || terms.dim(1)? != n {
        let (shape, dtype) = (terms.shape(), terms.dtype());
        return Err(Error::shape(
            OP,
            format!("terms: expected [T, {n}] U32, found {shape:?} {dtype:?}"),
        ));
    }
    Ok(terms
        .contiguous()?
        .apply_op1_no_bwd(&EngramHash { layout })?)
}

struct EngramHash<'a> {
    layout: &'a EngramLayout,
}

impl CustomOp1 for EngramHash<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let terms = cpu::contiguous::<u32>(storage, layout, OP)?;
        let tokens = terms.len() / self.layout.max_ngram_size();
        let shape = (self.layout.layers().len(), tokens, self.layout.columns());
        let mut out = vec![0u32; shape.0 * shape.1 * shape.2];
        hash_terms_into(terms, self.layout, &mut out)?;
        Ok((CpuStorage::U32(out), shape.into()))
    }
}

/// The definition: hashes `terms: [T, max_ngram_size]` of one layer into `out: [T, columns]`.
///
/// Terms must be below the layout's compressed vocabulary.
pub fn engram_hash_ref(terms: &[u32], layer: &LayerLayout, out: &mut [u32]) {
    let (n, columns) = (layer.multipliers().len(), layer.primes().len());
    let heads = columns / (n - 1);
    for (terms, out) in terms.chunks_exact(n).zip(out.chunks_exact_mut(columns)) {
        let mut mixed = u64::from(terms[0]) * layer.multipliers()[0];
        for s in 1..n {
            mixed ^= u64::from(terms[s]) * layer.multipliers()[s];
            for c in (s - 1) * heads..s * heads {
                out[c] = (mixed % u64::from(layer.primes()[c])) as u32 + layer.offsets()[c];
            }
        }
    }
}

/// All layers of `terms` into `out: [layers, T, columns]`: [`engram_hash_ref`] over slices of tokens.
///
/// # Errors
/// Lengths that do not fit, or a term that is not a compressed id.
pub fn hash_terms_into(terms: &[u32], layout: &EngramLayout, out: &mut [u32]) -> Result<()> {
    let (n, columns) = (layout.max_ngram_size(), layout.columns());
    let tokens = terms.len() / n;
    if terms.len() != tokens * n || out.len() != layout.layers().len() * tokens * columns {
        return Err(Error::shape(
            OP,
            format!(
                "{} terms of {n} a token, {} rows out",
                terms.len(),
                out.len()
            ),
        ));
    }
    // The bound is what keeps the products from overflowing.
    let vocab = layout.compressed_vocab_size();
    if let Some(&term) = terms.iter().max().filter(|&&term| term >= vocab) {
        return Err(Error::value(
            format!("compressed id {term}"),
            format!("the compressed vocabulary has {vocab} ids"),
        ));
    }
    if tokens == 0 {
        return Ok(());
    }
    // A 64-bit remainder costs about as much as twenty of the operations the threshold counts.
    let parallel = cpu::should_parallelise(out.len() * 20);
    for (layer, out) in layout
        .layers()
        .iter()
        .zip(out.chunks_exact_mut(tokens * columns))
    {
        if parallel {
            let terms = terms.par_chunks(TOKENS_PER_TASK * n);
            let out = out.par_chunks_mut(TOKENS_PER_TASK * columns);
            terms
                .zip(out)
                .for_each(|(terms, out)| engram_hash_ref(terms, layer, out));
        } else {
            engram_hash_ref(terms, layer, out);
        }
    }
    Ok(())
}
