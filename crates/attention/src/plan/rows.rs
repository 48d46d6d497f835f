//! Host lists on their way to tensors.

use std::ops::Range;

use candle_core::{Device, Tensor};
use deepseek_v41_core::{Result, upload};

pub(crate) fn i32_tensor(values: Vec<i32>, device: &Device) -> Result<Tensor> {
    let len = values.len();
    upload(values, len, device)
}

/// Rows of different lengths on their way to one `[T, n]` tensor.
#[derive(Default)]
pub(crate) struct RaggedRows {
    values: Vec<i32>,
    ends: Vec<usize>,
}

impl RaggedRows {
    /// Appends the row `positions.map(row)`.
    pub(crate) fn push(
        &mut self,
        positions: Range<u32>,
        row: impl Fn(u32) -> Result<i32>,
    ) -> Result<()> {
        for position in positions {
            self.values.push(row(position)?);
        }
        self.ends.push(self.values.len());
        Ok(())
    }

    /// As wide as the longest row, `-1` after the end of the others.
    pub(crate) fn into_tensor(self, device: &Device) -> Result<Tensor> {
        self.at_least(0, device)
    }

    /// [`RaggedRows::into_tensor`], `width` wide at least.
    pub(crate) fn at_least(self, width: usize, device: &Device) -> Result<Tensor> {
        let starts = || std::iter::once(0).chain(self.ends.iter().copied());
        let width = starts()
            .zip(&self.ends)
            .map(|(start, end)| end - start)
            .max()
            .unwrap_or(0)
            .max(width);
        let tokens = self.ends.len();
        let mut out = vec![-1; tokens * width];
        for (token, (start, &end)) in starts().zip(&self.ends).enumerate() {
            out[token * width..][..end - start].copy_from_slice(&self.values[start..end]);
        }
        upload(out, (tokens, width), device)
    }
}
