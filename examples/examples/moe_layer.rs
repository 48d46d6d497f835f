//! A mixture of experts used alone: where tokens go, and that company does not change a token.
//!
//!     cargo run --release --example moe_layer
//!
//! Builds a layer of eight bf16 experts from made-up weights, prints each token's experts and weights,
//! how the experts share the work, and compares a batch with its tokens one by one, bit for bit.

use std::{collections::HashMap, sync::Arc};

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Result, Weights,
    core::LocalComm,
    moe::{Moe, MoeConfig, ScoreFunc, group_tokens},
    quant::WeightFormat,
};

/// Made-up bf16 weights: the example needs no checkpoint.
fn noise(rows: usize, cols: usize, seed: usize) -> Result<Tensor> {
    let value = |i: usize| {
        let hash = (i + seed * 7919).wrapping_mul(2_654_435_761) >> 8;
        (hash % 2001) as f32 / 1000.0 - 1.0
    };
    let data = (0..rows * cols)
        .map(|i| value(i) / (cols as f32).sqrt() * 2.0)
        .collect();
    Ok(Tensor::from_vec::<_, f32>(data, (rows, cols), &Device::Cpu)?.to_dtype(DType::BF16)?)
}

#[allow(
    clippy::print_stdout,
    reason = "the routes are what this program is for"
)]
fn main() -> Result<()> {
    let cfg = MoeConfig {
        dim: 64,
        inter_dim: 32,
        n_routed: 8,
        n_activated: 2,
        score_func: ScoreFunc::SqrtSoftplus,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.5,
        swiglu_limit: 10.0,
        expert_format: WeightFormat::Bf16,
        shared_format: WeightFormat::Bf16,
        bias_vl: false,
    };
    let mut weights = HashMap::from([
        ("gate.weight".to_owned(), noise(8, 64, 1)?),
        // Selects expert 3 more often, without giving it more weight where it is selected.
        (
            "gate.bias".to_owned(),
            Tensor::new(&[0f32, 0., 0., 0.3, 0., 0., 0., 0.], &Device::Cpu)?,
        ),
    ]);
    let names = (0..8)
        .map(|j| format!("experts.{j}"))
        .chain(["shared_experts".to_owned()]);
    for (i, name) in names.enumerate() {
        weights.insert(format!("{name}.w1.weight"), noise(32, 64, 10 + i)?);
        weights.insert(format!("{name}.w3.weight"), noise(32, 64, 30 + i)?);
        weights.insert(format!("{name}.w2.weight"), noise(64, 32, 50 + i)?);
    }
    let vb = Weights::from_tensors(weights)?.var_builder(&Device::Cpu);
    let moe = Moe::new(&cfg, Arc::new(LocalComm), vb)?;

    let xs = noise(6, 64, 99)?.affine(8.0, 0.0)?;
    let routing = moe.gate().forward(&xs, None)?;
    let experts = routing.experts.to_vec2::<u32>()?;
    for (token, (e, w)) in experts
        .iter()
        .zip(routing.weights.to_vec2::<f32>()?)
        .enumerate()
    {
        println!(
            "token {token}: expert {} x {:.3}, expert {} x {:.3}",
            e[0], w[0], e[1], w[1]
        );
    }
    for (e, pairs) in group_tokens(&experts.concat(), 0..8).active() {
        let tokens: Vec<u32> = pairs.iter().map(|pair| pair / 2).collect();
        println!("expert {e} runs once, over tokens {tokens:?}");
    }

    let batch = moe
        .forward(&xs, None)?
        .to_dtype(DType::F32)?
        .to_vec2::<f32>()?;
    for (token, row) in batch.iter().enumerate() {
        let alone = moe
            .forward(&xs.narrow(0, token, 1)?, None)?
            .to_dtype(DType::F32)?;
        assert_eq!(&alone.to_vec2::<f32>()?[0], row, "token {token}");
    }
    println!(
        "each token alone gives the bits of the batch; {:.3?} ...",
        &batch[0][..4]
    );
    Ok(())
}
