//! From codes back to values: whole weights for tests and peers, single rows for tables that are
//! looked up.

use candle_core::{Device, Tensor};
use deepseek_v41_core::{
    Result,
    cpu::{self, WeightRows},
};
use half::bf16;

use crate::formats::{e4m3, e8m0};

/// The values of a quantised weight, `[rows, cols]` f32.
///
/// # Errors
/// candle refuses the tensor.
pub fn dequant<W: WeightRows>(weight: &W) -> Result<Tensor> {
    let (rows, cols) = (weight.rows(), weight.cols());
    Ok(Tensor::from_vec(
        dequant_values(weight),
        (rows, cols),
        &Device::Cpu,
    )?)
}

/// [`dequant`] rounded to bf16, which is exact but for scales below 2^-124: the form in which the
/// reference keeps `wo_a`.
///
/// # Errors
/// candle refuses the tensor.
pub fn dequant_bf16<W: WeightRows>(weight: &W) -> Result<Tensor> {
    let values: Vec<bf16> = dequant_values(weight)
        .into_iter()
        .map(cpu::round_bf16)
        .collect();
    Ok(Tensor::from_vec(
        values,
        (weight.rows(), weight.cols()),
        &Device::Cpu,
    )?)
}

fn dequant_values<W: WeightRows>(weight: &W) -> Vec<f32> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let mut values = vec![0f32; rows * cols];
    for (row, out) in values.chunks_mut(cols.max(1)).enumerate() {
        weight.decode(row, 0, out);
    }
    values
}

/// e4m3 codes with one e8m0 byte per `group` of them, as in the rows of an embedding table, to bf16.
/// A last group may be shorter.
pub fn dequant_fp8_slice(codes: &[u8], scales: &[u8], group: usize, out: &mut [bf16]) {
    let groups = codes
        .chunks(group.max(1))
        .zip(out.chunks_mut(group.max(1)))
        .zip(scales);
    for ((codes, out), byte) in groups {
        let scale = e8m0::decode(*byte);
        for (o, code) in out.iter_mut().zip(codes) {
            *o = cpu::round_bf16(e4m3::decode(*code) * scale);
        }
    }
}
