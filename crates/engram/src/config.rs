//! Settings of the Engram layers of one model.

use deepseek_v41_quant::WeightFormat;

/// Settings shared by every Engram layer of a model, under the names of the released config
/// (without their `engram_` prefix).
#[derive(Debug, Clone, PartialEq)]
pub struct EngramConfig {
    /// Backbone layers that carry an Engram, in the order in which primes are handed out.
    pub layer_ids: Vec<usize>,
    /// Longest n-gram hashed (the shortest is 2), so `max_ngram_size - 1` earlier tokens are read.
    pub max_ngram_size: usize,
    /// Bucket floor: the prime search starts here.
    pub vocab_size: usize,
    /// Hash heads of each n-gram order.
    pub n_heads: usize,
    /// Width of one table row; a multiple of 32, the block of its scales.
    pub head_dim: usize,
    /// Rows of each layer's table: the sum of that layer's primes.
    pub num_embeddings: Vec<usize>,
    /// Size of the compressed vocabulary; every multiplier is derived from it.
    pub compressed_vocab_size: usize,
    /// Token id (not compressed) that stands for "no token here".
    pub pad_id: u32,
    /// Width of the residual stream.
    pub dim: usize,
    /// Copies of the residual stream.
    pub hc_mult: usize,
    /// Added to the mean squares of stream and key. The release uses 1e-20.
    pub norm_eps: f32,
    /// Storage of `wkv`.
    pub linear_format: WeightFormat,
}

impl EngramConfig {
    /// Hash columns of one layer: one for each (order, head).
    pub fn columns(&self) -> usize {
        self.max_ngram_size
            .saturating_sub(1)
            .saturating_mul(self.n_heads)
    }
}
