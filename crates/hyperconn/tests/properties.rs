//! Odd shapes, independence of batch and threads, and what is refused.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use candle_core::{DType, Device, Tensor};
use common::{bf16s, bits, config, f32s, hyperconn, parts, stream, tensor, weights};
use deepseek_v41_core::{Error, WeightError, Weights};
use deepseek_v41_hyperconn::{
    HyperConn, Mix, PreMix, SinkhornParams, Site, hc_expand, hc_mean, hc_mean_ref, hc_mixes_ref,
    hc_post, hc_post_ref, hc_pre, hc_pre_ref, split_sinkhorn_ref,
};
use deepseek_v41_testing::{assert_bits_eq, assert_close, random_bf16, random_f32, with_threads};
use half::bf16;
use proptest::prelude::*;

/// One step with a sublayer that returns `y`: everything it computes, as bits.
fn step(hc: &HyperConn, stream: &Tensor, y: &Tensor) -> (Vec<u32>, Vec<bf16>, Vec<bf16>) {
    let mix = hc.mixes(stream).unwrap();
    let mut coefficients = bits(mix.pre.tensor());
    coefficients.extend(bits(&mix.post));
    coefficients.extend(bits(&mix.comb));
    let collapsed = bf16s(&hc_pre(stream, &mix.pre).unwrap());
    let (next, _) = mix.finish(y, stream).unwrap();
    (coefficients, collapsed, bf16s(&next))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ops_equal_their_references(t in 0usize..6, c in 1usize..6, dim in 1usize..70, seed: u32) {
        let cfg = config(c, dim);
        let seed = u64::from(seed);
        let hc = hyperconn(&cfg, Site::Ffn, seed);
        let [func, base, scale] = parts(&cfg, seed + 100);
        let xs = stream(t, &cfg, seed + 7);
        let y = tensor(random_bf16(t * dim, 1.0, seed + 8), &[t, dim]);
        let Mix { pre, post, comb } = hc.mixes(&xs).unwrap();
        let collapsed = bf16s(&hc_pre(&xs, &pre).unwrap());
        let next = bf16s(&hc_post(&y, &xs, &post, &comb).unwrap());
        let mean = bf16s(&hc_mean(&xs).unwrap());
        let (pre, post, comb) = (f32s(pre.tensor()), f32s(&post), f32s(&comb));

        for (i, x) in bf16s(&xs).chunks_exact(c * dim).enumerate() {
            let mut out = vec![0f32; (2 + c) * c];
            hc_mixes_ref(x, &func.1, &scale.1, &base.1, cfg.sinkhorn(), cfg.norm_eps, &mut out);
            let of = |all: &[f32], n: usize| all[i * n..(i + 1) * n].to_vec();
            // f32 sums of up to 400 products against f64 ones, then 20 iterations.
            let close = |a: &[f32], b: &[f32]| assert_close(a, b, 2e-6, 1e-4);
            close(&of(&pre, c), &out[..c]);
            close(&of(&post, c), &out[c..2 * c]);
            close(&of(&comb, c * c), &out[2 * c..]);

            let mut row = vec![bf16::ZERO; dim];
            hc_pre_ref(x, &of(&pre, c), &mut row);
            assert_bits_eq(&collapsed[i * dim..(i + 1) * dim], &row);
            hc_mean_ref(x, &mut row);
            assert_bits_eq(&mean[i * dim..(i + 1) * dim], &row);
            let mut copies = vec![bf16::ZERO; c * dim];
            let y = bf16s(&y)[i * dim..(i + 1) * dim].to_vec();
            hc_post_ref(&y, x, &of(&post, c), &of(&comb, c * c), &mut copies);
            assert_bits_eq(&next[i * c * dim..(i + 1) * c * dim], &copies);
        }
    }

    /// Columns always: the loop ends on them. Rows as far as it has converged, which 20 rounds
    /// do for logits within 0.75 of each other's mean (each round shrinks the error by
    /// tanh(0.75)^2 or more).
    #[test]
    fn comb_is_doubly_stochastic(c in 1usize..6, seed: u32, spread in 0.1f32..20.0) {
        let p = SinkhornParams { hc_mult: c, iters: 20, eps: 1e-6 };
        let mut mixes = random_f32(p.width(), 1.0, u64::from(seed));
        let largest = mixes.iter().fold(0f32, |m, v| m.max(v.abs()));
        mixes.iter_mut().for_each(|v| *v *= spread / largest);
        let mut out = vec![0f32; p.width()];
        split_sinkhorn_ref(&mixes, &[1.0; 3], &vec![0.0; p.width()], p, &mut out);
        let comb = &out[2 * c..];
        prop_assert!(comb.iter().all(|v| *v > 0.0));
        for k in 0..c {
            let column: f32 = (0..c).map(|j| comb[j * c + k]).sum();
            prop_assert!((column - 1.0).abs() < 1e-5, "column {k}: {column}");
            let row: f32 = comb[k * c..(k + 1) * c].iter().sum();
            prop_assert!(spread > 0.75 || (row - 1.0).abs() < 1e-5, "row {k}: {row}");
        }
    }
}

#[test]
fn a_batch_is_each_token_alone_bit_for_bit() {
    for (t, c, dim) in [(1, 4, 32), (3, 5, 33), (37, 4, 130)] {
        let cfg = config(c, dim);
        let hc = hyperconn(&cfg, Site::Attn, 21);
        let xs = stream(t, &cfg, 22);
        let y = tensor(random_bf16(t * dim, 1.0, 23), &[t, dim]);
        let mix = hc.mixes(&xs).unwrap();
        let (pre, comb) = (bits(mix.pre.tensor()), bits(&mix.comb));
        let (_, collapsed, next) = step(&hc, &xs, &y);
        for i in 0..t {
            let x = xs.narrow(0, i, 1).unwrap();
            let alone = hc.mixes(&x).unwrap();
            assert_eq!(bits(alone.pre.tensor()), pre[i * c..(i + 1) * c]);
            assert_eq!(bits(&alone.comb), comb[i * c * c..(i + 1) * c * c]);
            let (_, one, copies) = step(&hc, &x, &y.narrow(0, i, 1).unwrap());
            assert_eq!(one, collapsed[i * dim..(i + 1) * dim]);
            assert_eq!(copies, next[i * c * dim..(i + 1) * c * dim]);
        }
    }
}

#[test]
fn one_thread_is_many_threads_bit_for_bit() {
    // Large enough for every op to spread.
    let cfg = config(4, 1000);
    let hc = hyperconn(&cfg, Site::Attn, 31);
    let xs = stream(67, &cfg, 32);
    let y = tensor(random_bf16(67 * 1000, 1.0, 33), &[67, 1000]);
    let one = with_threads(1, || step(&hc, &xs, &y));
    for threads in [2, 5] {
        assert!(
            with_threads(threads, || step(&hc, &xs, &y)) == one,
            "{threads} threads"
        );
    }
}

#[test]
fn no_tokens_give_empty_tensors() {
    let cfg = config(4, 7);
    let hc = hyperconn(&cfg, Site::Attn, 1);
    let xs = Tensor::zeros((0, 4, 7), DType::BF16, &Device::Cpu).unwrap();
    let mix = hc.mixes(&xs).unwrap();
    assert_eq!(mix.comb.dims(), [0, 4, 4]);
    assert_eq!(hc_pre(&xs, &mix.pre).unwrap().dims(), [0, 7]);
    assert_eq!(hc_mean(&xs).unwrap().dims(), [0, 7]);
    let y = Tensor::zeros((0, 7), DType::BF16, &Device::Cpu).unwrap();
    assert_eq!(hc_expand(&y, 4).unwrap().dims(), [0, 4, 7]);
    assert_eq!(mix.finish(&y, &xs).unwrap().0.dims(), [0, 4, 7]);
    assert_eq!(
        PreMix::one_hot(0, 4, &Device::Cpu).unwrap().tensor().dims(),
        [0, 4]
    );
}

#[test]
fn strided_inputs_are_read_by_their_layout() {
    let cfg = config(3, 10);
    let hc = hyperconn(&cfg, Site::Attn, 2);
    let wide = stream(4, &config(3, 20), 3);
    let strided = wide.narrow(2, 5, 10).unwrap();
    let copied = strided.contiguous().unwrap();
    let y = strided.narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
    assert!(step(&hc, &strided, &y) == step(&hc, &copied, &y.contiguous().unwrap()));
}

#[test]
fn one_hot_selects_the_first_copy() {
    let cfg = config(3, 5);
    let xs = stream(2, &cfg, 6);
    let pre = PreMix::one_hot(2, 3, &Device::Cpu).unwrap();
    let first = xs.narrow(1, 0, 1).unwrap();
    assert_eq!(bf16s(&hc_pre(&xs, &pre).unwrap()), bf16s(&first));
}

/// The mean is summed in f32: in bf16 the small copies would vanish beside the large one.
#[test]
fn mean_rounds_once() {
    let xs: Vec<bf16> = [256.0, 1.0, 1.0, 1.0].map(bf16::from_f32).to_vec();
    let mean = hc_mean(&tensor(xs, &[1, 4, 1])).unwrap();
    assert_eq!(bf16s(&mean), [bf16::from_f32(259.0 / 4.0)]);
}

#[test]
fn misfits_are_shape_errors() {
    let cfg = config(2, 6);
    let hc = hyperconn(&cfg, Site::Attn, 1);
    let xs = stream(3, &cfg, 1);
    let shape = |r: deepseek_v41_core::Result<()>| {
        assert!(matches!(r, Err(Error::Shape { .. })), "{r:?}");
    };
    shape(hc.mixes(&xs.to_dtype(DType::F32).unwrap()).map(drop));
    shape(hc.mixes(&stream(3, &config(2, 5), 1)).map(drop));
    shape(hc.mixes(&stream(3, &config(3, 4), 1)).map(drop));
    let pre = PreMix::one_hot(2, 2, &Device::Cpu).unwrap();
    shape(hc_pre(&xs, &pre).map(drop));
    shape(hc_expand(&xs, 2).map(drop));
    shape(PreMix::one_hot(2, 0, &Device::Cpu).map(drop));
    shape(PreMix::from_tensor(xs.clone()).map(drop));
    let mix = hc.mixes(&xs).unwrap();
    let y = tensor(random_bf16(12, 1.0, 1), &[2, 6]);
    shape(mix.finish(&y, &xs).map(drop));
}

#[test]
fn wrong_weights_are_typed_errors() {
    let cfg = config(2, 6);
    let load = |change: &dyn Fn(&mut std::collections::HashMap<String, Tensor>)| {
        let mut all = weights(&cfg, 1);
        change(&mut all);
        let all = Weights::from_tensors(all).unwrap();
        match HyperConn::new(&cfg, Site::Ffn, all.var_builder(&Device::Cpu)) {
            Err(Error::Weight { name, reason, .. }) => (name, reason),
            other => panic!("{other:?}"),
        }
    };
    let (name, reason) = load(&|w| drop(w.remove("hc_ffn_fn")));
    assert_eq!((name.as_str(), reason), ("hc_ffn_fn", WeightError::Missing));
    let (name, reason) =
        load(&|w| drop(w.insert("hc_ffn_scale".into(), tensor(vec![1f32; 4], &[4]))));
    assert_eq!(name, "hc_ffn_scale");
    assert!(matches!(reason, WeightError::Shape { .. }));
    let (_, reason) = load(&|w| {
        w.insert("hc_ffn_base".into(), tensor(vec![bf16::ONE; 8], &[8]));
    });
    assert!(matches!(reason, WeightError::Dtype { .. }));
    let (_, reason) = load(&|w| {
        let mut base = vec![0f32; 8];
        base[3] = f32::NAN;
        w.insert("hc_ffn_base".into(), tensor(base, &[8]));
    });
    assert_eq!(reason, WeightError::Content("element 3 is NaN".into()));
}

#[test]
fn settings_without_meaning_are_refused() {
    let refuse = |change: &dyn Fn(&mut deepseek_v41_hyperconn::HyperConnConfig), field: &str| {
        let mut cfg = config(4, 8);
        change(&mut cfg);
        match cfg.validate() {
            Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{other:?}"),
        }
    };
    refuse(&|c| c.hc_mult = 0, "hc_mult");
    refuse(&|c| c.dim = 0, "dim");
    refuse(&|c| c.dim = usize::MAX, "hc_mult");
    refuse(&|c| c.hc_eps = f32::NAN, "hc_eps");
    refuse(&|c| c.norm_eps = -1.0, "norm_eps");
}
