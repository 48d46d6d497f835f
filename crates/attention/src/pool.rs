//! A pool of rows, and the format they are stored in.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result};
use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::ops;

/// How the rows of KV and index-key pools are stored.
///
/// Only writing into a pool and reading from it know the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvFormat {
    /// Two bytes an element, as computed.
    #[default]
    Bf16,
}

/// Rows of `dim` bf16 values, addressed by physical row.
#[derive(Debug)]
pub struct KvPool {
    data: Tensor,
    rows: usize,
    dim: usize,
}

impl KvPool {
    /// A pool of `rows` rows of zeros. On the CPU the memory is committed as rows are written.
    ///
    /// # Errors
    /// The size does not fit a machine word, or the device has no room for it.
    pub fn new(rows: usize, dim: usize, device: &Device) -> Result<Self> {
        Ok(Self { data: lazy_zeros_bf16(rows, dim, device)?, rows, dim })
    }

    /// Physical rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// `[rows, dim]` bf16, shared with the pool: later writes show in it.
    pub fn tensor(&self) -> &Tensor {
        &self.data
    }

    /// Bytes the pool takes when every row has been written.
    pub fn capacity_bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.dim * DType::BF16.size_in_bytes()
    }

    /// Writes `rows: [n, dim]` bf16 to the physical rows `slots: [n]` i32, skipping `-1`.
    ///
    /// # Errors
    /// Shapes that do not fit, or a row outside of the pool.
    pub fn write(&mut self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        ops::write_rows(&self.data, rows, slots)
    }

    /// A copy of the physical rows `range`: `[n, dim]` bf16.
    ///
    /// # Errors
    /// The range passes the end of the pool.
    pub fn read(&self, range: Range<u32>) -> Result<Tensor> {
        read_rows(&self.data, range)
    }

    /// Overwrites the rows from `at` on with `rows: [n, dim]`.
    ///
    /// # Errors
    /// Another width or dtype, or rows past the end of the pool.
    pub fn fill(&mut self, at: u32, rows: &Tensor) -> Result<()> {
        fill_rows(&self.data, at, rows)
    }

    /// Copies `n` rows from row `from` on to row `to` on.
    ///
    /// # Errors
    /// Either range passes the end of the pool.
    pub fn copy_rows(&mut self, from: u32, to: u32, n: u32) -> Result<()> {
        copy_rows(&self.data, from, to, n)
    }
}

/// `[rows, dim]` zeros whose pages the operating system supplies at first touch.
fn lazy_zeros_bf16(rows: usize, dim: usize, device: &Device) -> Result<Tensor> {
    let len = rows
        .checked_mul(dim)
        .ok_or(Error::Capacity { what: "elements of a cache", needed: rows, available: dim })?;
    if !device.is_cpu() {
        return Ok(Tensor::zeros((rows, dim), DType::BF16, device)?);
    }
    // `vec![0u16; n]` asks the allocator for zeroed memory; `vec![bf16::ZERO; n]` would write it all.
    let zeros: Vec<bf16> = vec![0u16; len].reinterpret_into();
    Ok(Tensor::from_vec(zeros, (rows, dim), device)?)
}

pub(crate) fn read_rows(pool: &Tensor, range: Range<u32>) -> Result<Tensor> {
    let len = range.end.saturating_sub(range.start) as usize;
    Ok(pool.narrow(0, range.start as usize, len)?.copy()?)
}

pub(crate) fn fill_rows(pool: &Tensor, at: u32, rows: &Tensor) -> Result<()> {
    let (n, dim) = rows.dims2()?;
    let (available, width) = pool.dims2()?;
    if rows.dtype() != pool.dtype() || dim != width || at as usize + n > available {
        return Err(Error::shape(
            "fill_rows",
            format!(
                "expected at most {} rows of {width} {:?} for row {at} on, found {:?} {:?}",
                available.saturating_sub(at as usize),
                pool.dtype(),
                rows.shape(),
                rows.dtype()
            ),
        ));
    }
    if n > 0 {
        pool.slice_set(&rows.contiguous()?, 0, at as usize)?;
    }
    Ok(())
}

pub(crate) fn copy_rows(pool: &Tensor, from: u32, to: u32, n: u32) -> Result<()> {
    fill_rows(pool, to, &read_rows(pool, from..from + n)?)
}
