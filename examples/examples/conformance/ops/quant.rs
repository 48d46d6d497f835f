//! Number formats: everything bit for bit.

use deepseek_v41::{
    Result,
    quant::{
        ActScale, ScaleFormat, act_quant_with, e2m1, fake_quant_fp4, fake_quant_fp8_with,
        fp4_act_quant,
        ops::{act_quant::fp8_scale, fp4_act_quant::fp4_scale},
    },
};

use crate::case::Case;

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    match case.name {
        "e2m1_round" => e2m1_round(case)?,
        "scales" => scales(case)?,
        name => match name.rsplit_once('_') {
            Some((kind, format)) if kind.starts_with("act_quant_b") => {
                let format = match format {
                    "ue8m0" => ActScale::E8M0,
                    "fp32" => ActScale::F32,
                    _ => return Ok(false),
                };
                act_quant(case, block(case, kind)?, format)?;
            }
            Some((kind, format)) if kind.starts_with("fp4_act_quant_b") => {
                let format = match format {
                    "e8m0" => ScaleFormat::E8M0,
                    "e4m3" => ScaleFormat::E4M3,
                    _ => return Ok(false),
                };
                fp4(case, block(case, kind)?, format)?;
            }
            _ => return Ok(false),
        },
    }
    Ok(true)
}

/// 32 of `act_quant_b32`.
fn block(case: &Case<'_>, kind: &str) -> Result<usize> {
    let digits = kind.rsplit('b').next().unwrap_or("");
    digits
        .parse()
        .map_err(|_| case.bad(format!("no block size in `{kind}`")))
}

fn act_quant(case: &mut Case<'_>, block: usize, format: ActScale) -> Result<()> {
    let xs = case.tensor("x")?;
    let quantised = act_quant_with(&xs, block, format)?;
    case.exact_tensor(&quantised.data, "q_bits")?;
    case.exact_tensor(&quantised.scale, "scale")?;
    case.exact_tensor(&fake_quant_fp8_with(&xs, block, format)?, "inplace")
}

fn fp4(case: &mut Case<'_>, block: usize, format: ScaleFormat) -> Result<()> {
    let xs = case.tensor("x")?;
    let quantised = fp4_act_quant(&xs, block, format)?;
    case.exact_tensor(&quantised.data, "packed")?;
    case.exact_tensor(&quantised.scale, "scale")?;
    case.exact_tensor(&fake_quant_fp4(&xs, block, format)?, "inplace")
}

fn e2m1_round(case: &mut Case<'_>) -> Result<()> {
    let codes: Vec<u8> = case.f32s("x")?.into_iter().map(e2m1::encode).collect();
    let values: Vec<f32> = codes.iter().map(|c| e2m1::decode(*c)).collect();
    let (want_codes, want_values) = (case.bytes("codes")?, case.f32s("values")?);
    case.exact("codes", &codes, &want_codes)?;
    case.exact_f32("values", &values, &want_values)
}

fn scales(case: &mut Case<'_>) -> Result<()> {
    let amax = case.f32s("amax")?;
    type Rule = fn(f32) -> f32;
    let rules: [(&str, Rule); 3] = [
        ("fp8_pow2", |amax| fp8_scale(amax, ActScale::E8M0)),
        ("fp4_pow2", |amax| fp4_scale(amax, ScaleFormat::E8M0)),
        ("fp4_e4m3", |amax| fp4_scale(amax, ScaleFormat::E4M3)),
    ];
    for (part, rule) in rules {
        let got: Vec<f32> = amax.iter().map(|a| rule(*a)).collect();
        let want = case.f32s(part)?;
        case.exact_f32(part, &got, &want)?;
    }
    Ok(())
}
