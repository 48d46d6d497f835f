//! Experts, and a whole mixture of them.

use std::sync::Arc;

use deepseek_v41::{
    Result,
    core::LocalComm,
    moe::{Expert, Moe, MoeConfig, ScoreFunc},
    quant::WeightFormat,
};
use half::bf16;

use crate::{
    case::{Case, f32s},
    tolerance::EXPERT,
};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    match case.name.split('_').collect::<Vec<_>>().as_slice() {
        ["moe"] => moe(case)?,
        ["expert", "fp4", _] => expert(case, WeightFormat::Fp4)?,
        ["expert", "fp8", _] => expert(case, WeightFormat::Fp8)?,
        ["expert", "bf16", _] => expert(case, WeightFormat::Bf16)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn config(case: &Case<'_>, dim: usize, inter_dim: usize, swiglu_limit: f32) -> Result<MoeConfig> {
    let routed = case.has("gate.weight");
    Ok(MoeConfig {
        dim,
        inter_dim,
        n_routed: if routed {
            case.shape("gate.weight")?[0]
        } else {
            1
        },
        n_activated: if routed { case.noted("top")? } else { 1 },
        score_func: ScoreFunc::SqrtSoftplus,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: if routed {
            case.noted("route_scale")?
        } else {
            1.0
        },
        swiglu_limit,
        expert_format: WeightFormat::Fp4,
        shared_format: WeightFormat::Fp8,
        bias_vl: case.has("gate.bias_vl"),
    })
}

fn expert(case: &mut Case<'_>, format: WeightFormat) -> Result<()> {
    let inter_dim = case.shape("w1.weight")?[0];
    let dim = case.shape("x")?[1];
    let cfg = config(case, dim, inter_dim, case.noted("swiglu_limit")?)?;
    let expert = Expert::new(&cfg, format, case.weights())?;
    let (xs, route) = (case.bf16s("x")?, case.f32s("route")?);
    for (part, route) in [("y", None), ("y_routed", Some(route.as_slice()))] {
        let mut out = vec![bf16::ZERO; xs.len()];
        expert.forward_slice(&xs, route, &mut out)?;
        let got: Vec<f32> = out.iter().map(|v| v.to_f32()).collect();
        let want = case.f32s(part)?;
        case.rms(part, &got, &want, EXPERT)?;
    }
    Ok(())
}

fn moe(case: &mut Case<'_>) -> Result<()> {
    let inter_dim = case.shape("shared_experts.w1.weight")?[0];
    let xs = case.tensor("x")?.flatten(0, 1)?;
    let cfg = config(case, xs.dims()[1], inter_dim, case.noted("limit")?)?;
    let mask = case.tensor("image_mask")?.flatten_all()?;
    let moe = Moe::new(&cfg, Arc::new(LocalComm), case.weights())?;
    let got = f32s(&moe.forward(&xs, Some(&mask))?)?;
    let want = case.f32s("y")?;
    case.rms("y", &got, &want, EXPERT)
}
