//! Shared by the integration tests of this crate.
#![allow(dead_code, unreachable_pub)]

use std::{collections::HashMap, sync::Arc};

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Comm, LocalComm, Weights};
use deepseek_v41_moe::{Moe, MoeConfig, ScoreFunc};
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::{random_bf16, random_f32};
use half::bf16;

pub fn bf16s(xs: &Tensor) -> Vec<bf16> {
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn f32s(xs: &Tensor) -> Vec<f32> {
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn u32s(xs: &Tensor) -> Vec<u32> {
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn bits(xs: &[f32]) -> Vec<u32> {
    xs.iter().map(|v| v.to_bits()).collect()
}

pub fn tensor<T: candle_core::WithDType>(data: Vec<T>, shape: &[usize]) -> Tensor {
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

pub fn input(t: usize, dim: usize, seed: u64) -> Tensor {
    tensor(random_bf16(t * dim, 1.0, seed), &[t, dim])
}

/// A small layer in the released manner: fp4 experts, fp8 shared expert.
pub fn config(n_routed: usize, n_activated: usize) -> MoeConfig {
    MoeConfig {
        dim: 64,
        inter_dim: 32,
        n_routed,
        n_activated,
        score_func: ScoreFunc::SqrtSoftplus,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.5,
        swiglu_limit: 10.0,
        expert_format: WeightFormat::Fp4,
        shared_format: WeightFormat::Fp8,
        bias_vl: true,
    }
}

/// `out` rows of `k` columns in `format`, with values of about `1/sqrt(k)`.
fn linear(
    all: &mut HashMap<String, Tensor>,
    name: &str,
    k: usize,
    n: usize,
    format: WeightFormat,
    seed: u64,
) {
    let noise = random_f32(n * k, 1.0, seed);
    let byte = |v: f32| (v.to_bits() >> 7) as u8;
    match format {
        WeightFormat::Fp4 => {
            let codes: Vec<u8> = noise[..n * k / 2].iter().map(|v| byte(*v)).collect();
            all.insert(format!("{name}.weight"), tensor(codes, &[n, k / 2]));
            let scales: Vec<u8> = noise[..n * k / 32]
                .iter()
                .map(|v| 122 + byte(*v) % 4)
                .collect();
            all.insert(format!("{name}.scale"), tensor(scales, &[n, k / 32]));
        }
        WeightFormat::Fp8 => {
            // Exponents up to 8, so no NaN code.
            let codes: Vec<u8> = noise.iter().map(|v| byte(*v) & 0xBF).collect();
            all.insert(format!("{name}.weight"), tensor(codes, &[n, k]));
            let tiles = n.div_ceil(32) * (k / 32);
            let scales: Vec<u8> = noise[..tiles].iter().map(|v| 123 + byte(*v) % 3).collect();
            all.insert(
                format!("{name}.scale"),
                tensor(scales, &[n.div_ceil(32), k / 32]),
            );
        }
        WeightFormat::Bf16 | WeightFormat::F32 => {
            let std = 1.0 / (k as f32).sqrt();
            let values = noise.iter().map(|v| bf16::from_f32(v * std)).collect();
            all.insert(format!("{name}.weight"), tensor::<bf16>(values, &[n, k]));
        }
    }
}

pub fn weights(cfg: &MoeConfig, seed: u64) -> HashMap<String, Tensor> {
    let (e, dim, inter) = (cfg.n_routed, cfg.dim, cfg.inter_dim);
    let std = 1.0 / (dim as f32).sqrt();
    let mut all = HashMap::from([
        (
            "gate.weight".into(),
            tensor(random_bf16(e * dim, std, seed), &[e, dim]),
        ),
        (
            "gate.bias".into(),
            tensor(random_f32(e, 0.2, seed + 1), &[e]),
        ),
        (
            "gate.bias_vl".into(),
            tensor(random_f32(e, 0.2, seed + 2), &[e]),
        ),
    ]);
    let experts = (0..e).map(|j| (format!("experts.{j}"), cfg.expert_format));
    let shared = [("shared_experts".to_owned(), cfg.shared_format)];
    for (i, (name, format)) in experts.chain(shared).enumerate() {
        let seed = seed + 10 + 3 * i as u64;
        linear(&mut all, &format!("{name}.w1"), dim, inter, format, seed);
        linear(
            &mut all,
            &format!("{name}.w2"),
            inter,
            dim,
            format,
            seed + 1,
        );
        linear(
            &mut all,
            &format!("{name}.w3"),
            dim,
            inter,
            format,
            seed + 2,
        );
    }
    all
}

pub fn build(cfg: &MoeConfig, weights: &HashMap<String, Tensor>, comm: Arc<dyn Comm>) -> Moe {
    let weights = Weights::from_tensors(weights.clone()).unwrap();
    Moe::new(cfg, comm, weights.var_builder(&Device::Cpu)).unwrap()
}

pub fn moe(cfg: &MoeConfig, seed: u64) -> Moe {
    build(cfg, &weights(cfg, seed), Arc::new(LocalComm))
}
