//! The n-gram hash: golden values, chunking, dead tokens, and a direct restatement as an oracle.
#![allow(clippy::unwrap_used)]

mod common;

use candle_core::{Device, Tensor};
use common::{identity_map, layout, released, small};
use deepseek_v41_core::Error;
use deepseek_v41_engram::{
    EngramHashes, EngramLayout, NgramWindow, TokenMap, engram_hash,
    ops::engram_hash::engram_hash_terms,
};
use deepseek_v41_testing::{Golden, with_threads};
use proptest::prelude::*;

/// `hashes: [T, layers, columns]` as the golden files store them.
fn interleaved(hashes: &EngramHashes, layers: usize) -> Vec<i64> {
    let columns = hashes.columns();
    (0..hashes.tokens())
        .flat_map(|t| (0..layers).map(move |l| (t, l)))
        .flat_map(|(t, l)| hashes.layer(l)[t * columns..(t + 1) * columns].to_vec())
        .map(i64::from)
        .collect()
}

fn to_u32(values: &[i64]) -> Vec<u32> {
    values.iter().map(|&v| v as u32).collect()
}

/// Hashes a sequence in chunks, each given only the `n - 1` tokens before it.
fn chunked(
    ids: &[u32],
    image: &[u8],
    chunks: &[usize],
    layout: &EngramLayout,
    map: &TokenMap,
) -> Vec<i64> {
    let (mut out, mut at) = (Vec::new(), 0);
    for &len in chunks {
        let from = at - at.min(layout.lookback());
        let window = NgramWindow {
            history: &ids[from..at],
            history_image_mask: Some(&image[from..at]),
            start: at,
            ids: &ids[at..at + len],
            image_mask: Some(&image[at..at + len]),
        };
        let hashes = engram_hash(&[window], layout, map).unwrap();
        out.extend(interleaved(&hashes, layout.layers().len()));
        at += len;
    }
    out
}

#[test]
fn released_layout_on_random_ids() {
    let golden = Golden::open("ops_engram");
    let layout = layout(&released());
    let pad = golden.i64("engram_real.pad_id")[0] as u32;
    let map = identity_map(99_092, pad);
    let ids = to_u32(&golden.i64("engram_real.compressed"));
    let mask = golden.i64("engram_real.mask");
    let plain = golden.i64("engram_real.hashes");
    let masked = golden.i64("engram_real.hashes_masked");
    for b in 0..3 {
        let ids = &ids[b * 60..][..60];
        let image: Vec<u8> = mask[b * 60..][..60]
            .iter()
            .map(|&alive| u8::from(alive == 0))
            .collect();
        let whole = NgramWindow {
            ids,
            ..Default::default()
        };
        let hashes = engram_hash(&[whole], &layout, &map).unwrap();
        assert_eq!(interleaved(&hashes, 2), plain[b * 60 * 48..][..60 * 48]);
        let expected = &masked[b * 40 * 48..][..40 * 48];
        assert_eq!(
            chunked(ids, &image, &[20, 1, 1, 3, 15], &layout, &map),
            expected
        );
        assert_eq!(chunked(ids, &image, &[40], &layout, &map), expected);
        assert_eq!(chunked(ids, &image, &[1; 40], &layout, &map), expected);
    }
}

#[test]
fn released_token_map() {
    let golden = Golden::open("engram_released");
    let layout = layout(&released());
    let map = TokenMap::new(to_u32(&golden.i64("token_map")), 99_092, 2).unwrap();
    assert_eq!((map.len(), map.pad()), (129_280, 2));
    assert_eq!(map.ids()[..5], [0, 1, 2, 3, 4]);
    let (ids, mask) = (to_u32(&golden.i64("ids")), golden.i64("mask"));
    let image: Vec<u8> = mask.iter().map(|&alive| u8::from(alive == 0)).collect();
    let windows: Vec<NgramWindow> = (0..2)
        .map(|b| NgramWindow {
            ids: &ids[b * 24..][..24],
            image_mask: Some(&image[b * 24..][..24]),
            ..Default::default()
        })
        .collect();
    let hashes = engram_hash(&windows, &layout, &map).unwrap();
    assert_eq!(interleaved(&hashes, 2), golden.i64("hashes"));
}

/// All 24 columns are filled, each in its own bucket range, for every token of a short sequence.
#[test]
fn every_head_of_every_order_has_its_column() {
    let layout = layout(&released());
    let map = identity_map(99_092, 2);
    let ids = [11, 99_091, 5, 0, 70_000, 123, 9, 42_424];
    let hashes = engram_hash(
        &[NgramWindow {
            ids: &ids,
            ..Default::default()
        }],
        &layout,
        &map,
    )
    .unwrap();
    for (l, layer) in layout.layers().iter().enumerate() {
        for token in hashes.layer(l).chunks_exact(24) {
            let mut seen: Vec<u32> = token
                .iter()
                .zip(layer.offsets())
                .map(|(row, offset)| row - offset)
                .collect();
            assert!(
                seen.iter()
                    .zip(layer.primes())
                    .all(|(bucket, prime)| bucket < prime)
            );
            // Buckets, not rows: two columns of one token landing on the same bucket would mean
            // that they share a prime or a mix.
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), 24);
        }
    }
}

/// Pad id and vocabulary come from the config: pad 5 that compresses to another id, 300 entries.
#[test]
fn pad_and_vocabulary_are_configured() {
    let mut cfg = small(2, 4, 3, 500, 300);
    cfg.pad_id = 5;
    let layout = layout(&cfg);
    let mut ids: Vec<u32> = (0..300).collect();
    ids.swap(5, 17);
    let map = TokenMap::new(ids, 300, cfg.pad_id).unwrap();
    assert_eq!(map.pad(), 17);
    let first = NgramWindow {
        ids: &[40],
        ..Default::default()
    };
    let padded = NgramWindow {
        history: &[5, 5, 5],
        start: 3,
        ids: &[40],
        ..Default::default()
    };
    let a = engram_hash(&[first], &layout, &map).unwrap();
    assert_eq!(a, engram_hash(&[padded], &layout, &map).unwrap());
    let other = NgramWindow {
        history: &[2, 2, 2],
        start: 3,
        ids: &[40],
        ..Default::default()
    };
    assert_ne!(a, engram_hash(&[other], &layout, &map).unwrap());
}

#[test]
fn a_dead_token_ends_the_ngrams_behind_it() {
    let layout = layout(&small(1, 4, 2, 1000, 100));
    let map = identity_map(100, 0);
    let hash = |ids: &[u32], image: &[u8]| {
        let window = NgramWindow {
            ids,
            image_mask: Some(image),
            ..Default::default()
        };
        engram_hash(&[window], &layout, &map)
            .unwrap()
            .layer(0)
            .to_vec()
    };
    let masked = hash(&[7, 8, 9, 10], &[0, 1, 0, 0]);
    // Position 1 is dead itself: pads throughout, whatever its id and neighbours.
    assert_eq!(masked[6..12], hash(&[1, 2], &[0, 1])[6..12]);
    // Position 3 sees 9 but neither the dead 8 nor the live 7 behind it.
    assert_eq!(
        masked[18..24],
        hash(&[55, 66, 9, 10], &[1, 1, 0, 0])[18..24]
    );
    assert_ne!(masked[18..24], hash(&[7, 8, 9, 10], &[0, 0, 0, 0])[18..24]);
    // The id of an image token may lie outside the text vocabulary.
    assert_eq!(masked, hash(&[7, 5_000_000, 9, 10], &[0, 1, 0, 0]));
}

#[test]
fn wrong_input_is_refused() {
    let cfg = small(1, 4, 2, 1000, 100);
    let layout = layout(&cfg);
    let map = identity_map(100, 0);
    let hash = |window: NgramWindow| engram_hash(&[window], &layout, &map);
    let short = NgramWindow {
        history: &[1, 2],
        start: 9,
        ids: &[3],
        ..Default::default()
    };
    assert!(matches!(hash(short), Err(Error::Shape { .. })));
    let outside = NgramWindow {
        ids: &[100],
        ..Default::default()
    };
    assert!(matches!(hash(outside), Err(Error::Value { .. })));
    let mask = NgramWindow {
        ids: &[1, 2],
        image_mask: Some(&[0]),
        ..Default::default()
    };
    assert!(matches!(hash(mask), Err(Error::Shape { .. })));
    // A token map of another size, here and in its own constructor.
    let other = identity_map(101, 0);
    let window = NgramWindow {
        ids: &[1],
        ..Default::default()
    };
    assert!(matches!(
        engram_hash(&[window], &layout, &other),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        TokenMap::new(vec![0, 1, 2], 4, 0),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        TokenMap::new(vec![], 0, 0),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        TokenMap::new(vec![0, 1], 2, 2),
        Err(Error::Config { .. })
    ));
    // Terms that are no compressed ids would overflow the products.
    assert!(EngramHashes::from_terms(&[1, 2, 3, 100], &layout).is_err());
    assert!(EngramHashes::from_terms(&[1, 2, 3], &layout).is_err());
}

#[test]
fn empty_batches_hash_to_nothing() {
    let layout = layout(&small(2, 3, 2, 100, 10));
    let map = identity_map(10, 0);
    for windows in [vec![], vec![NgramWindow::default()]] {
        let hashes = engram_hash(&windows, &layout, &map).unwrap();
        assert_eq!((hashes.tokens(), hashes.layer(1).len()), (0, 0));
        assert_eq!(hashes.tensor(1, &Device::Cpu).unwrap().dims(), [0, 4]);
    }
}

#[test]
fn the_op_takes_terms_of_any_layout() {
    let layout = layout(&small(2, 3, 5, 100, 10));
    let terms: Vec<u32> = (0..21).map(|i| i * 7 % 10).collect();
    let expected = EngramHashes::from_terms(&terms, &layout).unwrap();
    let transposed = Tensor::from_slice(&terms, (7, 3), &Device::Cpu)
        .unwrap()
        .t()
        .unwrap()
        .contiguous()
        .unwrap();
    let hashes = engram_hash_terms(&transposed.t().unwrap(), &layout).unwrap();
    assert_eq!(hashes.dims(), [2, 7, 10]);
    let layer1: Vec<u32> = hashes
        .get(1)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    assert_eq!(layer1, expected.layer(1));
    assert!(engram_hash_terms(&transposed, &layout).is_err());
}

/// The definition in one breath: for each shift walk back, stop for good at the first dead token.
fn direct(ids: &[u32], image: &[u8], layout: &EngramLayout, map: &TokenMap) -> Vec<i64> {
    let mut out = Vec::new();
    for p in 0..ids.len() {
        for layer in layout.layers() {
            let (mut mixed, mut blocked) = (0i128, false);
            for s in 0..layout.max_ngram_size() {
                blocked |= p < s || image[p - s.min(p)] != 0;
                let x = if blocked {
                    map.pad()
                } else {
                    map.compress(ids[p - s]).unwrap()
                };
                mixed ^= i128::from(x) * i128::from(layer.multipliers()[s]);
                assert!(mixed < 1 << 63);
                for head in 0..if s == 0 { 0 } else { layout.n_heads() } {
                    let c = (s - 1) * layout.n_heads() + head;
                    out.push(
                        (mixed % i128::from(layer.primes()[c])) as i64
                            + i64::from(layer.offsets()[c]),
                    );
                }
            }
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_chunking_of_any_layout_is_the_direct_hash(
        (layers, n, heads) in (1usize..4, 2usize..6, 1usize..6),
        tokens in prop::collection::vec((0u32..37, prop::bool::weighted(0.2)), 0..40),
        cuts in prop::collection::vec(1usize..6, 0..40),
    ) {
        let layout = layout(&small(layers, n, heads, 61, 29));
        // 37 tokens onto 29 compressed ids.
        let map = TokenMap::new((0..37).map(|i| i % 29).collect(), 29, 31).unwrap();
        let ids: Vec<u32> = tokens.iter().map(|t| t.0).collect();
        let image: Vec<u8> = tokens.iter().map(|t| u8::from(t.1)).collect();
        let mut chunks = Vec::new();
        let mut left = ids.len();
        for cut in cuts {
            chunks.push(cut.min(left));
            left -= cut.min(left);
        }
        chunks.push(left);
        let expected = direct(&ids, &image, &layout, &map);
        prop_assert_eq!(chunked(&ids, &image, &chunks, &layout, &map), expected.clone());
        // A batch of two sequences is each alone.
        let window = NgramWindow { ids: &ids, image_mask: Some(&image), ..Default::default() };
        let twice = interleaved(&engram_hash(&[window, window], &layout, &map).unwrap(), layers);
        prop_assert_eq!(twice, [expected.clone(), expected].concat());
    }
}

#[test]
fn threads_do_not_show() {
    let layout = layout(&released());
    let map = identity_map(99_092, 2);
    let ids: Vec<u32> = (0..3001u32)
        .map(|i| i.wrapping_mul(2_654_435_761) % 99_092)
        .collect();
    let window = NgramWindow {
        ids: &ids,
        ..Default::default()
    };
    let hash = |threads| with_threads(threads, || engram_hash(&[window], &layout, &map).unwrap());
    assert_eq!(hash(1), hash(4));
}
