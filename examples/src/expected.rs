//! A recording of the official code: a safetensors file of named arrays.

use std::path::Path;

use bytes::Bytes;
use candle_core::{Device, Tensor};
use deepseek_v41::{
    Error, Result, Weights,
    core::{RawTensor, StoredDtype, WeightError},
};

/// Named arrays of one recording.
pub struct Expected(Weights);

impl Expected {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let label = path.display().to_string();
        Ok(Self(Weights::from_shards(vec![(
            label,
            Bytes::from(bytes),
        )])?))
    }

    /// Whether it has an array of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// The array as stored.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn raw(&self, name: &str) -> Result<&RawTensor> {
        self.0.get(name)
    }

    /// Shape of an array.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.raw(name)?.shape)
    }

    /// Every name, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|t| t.name.as_str())
    }

    /// The array in its own dtype on `device`.
    ///
    /// # Errors
    /// There is none of this name, or candle has no such dtype.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        self.raw(name)?.to_tensor(device)
    }

    /// The arrays that `rename` gives a name, as a checkpoint of their own.
    pub fn select(&self, rename: impl Fn(&str) -> Option<String>) -> Weights {
        Weights::from_raw(self.0.iter().filter_map(|t| {
            Some(RawTensor {
                name: rename(&t.name)?,
                ..t.clone()
            })
        }))
    }

    /// An I32, I64 or U8 array.
    ///
    /// # Errors
    /// There is none of this name, or it is of another kind.
    pub fn integers(&self, name: &str) -> Result<Vec<i64>> {
        let raw = self.raw(name)?;
        match raw.dtype {
            StoredDtype::I32 => Ok(raw
                .bytes
                .chunks_exact(4)
                .map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect()),
            StoredDtype::I64 => Ok(raw
                .bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
                .collect()),
            StoredDtype::U8 => Ok(raw.bytes.iter().map(|b| i64::from(*b)).collect()),
            found => {
                let expected = vec![StoredDtype::I32, StoredDtype::I64, StoredDtype::U8];
                Err(raw.error(WeightError::Dtype { expected, found }))
            }
        }
    }

    /// A BF16 or F32 array, widened.
    ///
    /// # Errors
    /// There is none of this name, or it is of another kind.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        self.raw(name)?.to_f32()
    }

    /// Some rows of a float array: fixed leading indices `at`, then the given `rows` of the next
    /// dimension, end to end.
    ///
    /// # Errors
    /// As [`Expected::floats`], or an index past its dimension.
    pub fn rows(&self, name: &str, at: &[usize], rows: &[usize]) -> Result<Vec<f32>> {
        let shape = self.shape(name)?;
        let mut data = &self.floats(name)?[..];
        for (index, dim) in at.iter().zip(shape) {
            let size = data.len() / dim.max(&1);
            data = data
                .get(index * size..(index + 1) * size)
                .ok_or_else(|| past(name, *index))?;
        }
        let size = data.len() / shape.get(at.len()).copied().unwrap_or(1).max(1);
        let mut out = Vec::with_capacity(rows.len() * size);
        for row in rows {
            let part = data
                .get(row * size..(row + 1) * size)
                .ok_or_else(|| past(name, *row))?;
            out.extend_from_slice(part);
        }
        Ok(out)
    }
}

fn past(name: &str, index: usize) -> Error {
    Error::value(
        format!("recorded array `{name}`"),
        format!("has no index {index}"),
    )
}
