//! `index_topk`: the streaming selection against scoring and sorting everything.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor};
use deepseek_v41_attention::ops::{
    CandidateBlocks, IndexSpan, index_score_ref, index_topk, index_topk_ref, topk_rows_ref,
};
use deepseek_v41_core::Error;
use deepseek_v41_testing::{random_bf16, with_threads};
use half::bf16;
use proptest::prelude::*;

const CPU: Device = Device::Cpu;

struct Inputs {
    q: Vec<bf16>,
    weights: Vec<bf16>,
    keys: Vec<bf16>,
    heads: usize,
    dim: usize,
}

/// Coarse values, as after fp4 rounding, so that equal scores occur.
fn inputs(t: usize, heads: usize, dim: usize, rows: usize, seed: u64) -> Inputs {
    let coarse = |n: usize, seed: u64| {
        random_bf16(n, 1.0, seed)
            .into_iter()
            .map(|v| bf16::from_f32(v.to_f32().round()))
            .collect()
    };
    Inputs {
        q: coarse(t * heads * dim, seed),
        weights: random_bf16(t * heads, 0.1, seed + 1),
        keys: coarse(rows * dim, seed + 2),
        heads,
        dim,
    }
}

impl Inputs {
    fn tensors(&self) -> (Tensor, Tensor, Tensor) {
        let (h, d) = (self.heads, self.dim);
        let t = self.q.len() / (h * d);
        (
            Tensor::from_slice(&self.q, (t, h, d), &CPU).unwrap(),
            Tensor::from_slice(&self.weights, (t, h), &CPU).unwrap(),
            Tensor::from_slice(&self.keys, (self.keys.len() / d, d), &CPU).unwrap(),
        )
    }

    fn run(&self, spans: &[IndexSpan], k: usize, c: Option<&CandidateBlocks>) -> Vec<Vec<i32>> {
        let (q, w, keys) = self.tensors();
        index_topk(&q, &w, &keys, spans, k, c)
            .unwrap()
            .0
            .to_vec2()
            .unwrap()
    }

    fn reference(
        &self,
        spans: &[IndexSpan],
        k: usize,
        candidates: Option<(usize, &[Vec<i32>])>,
    ) -> Vec<Vec<i32>> {
        let (h, d) = (self.heads, self.dim);
        let one = |(t, span): (usize, &IndexSpan)| {
            let (q, w) = (&self.q[t * h * d..][..h * d], &self.weights[t * h..][..h]);
            let ids = candidates.map(|(block, ids)| (block, ids[t].as_slice()));
            let mut rows = index_topk_ref(q, w, &self.keys, *span, k, ids);
            rows.resize(k, -1);
            rows
        };
        spans.iter().enumerate().map(one).collect()
    }
}

fn span(base: u32, visible: u32) -> IndexSpan {
    IndexSpan { base, visible }
}

fn blocks(block: usize, ids: &[Vec<i32>]) -> CandidateBlocks {
    let shape = (ids.len(), ids.first().map_or(0, Vec::len));
    CandidateBlocks {
        block,
        ids: Tensor::from_vec(ids.concat(), shape, &CPU).unwrap(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn streaming_selects_what_sorting_selects(
        heads in prop::sample::select(vec![1usize, 4, 5, 16, 33]),
        dim in prop::sample::select(vec![8usize, 40, 128]),
        spans in prop::collection::vec((0u32..60, 0u32..200), 1..5),
        k in prop::sample::select(vec![0usize, 1, 7, 48, 300]), seed in 0u64..1000,
    ) {
        let x = inputs(spans.len(), heads, dim, 260, seed);
        let spans: Vec<IndexSpan> = spans.iter().map(|&(b, v)| span(b, v)).collect();
        prop_assert_eq!(x.run(&spans, k, None), x.reference(&spans, k, None));
    }

    #[test]
    fn candidates_select_what_the_mask_selects(
        spans in prop::collection::vec((0u32..60, 0u32..200), 1..4),
        block in prop::sample::select(vec![1usize, 7, 8, 100, 1000]),
        picks in prop::collection::vec(0i32..30, 0..20), k in prop::sample::select(vec![1usize, 7, 48]),
        seed in 0u64..1000,
    ) {
        let x = inputs(spans.len(), 5, 40, 260, seed);
        let spans: Vec<IndexSpan> = spans.iter().map(|&(b, v)| span(b, v)).collect();
        let mut ids = picks;
        ids.sort_unstable();
        ids.dedup();
        ids.resize(22, -1);
        let ids = vec![ids; spans.len()];
        prop_assert_eq!(
            x.run(&spans, k, Some(&blocks(block, &ids))),
            x.reference(&spans, k, Some((block, &ids)))
        );
    }
}

#[test]
fn threads_do_not_matter() {
    // One query is spread over ranges of positions, ten over queries.
    for t in [1usize, 10] {
        let x = inputs(t, 8, 64, 20_000, 5);
        let spans: Vec<IndexSpan> = (0..t as u32)
            .map(|t| span(100 - t, 19_900 - 977 * t))
            .collect();
        let want = x.reference(&spans, 512, None);
        assert_eq!(with_threads(1, || x.run(&spans, 512, None)), want);
        assert_eq!(with_threads(4, || x.run(&spans, 512, None)), want);
        let ids: Vec<i32> = (0..3000).filter(|i| i % 3 != 1).collect();
        let c = blocks(7, &vec![ids; t]);
        let one = with_threads(1, || x.run(&spans, 512, Some(&c)));
        assert_eq!(with_threads(4, || x.run(&spans, 512, Some(&c))), one);
    }
}

#[test]
fn each_query_has_its_own_length() {
    let x = inputs(4, 5, 40, 40, 2);
    let spans = [span(0, 0), span(0, 3), span(10, 1), span(20, 20)];
    let rows = x.run(&spans, 5, None);
    assert_eq!(rows[0], [-1; 5]);
    assert_eq!(rows[1], [0, 1, 2, -1, -1]);
    assert_eq!(rows[2], [10, -1, -1, -1, -1]);
    assert!(rows[3].windows(2).all(|w| w[0] < w[1]) && rows[3][0] >= 20);
}

#[test]
fn ties_go_to_the_lower_position() {
    // Every score is 0 (relu of a negative dot), then one position is better.
    let mut x = inputs(1, 2, 8, 200, 2);
    x.q.fill(bf16::from_f32(-1.0));
    x.weights.fill(bf16::ONE);
    x.keys.fill(bf16::ONE);
    assert_eq!(x.run(&[span(0, 200)], 3, None), [[0, 1, 2]]);
    x.keys[150 * 8] = bf16::from_f32(-100.0);
    assert_eq!(x.run(&[span(0, 200)], 3, None), [[0, 1, 150]]);
    assert_eq!(x.run(&[span(10, 190)], 3, None), [[10, 11, 150]]);
}

#[test]
fn a_small_candidate_pool_gives_fewer_rows() {
    let x = inputs(1, 5, 40, 100, 2);
    let c = blocks(8, &[vec![1, 12, -1]]);
    // Block 12 reaches to position 103, of which 96 and 97 are visible.
    let rows = x.run(&[span(0, 98)], 12, Some(&c));
    assert_eq!(rows, [[8, 9, 10, 11, 12, 13, 14, 15, 96, 97, -1, -1]]);
    let none = blocks(8, &[vec![-1, -1]]);
    assert_eq!(x.run(&[span(0, 98)], 2, Some(&none)), [[-1, -1]]);
}

#[test]
fn nan_scores_are_selected_last() {
    let mut x = inputs(1, 2, 8, 6, 2);
    x.weights.fill(bf16::from_f32(-1.0));
    for position in [0, 3] {
        x.keys[position * 8] = bf16::NAN;
    }
    assert!(index_score_ref(&x.q, &x.weights, &x.keys[..8]).is_nan());
    assert_eq!(x.run(&[span(0, 6)], 4, None), [[1, 2, 4, 5]]);
    assert_eq!(x.run(&[span(0, 6)], 5, None), [[0, 1, 2, 4, 5]]);
    x.q.fill(bf16::NAN);
    assert_eq!(x.run(&[span(0, 6)], 3, None), [[0, 1, 2]]);
}

#[test]
fn scores_round_where_the_reference_rounds() {
    let bf = |v: &[f32]| v.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>();
    // 256 + 1 is not a bf16: the dot rounds to 256 before anything else sees it.
    assert_eq!(
        index_score_ref(&bf(&[16.0, 1.0]), &bf(&[1.0]), &bf(&[16.0, 1.0])),
        256.0
    );
    // 3 * 1.0078125 = 3.0234375 is not a bf16 (steps of 1/64): the product rounds to 3.03125 (even).
    assert_eq!(
        index_score_ref(&bf(&[3.0]), &bf(&[1.007_812_5]), &bf(&[1.0])),
        3.03125
    );
    // The sum over heads is f32, 256 + 0.5 + 0.5 + 1 = 258: in bf16 it would never leave 256.
    let w = bf(&[1.0, 0.5, 0.5, 1.0]);
    assert_eq!(
        index_score_ref(&bf(&[256.0, 1.0, 1.0, 1.0]), &w, &bf(&[1.0])),
        258.0
    );
    // relu before the weight.
    assert_eq!(
        index_score_ref(&bf(&[-4.0, 2.0]), &bf(&[-1.0, -1.0]), &bf(&[1.0])),
        -2.0
    );
}

#[test]
fn top_k_rows_reference() {
    assert_eq!(topk_rows_ref(&[1.0, 3.0, 2.0, 3.0], 2), [1, 3]);
    assert_eq!(topk_rows_ref(&[1.0, 1.0, 1.0], 2), [0, 1]);
    assert_eq!(topk_rows_ref(&[f32::NAN, -1.0], 1), [1]);
    assert_eq!(topk_rows_ref(&[], 4), [0u32; 0]);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let x = inputs(2, 5, 40, 30, 2);
    let (q, w, keys) = x.tensors();
    let spans = [span(0, 30), span(10, 20)];
    let shape = |r: Result<_, Error>| assert!(matches!(r, Err(Error::Shape { .. })));
    let value = |r: Result<_, Error>| assert!(matches!(r, Err(Error::Value { .. })));
    let run = |spans: &[IndexSpan], c: Option<&CandidateBlocks>| {
        index_topk(&q, &w, &keys, spans, 4, c).map(|_| ())
    };
    shape(run(&spans[..1], None));
    shape(index_topk(&q, &w.narrow(1, 0, 4).unwrap(), &keys, &spans, 4, None).map(|_| ()));
    shape(index_topk(&q, &w, &keys.narrow(1, 0, 8).unwrap(), &spans, 4, None).map(|_| ()));
    shape(index_topk(&q, &w.to_dtype(DType::F32).unwrap(), &keys, &spans, 4, None).map(|_| ()));
    value(run(&[span(0, 31), span(0, 1)], None));
    value(run(&[span(0, 30), span(u32::MAX, u32::MAX)], None));
    shape(run(&spans, Some(&blocks(8, &[vec![0]]))));
    shape(run(&spans, Some(&blocks(0, &[vec![0], vec![0]]))));
    for bad in [
        vec![1, 0],
        vec![1, 1],
        vec![-1, 2],
        vec![-2, -1],
        vec![0, -2],
    ] {
        value(run(&spans, Some(&blocks(8, &[vec![0, 1], bad]))));
    }
    // Blocks past what is visible are no error: another query of the pool may see them.
    run(&spans, Some(&blocks(8, &[vec![0, i32::MAX], vec![-1, -1]]))).unwrap();
}

#[test]
fn no_queries_give_no_rows() {
    let x = inputs(0, 5, 40, 30, 2);
    let (q, w, keys) = x.tensors();
    assert_eq!(
        index_topk(&q, &w, &keys, &[], 4, None).unwrap().0.dims(),
        [0, 4]
    );
}
