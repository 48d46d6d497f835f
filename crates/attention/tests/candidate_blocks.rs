//! `candidate_blocks`: golden selections, per-query newest blocks, and the two-level top-k.
#![allow(clippy::unwrap_used)]

use candle_core::{Device, Tensor};
use deepseek_v41_attention::ops::{
    IndexSpan, candidate_blocks, candidate_blocks_ref, index_topk, index_topk_with_candidates,
    select_candidate_blocks_ref,
};
use deepseek_v41_core::Error;
use deepseek_v41_testing::{Golden, random_bf16, with_threads};
use half::bf16;
use proptest::prelude::*;

const CPU: Device = Device::Cpu;

#[test]
fn golden() {
    let golden = Golden::open("ops_basic");
    for (case, topk_blocks, block) in [
        ("candidates_0", 3, 4),
        ("candidates_1", 100, 8),
        ("candidates_2", 1, 8),
    ] {
        let lens: Vec<u32> = golden
            .i64(&format!("{case}.lens"))
            .iter()
            .map(|&len| len as u32)
            .collect();
        for prefix in ["", "decode_"] {
            let key = format!("{case}.{prefix}logits");
            let (logits, shape) = (golden.f32(&key), golden.shape(&key));
            let (batch, queries, width) = (shape[0], shape[1], shape[2]);
            let visible = match prefix {
                "" => lens.repeat(batch),
                _ => vec![width as u32; batch * queries],
            };
            let ids = select_candidate_blocks_ref(&logits, width, &visible, topk_blocks, block);
            let mut keep = vec![0i64; logits.len()];
            for (ids, keep) in ids.chunks(topk_blocks).zip(keep.chunks_mut(width)) {
                for &id in ids.iter().filter(|&&id| id >= 0) {
                    let start = id as usize * block;
                    keep[start..(start + block).min(width)].fill(1);
                }
            }
            assert_eq!(keep, golden.i64(&format!("{case}.{prefix}keep")), "{key}");
        }
    }
}

struct Inputs {
    q: Vec<bf16>,
    weights: Vec<bf16>,
    keys: Vec<bf16>,
    heads: usize,
    dim: usize,
}

impl Inputs {
    fn new(t: usize, heads: usize, dim: usize, rows: usize, seed: u64) -> Self {
        let coarse = |n: usize, seed: u64| -> Vec<bf16> {
            let values = random_bf16(n, 1.0, seed);
            values
                .into_iter()
                .map(|v| bf16::from_f32(v.to_f32().round()))
                .collect()
        };
        let (q, keys) = (coarse(t * heads * dim, seed), coarse(rows * dim, seed + 1));
        Self {
            q,
            keys,
            weights: random_bf16(t * heads, 0.1, seed + 2),
            heads,
            dim,
        }
    }

    fn tensors(&self) -> (Tensor, Tensor, Tensor) {
        let (h, d) = (self.heads, self.dim);
        let t = self.weights.len() / h;
        (
            Tensor::from_slice(&self.q, (t, h, d), &CPU).unwrap(),
            Tensor::from_slice(&self.weights, (t, h), &CPU).unwrap(),
            Tensor::from_slice(&self.keys, (self.keys.len() / d, d), &CPU).unwrap(),
        )
    }

    fn run(&self, spans: &[IndexSpan], topk_blocks: usize, block: usize) -> Vec<Vec<i32>> {
        let (q, w, keys) = self.tensors();
        let blocks = candidate_blocks(&q, &w, &keys, spans, topk_blocks, block).unwrap();
        assert_eq!(blocks.block, block);
        blocks.ids.to_vec2().unwrap()
    }

    fn reference(&self, spans: &[IndexSpan], topk_blocks: usize, block: usize) -> Vec<Vec<i32>> {
        let (h, d) = (self.heads, self.dim);
        let one = |(t, span): (usize, &IndexSpan)| {
            let (q, w) = (&self.q[t * h * d..][..h * d], &self.weights[t * h..][..h]);
            candidate_blocks_ref(q, w, &self.keys, *span, topk_blocks, block)
        };
        spans.iter().enumerate().map(one).collect()
    }
}

fn span(base: u32, visible: u32) -> IndexSpan {
    IndexSpan { base, visible }
}

/// One head, one column, query 1, weight 1: a position's score is its key.
fn scores(t: usize, keys: &[f32]) -> Inputs {
    let one = bf16::ONE;
    let keys = keys.iter().map(|&k| bf16::from_f32(k)).collect();
    Inputs {
        q: vec![one; t],
        weights: vec![one; t],
        keys,
        heads: 1,
        dim: 1,
    }
}

#[test]
fn each_query_pins_its_own_newest_block() {
    // Ratio 1, scores falling with the position: without the pin every query would keep block 0.
    let keys: Vec<f32> = (0..20).map(|j| (100 - j) as f32).collect();
    let spans: Vec<IndexSpan> = (0..20).map(|t| span(0, t + 1)).collect();
    let ids = scores(20, &keys).run(&spans, 1, 8);
    assert_eq!(ids[3], [0]);
    assert_eq!(ids[7], [0]);
    assert_eq!(ids[8], [1]);
    assert_eq!(ids[19], [2]);
}

#[test]
fn nothing_visible_pins_nothing() {
    let x = scores(2, &[1.0; 20]);
    assert_eq!(x.run(&[span(0, 0), span(0, 1)], 2, 8), [[-1, -1], [0, -1]]);
    assert_eq!(
        select_candidate_blocks_ref(&[1.0; 20], 20, &[0], 2, 8),
        [-1, -1]
    );
}

#[test]
fn ties_go_to_the_lower_block() {
    let x = scores(1, &[5.0; 40]);
    assert_eq!(x.run(&[span(0, 40)], 3, 8), [[0, 1, 4]]);
}

#[test]
fn unreachable_scores_drop_their_block() {
    let mut keys = vec![1.0; 40];
    keys[8..16].fill(f32::INFINITY);
    keys[16..24].fill(f32::NAN);
    let mut x = scores(1, &keys);
    x.weights[0] = bf16::from_f32(-1.0);
    // Block 1 scores minus infinity and block 2 NaN; block 4 is the newest.
    assert_eq!(x.run(&[span(0, 40)], 5, 8), [[0, 3, 4, -1, -1]]);
    assert_eq!(x.run(&[span(0, 20)], 5, 8), [[0, 2, -1, -1, -1]]);
    assert_eq!(x.reference(&[span(0, 20)], 5, 8), [[0, 2, -1, -1, -1]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn streaming_selects_what_sorting_selects(
        spans in prop::collection::vec((0u32..60, 0u32..200), 1..5),
        block in prop::sample::select(vec![1usize, 3, 8, 64, 100, 1 << 40]),
        topk_blocks in prop::sample::select(vec![0usize, 1, 3, 30]), seed in 0u64..1000,
    ) {
        let x = Inputs::new(spans.len(), 5, 40, 260, seed);
        let spans: Vec<IndexSpan> = spans.iter().map(|&(b, v)| span(b, v)).collect();
        prop_assert_eq!(x.run(&spans, topk_blocks, block), x.reference(&spans, topk_blocks, block));
    }

    #[test]
    fn one_pass_gives_what_two_give(
        visible in prop::collection::vec(0u32..200, 1..5), block in 1usize..20, seed in 0u64..1000,
    ) {
        let x = Inputs::new(visible.len(), 4, 16, 260, seed);
        let spans: Vec<IndexSpan> = visible.iter().map(|&v| span(30, v)).collect();
        let (q, w, keys) = x.tensors();
        let (topk, blocks) = index_topk_with_candidates(&q, &w, &keys, &spans, 17, 6, block).unwrap();
        let alone = index_topk(&q, &w, &keys, &spans, 17, None).unwrap();
        let rows = |x: &Tensor| x.to_vec2::<i32>().unwrap();
        prop_assert_eq!(rows(&topk.0), rows(&alone.0));
        prop_assert_eq!(rows(&blocks.ids), x.run(&spans, 6, block));
    }

    /// With `(blocks - 1) * block + 1 >= k`, the blocks hold every one of the k best positions when the
    /// same scores are ranked again: the second level loses nothing.
    #[test]
    fn the_second_level_finds_the_best_of_the_same_scores(visible in 1u32..250, block in 1usize..9, seed in 0u64..1000) {
        let x = Inputs::new(1, 4, 16, 260, seed);
        let k = 4 * block + 1;
        let (q, w, keys) = x.tensors();
        let spans = [span(5, visible)];
        let (topk, blocks) = index_topk_with_candidates(&q, &w, &keys, &spans, k, k + 1, block).unwrap();
        let again = index_topk(&q, &w, &keys, &spans, k, Some(&blocks)).unwrap();
        prop_assert_eq!(topk.0.to_vec2::<i32>().unwrap(), again.0.to_vec2::<i32>().unwrap());
    }
}

#[test]
fn threads_do_not_matter() {
    for t in [1usize, 9] {
        let x = Inputs::new(t, 8, 64, 20_000, 4);
        let spans: Vec<IndexSpan> = (0..t as u32).map(|t| span(t, 19_990 - 1111 * t)).collect();
        let want = x.reference(&spans, 200, 7);
        assert_eq!(with_threads(1, || x.run(&spans, 200, 7)), want);
        assert_eq!(with_threads(4, || x.run(&spans, 200, 7)), want);
    }
}

#[test]
fn blocks_of_nothing_are_an_error() {
    let x = scores(1, &[1.0; 4]);
    let (q, w, keys) = x.tensors();
    let err = candidate_blocks(&q, &w, &keys, &[span(0, 4)], 2, 0).unwrap_err();
    assert!(matches!(err, Error::Shape { .. }), "{err}");
}
