//! Quantised products and the linear layers made of them.

use bytes::Bytes;
use candle_core::Tensor;
use deepseek_v41::{
    Result,
    quant::{Fp4Weight, Fp8Weight, Linear, QuantizedActivation, WeightFormat, fp4_gemm, fp8_gemm},
};

use half::bf16;

use crate::case::{Case, bf16s};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    let kind = case.name;
    if kind.starts_with("fp8_gemm_") {
        let weight = fp8_weight(case)?;
        let out = fp8_gemm(&activation(case)?, &weight)?;
        product(case, &out)?;
    } else if kind.starts_with("fp4_gemm_") {
        let shape = case.shape("b")?;
        let (rows, cols) = (shape[0], 2 * shape[1]);
        let (codes, scales) = operand(case)?;
        let out = fp4_gemm(
            &activation(case)?,
            &Fp4Weight::new(codes, scales, rows, cols)?,
        )?;
        product(case, &out)?;
    } else if kind.starts_with("linear_") {
        linear(case, WeightFormat::Fp8, "w8", "w8_s", "y8")?;
        linear(case, WeightFormat::Fp4, "w4", "w4_s", "y4")?;
    } else {
        return Ok(false);
    }
    Ok(true)
}

fn activation(case: &Case<'_>) -> Result<QuantizedActivation> {
    Ok(QuantizedActivation {
        data: case.tensor("a")?,
        scale: case.tensor("a_s")?,
    })
}

fn operand(case: &Case<'_>) -> Result<(Bytes, Bytes)> {
    Ok((case.bytes("b")?.into(), case.bytes("b_s")?.into()))
}

/// Tiles as wide as the columns one scale covers.
fn fp8_weight(case: &Case<'_>) -> Result<Fp8Weight> {
    let (shape, scales) = (case.shape("b")?, case.shape("b_s")?);
    let tile = shape[1] / scales[1].max(1);
    let (rows, cols) = (shape[0], shape[1]);
    let (codes, scales) = operand(case)?;
    Fp8Weight::new(codes, scales, rows, cols, tile)
}

fn product(case: &mut Case<'_>, out: &Tensor) -> Result<()> {
    case.one_ulp(out, "out")?;
    let exact: Vec<bf16> = case
        .f32s("exact")?
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    case.one_ulp_of("exact", &bf16s(out)?, &exact)
}

fn linear(case: &mut Case<'_>, format: WeightFormat, w: &str, s: &str, y: &str) -> Result<()> {
    let (xs, out_dim) = (case.tensor("x")?, case.shape(w)?[0]);
    let in_dim = xs.dims()[1];
    let vb = case.weights_named(&[(w, "weight"), (s, "scale")]);
    let out = Linear::new(in_dim, out_dim, format, vb)?.forward(&xs)?;
    case.one_ulp(&out, y)
}
