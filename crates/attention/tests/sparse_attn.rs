//! `sparse_attn`: golden cases, the definition on odd shapes, and what a result may depend on.
#![allow(clippy::unwrap_used)]

use candle_core::{Device, Tensor};
use deepseek_v41_attention::ops::{KvRows, KvScope, PoolRows, sparse_attn, sparse_attn_ref};
use deepseek_v41_core::Error;
use deepseek_v41_testing::{
    Golden, assert_bits_eq, assert_close, random_bf16, random_f32, with_threads,
};
use half::bf16;
use proptest::prelude::*;

const CPU: Device = Device::Cpu;

fn values(x: &Tensor) -> Vec<bf16> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Random `q [t, heads, dim]`, `kv [rows, dim]`, `sink [heads]`.
struct Inputs {
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    scale: f32,
}

fn inputs(t: usize, heads: usize, dim: usize, rows: usize, seed: u64) -> Inputs {
    Inputs {
        q: Tensor::from_vec(
            random_bf16(t * heads * dim, 1.0, seed),
            (t, heads, dim),
            &CPU,
        )
        .unwrap(),
        kv: Tensor::from_vec(random_bf16(rows * dim, 1.0, seed + 1), (rows, dim), &CPU).unwrap(),
        sink: Tensor::from_vec(random_f32(heads, 1.0, seed + 2), heads, &CPU).unwrap(),
        scale: (dim as f32).powf(-0.5),
    }
}

impl Inputs {
    fn run(&self, idxs: &[Vec<i32>]) -> Vec<bf16> {
        self.run_scopes(&[idxs])
    }

    /// One index list per scope and query, all over the same rows.
    fn run_scopes(&self, scopes: &[&[Vec<i32>]]) -> Vec<bf16> {
        let idxs: Vec<Tensor> = scopes.iter().map(|s| idx_tensor(s)).collect();
        let scopes: Vec<_> = idxs
            .iter()
            .map(|idxs| KvScope::new(&self.kv, idxs))
            .collect();
        values(&sparse_attn(&self.q, &scopes, &self.sink, self.scale).unwrap())
    }

    fn reference(&self, idxs: &[Vec<i32>]) -> Vec<bf16> {
        let (q, kv) = (values(&self.q), values(&self.kv));
        let sink: Vec<f32> = self.sink.to_vec1().unwrap();
        let flat = idxs.concat();
        let scopes = [KvRows {
            kv: PoolRows::Bf16(&kv),
            idxs: &flat,
            width: idxs.first().map_or(0, Vec::len),
        }];
        let mut out = vec![bf16::ONE; q.len()];
        sparse_attn_ref(&q, &scopes, &sink, self.kv.dims()[1], self.scale, &mut out);
        out
    }
}

fn idx_tensor(idxs: &[Vec<i32>]) -> Tensor {
    let n = idxs.first().map_or(0, Vec::len);
    Tensor::from_vec(idxs.concat(), (idxs.len(), n), &CPU).unwrap()
}

#[test]
fn golden() {
    let golden = Golden::open("ops_attn");
    for case in ["sparse_attn_0", "sparse_attn_1", "sparse_attn_2"] {
        let key = |name: &str| golden.tensor(&format!("{case}.{name}"));
        let (q, kv, sink, idx) = (key("q"), key("kv"), key("sink"), key("idx"));
        let scale = (q.dims()[3] as f32).powf(-0.5);
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for b in 0..q.dims()[0] {
            let (kv, idxs) = (kv.get(b).unwrap(), idx.get(b).unwrap());
            let scope = KvScope::new(&kv, &idxs);
            let out = sparse_attn(&q.get(b).unwrap(), &[scope], &sink, scale).unwrap();
            got.extend(values(&out).iter().map(|v| v.to_f32()));
        }
        want.extend(golden.f32(&format!("{case}.out")));
        assert_close(&got, &want, 2e-3, 0.01);
        assert_close(&got, &golden.f32(&format!("{case}.exact")), 2e-3, 0.01);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn fast_path_is_the_definition(
        t in 1usize..4, heads in prop::sample::select(vec![1usize, 5, 8, 9, 20, 33]),
        dim in prop::sample::select(vec![1usize, 16, 40, 64]),
        n in prop::sample::select(vec![0usize, 1, 33, 64, 70, 130]), seed in 0u64..1000,
    ) {
        let x = inputs(t, heads, dim, 37, seed);
        let idxs: Vec<Vec<i32>> = (0..t)
            .map(|t| (0..n).map(|i| ((i as u64 * 11 + t as u64 * 5 + seed) % 38) as i32 - 1).collect())
            .collect();
        assert_bits_eq(&x.run(&idxs), &x.reference(&idxs));
    }

    #[test]
    fn only_the_valid_rows_and_their_order_count(
        rows in prop::collection::vec(0i32..37, 0..140), holes in prop::collection::vec(0usize..140, 0..90),
        cut in 0usize..140,
    ) {
        let x = inputs(1, 5, 40, 37, 7);
        let packed = x.run(std::slice::from_ref(&rows));
        let mut holey = rows.clone();
        for hole in holes {
            holey.insert(hole.min(holey.len()), -1);
        }
        assert_bits_eq(&x.run(std::slice::from_ref(&holey)), &packed);
        // Two scopes cut anywhere, the first of them ending in a hole.
        let (a, b) = holey.split_at(cut.min(holey.len()));
        let a = [a.to_vec(), vec![-1]].concat();
        assert_bits_eq(&x.run_scopes(&[&[a], &[b.to_vec()]]), &packed);
    }
}

#[test]
fn queries_do_not_see_each_other() {
    let x = inputs(7, 5, 40, 50, 3);
    let idxs: Vec<Vec<i32>> = (0..7)
        .map(|t| {
            (0..33)
                .map(|i| if i <= t * 5 { (i * 3 + t) % 50 } else { -1 })
                .collect()
        })
        .collect();
    let all = x.run(&idxs);
    for (t, idxs) in idxs.iter().enumerate() {
        let one = Inputs {
            q: x.q.narrow(0, t, 1).unwrap(),
            ..x_clone(&x)
        };
        assert_bits_eq(
            &one.run(std::slice::from_ref(idxs)),
            &all[t * 200..(t + 1) * 200],
        );
    }
}

fn x_clone(x: &Inputs) -> Inputs {
    Inputs {
        q: x.q.clone(),
        kv: x.kv.clone(),
        sink: x.sink.clone(),
        scale: x.scale,
    }
}

#[test]
fn threads_do_not_matter() {
    // Large enough to be spread: heads are split for one query, queries for nine.
    for t in [1, 9] {
        let x = inputs(t, 40, 128, 300, 11);
        let idxs: Vec<Vec<i32>> = (0..t)
            .map(|t| (0..290).map(|i| (i * 7 + t as i32) % 301 - 1).collect())
            .collect();
        let one = with_threads(1, || x.run(&idxs));
        assert_bits_eq(&with_threads(4, || x.run(&idxs)), &one);
        assert_bits_eq(&one, &x.reference(&idxs));
    }
}

#[test]
fn a_query_without_rows_is_zero_whatever_the_sink() {
    for sink in [0.0, -100.0, 1e30, f32::NEG_INFINITY, f32::INFINITY] {
        let mut x = inputs(2, 5, 40, 8, 1);
        x.sink = Tensor::full(sink, 5, &CPU).unwrap();
        let out = x.run(&[vec![-1; 70], vec![-1; 70]]);
        assert!(out.iter().all(|v| v.to_bits() == 0), "sink {sink}");
        assert_bits_eq(&x.run_scopes(&[]), &out);
        assert_bits_eq(&x.run(&[vec![], vec![]]), &out);
        assert_bits_eq(&x.reference(&[vec![-1; 3], vec![-1; 3]]), &out);
    }
}

#[test]
fn the_sink_is_in_the_denominator_only() {
    // One row with score 0: weight 1 / (1 + e^sink).
    let q = Tensor::zeros((1, 1, 16), candle_core::DType::BF16, &CPU).unwrap();
    let kv = Tensor::full(bf16::from_f32(3.0), (1, 16), &CPU).unwrap();
    let idxs = idx_tensor(&[vec![0]]);
    let out = |sink: f32| {
        let sink = Tensor::full(sink, 1, &CPU).unwrap();
        let out = sparse_attn(&q, &[KvScope::new(&kv, &idxs)], &sink, 0.125).unwrap();
        values(&out)[0].to_f32()
    };
    assert_eq!(out(f32::NEG_INFINITY), 3.0);
    assert_eq!(out(0.0), 1.5);
    assert_eq!(out(3f32.ln()), 0.75);
    assert_eq!(out(f32::INFINITY), 0.0);
}

#[test]
fn duplicates_count_twice() {
    let x = inputs(1, 5, 40, 4, 9);
    let twice = x.run(&[vec![0, 1, 1]]);
    // A pool where row 1 is stored twice.
    let kv = Tensor::cat(
        &[x.kv.narrow(0, 0, 2).unwrap(), x.kv.narrow(0, 1, 1).unwrap()],
        0,
    )
    .unwrap();
    let copied = Inputs { kv, ..x_clone(&x) }.run(&[vec![0, 1, 2]]);
    assert_bits_eq(&twice, &copied);
    assert_ne!(twice, x.run(&[vec![0, 1, -1]]));
}

#[test]
fn probabilities_are_rounded_for_the_values_only() {
    // Two rows, p = 1 and p = e^-0.3: the numerator takes bf16(p), the denominator p.
    let q = Tensor::from_vec(vec![bf16::ONE], (1, 1, 1), &CPU).unwrap();
    let kv = Tensor::from_vec(vec![bf16::ZERO, bf16::from_f32(-1.0)], (2, 1), &CPU).unwrap();
    let sink = Tensor::full(f32::NEG_INFINITY, 1, &CPU).unwrap();
    let idxs = idx_tensor(&[vec![0, 1]]);
    let out = sparse_attn(&q, &[KvScope::new(&kv, &idxs)], &sink, 0.3).unwrap();
    let p = (-0.3f32).exp();
    let want = bf16::from_f32(-bf16::from_f32(p).to_f32() / (1.0 + p));
    assert_eq!(values(&out)[0], want);
}

#[test]
fn nan_stays_with_the_queries_that_see_it() {
    let x = inputs(2, 5, 40, 4, 5);
    let mut kv = values(&x.kv);
    kv[2 * 40 + 39] = bf16::NAN;
    let x = Inputs {
        kv: Tensor::from_vec(kv, (4, 40), &CPU).unwrap(),
        ..x
    };
    let out = x.run(&[vec![0, 1, -1], vec![0, 2, 3]]);
    assert!(out[..200].iter().all(|v| v.is_finite()));
    assert!(out[200..].iter().all(|v| v.is_nan()));
}

#[test]
fn indices_outside_the_pool_are_errors() {
    let x = inputs(2, 5, 40, 4, 5);
    for bad in [4, -2, i32::MIN, i32::MAX] {
        let idxs = idx_tensor(&[vec![0, 1], vec![2, bad]]);
        let scope = KvScope::new(&x.kv, &idxs);
        let err = sparse_attn(&x.q, &[scope], &x.sink, x.scale).unwrap_err();
        assert!(matches!(err, Error::Value { .. }), "{err}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let x = inputs(2, 5, 40, 4, 5);
    let idxs = idx_tensor(&[vec![0], vec![1]]);
    let run = |q: &Tensor, kv: &Tensor, idxs: &Tensor, sink: &Tensor| {
        sparse_attn(q, &[KvScope::new(kv, idxs)], sink, 1.0).map(|_| ())
    };
    let narrow = |x: &Tensor, d: usize| x.narrow(d, 0, 1).unwrap();
    let cases = [
        run(&x.q.flatten_all().unwrap(), &x.kv, &idxs, &x.sink),
        run(&x.q, &narrow(&x.kv, 1), &idxs, &x.sink),
        run(&x.q, &x.kv, &narrow(&idxs, 0), &x.sink),
        run(
            &x.q,
            &x.kv,
            &idxs.to_dtype(candle_core::DType::I64).unwrap(),
            &x.sink,
        ),
        run(&x.q, &x.kv, &idxs, &narrow(&x.sink, 0)),
        run(
            &x.q.to_dtype(candle_core::DType::F32).unwrap(),
            &x.kv,
            &idxs,
            &x.sink,
        ),
    ];
    for case in cases {
        assert!(matches!(case, Err(Error::Shape { .. })), "{case:?}");
    }
}

#[test]
fn no_queries_give_no_rows() {
    let x = inputs(0, 5, 40, 4, 5);
    let idxs = Tensor::zeros((0, 7), candle_core::DType::I32, &CPU).unwrap();
    let scope = KvScope::new(&x.kv, &idxs);
    assert_eq!(
        sparse_attn(&x.q, &[scope], &x.sink, 1.0).unwrap().dims(),
        [0, 5, 40]
    );
}
