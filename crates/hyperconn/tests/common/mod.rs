//! Shared by the integration tests of this crate.
#![allow(dead_code, unreachable_pub)]

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use deepseek_v41_core::Weights;
use deepseek_v41_hyperconn::{HyperConn, HyperConnConfig, Site};
use deepseek_v41_testing::{random_bf16, random_f32};
use half::bf16;

pub fn f32s(xs: &Tensor) -> Vec<f32> {
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn bf16s(xs: &Tensor) -> Vec<bf16> {
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn bits(xs: &Tensor) -> Vec<u32> {
    f32s(xs).into_iter().map(f32::to_bits).collect()
}

pub fn tensor<T: candle_core::WithDType>(data: Vec<T>, shape: &[usize]) -> Tensor {
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

pub fn config(hc_mult: usize, dim: usize) -> HyperConnConfig {
    HyperConnConfig {
        hc_mult,
        dim,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-20,
    }
}

/// The three weights of a site, random, keyed by part.
pub fn parts(cfg: &HyperConnConfig, seed: u64) -> [(&'static str, Vec<f32>, Vec<usize>); 3] {
    let width = (2 + cfg.hc_mult) * cfg.hc_mult;
    let cols = cfg.hc_mult * cfg.dim;
    let std = 2.0 / (cols as f32).sqrt();
    [
        ("fn", random_f32(width * cols, std, seed), vec![width, cols]),
        ("base", random_f32(width, 0.5, seed + 1), vec![width]),
        ("scale", vec![0.9, 1.1, 1.7], vec![3]),
    ]
}

/// Both sites under one map of names.
pub fn weights(cfg: &HyperConnConfig, seed: u64) -> HashMap<String, Tensor> {
    let mut all = HashMap::new();
    for (i, site) in ["attn", "ffn"].into_iter().enumerate() {
        for (part, data, shape) in parts(cfg, seed + 100 * i as u64) {
            all.insert(format!("hc_{site}_{part}"), tensor(data, &shape));
        }
    }
    all
}

pub fn hyperconn(cfg: &HyperConnConfig, site: Site, seed: u64) -> HyperConn {
    let weights = Weights::from_tensors(weights(cfg, seed)).unwrap();
    HyperConn::new(cfg, site, weights.var_builder(&Device::Cpu)).unwrap()
}

pub fn stream(t: usize, cfg: &HyperConnConfig, seed: u64) -> Tensor {
    let (c, dim) = (cfg.hc_mult, cfg.dim);
    tensor(random_bf16(t * c * dim, 1.5, seed), &[t, c, dim])
}
