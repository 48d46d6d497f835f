//! Look-back windows, slot caches and shards against the hash of whole sequences and whole tables.
#![allow(clippy::unwrap_used)]

mod common;

use common::{identity_map, layout, small};
use deepseek_v41_core::Error;
use deepseek_v41_engram::{
    EngramHashes, EngramLayout, EngramTable, NgramWindow, TokenMap,
    hash::{compress, ngram_terms},
    lookback::{BlockTable, FlatBatch, LookbackWindows, SlotCache, lookback_terms, request_of},
    ops::engram_lookup::engram_lookup_ref,
    pcg64::Pcg64,
    shard::{EvenRowShard, HeadShard, TokenShare},
};
use half::bf16;
use proptest::prelude::*;

const BLOCK: usize = 5;
const MAX_BLOCKS: usize = 9;

fn setup() -> (EngramLayout, TokenMap) {
    let cfg = small(1, 4, 3, 97, 23);
    (
        layout(&cfg),
        TokenMap::new((0..31).map(|i| i % 23).collect(), 23, 7).unwrap(),
    )
}

/// A sequence being served: all its tokens, and how many were processed in earlier steps.
#[derive(Debug, Clone)]
struct Sequence {
    ids: Vec<u32>,
    image: Vec<u8>,
    done: usize,
    now: usize,
}

fn sequences() -> impl Strategy<Value = Vec<Sequence>> {
    let one = (
        prop::collection::vec((0u32..31, prop::bool::weighted(0.15)), 1..40),
        any::<u16>(),
        any::<u16>(),
    );
    let one = one.prop_map(|(tokens, a, b)| {
        let (ids, image): (Vec<_>, Vec<_>) = tokens.iter().map(|t| (t.0, u8::from(t.1))).unzip();
        let done = usize::from(a) % (ids.len() + 1);
        let now = usize::from(b) % (ids.len() - done + 1);
        Sequence {
            ids,
            image,
            done,
            now,
        }
    });
    prop::collection::vec(one, 1..5)
}

fn expected(sequences: &[Sequence], layout: &EngramLayout, map: &TokenMap) -> Vec<u32> {
    let n = layout.max_ngram_size();
    let mut terms = Vec::new();
    for s in sequences {
        let window = NgramWindow {
            ids: &s.ids,
            image_mask: Some(&s.image),
            ..Default::default()
        };
        let whole = ngram_terms(&[window], layout, map).unwrap();
        terms.extend_from_slice(&whole[s.done * n..(s.done + s.now) * n]);
    }
    terms
}

struct Flat {
    ids: Vec<u32>,
    image: Vec<u8>,
    positions: Vec<u32>,
    query_start: Vec<u32>,
}

impl Flat {
    /// The step's chunks, with two padding requests behind them.
    fn new(sequences: &[Sequence]) -> Self {
        let mut flat = Self {
            ids: vec![],
            image: vec![],
            positions: vec![],
            query_start: vec![0],
        };
        for s in sequences {
            let chunk = s.done..s.done + s.now;
            flat.ids.extend_from_slice(&s.ids[chunk.clone()]);
            flat.image.extend_from_slice(&s.image[chunk.clone()]);
            flat.positions.extend(chunk.map(|p| p as u32));
            flat.query_start.push(flat.ids.len() as u32);
        }
        flat.query_start.extend([flat.ids.len() as u32; 2]);
        flat
    }

    fn batch(&self) -> FlatBatch<'_> {
        FlatBatch {
            ids: &self.ids,
            image_mask: Some(&self.image),
            positions: &self.positions,
            query_start: &self.query_start,
        }
    }

    fn requests(&self) -> usize {
        self.query_start.len() - 1
    }
}

/// Windows of `depth` entries, newest first, of which `known` says which are given.
fn windows(
    flat: &Flat,
    sequences: &[Sequence],
    depth: usize,
    known: impl Fn(usize, usize) -> bool,
) -> (Vec<i32>, Vec<u8>) {
    let (mut ids, mut image) = (
        vec![-1; flat.requests() * depth],
        vec![0; flat.requests() * depth],
    );
    for (r, s) in sequences.iter().enumerate() {
        for col in 0..depth.min(s.done) {
            if known(r, col) {
                ids[r * depth + col] = s.ids[s.done - 1 - col] as i32;
                image[r * depth + col] = s.image[s.done - 1 - col];
            }
        }
    }
    (ids, image)
}

/// A cache that the earlier steps wrote, with blocks handed out in a scrambled order.
fn written_cache(flat: &Flat, sequences: &[Sequence], map: &TokenMap) -> (SlotCache, Vec<u32>) {
    let total = flat.requests() * MAX_BLOCKS;
    let blocks: Vec<u32> = (0..total).map(|i| (i * 13 % total) as u32).collect();
    let table = BlockTable {
        blocks: &blocks,
        max_blocks: MAX_BLOCKS,
        block_size: BLOCK,
    };
    let mut cache = SlotCache::new(total * BLOCK);
    for (r, s) in sequences.iter().enumerate() {
        let mut compressed = Vec::new();
        compress(
            &s.ids[..s.done],
            Some(&s.image[..s.done]),
            map,
            &mut compressed,
        )
        .unwrap();
        let mut slots: Vec<i64> = (0..s.done)
            .map(|p| table.slot(r, p).unwrap() as i64)
            .collect();
        compressed.push(3);
        slots.push(-1);
        cache.write(&slots, &compressed).unwrap();
    }
    (cache, blocks)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn windows_and_slots_give_the_terms_of_the_whole_sequence(
        sequences in sequences(),
        gaps in any::<u64>(),
        depth in 3usize..6,
    ) {
        let (layout, map) = setup();
        let flat = Flat::new(&sequences);
        prop_assume!(sequences.iter().all(|s| s.ids.len() <= MAX_BLOCKS * BLOCK));
        let want = expected(&sequences, &layout, &map);
        // Every look-back id in the windows: no cache needed.
        let (ids, image) = windows(&flat, &sequences, depth, |_, _| true);
        let full = LookbackWindows { depth, ids: &ids, image_mask: Some(&image) };
        prop_assert_eq!(&lookback_terms(&flat.batch(), Some(&full), None, &layout, &map).unwrap(), &want);
        // None of them: the cache answers.
        let (cache, blocks) = written_cache(&flat, &sequences, &map);
        let table = BlockTable { blocks: &blocks, max_blocks: MAX_BLOCKS, block_size: BLOCK };
        let slots = Some((&cache, &table));
        prop_assert_eq!(&lookback_terms(&flat.batch(), None, slots, &layout, &map).unwrap(), &want);
        // Some of them, and windows too short: both together.
        for depth in [1, depth] {
            let (ids, image) = windows(&flat, &sequences, depth, |r, c| gaps >> (7 * r + c) & 1 == 1);
            let some = LookbackWindows { depth, ids: &ids, image_mask: Some(&image) };
            prop_assert_eq!(&lookback_terms(&flat.batch(), Some(&some), slots, &layout, &map).unwrap(), &want);
        }
        // Hashes follow from the terms.
        let from_terms = EngramHashes::from_terms(&want, &layout).unwrap();
        prop_assert_eq!(from_terms.tokens(), flat.ids.len());
    }

    #[test]
    fn head_shards_put_the_whole_lookup_together(
        (n, heads, world) in (2usize..6, 1usize..6, 1usize..9),
        tokens in 0usize..7,
        seed in any::<u64>(),
    ) {
        let layout = layout(&small(2, n, heads, 5, 23));
        let layer = &layout.layers()[1];
        let mut rng = Pcg64::from_seed(seed);
        let whole = random_table(layer.rows() as usize, &mut rng);
        let hashes: Vec<u32> = (0..tokens)
            .flat_map(|_| layer.offsets().iter().zip(layer.primes()))
            .map(|(offset, prime)| offset + rng.integer_up_to(u64::from(*prime) - 1) as u32)
            .collect();
        let mut want = vec![bf16::ZERO; hashes.len() * 32];
        engram_lookup_ref(&hashes, &whole, &mut want);

        let shards: Vec<HeadShard> = (0..world).map(|r| HeadShard::new(layer, r, world).unwrap()).collect();
        // The shards' rows and columns follow one another without gap or overlap.
        let ends = shards.iter().try_fold((0, 0), |(row, column), s| {
            (s.rows().start == row && s.columns().start == column).then_some((s.rows().end, s.columns().end))
        });
        prop_assert_eq!(ends, Some((layer.rows(), layout.columns())));
        let tables: Vec<EngramTable> = shards.iter().map(|s| slice(&whole, s.rows().start as usize..s.rows().end as usize)).collect();
        let parts: Vec<Vec<bf16>> = shards.iter().zip(&tables).map(|(s, t)| s.lookup(&hashes, t).unwrap()).collect();
        for (shard, part) in shards.iter().zip(&parts) {
            let real = shard.columns().len() * 32;
            for token in part.chunks_exact(shard.width() * 32) {
                prop_assert!(token[real..].iter().all(|v| v.to_bits() == 0));
            }
        }
        let parts: Vec<&[bf16]> = parts.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(&shards[0].gather_cut(&parts, tokens, 32).unwrap(), &want);

        // The same rows, converted to the reference's even split over another number of ranks.
        for even_world in [1, 3, world + 1] {
            let mut sum = vec![0f32; want.len()];
            for rank in 0..even_world {
                let shard = EvenRowShard::new(whole.rows(), rank, even_world).unwrap();
                let table = shard.convert(layer, &tables).unwrap();
                prop_assert_eq!(table.rows(), whole.rows().div_ceil(even_world));
                for row in 0..table.rows() {
                    let expected = match row < shard.rows().len() {
                        true => whole.row(shard.rows().start + row),
                        false => (&[0; 32][..], &[127][..]),
                    };
                    prop_assert_eq!(table.row(row), expected);
                }
                for (sum, v) in sum.iter_mut().zip(shard.lookup(&hashes, &table).unwrap()) {
                    *sum += v.to_f32();
                }
            }
            prop_assert!(sum.iter().zip(&want).all(|(a, b)| *a == b.to_f32()));
        }
    }

    #[test]
    fn token_shares_cover_a_step_once(tokens in 0usize..50, world in 1usize..9) {
        let mut next = 0;
        for rank in 0..world {
            let share = TokenShare::new(tokens, rank, world).unwrap();
            prop_assert_eq!(share.tokens.start, next);
            prop_assert_eq!(share.padded, tokens.div_ceil(world));
            prop_assert!(share.tokens.len() <= share.padded);
            next = share.tokens.end;
        }
        prop_assert_eq!(next, tokens);
    }
}

fn random_table(rows: usize, rng: &mut Pcg64) -> EngramTable {
    let codes: Vec<u8> = (0..rows * 32)
        .map(|_| rng.integer_up_to(0x7e) as u8)
        .collect();
    let scales: Vec<u8> = (0..rows)
        .map(|_| 120 + rng.integer_up_to(9) as u8)
        .collect();
    EngramTable::from_bytes(rows, 32, codes.into(), scales.into()).unwrap()
}

fn slice(table: &EngramTable, rows: std::ops::Range<usize>) -> EngramTable {
    let codes: Vec<u8> = rows.clone().flat_map(|r| table.row(r).0.to_vec()).collect();
    let scales: Vec<u8> = rows.clone().flat_map(|r| table.row(r).1.to_vec()).collect();
    EngramTable::from_bytes(rows.len(), 32, codes.into(), scales.into()).unwrap()
}

#[test]
fn requests_are_found_between_repeated_boundaries() {
    let query_start = [0, 0, 3, 3, 4, 4, 4];
    let found: Vec<_> = (0..6).map(|t| request_of(t, &query_start)).collect();
    assert_eq!(found, [Some(1), Some(1), Some(1), Some(3), None, None]);
    assert_eq!(request_of(0, &[]), None);
    assert_eq!(request_of(0, &[0]), None);
    assert_eq!(request_of(0, &[2, 4]), None);
}

#[test]
fn slots_follow_the_block_table() {
    let table = BlockTable {
        blocks: &[4, 0, 7, 2],
        max_blocks: 2,
        block_size: 3,
    };
    assert_eq!(table.slot(0, 0).unwrap(), 12);
    assert_eq!(table.slot(0, 5).unwrap(), 2);
    assert_eq!(table.slot(1, 4).unwrap(), 7);
    for (request, position) in [(0, 6), (2, 0), (usize::MAX, 0), (0, usize::MAX)] {
        assert!(matches!(
            table.slot(request, position),
            Err(Error::Value { .. })
        ));
    }
    let broken = BlockTable {
        blocks: &[0],
        max_blocks: 1,
        block_size: 0,
    };
    assert!(broken.slot(0, 0).is_err());
}

#[test]
fn a_slot_cache_skips_padding_and_refuses_strangers() {
    let mut cache = SlotCache::new(4);
    cache.write(&[2, -1, 0], &[5, 6, -1]).unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|s| cache.get(s)),
        [Some(-1), Some(0), Some(5), Some(0)]
    );
    let before = cache.clone();
    assert!(cache.write(&[1, 4], &[9, 9]).is_err());
    assert!(cache.write(&[1], &[9, 9]).is_err());
    assert_eq!(cache, before);
    assert_eq!(cache.get(4), None);
}

/// With neither a window entry nor a slot cache the term is pad, and older known terms still count.
#[test]
fn an_unknown_term_is_pad_and_does_not_block() {
    let (layout, map) = setup();
    let flat = Flat {
        ids: vec![9],
        image: vec![0],
        positions: vec![5],
        query_start: vec![0, 1],
    };
    let windows = LookbackWindows {
        depth: 3,
        ids: &[11, -1, 12],
        image_mask: None,
    };
    let terms = lookback_terms(&flat.batch(), Some(&windows), None, &layout, &map).unwrap();
    assert_eq!(terms, [9, 11, 7, 12]);
    let dead = LookbackWindows {
        depth: 3,
        ids: &[11, 13, 12],
        image_mask: Some(&[0, 1, 0]),
    };
    let terms = lookback_terms(&flat.batch(), Some(&dead), None, &layout, &map).unwrap();
    assert_eq!(terms, [9, 11, 7, 7]);
}

#[test]
fn tokens_of_no_request_hash_as_pads() {
    let (layout, map) = setup();
    let batch = FlatBatch {
        ids: &[9, 8, 1],
        image_mask: None,
        positions: &[0, 1, 0],
        query_start: &[0, 2],
    };
    let terms = lookback_terms(&batch, None, None, &layout, &map).unwrap();
    assert_eq!(terms, [9, 7, 7, 7, 8, 9, 7, 7, 7, 7, 7, 7]);
}

#[test]
fn ill_fitting_batches_are_refused() {
    let (layout, map) = setup();
    let good = FlatBatch {
        ids: &[1, 2],
        image_mask: None,
        positions: &[4, 5],
        query_start: &[0, 2],
    };
    let run = |batch: FlatBatch, windows: Option<&LookbackWindows>| {
        lookback_terms(&batch, windows, None, &layout, &map)
    };
    assert!(run(good, None).is_ok());
    assert!(
        run(
            FlatBatch {
                positions: &[4],
                ..good
            },
            None
        )
        .is_err()
    );
    assert!(
        run(
            FlatBatch {
                positions: &[4, 6],
                ..good
            },
            None
        )
        .is_err()
    );
    assert!(
        run(
            FlatBatch {
                positions: &[4, 3],
                ..good
            },
            None
        )
        .is_err()
    );
    assert!(
        run(
            FlatBatch {
                query_start: &[0, 3],
                ..good
            },
            None
        )
        .is_err()
    );
    assert!(
        run(
            FlatBatch {
                query_start: &[0, 2, 1],
                ..good
            },
            None
        )
        .is_err()
    );
    assert!(
        run(
            FlatBatch {
                image_mask: Some(&[0]),
                ..good
            },
            None
        )
        .is_err()
    );
    assert!(
        run(
            FlatBatch {
                ids: &[1, 31],
                ..good
            },
            None
        )
        .is_err()
    );
    let windows = LookbackWindows {
        depth: 3,
        ids: &[1, 2],
        image_mask: None,
    };
    assert!(run(good, Some(&windows)).is_err());
    let windows = LookbackWindows {
        depth: 1,
        ids: &[31],
        image_mask: None,
    };
    assert!(run(good, Some(&windows)).is_err());
    assert!(lookback_terms(&good, None, None, &layout, &identity_map(24, 0)).is_err());
}

#[test]
fn ranks_outside_the_world_are_refused() {
    let (layout, _) = setup();
    let layer = &layout.layers()[0];
    for (rank, world) in [(2, 2), (0, 0)] {
        assert!(HeadShard::new(layer, rank, world).is_err());
        assert!(EvenRowShard::new(10, rank, world).is_err());
        assert!(TokenShare::new(10, rank, world).is_err());
    }
    // A hash that belongs to another rank is an error, not somebody else's row.
    let shard = HeadShard::new(layer, 0, 3).unwrap();
    let table = random_table(shard.rows().len(), &mut Pcg64::from_seed(1));
    let foreign: Vec<u32> = layer.offsets().iter().rev().copied().collect();
    assert!(matches!(
        shard.lookup(&foreign, &table),
        Err(Error::Value { .. })
    ));
    assert!(shard.lookup(&foreign[1..], &table).is_err());
}
