//! Faults other implementations shipped, as small inputs with their right answers.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use candle_core::{Device, Tensor};
use common::{bf16s, bits, config, f32s, hyperconn, stream, tensor};
use deepseek_v41_hyperconn::{
    PreMix, SinkhornParams, Site, hc_post, hc_pre, split_sinkhorn, split_sinkhorn_ref,
};
use half::bf16;

fn bf(values: &[f32]) -> Vec<bf16> {
    values.iter().copied().map(bf16::from_f32).collect()
}

/// Row `j` of comb says where copy `j` goes: with `[[0, 1], [0, 0]]` copy 0 moves to copy 1.
#[test]
fn f1_comb_is_not_transposed() {
    let residual = tensor(bf(&[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]), &[1, 2, 3]);
    let y = tensor(bf(&[0.0; 3]), &[1, 3]);
    let post = tensor(vec![1f32, 1.0], &[1, 2]);
    let comb = tensor(vec![0f32, 1.0, 0.0, 0.0], &[1, 2, 2]);
    let out = hc_post(&y, &residual, &post, &comb).unwrap();
    assert_eq!(bf16s(&out), bf(&[0.0, 0.0, 0.0, 1.0, 2.0, 3.0]));
}

/// Two sublayers whose `pre` differ: each must be fed with what the one before derived.
#[test]
fn f2_a_sublayer_uses_the_previous_pre() {
    let cfg = config(3, 20);
    let attn = hyperconn(&cfg, Site::Attn, 5);
    let ffn = hyperconn(&cfg, Site::Ffn, 5);
    let start = stream(4, &cfg, 77);
    let mut inputs = Vec::new();
    let mut sublayer = |x: Tensor| {
        inputs.push(x.clone());
        Ok((x * 0.5)?)
    };
    let first = PreMix::one_hot(4, 3, &Device::Cpu).unwrap();
    let (middle, carried) = attn.around(&start, first, &mut sublayer).unwrap();
    let (_, last) = ffn.around(&middle, carried, &mut sublayer).unwrap();

    let attn_pre = attn.mixes(&start).unwrap().pre;
    let ffn_pre = ffn.mixes(&middle).unwrap().pre;
    assert_ne!(bits(attn_pre.tensor()), bits(ffn_pre.tensor()));
    // Attention: the one-hot mix, so copy 0. Feed-forward: attention's.
    assert_eq!(bf16s(&inputs[0]), bf16s(&start.narrow(1, 0, 1).unwrap()));
    assert_eq!(
        bf16s(&inputs[1]),
        bf16s(&hc_pre(&middle, &attn_pre).unwrap())
    );
    assert_ne!(
        bf16s(&inputs[1]),
        bf16s(&hc_pre(&middle, &ffn_pre).unwrap())
    );
    assert_eq!(bits(last.tensor()), bits(ffn_pre.tensor()));
}

/// The op that does everything against the composition of its parts, row by row, 1000 rows: 0 ulp.
#[test]
fn f3_fused_equals_unfused_over_1000_rows() {
    let cfg = config(4, 24);
    let hc = hyperconn(&cfg, Site::Attn, 9);
    let [func, base, scale] = common::parts(&cfg, 9);
    let rows = stream(1000, &cfg, 4);
    let fused = hc.mixes(&rows).unwrap();
    // Unfused: projection and statistic one after the other, then the op of its own.
    let dot = |a: &[f32], b: &[f32]| {
        let mut l = [0f64; 8];
        for (k, (a, b)) in a.iter().zip(b).enumerate() {
            l[k % 8] += f64::from(*a) * f64::from(*b);
        }
        ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
    };
    let mut mixes = Vec::new();
    for row in bf16s(&rows).chunks_exact(4 * 24) {
        let x: Vec<f32> = row.iter().map(|v| v.to_f32()).collect();
        let mean = dot(&x, &x) / x.len() as f64;
        let rstd = 1.0 / (mean + f64::from(cfg.norm_eps)).sqrt();
        mixes.extend(
            func.1
                .chunks_exact(x.len())
                .map(|w| (dot(&x, w) * rstd) as f32),
        );
    }
    let unfused = split_sinkhorn(
        &tensor(mixes, &[1000, 24]),
        &tensor(scale.1, &scale.2),
        &tensor(base.1, &base.2),
        cfg.sinkhorn(),
    )
    .unwrap();
    assert!(bits(fused.pre.tensor()) == bits(unfused.pre.tensor()));
    assert!(bits(&fused.post) == bits(&unfused.post));
    assert!(bits(&fused.comb) == bits(&unfused.comb));
}

const P: SinkhornParams = SinkhornParams {
    hc_mult: 4,
    iters: 20,
    eps: 1e-6,
};

/// Coefficients of one token whose mixes are `m`, with scale 1 and base 0.
fn split(m: &[f32; 24]) -> ([f32; 4], [f32; 4], [[f32; 4]; 4]) {
    let mut out = [0f32; 24];
    split_sinkhorn_ref(m, &[1.0; 3], &[0.0; 24], P, &mut out);
    let part = |i: usize| -> [f32; 4] { std::array::from_fn(|k| out[4 * i + k]) };
    (part(0), part(1), std::array::from_fn(|j| part(2 + j)))
}

fn sums(comb: &[[f32; 4]; 4]) -> ([f32; 4], [f32; 4]) {
    let rows = comb.map(|r| r.iter().sum());
    (
        rows,
        std::array::from_fn(|k| comb.iter().map(|r| r[k]).sum()),
    )
}

#[track_caller]
fn assert_doubly_stochastic(comb: &[[f32; 4]; 4]) {
    let (rows, columns) = sums(comb);
    for s in rows.into_iter().chain(columns) {
        assert!(
            (s - 1.0).abs() <= 1e-5,
            "rows {rows:?}, columns {columns:?}"
        );
    }
}

#[test]
fn f4_equal_logits_mix_evenly() {
    for v in [0.0, 80.0, -80.0] {
        let (pre, post, comb) = split(&[v; 24]);
        assert_doubly_stochastic(&comb);
        assert!(
            comb.as_flattened().iter().all(|c| (c - 0.25).abs() < 1e-5),
            "{comb:?}"
        );
        let sigmoid = 1.0 / (1.0 + (-v).exp());
        assert_eq!(pre, [sigmoid + 1e-6; 4]);
        assert_eq!(post, [2.0 * sigmoid; 4]);
    }
}

#[test]
fn f4_logits_of_80_make_a_permutation() {
    let mut m = [-80.0; 24];
    for (j, k) in [(0, 2), (1, 0), (2, 3), (3, 1)] {
        m[8 + 4 * j + k] = 80.0;
    }
    let (_, _, comb) = split(&m);
    assert_doubly_stochastic(&comb);
    assert!(comb[0][2] > 0.999 && comb[1][0] > 0.999 && comb[2][3] > 0.999 && comb[3][1] > 0.999);
}

/// Every row wants the same column. The eps of the softmax is what the other columns live on; the
/// rows are equal, so the result is even.
#[test]
fn f4_logits_of_80_in_one_column_stay_finite() {
    let mut m = [-80.0; 24];
    for j in 0..4 {
        m[8 + 4 * j + 1] = 80.0;
    }
    let (_, _, comb) = split(&m);
    assert_doubly_stochastic(&comb);
    assert!(
        comb.as_flattened().iter().all(|c| (c - 0.25).abs() < 1e-4),
        "{comb:?}"
    );
}

#[test]
fn f4_one_negative_infinity_is_a_closed_path() {
    let mut m: [f32; 24] = std::array::from_fn(|i| (i as f32 * 0.37).sin());
    m[0] = f32::NEG_INFINITY;
    m[4] = f32::NEG_INFINITY;
    m[8 + 5] = f32::NEG_INFINITY;
    let (pre, post, comb) = split(&m);
    assert_eq!((pre[0], post[0]), (1e-6, 0.0));
    assert_doubly_stochastic(&comb);
    assert!(comb[1][1] < 1e-5, "{comb:?}");
}

/// A row without any finite logit has no softmax: NaN for that token, as in the reference, and for
/// that token only.
#[test]
fn f4_a_row_of_negative_infinities_is_nan_for_its_token_alone() {
    let mut m = vec![0.5f32; 48];
    m[8..12].fill(f32::NEG_INFINITY);
    let mix = split_sinkhorn(
        &tensor(m, &[2, 24]),
        &tensor(vec![1f32; 3], &[3]),
        &tensor(vec![0f32; 24], &[24]),
        P,
    )
    .unwrap();
    let comb = f32s(&mix.comb);
    assert!(comb[..16].iter().all(|v| v.is_nan()));
    assert!(comb[16..].iter().all(|v| (v - 0.25).abs() < 1e-5));
    assert!(
        f32s(mix.pre.tensor())
            .iter()
            .chain(&f32s(&mix.post))
            .all(|v| v.is_finite())
    );
}

#[test]
fn infinite_logits_open_and_close_the_gates() {
    let mut m = [0.0; 24];
    (m[0], m[4], m[1], m[5]) = (f32::INFINITY, f32::INFINITY, -1e30, -1e30);
    let (pre, post, _) = split(&m);
    assert_eq!((pre[0], post[0]), (1.0 + 1e-6, 2.0));
    assert_eq!((pre[1], post[1]), (1e-6, 0.0));
}

/// `norm_eps` is 1e-20: a zero stream must not become NaN, and the coefficients are base's alone.
#[test]
fn zero_stream_gives_the_base() {
    let cfg = config(2, 9);
    let hc = hyperconn(&cfg, Site::Attn, 3);
    let zero = tensor(vec![bf16::ZERO; 2 * 9], &[1, 2, 9]);
    let mix = hc.mixes(&zero).unwrap();
    let [_, base, scale] = common::parts(&cfg, 3);
    let expected = split_sinkhorn(
        &tensor(vec![0f32; 8], &[1, 8]),
        &tensor(scale.1, &scale.2),
        &tensor(base.1, &base.2),
        cfg.sinkhorn(),
    )
    .unwrap();
    assert_eq!(bits(mix.pre.tensor()), bits(expected.pre.tensor()));
    assert_eq!(bits(&mix.comb), bits(&expected.comb));
}
