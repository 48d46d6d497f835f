//! The stream carried through sublayers in fused steps, against the operations one by one.
#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is the report"
)]

mod common;

use candle_core::{Device, Tensor};
use common::{bf16s, bits, config, tensor, weights};
use deepseek_v41_core::{Error, RmsNorm, Weights};
use deepseek_v41_hyperconn::{Flow, HyperConn, HyperConnConfig, PreMix, Site, hc_pre};
use deepseek_v41_testing::{random_bf16, random_f32, with_threads};
use proptest::prelude::*;

struct Layers {
    attn: HyperConn,
    ffn: HyperConn,
    norm: RmsNorm,
}

impl Layers {
    fn new(cfg: &HyperConnConfig, seed: u64) -> Self {
        let mut all = weights(cfg, seed);
        let norm = random_bf16(cfg.dim, 1.0, seed + 7);
        all.insert("norm.weight".into(), tensor(norm, &[cfg.dim]));
        let vb = Weights::from_tensors(all).unwrap();
        let vb = vb.var_builder(&Device::Cpu);
        Self {
            attn: HyperConn::new(cfg, Site::Attn, vb.clone()).unwrap(),
            ffn: HyperConn::new(cfg, Site::Ffn, vb.clone()).unwrap(),
            norm: RmsNorm::new(cfg.dim, cfg.norm_eps, vb.pp("norm")).unwrap(),
        }
    }
}

/// Inputs of both sublayers, the last stream, the last mix.
type Seen = [Vec<u32>; 4];

fn seen(inputs: [Tensor; 2], stream: &Tensor, pre: &PreMix) -> Seen {
    let wide = |xs: &Tensor| bf16s(xs).iter().map(|x| u32::from(x.to_bits())).collect();
    let [a, b] = &inputs;
    [wide(a), wide(b), wide(stream), bits(pre.tensor())]
}

fn one_by_one(layers: &Layers, start: &Tensor, pre: PreMix, ys: &[Tensor; 2]) -> Seen {
    let input = |stream: &Tensor, pre: &PreMix| {
        let collapsed = hc_pre(stream, pre).unwrap();
        layers.norm.forward(&collapsed).unwrap()
    };
    let mix = layers.attn.mixes(start).unwrap();
    let first = input(start, &pre);
    let (stream, pre) = mix.finish(&ys[0], start).unwrap();
    let mix = layers.ffn.mixes(&stream).unwrap();
    let second = input(&stream, &pre);
    let (stream, pre) = mix.finish(&ys[1], &stream).unwrap();
    seen([first, second], &stream, &pre)
}

fn flowing(layers: &Layers, start: &Tensor, pre: PreMix, ys: &[Tensor; 2], look: bool) -> Seen {
    let mut flow = Flow::new(start.clone(), pre);
    let first = flow.enter(&layers.attn, &layers.norm).unwrap();
    flow.leave(ys[0].clone()).unwrap();
    if look {
        flow.stream().unwrap();
    }
    let second = flow.enter(&layers.ffn, &layers.norm).unwrap();
    flow.leave(ys[1].clone()).unwrap();
    let (stream, pre) = flow.finish().unwrap();
    seen([first, second], &stream, &pre)
}

fn data(cfg: &HyperConnConfig, t: usize, seed: u64) -> (Tensor, PreMix, [Tensor; 2]) {
    let (c, dim) = (cfg.hc_mult, cfg.dim);
    let ys = [1, 2].map(|i| tensor(random_bf16(t * dim, 1.0, seed ^ i), &[t, dim]));
    let pre = tensor(random_f32(t * c, 1.0, !seed), &[t, c]);
    let stream = tensor(random_bf16(t * c * dim, 1.0, seed), &[t, c, dim]);
    (stream, PreMix::from_tensor(pre).unwrap(), ys)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn steps_give_the_bits_of_their_parts(
        t in 1usize..20, c in 1usize..6, dim in 1usize..70, threads in 1usize..4, look: bool, seed: u64,
    ) {
        let cfg = config(c, dim);
        let layers = Layers::new(&cfg, seed % 1000);
        let (stream, pre, ys) = data(&cfg, t, seed);
        let again = PreMix::from_tensor(pre.tensor().clone()).unwrap();
        let expected = one_by_one(&layers, &stream, pre, &ys);
        let found = with_threads(threads, || flowing(&layers, &stream, again, &ys, look));
        prop_assert_eq!(found, expected);
    }
}

/// Large enough to be shared among threads: by tokens, and by weight rows where tokens are few.
#[test]
fn threads_do_not_show() {
    let cfg = config(4, 1024);
    let layers = Layers::new(&cfg, 3);
    for t in [1, 2, 5, 19] {
        let run = |threads| {
            let (stream, pre, ys) = data(&cfg, t, 11);
            with_threads(threads, || flowing(&layers, &stream, pre, &ys, false))
        };
        let (stream, pre, ys) = data(&cfg, t, 11);
        let expected = one_by_one(&layers, &stream, pre, &ys);
        for threads in [1, 2, 7] {
            assert!(run(threads) == expected, "{t} tokens, {threads} threads");
        }
    }
}

#[test]
fn misuse_is_an_error() {
    let (cfg, other) = (config(4, 8), config(3, 8));
    let layers = Layers::new(&cfg, 3);
    let (stream, pre, ys) = data(&cfg, 2, 5);
    let mut flow = Flow::new(stream, pre);
    assert!(flow.leave(ys[0].clone()).is_err(), "nothing was entered");
    flow.enter(&layers.attn, &layers.norm).unwrap();
    assert!(flow.enter(&layers.ffn, &layers.norm).is_err(), "not left");
    let (stream, pre, _) = data(&other, 2, 5);
    let misfit = Flow::new(stream, pre).enter(&layers.attn, &layers.norm);
    assert!(matches!(misfit, Err(Error::Shape { .. })));
    let (stream, pre, ys) = data(&cfg, 2, 5);
    let mut flow = Flow::new(stream, pre);
    flow.enter(&layers.attn, &layers.norm).unwrap();
    flow.leave(ys[0].narrow(0, 0, 1).unwrap()).unwrap();
    assert!(matches!(flow.stream(), Err(Error::Shape { .. })));
}
