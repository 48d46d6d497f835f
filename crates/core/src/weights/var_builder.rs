//! Walking the name tree of a checkpoint.

use std::fmt::Display;

use bytes::{Bytes, BytesMut};
use candle_core::{DType, Device, Tensor};

use super::{RawTensor, StoredDtype, Weights};
use crate::{Error, Result, WeightError};

/// A place in the name tree of a checkpoint, as candle's `VarBuilder`: `vb.pp("attn").pp("wq_a")`.
///
/// Unlike candle's it never casts: a tensor comes as it is stored, and a shape or dtype other than
/// the one asked for is an error that names the tensor and its file.
#[derive(Debug, Clone)]
pub struct VarBuilder {
    weights: Weights,
    device: Device,
    prefix: String,
}

/// A rank's part of a tensor that is split along one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// The split dimension.
    pub dim: usize,
    /// This rank.
    pub rank: usize,
    /// Number of equal parts.
    pub world_size: usize,
}

impl Default for Shard {
    /// The whole tensor.
    fn default() -> Self {
        Self {
            dim: 0,
            rank: 0,
            world_size: 1,
        }
    }
}

impl VarBuilder {
    pub(super) fn new(weights: Weights, device: Device) -> Self {
        Self {
            weights,
            device,
            prefix: String::new(),
        }
    }

    /// The subtree `name`.
    pub fn pp(&self, name: impl Display) -> Self {
        Self {
            prefix: self.full_name(name),
            ..self.clone()
        }
    }

    /// The full name of `name` at this place.
    pub fn full_name(&self, name: impl Display) -> String {
        if self.prefix.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.prefix)
        }
    }

    /// Where this builder stands, without a trailing dot.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Where [`VarBuilder::tensor`] puts what it loads.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The whole checkpoint.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Whether the checkpoint has `name` at this place.
    pub fn contains(&self, name: &str) -> bool {
        self.weights.contains(&self.full_name(name))
    }

    /// The tensor as stored, with one of the `allowed` dtypes and exactly this shape.
    ///
    /// # Errors
    /// [`Error::Weight`]: missing, another dtype, another shape.
    pub fn raw(&self, name: &str, allowed: &[StoredDtype], shape: &[usize]) -> Result<RawTensor> {
        let tensor = self.weights.get(&self.full_name(name))?;
        if !allowed.contains(&tensor.dtype) {
            return Err(tensor.error(WeightError::Dtype {
                expected: allowed.to_vec(),
                found: tensor.dtype,
            }));
        }
        if tensor.shape != shape {
            return Err(tensor.error(WeightError::Shape {
                expected: shape.to_vec(),
                found: tensor.shape.clone(),
            }));
        }
        Ok(tensor.clone())
    }

    /// A rank's part of [`VarBuilder::raw`]; `shape` is the full one. A split of dimension 0 shares
    /// the stored bytes, any other copies its part.
    ///
    /// # Errors
    /// As [`VarBuilder::raw`]; [`Error::Shape`] when the dimension does not divide evenly.
    pub fn raw_sharded(
        &self,
        name: &str,
        allowed: &[StoredDtype],
        shape: &[usize],
        shard: Shard,
    ) -> Result<RawTensor> {
        let mut tensor = self.raw(name, allowed, shape)?;
        if shard.world_size == 1 {
            return Ok(tensor);
        }
        let whole = shape.get(shard.dim).copied().unwrap_or(0);
        if shard.rank >= shard.world_size || whole == 0 || whole % shard.world_size != 0 {
            return Err(Error::shape(
                "raw_sharded",
                format!("`{}` {shape:?} cannot be split as {shard:?}", tensor.name),
            ));
        }
        let part = whole / shard.world_size;
        let outer: usize = shape[..shard.dim].iter().product();
        let inner: usize = shape[shard.dim + 1..].iter().product();
        // F4 counts nibbles: a part must still be whole bytes.
        let bits = part * inner * tensor.dtype.bitsize();
        if !bits.is_multiple_of(8) {
            return Err(Error::shape(
                "raw_sharded",
                format!(
                    "`{}` {shape:?} cannot be split as {shard:?} within a byte",
                    tensor.name
                ),
            ));
        }
        let run = bits / 8;
        let (row, skip) = (run * shard.world_size, shard.rank * run);
        tensor.bytes = if shard.dim == 0 {
            tensor.bytes.slice(skip..skip + run)
        } else {
            let mut out = BytesMut::with_capacity(outer * run);
            for i in 0..outer {
                out.extend_from_slice(&tensor.bytes[i * row + skip..i * row + skip + run]);
            }
            Bytes::from(out)
        };
        tensor.shape[shard.dim] = part;
        Ok(tensor)
    }

    /// The tensor on [`VarBuilder::device`], stored as exactly `dtype` (BF16, F32, …).
    ///
    /// # Errors
    /// As [`VarBuilder::raw`].
    pub fn tensor(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let stored = match dtype {
            DType::BF16 => StoredDtype::BF16,
            DType::F32 => StoredDtype::F32,
            DType::F16 => StoredDtype::F16,
            DType::U8 => StoredDtype::U8,
            DType::U32 => StoredDtype::U32,
            DType::I64 => StoredDtype::I64,
            other => {
                return Err(Error::shape(
                    "tensor",
                    format!("no stored dtype for {other:?}"),
                ));
            }
        };
        self.raw(name, &[stored], shape)?.to_tensor(&self.device)
    }

    /// A BF16 or F32 tensor widened to F32 on [`VarBuilder::device`].
    ///
    /// # Errors
    /// As [`VarBuilder::raw`].
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let raw = self.raw(name, &[StoredDtype::BF16, StoredDtype::F32], shape)?;
        Ok(Tensor::from_vec(raw.to_f32()?, shape, &self.device)?)
    }
}
