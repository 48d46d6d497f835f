//! The compressor against the official code's latents.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use std::collections::HashMap;

use candle_core::Tensor;
use common::{CPU, bits, chunk, geometry, input, odd_config};
use deepseek_v41_attention::{AttentionConfig, AttnPlan, CompressedCache, Compressor, KvFormat};
use deepseek_v41_core::Weights;
use deepseek_v41_testing::{Golden, assert_bits_eq, bf16_ulp_distance};
use half::bf16;

fn compressor(cfg: &AttentionConfig, ratio: usize, weights: HashMap<String, Tensor>) -> Compressor {
    let vb = Weights::from_tensors(weights).unwrap().var_builder(&CPU);
    Compressor::new(cfg, ratio, vb).unwrap()
}

#[test]
fn golden_prefill_then_one_by_one() {
    let golden = Golden::open("ops_compressor");
    for ratio in [1, 2, 4] {
        let case = format!("compressor_r{ratio}");
        let mut weights = golden.subtree(&case);
        let norm = weights.remove("norm").unwrap();
        weights.insert("norm.weight".into(), norm);
        let x = golden.tensor(&format!("{case}.x"));
        let (batch, len, dim) = x.dims3().unwrap();
        let width = golden.shape(&format!("{case}.prefill"))[2];
        let cfg = AttentionConfig {
            dim,
            head_dim: width,
            ..odd_config(ratio)
        };
        let layer = compressor(&cfg, ratio, weights);

        let g = geometry(8, 0, 32, batch);
        let mut cache =
            CompressedCache::new(g, ratio, width, None, KvFormat::default(), &CPU).unwrap();
        let mut latents: Vec<Vec<bf16>> = vec![Vec::new(); batch];
        let prefill = 9;
        let chunks = std::iter::once((0, prefill)).chain((prefill..len).map(|p| (p, 1)));
        for (start, n) in chunks {
            let specs: Vec<_> = (0..batch)
                .map(|b| chunk(b as u32, start as u32, n as u32))
                .collect();
            let plan = AttnPlan::new(&specs, &g, &[ratio], &CPU).unwrap();
            let xs = x
                .narrow(1, start, n)
                .unwrap()
                .reshape((batch * n, dim))
                .unwrap();
            let plan = plan.compress(ratio).unwrap();
            if let Some(latent) = layer.forward(&xs, plan, &mut cache).unwrap() {
                let rows = bits(&latent);
                for (b, rows) in rows.chunks(rows.len() / batch).enumerate() {
                    latents[b].extend(rows);
                }
            }
        }
        let (first, later) = (
            golden.bf16(&format!("{case}.prefill")),
            golden.bf16(&format!("{case}.decode")),
        );
        for (b, got) in latents.iter().enumerate() {
            let part = |all: &[bf16]| {
                let n = all.len() / batch;
                all[b * n..(b + 1) * n].to_vec()
            };
            let want = [part(&first), part(&later)].concat();
            assert_eq!(got.len(), want.len(), "{case}");
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(
                    bf16_ulp_distance(*got, *want) <= 1,
                    "{case}[{b}][{i}]: {got} vs {want}"
                );
            }
        }
    }
}

/// The gate weighs every channel on its own: one weight for the whole row would give 2, 2, 2, 2.
#[test]
fn gate_is_per_channel() {
    let kv = Tensor::new(&[[1f32, 1., 1., 1.], [3., 3., 3., 3.]], &CPU).unwrap();
    let gate = Tensor::new(&[[0f32, 100., -100., 0.], [0., 0., 0., 100.]], &CPU).unwrap();
    let pooled = deepseek_v41_attention::ops::compress(&kv, &gate, None, &[0, 1], 2).unwrap();
    let want = [2f32, 1., 3., 3.].map(bf16::from_f32);
    assert_bits_eq(&bits(&pooled), &want);
}

/// A chunk longer than the ring of open-group entries overwrites them; the group they belong to must
/// have been pooled by then.
#[test]
fn long_chunk_pools_before_it_overwrites() {
    let cfg = odd_config(3);
    let weights: HashMap<_, _> = common::random_weights(&cfg, 3)
        .into_iter()
        .filter_map(|(k, v)| Some((k.strip_prefix("compressor.")?.to_string(), v)))
        .collect();
    let layer = compressor(&cfg, 3, weights);
    let g = geometry(7, 0, 64, 1);
    let xs = input(32, cfg.dim, 1);
    let run = |lens: &[usize]| {
        let mut cache =
            CompressedCache::new(g, 3, cfg.head_dim, None, KvFormat::default(), &CPU).unwrap();
        let (mut start, mut out) = (0, Vec::new());
        for &n in lens {
            let plan = AttnPlan::new(&[chunk(0, start as u32, n as u32)], &g, &[3], &CPU).unwrap();
            let part = xs.narrow(0, start, n).unwrap();
            if let Some(latent) = layer.forward(&part, &plan.compress[0], &mut cache).unwrap() {
                out.extend(bits(&latent));
            }
            start += n;
        }
        out
    };
    assert_bits_eq(&run(&[2, 30]), &run(&[32]));
    assert_bits_eq(&run(&[1; 32]), &run(&[32]));
}
