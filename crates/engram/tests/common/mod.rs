//! Configurations shared by the tests.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use deepseek_v41_engram::{EngramConfig, EngramLayout, TokenMap, layout::primes_from};
use deepseek_v41_quant::WeightFormat;

/// The released layout.
pub fn released() -> EngramConfig {
    EngramConfig {
        layer_ids: vec![1, 14],
        max_ngram_size: 4,
        vocab_size: 16_000_000,
        n_heads: 8,
        head_dim: 256,
        num_embeddings: vec![384_006_168, 384_016_682],
        compressed_vocab_size: 99_092,
        pad_id: 2,
        dim: 5120,
        hc_mult: 4,
        norm_eps: 1e-20,
        linear_format: WeightFormat::Fp8,
    }
}

/// A small layout of any shape, with the row counts its primes ask for.
pub fn small(layers: usize, n: usize, heads: usize, floor: usize, vocab: usize) -> EngramConfig {
    let columns = (n - 1) * heads;
    let primes = primes_from(floor, layers * columns).unwrap();
    EngramConfig {
        layer_ids: (0..layers).map(|i| 3 * i).collect(),
        max_ngram_size: n,
        vocab_size: floor,
        n_heads: heads,
        head_dim: 32,
        num_embeddings: primes
            .chunks(columns)
            .map(|p| p.iter().map(|&p| p as usize).sum())
            .collect(),
        compressed_vocab_size: vocab,
        pad_id: 0,
        dim: 48,
        hc_mult: 4,
        norm_eps: 1e-20,
        linear_format: WeightFormat::Bf16,
    }
}

pub fn layout(cfg: &EngramConfig) -> EngramLayout {
    EngramLayout::new(cfg).unwrap()
}

/// Every token its own compressed id.
pub fn identity_map(vocab: usize, pad: u32) -> TokenMap {
    TokenMap::new((0..vocab as u32).collect(), vocab, pad).unwrap()
}
