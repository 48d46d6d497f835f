//! From a checkpoint to weights: which tensors a format consists of, and how they split over ranks.

use bytes::Bytes;
use candle_core::Device;
use deepseek_v41_core::{
    Error, Result, Shard, StoredDtype, VarBuilder, WeightError,
    cpu::{Bf16Rows, F32Rows},
};

use crate::{
    linear::{FP4_CODES, FP8_CODES, Linear, SCALES, WeightFormat, WideRows},
    weight::{FP4_GROUP, FP8_TILE, Fp4Weight, Fp8Weight},
};

/// The whole tensor.
pub(crate) const WHOLE: Shard = Shard {
    dim: 0,
    rank: 0,
    world_size: 1,
};

/// A rank's part of a layer whose full size is `[out_dim, in_dim]`.
pub(crate) fn linear(
    in_dim: usize,
    out_dim: usize,
    format: WeightFormat,
    vb: &VarBuilder,
    shard: Shard,
) -> Result<Linear> {
    on_device(stored(in_dim, out_dim, format, vb, shard)?, vb.device())
}

/// The layer as its file has it.
fn stored(
    in_dim: usize,
    out_dim: usize,
    format: WeightFormat,
    vb: &VarBuilder,
    shard: Shard,
) -> Result<Linear> {
    match format {
        WeightFormat::Bf16 => {
            let (rows, cols, bytes) =
                plain(in_dim, out_dim, &[StoredDtype::BF16], vb, shard).map(split)?;
            Ok(Linear::Bf16(bf16_rows(bytes, rows, cols)?))
        }
        WeightFormat::F32 => {
            let raw = plain(
                in_dim,
                out_dim,
                &[StoredDtype::BF16, StoredDtype::F32],
                vb,
                shard,
            )?;
            let dtype = raw.dtype;
            let (rows, cols, bytes) = split(raw);
            Ok(Linear::F32(if dtype == StoredDtype::BF16 {
                WideRows::Bf16(bf16_rows(bytes, rows, cols)?)
            } else {
                WideRows::F32(
                    F32Rows::new(bytes, rows, cols).ok_or_else(|| odd_length(rows, cols))?,
                )
            }))
        }
        WeightFormat::Fp8 => fp8(in_dim, out_dim, FP8_TILE, vb, shard).map(Linear::Fp8),
        WeightFormat::Fp4 => fp4(in_dim, out_dim, vb, shard).map(Linear::Fp4),
    }
}

/// e4m3 codes and their tiles' scales.
pub(crate) fn fp8(
    in_dim: usize,
    out_dim: usize,
    tile: usize,
    vb: &VarBuilder,
    shard: Shard,
) -> Result<Fp8Weight> {
    divides(vb, "input", in_dim, tile)?;
    // A rank must own whole tiles, or two ranks would need the same scale.
    let parts = [out_dim, in_dim][shard.dim.min(1)] / shard.world_size.max(1);
    if shard.world_size > 1 {
        divides(vb, "each rank's part", parts, tile)?;
    }
    let weight = vb.raw_sharded("weight", FP8_CODES, &[out_dim, in_dim], shard)?;
    let tiles = [out_dim.div_ceil(tile), in_dim / tile];
    let scale = vb.raw_sharded("scale", SCALES, &tiles, shard)?;
    let (rows, cols, codes) = split(weight);
    Fp8Weight::new(codes, scale.bytes, rows, cols, tile)
}

fn fp4(in_dim: usize, out_dim: usize, vb: &VarBuilder, shard: Shard) -> Result<Fp4Weight> {
    divides(vb, "input", in_dim, FP4_GROUP)?;
    if shard.world_size > 1 && shard.dim == 1 {
        divides(
            vb,
            "each rank's input",
            in_dim / shard.world_size,
            FP4_GROUP,
        )?;
    }
    // Released files hold packed bytes as I8; F4 counts elements instead.
    let stored = vb.weights().get(&vb.full_name("weight"))?.dtype;
    let weight = if stored == StoredDtype::F4 {
        if shard.world_size > 1 && shard.dim == 1 {
            return Err(Error::Unsupported {
                what: format!("`{}`: F4 split along its columns", vb.full_name("weight")),
            });
        }
        vb.raw_sharded("weight", &[StoredDtype::F4], &[out_dim, in_dim], shard)?
    } else {
        let mut raw = vb.raw_sharded("weight", FP4_CODES, &[out_dim, in_dim / 2], shard)?;
        raw.shape[1] *= 2;
        raw
    };
    let scale = vb.raw_sharded("scale", SCALES, &[out_dim, in_dim / FP4_GROUP], shard)?;
    let (rows, cols, packed) = split(weight);
    Fp4Weight::new(packed, scale.bytes, rows, cols)
}

/// The rows of a block-diagonal product: bf16, or e4m3 in tiles of 32 or 128.
pub(crate) fn grouped(
    in_dim: usize,
    out_dim: usize,
    vb: &VarBuilder,
    shard: Shard,
) -> Result<Linear> {
    if vb.weights().get(&vb.full_name("weight"))?.dtype == StoredDtype::BF16 {
        return linear(in_dim, out_dim, WeightFormat::Bf16, vb, shard);
    }
    // Older exports keep this weight in tiles of 128; the scale's shape tells.
    let scale = vb.weights().get(&vb.full_name("scale"))?;
    let tile = if scale.shape == [out_dim.div_ceil(128), in_dim / 128] {
        128
    } else {
        FP8_TILE
    };
    let weight = fp8(in_dim, out_dim, tile, vb, shard)?.rounded_to_bf16();
    on_device(Linear::Fp8(weight), vb.device())
}

fn plain(
    in_dim: usize,
    out_dim: usize,
    allowed: &[StoredDtype],
    vb: &VarBuilder,
    shard: Shard,
) -> Result<deepseek_v41_core::RawTensor> {
    vb.raw_sharded("weight", allowed, &[out_dim, in_dim], shard)
}

fn split(raw: deepseek_v41_core::RawTensor) -> (usize, usize, Bytes) {
    (raw.shape[0], raw.shape[1], raw.bytes)
}

fn bf16_rows(bytes: Bytes, rows: usize, cols: usize) -> Result<Bf16Rows> {
    Bf16Rows::new(bytes, rows, cols).ok_or_else(|| odd_length(rows, cols))
}

fn odd_length(rows: usize, cols: usize) -> Error {
    Error::shape(
        "linear",
        format!("the bytes of a [{rows}, {cols}] weight do not fit its shape"),
    )
}

fn divides(vb: &VarBuilder, what: &str, dim: usize, by: usize) -> Result<()> {
    if dim > 0 && dim.is_multiple_of(by) {
        return Ok(());
    }
    Err(Error::weight(
        vb.full_name("weight"),
        WeightError::Content(format!(
            "{what} dimension {dim} is not a positive multiple of {by}"
        )),
    ))
}

/// On a GPU with a copy of the weight there. The stored bytes stay: normally they are a mapped file.
#[cfg(feature = "cuda")]
fn on_device(linear: Linear, device: &Device) -> Result<Linear> {
    crate::cuda::upload(linear, device)
}

#[cfg(not(feature = "cuda"))]
fn on_device(linear: Linear, device: &Device) -> Result<Linear> {
    if device.is_cpu() {
        return Ok(linear);
    }
    Err(Error::Unsupported {
        what: "linear layers off the CPU: build with `--features cuda`".to_owned(),
    })
}
