//! The gate of a mixture of experts.

use deepseek_v41::{
    Result,
    moe::{Gate, MoeConfig, ScoreFunc},
    quant::WeightFormat,
};

use crate::{
    case::{Case, flat},
    tolerance::ROUTE_WEIGHTS,
};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    let score_func = match case.name.split('_').nth(1) {
        Some("softmax") => ScoreFunc::Softmax,
        Some("sigmoid") => ScoreFunc::Sigmoid,
        Some("sqrtsoftplus") => ScoreFunc::SqrtSoftplus,
        _ => return Ok(false),
    };
    let shape = case.shape("weight")?;
    let cfg = MoeConfig {
        dim: shape[1],
        n_routed: shape[0],
        n_activated: case.arg("topk")?,
        score_func,
        gate_temp: case.arg("gate_temp")?,
        norm_topk_prob: case.arg("norm_topk_prob")?,
        route_scale: case.arg("route_scale")?,
        bias_vl: case.has("bias_vl"),
        // The gate has no experts.
        inter_dim: 32,
        swiglu_limit: 0.0,
        expert_format: WeightFormat::Bf16,
        shared_format: WeightFormat::Bf16,
    };
    let mask = match case.has("image_mask") {
        true => Some(case.tensor("image_mask")?),
        false => None,
    };
    let routing = Gate::new(&cfg, case.weights())?.forward(&case.tensor("x")?, mask.as_ref())?;
    // A selection is a set: order both by expert.
    let ordered = |experts: &[u32], weights: &[f32]| -> (Vec<u32>, Vec<f32>) {
        let pairs = experts
            .iter()
            .copied()
            .zip(weights.iter().copied())
            .collect::<Vec<_>>();
        let rows = pairs.chunks(cfg.n_activated).flat_map(|row| {
            let mut row = row.to_vec();
            row.sort_by_key(|(expert, _)| *expert);
            row
        });
        rows.unzip()
    };
    let got = ordered(
        &flat::<u32>(&routing.experts)?,
        &flat::<f32>(&routing.weights)?,
    );
    let want = ordered(&case.ids("indices")?, &case.f32s("weights")?);
    case.exact("experts", &got.0, &want.0)?;
    case.close("weights", &got.1, &want.1, ROUTE_WEIGHTS)?;
    Ok(true)
}
