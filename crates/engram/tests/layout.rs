//! Primes, offsets, multipliers and numpy's generator against the golden data.

mod common;

use common::{released, small};
use deepseek_v41_core::Error;
use deepseek_v41_engram::{
    EngramConfig, EngramLayout,
    layout::{is_prime, multipliers},
    pcg64::Pcg64,
};
use deepseek_v41_testing::Golden;

fn as_i64(values: impl IntoIterator<Item = impl Into<u64>>) -> Vec<i64> {
    values.into_iter().map(|v| v.into() as i64).collect()
}

#[test]
fn released_layout() {
    let golden = Golden::open("ops_engram");
    let layout = EngramLayout::new(&released()).unwrap();
    let layers = layout.layers();
    let flat = |f: &dyn Fn(usize) -> Vec<i64>| [f(0), f(1)].concat();
    assert_eq!(
        flat(&|i| as_i64(layers[i].primes().iter().copied())),
        golden.i64("engram_real.primes")
    );
    assert_eq!(
        flat(&|i| as_i64(layers[i].offsets().iter().copied())),
        golden.i64("engram_real.offsets")
    );
    assert_eq!(
        flat(&|i| as_i64(layers[i].multipliers().iter().copied())),
        golden.i64("engram_real.multipliers")
    );
    let ends = |i: usize| (layers[i].primes()[0], layers[i].primes()[23]);
    assert_eq!(ends(0), (16_000_057, 16_000_463));
    assert_eq!(ends(1), (16_000_477, 16_000_889));
    assert_eq!(layout.columns(), 24);
    assert_eq!((layout.index_of(14), layout.index_of(2)), (Some(1), None));
}

#[test]
fn multipliers_of_other_sizes() {
    let golden = Golden::open("ops_engram");
    for (layers, terms, vocab) in [
        (&[1, 14][..], 4, 99_092),
        (&[0, 2, 9], 3, 50),
        (&[3], 6, 1u64 << 33),
    ] {
        let names: Vec<String> = layers.iter().map(usize::to_string).collect();
        let key = format!("multipliers_{}_{terms}_{vocab}", names.join("_"));
        let ours = layers
            .iter()
            .flat_map(|&layer| multipliers(layer, terms, vocab).unwrap());
        assert_eq!(as_i64(ours), golden.i64(&key), "{key}");
    }
    // A vocabulary so large that the bound would be 0: every multiplier is 1.
    assert_eq!(multipliers(1, 3, u64::MAX).unwrap(), [1, 1, 1]);
    assert!(multipliers(1, 3, 0).is_err());
    assert!(multipliers(usize::MAX, 3, 10).is_err());
}

#[test]
fn generator_matches_numpy() {
    let golden = Golden::open("ops_engram");
    let raw = golden.i64("pcg64.raw_as_i64");
    for (seed, words) in golden
        .i64("pcg64.seeds")
        .into_iter()
        .zip(raw.chunks_exact(6))
    {
        let mut rng = Pcg64::from_seed(seed as u64);
        let ours: Vec<i64> = (0..6).map(|_| rng.next_u64() as i64).collect();
        assert_eq!(ours, words, "seed {seed}");
    }
    let bounded = golden.i64("pcg64.bounded");
    for (bound, draws) in golden
        .i64("pcg64.bounds")
        .into_iter()
        .zip(bounded.chunks_exact(8))
    {
        let mut rng = Pcg64::from_seed(10_007);
        let ours: Vec<i64> = (0..8)
            .map(|_| rng.integer_up_to(bound as u64 - 1) as i64)
            .collect();
        assert_eq!(ours, draws, "bound {bound}");
    }
}

/// The search as it is defined: restart below the floor for every (layer, order), skip used primes,
/// and 61, which the reference's test takes for composite.
#[test]
fn primes_are_what_the_restarting_search_finds() {
    for (layers, n, heads, floor) in [(2, 4, 2, 101), (3, 3, 5, 2), (1, 2, 1, 0), (2, 6, 3, 1000)] {
        let cfg = small(layers, n, heads, floor, 50);
        let layout = EngramLayout::new(&cfg).unwrap();
        let mut used = std::collections::HashSet::new();
        for layer in layout.layers() {
            let mut expected = Vec::new();
            for _ in 2..=n {
                let mut at = floor as i64 - 1;
                for _ in 0..heads {
                    at += 1;
                    while !is_prime(at as u32) || at == 61 || used.contains(&at) {
                        at += 1;
                    }
                    used.insert(at);
                    expected.push(at as u32);
                }
            }
            assert_eq!(layer.primes(), expected);
        }
    }
}

#[test]
fn impossible_configs_name_the_field() {
    let refuse = |field: &str, edit: &dyn Fn(&mut EngramConfig)| {
        let mut cfg = released();
        edit(&mut cfg);
        match EngramLayout::new(&cfg) {
            Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
    };
    refuse("engram_layer_ids", &|c| c.layer_ids.clear());
    refuse("engram_layer_ids", &|c| c.layer_ids = vec![1, 1]);
    refuse("engram_layer_ids", &|c| {
        // The seed of the multipliers overflows; the row count is right for the second layer.
        c.layer_ids = vec![1, usize::MAX];
    });
    refuse("engram_num_embeddings", &|c| c.num_embeddings.truncate(1));
    refuse("engram_num_embeddings", &|c| c.num_embeddings[1] += 1);
    refuse("engram_num_embeddings", &|c| c.num_embeddings.swap(0, 1));
    refuse("engram_max_ngram_size", &|c| c.max_ngram_size = 1);
    refuse("engram_max_ngram_size", &|c| c.max_ngram_size = usize::MAX);
    refuse("engram_n_heads", &|c| c.n_heads = 0);
    refuse("engram_n_heads", &|c| c.n_heads = usize::MAX);
    refuse("engram_n_heads", &|c| c.n_heads = usize::MAX / 3);
    refuse("engram_compressed_vocab_size", &|c| {
        c.compressed_vocab_size = 0
    });
    refuse("engram_compressed_vocab_size", &|c| {
        c.compressed_vocab_size = 1 << 31
    });
    refuse("engram_vocab_size", &|c| c.vocab_size = usize::MAX);
    refuse("engram_vocab_size", &|c| c.vocab_size = u32::MAX as usize);
    // Each prime fits, the sum of a layer's does not.
    refuse("engram_vocab_size", &|c| c.vocab_size = 1 << 31);
}
