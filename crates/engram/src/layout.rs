//! Which buckets the n-gram hashes fall into, and the numbers they are mixed with.

use deepseek_v41_core::{Error, Result};

use crate::{config::EngramConfig, pcg64::Pcg64};

/// Longest n-gram accepted: a window of this many terms is kept for every token.
const MAX_NGRAM: usize = 64;
/// Most hash columns of all layers together. The release has 48; the bound keeps the prime search
/// of a hostile config to a fraction of a second.
const MAX_COLUMNS: usize = 1 << 16;

/// Whether `n` is prime, deterministically: Miller-Rabin with witnesses 2, 7 and 61 is exact for
/// every 32-bit number.
pub fn is_prime(n: u32) -> bool {
    const SMALL: [u32; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];
    if n < 2 {
        return false;
    }
    for p in SMALL {
        if n.is_multiple_of(p) {
            return n == p;
        }
    }
    let twos = (n - 1).trailing_zeros();
    let odd = (n - 1) >> twos;
    [2, 7, 61].into_iter().all(|witness| {
        if n == witness {
            return true; // a witness says nothing about itself: it would call 61 composite
        }
        let mut v = pow_mod(witness, odd, n);
        if v == 1 || v == n - 1 {
            return true;
        }
        for _ in 1..twos {
            v = (u64::from(v) * u64::from(v) % u64::from(n)) as u32;
            if v == n - 1 {
                return true;
            }
        }
        false
    })
}

fn pow_mod(base: u32, mut exponent: u32, modulus: u32) -> u32 {
    let m = u64::from(modulus);
    let (mut result, mut square) = (1u64, u64::from(base) % m);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = result * square % m;
        }
        square = square * square % m;
        exponent >>= 1;
    }
    result as u32
}

/// The first `count` primes that are at least `floor`.
///
/// This is the whole bucket search: every (layer, order) restarts below the floor and skips the
/// primes handed out before, which together are always the first ones, so the sequence simply goes on.
///
/// # Errors
/// The primes would leave 32 bits.
pub fn primes_from(floor: usize, count: usize) -> Result<Vec<u32>> {
    let too_large = || {
        Error::config(
            "engram_vocab_size",
            format!("no {count} 32-bit primes at or above {floor}"),
        )
    };
    let mut candidate = u32::try_from(floor).map_err(|_| too_large())?;
    let mut primes = Vec::with_capacity(count.min(MAX_COLUMNS));
    while primes.len() < count {
        // 61 is a witness of the reference's primality test, which therefore rejects it: models
        // whose buckets start at or below 61 were laid out without that prime.
        if is_prime(candidate) && candidate != 61 {
            primes.push(candidate);
        }
        if primes.len() < count {
            candidate = candidate.checked_add(1).ok_or_else(too_large)?;
        }
    }
    Ok(primes)
}

/// Hash multipliers of one layer: numpy's `default_rng(10007 * layer_id).integers(0, bound)`, made
/// odd, with `bound` such that `compressed_id * multiplier` stays below 2^63.
///
/// # Errors
/// `compressed_vocab_size == 0`, or a layer number whose seed leaves 64 bits.
pub fn multipliers(layer_id: usize, terms: usize, compressed_vocab_size: u64) -> Result<Vec<u64>> {
    if compressed_vocab_size == 0 {
        return Err(Error::config(
            "engram_compressed_vocab_size",
            "must not be 0",
        ));
    }
    let seed = (layer_id as u64).checked_mul(10_007).ok_or_else(|| {
        Error::config(
            "engram_layer_ids",
            format!("layer {layer_id} has no 64-bit seed"),
        )
    })?;
    let bound = (i64::MAX as u64 / compressed_vocab_size / 2).max(1);
    let mut rng = Pcg64::from_seed(seed);
    Ok((0..terms)
        .map(|_| rng.integer_up_to(bound - 1) * 2 + 1)
        .collect())
}

/// Buckets and multipliers of one Engram layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerLayout {
    layer_id: usize,
    primes: Vec<u32>,
    offsets: Vec<u32>,
    multipliers: Vec<u64>,
    rows: u32,
}

impl LayerLayout {
    /// Number of the backbone layer.
    pub fn layer_id(&self) -> usize {
        self.layer_id
    }

    /// Bucket count of every column; column `(order - 2) * n_heads + head`.
    pub fn primes(&self) -> &[u32] {
        &self.primes
    }

    /// First table row of every column: the sum of the primes before it.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// One odd multiplier for each look-back distance `0..max_ngram_size`.
    pub fn multipliers(&self) -> &[u64] {
        &self.multipliers
    }

    /// Rows of the layer's table.
    pub fn rows(&self) -> u32 {
        self.rows
    }
}

/// Bucket layout of all Engram layers of a model.
///
/// A position is hashed as `max_ngram_size - 1` n-grams, each over `n_heads` heads. Every (order,
/// head) owns a prime number of rows in its layer's table, and no prime serves twice in a model.
///
/// Reference: `EngramLayout` and `compute_hash_multipliers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngramLayout {
    max_ngram_size: usize,
    n_heads: usize,
    compressed_vocab_size: u32,
    layers: Vec<LayerLayout>,
}

impl EngramLayout {
    /// Draws primes and multipliers and checks them against the config's row counts.
    ///
    /// # Errors
    /// `Error::Config` naming the field: no layers, a repeated layer, sizes of 0 or beyond what 32-bit
    /// row numbers can address, or `num_embeddings` that are not the sums of the primes.
    pub fn new(cfg: &EngramConfig) -> Result<Self> {
        let (n, heads) = (cfg.max_ngram_size, cfg.n_heads);
        if cfg.layer_ids.is_empty() {
            return Err(Error::config(
                "engram_layer_ids",
                "no layer carries an engram",
            ));
        }
        let mut sorted = cfg.layer_ids.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::config(
                "engram_layer_ids",
                format!("layer {} appears twice", pair[0]),
            ));
        }
        if cfg.num_embeddings.len() != cfg.layer_ids.len() {
            let (rows, layers) = (cfg.num_embeddings.len(), cfg.layer_ids.len());
            return Err(Error::config(
                "engram_num_embeddings",
                format!("expected one entry for each of {layers} layers, found {rows}"),
            ));
        }
        if !(2..=MAX_NGRAM).contains(&n) {
            return Err(Error::config(
                "engram_max_ngram_size",
                format!("{n} is not in 2..={MAX_NGRAM}"),
            ));
        }
        // The compressed ids also travel as i32 with -1 for a dead token.
        let vocab = match u32::try_from(cfg.compressed_vocab_size) {
            Ok(v) if (1..=i32::MAX as u32).contains(&v) => v,
            _ => {
                return Err(Error::config(
                    "engram_compressed_vocab_size",
                    format!("{} is not in 1..2^31", cfg.compressed_vocab_size),
                ));
            }
        };
        let columns = (n - 1).checked_mul(heads).filter(|&c| c > 0);
        let total = columns
            .and_then(|c| c.checked_mul(cfg.layer_ids.len()))
            .filter(|&t| t <= MAX_COLUMNS);
        let (Some(columns), Some(total)) = (columns, total) else {
            return Err(Error::config(
                "engram_n_heads",
                format!("{heads} heads need between 1 and {MAX_COLUMNS} hash columns in all"),
            ));
        };
        let primes = primes_from(cfg.vocab_size, total)?;
        let layers = cfg
            .layer_ids
            .iter()
            .zip(&cfg.num_embeddings)
            .zip(primes.chunks_exact(columns));
        let layers = layers
            .map(|((&layer_id, &expected), primes)| {
                let (offsets, rows) = offsets_of(primes, layer_id)?;
                if rows as usize != expected {
                    return Err(Error::config(
                        "engram_num_embeddings",
                        format!(
                            "layer {layer_id}: the primes sum to {rows}, the config says {expected}"
                        ),
                    ));
                }
                let multipliers = multipliers(layer_id, n, u64::from(vocab))?;
                Ok(LayerLayout {
                    layer_id,
                    primes: primes.to_vec(),
                    offsets,
                    multipliers,
                    rows,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            max_ngram_size: n,
            n_heads: heads,
            compressed_vocab_size: vocab,
            layers,
        })
    }

    /// Longest n-gram; also the number of terms kept for a position.
    pub fn max_ngram_size(&self) -> usize {
        self.max_ngram_size
    }

    /// Earlier tokens a position looks at.
    pub fn lookback(&self) -> usize {
        self.max_ngram_size - 1
    }

    /// Hash heads of each order.
    pub fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Hash columns of one layer.
    pub fn columns(&self) -> usize {
        self.lookback() * self.n_heads
    }

    /// Size of the compressed vocabulary the multipliers were derived from.
    pub fn compressed_vocab_size(&self) -> u32 {
        self.compressed_vocab_size
    }

    /// The layers, in the config's order.
    pub fn layers(&self) -> &[LayerLayout] {
        &self.layers
    }

    /// Index into [`EngramLayout::layers`] of a backbone layer, if it carries an Engram.
    pub fn index_of(&self, layer_id: usize) -> Option<usize> {
        self.layers
            .iter()
            .position(|layer| layer.layer_id == layer_id)
    }
}

fn offsets_of(primes: &[u32], layer_id: usize) -> Result<(Vec<u32>, u32)> {
    let mut rows = 0u32;
    let mut offsets = Vec::with_capacity(primes.len());
    for &prime in primes {
        offsets.push(rows);
        rows = rows.checked_add(prime).ok_or_else(|| {
            Error::config(
                "engram_vocab_size",
                format!("layer {layer_id}: more than 2^32 table rows"),
            )
        })?;
    }
    Ok((offsets, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn miller_rabin_agrees_with_trial_division() {
        let slow = |n: u32| {
            n >= 2
                && (2..)
                    .take_while(|d| d * d <= n)
                    .all(|d| !n.is_multiple_of(d))
        };
        assert!((0..5000).all(|n| is_prime(n) == slow(n)));
        assert!((15_999_900..16_000_500).all(|n| is_prime(n) == slow(n)));
        // Strong pseudoprimes to base 2, to 2 and 7, and the ends of the range.
        for composite in [2047, 3277, 314_821, 3_215_031_751, 4_294_967_295] {
            assert!(!is_prime(composite), "{composite}");
        }
        assert!(is_prime(4_294_967_291));
    }

    #[test]
    fn the_search_ends_at_32_bits() -> Result<()> {
        assert_eq!(primes_from(4_294_967_291, 1)?, [4_294_967_291]);
        assert!(primes_from(4_294_967_291, 2).is_err());
        assert!(primes_from(1 << 40, 1).is_err());
        assert!(primes_from(7, 0)?.is_empty());
        Ok(())
    }

    #[test]
    fn the_reference_never_hands_out_61() -> Result<()> {
        assert_eq!(primes_from(53, 3)?, [53, 59, 67]);
        assert_eq!(primes_from(61, 1)?, [67]);
        Ok(())
    }
}
