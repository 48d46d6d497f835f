//! Checkpoints: safetensors directories, memory-mapped, every tensor as it is stored.
//!
//! Quantised weights cannot go through candle's own loaders: those cast to one dtype, and a scale
//! byte does not survive a numeric cast. Here a weight stays the bytes of the file ([`RawTensor`])
//! until the layer that owns it says what they mean.

mod dir;
mod fingerprint;
mod header;
mod source;
mod var_builder;

use std::{path::Path, sync::Arc};

use bytes::Bytes;
use candle_core::{DType, Device, Tensor};
pub use dir::LoadPolicy;
/// The dtypes a checkpoint file can hold.
pub use safetensors::Dtype as StoredDtype;
pub use source::Weights;
pub use var_builder::{Shard, VarBuilder};

use crate::{Error, Result, WeightError};

/// One tensor as it lies in the checkpoint: name, stored dtype, shape and bytes (not copied).
#[derive(Debug, Clone)]
pub struct RawTensor {
    /// Full name, such as `layers.3.attn.wq_a.scale`.
    pub name: String,
    /// The file it comes from, when there is one.
    pub file: Option<Arc<Path>>,
    /// Type of the stored elements.
    pub dtype: StoredDtype,
    /// Shape in stored elements (packed fp4 counts bytes).
    pub shape: Vec<usize>,
    /// Little-endian, row-major.
    pub bytes: Bytes,
}

impl RawTensor {
    /// An [`Error::Weight`] about this tensor.
    pub fn error(&self, reason: WeightError) -> Error {
        Error::Weight {
            name: self.name.clone(),
            file: self.file.as_deref().map(Path::to_path_buf),
            reason,
        }
    }

    /// Copies the elements to `device`. Types of one byte without arithmetic in candle (fp8, fp4,
    /// scales, I8) arrive as `U8`: the owner knows what they mean.
    ///
    /// # Errors
    /// The dtype has no counterpart in candle, or the device refuses the copy.
    pub fn to_tensor(&self, device: &Device) -> Result<Tensor> {
        let dtype = match self.dtype {
            StoredDtype::BF16 => DType::BF16,
            StoredDtype::F16 => DType::F16,
            StoredDtype::F32 => DType::F32,
            StoredDtype::F64 => DType::F64,
            StoredDtype::I32 => DType::I32,
            StoredDtype::I64 => DType::I64,
            StoredDtype::U32 => DType::U32,
            StoredDtype::U8
            | StoredDtype::I8
            | StoredDtype::BOOL
            | StoredDtype::F8_E4M3
            | StoredDtype::F8_E8M0 => DType::U8,
            found => {
                return Err(self.error(WeightError::Dtype {
                    expected: Vec::new(),
                    found,
                }));
            }
        };
        Ok(Tensor::from_raw_buffer(
            &self.bytes,
            dtype,
            &self.shape,
            device,
        )?)
    }

    /// The elements widened to f32, for BF16 and F32 tensors.
    ///
    /// # Errors
    /// Any other stored dtype.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        match self.dtype {
            StoredDtype::F32 => Ok(self
                .bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect()),
            StoredDtype::BF16 => Ok(self
                .bytes
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                .collect()),
            found => Err(self.error(WeightError::Dtype {
                expected: vec![StoredDtype::BF16, StoredDtype::F32],
                found,
            })),
        }
    }
}
