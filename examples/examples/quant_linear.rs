//! The quant crate used alone: a weight matrix in fp8 and fp4, and what each costs in precision.
//!
//!     cargo run --release --example quant_linear
//!
//! Quantises a made-up f32 matrix to both formats with the crate's codecs, loads them as layers, and
//! compares their outputs with the f32 product:
//!
//! ```text
//! f32   131072 bytes
//! fp8    32800 bytes   relative error 0.02
//! fp4    17408 bytes   relative error 0.06
//! ```

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Result, Weights,
    quant::{FP8_TILE, Linear, WeightFormat, e2m1, e4m3, e8m0},
};

const ROWS: usize = 128;
const COLS: usize = 256;

/// Codes in tiles of 32 × 32, each scaled by the power of two that brings its largest value to 448.
fn to_fp8(w: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let tiles_per_row = COLS / FP8_TILE;
    let tile_of = |i: usize| i / COLS / FP8_TILE * tiles_per_row + i % COLS / FP8_TILE;
    let mut amax = vec![1e-4f32; ROWS / FP8_TILE * tiles_per_row];
    for (i, v) in w.iter().enumerate() {
        amax[tile_of(i)] = amax[tile_of(i)].max(v.abs());
    }
    let scales: Vec<f32> = amax.iter().map(|a| e8m0::pow2ceil(a / e4m3::MAX)).collect();
    let codes = w
        .iter()
        .enumerate()
        .map(|(i, v)| e4m3::encode(v / scales[tile_of(i)]))
        .collect();
    (codes, scales.into_iter().map(e8m0::encode).collect())
}

/// Two codes a byte, one scale per 32 columns of a row.
fn to_fp4(w: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (mut packed, mut scales) = (Vec::new(), Vec::new());
    for group in w.chunks(32) {
        let amax = group.iter().fold(1e-4f32, |m, v| m.max(v.abs()));
        let scale = e8m0::pow2ceil(amax / e2m1::MAX);
        scales.push(e8m0::encode(scale));
        let code = |v: f32| e2m1::encode(v / scale);
        packed.extend(
            group
                .chunks(2)
                .map(|pair| e2m1::pack(code(pair[0]), code(pair[1]))),
        );
    }
    (packed, scales)
}

fn layer(format: WeightFormat, weight: Tensor, scale: Tensor) -> Result<Linear> {
    let tensors = HashMap::from([("weight".to_owned(), weight), ("scale".to_owned(), scale)]);
    Linear::new(
        COLS,
        ROWS,
        format,
        Weights::from_tensors(tensors)?.var_builder(&Device::Cpu),
    )
}

fn relative_error(y: &Tensor, exact: &Tensor) -> Result<f32> {
    let diff = (y.to_dtype(DType::F32)? - exact)?
        .sqr()?
        .sum_all()?
        .to_scalar::<f32>()?;
    Ok((diff / exact.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt())
}

#[allow(clippy::print_stdout, reason = "the table is what this program is for")]
fn main() -> Result<()> {
    let cpu = &Device::Cpu;
    let w: Vec<f32> = (0..ROWS * COLS)
        .map(|i| (i as f32 * 0.37).sin() / 16.0)
        .collect();
    let xs = Tensor::randn(0f32, 1.0, (4, COLS), cpu)?.to_dtype(DType::BF16)?;
    let exact = xs
        .to_dtype(DType::F32)?
        .matmul(&Tensor::from_slice(&w, (ROWS, COLS), cpu)?.t()?)?;

    let (codes, scales) = to_fp8(&w);
    let fp8 = layer(
        WeightFormat::Fp8,
        Tensor::from_vec(codes, (ROWS, COLS), cpu)?,
        Tensor::from_vec(scales, (ROWS / FP8_TILE, COLS / FP8_TILE), cpu)?,
    )?;
    let (packed, scales) = to_fp4(&w);
    let fp4 = layer(
        WeightFormat::Fp4,
        Tensor::from_vec(packed, (ROWS, COLS / 2), cpu)?,
        Tensor::from_vec(scales, (ROWS, COLS / 32), cpu)?,
    )?;

    println!("f32 {:8} bytes", 4 * w.len());
    for (name, layer) in [("fp8", fp8), ("fp4", fp4)] {
        let error = relative_error(&layer.forward(&xs)?, &exact)?;
        println!(
            "{name} {:8} bytes   relative error {error:.2}",
            layer.weight_bytes()
        );
    }
    Ok(())
}
