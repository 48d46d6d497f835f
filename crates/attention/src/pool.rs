//! A pool of rows, and the format they are stored in.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result};
use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::ops;
use crate::packed::{RowCodec, pack_rows, unpack_rows};
use crate::plan::i32_tensor;
use crate::rows::RowQuant;

/// How the rows of KV and index-key pools are stored.
///
/// Only writing into a pool and reading from it know the format; results are the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvFormat {
    /// Two bytes an element, as computed.
    #[default]
    Bf16,
    /// Codes and scales, see [`RowCodec`]: about a third of the bytes.
    Packed,
}

/// Rows of `dim` values that were rounded to one number format, addressed by physical row.
#[derive(Debug)]
pub struct KvPool {
    data: Tensor,
    format: KvFormat,
    codec: RowCodec,
}

impl KvPool {
    /// A pool of `rows` rows of zeros. On the CPU the memory is committed as rows are written.
    ///
    /// # Errors
    /// A `dim` that is not made of whole groups, a size that does not fit a machine word, or no room
    /// on the device.
    pub fn new(
        rows: usize,
        dim: usize,
        quant: RowQuant,
        format: KvFormat,
        device: &Device,
    ) -> Result<Self> {
        let codec = RowCodec::new(quant, dim)?;
        if format == KvFormat::Packed && !device.is_cpu() {
            return Err(Error::Unsupported {
                what: "packed KV rows on a GPU: use KvFormat::Bf16 there".into(),
            });
        }
        let data = match format {
            KvFormat::Bf16 => lazy_zeros_bf16(rows, dim, device)?,
            // All-zero bytes are rows of zeros.
            KvFormat::Packed => {
                checked_len(rows, codec.row_bytes())?;
                Tensor::zeros((rows, codec.row_bytes()), DType::U8, device)?
            }
        };
        Ok(Self {
            data,
            format,
            codec,
        })
    }

    /// Physical rows.
    pub fn rows(&self) -> usize {
        self.data.dims()[0]
    }

    /// The packed form of this pool's rows, whatever they are stored as.
    pub fn codec(&self) -> RowCodec {
        self.codec
    }

    /// `[rows, dim]` bf16 or `[rows, row_bytes]` U8, shared with the pool: later writes show in it. The
    /// operations of this crate take either.
    pub fn tensor(&self) -> &Tensor {
        &self.data
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        match self.format {
            KvFormat::Bf16 => self.codec.dim() * DType::BF16.size_in_bytes(),
            KvFormat::Packed => self.codec.row_bytes(),
        }
    }

    /// Bytes the pool takes when every row has been written.
    pub fn capacity_bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    /// Writes `rows: [n, dim]` bf16 to the physical rows `slots: [n]` i32, skipping `-1`.
    ///
    /// # Errors
    /// Shapes that do not fit, a row outside of the pool, or, in a packed pool, a row that was not
    /// rounded by the pool's format.
    pub fn write(&mut self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        match self.format {
            KvFormat::Bf16 => ops::write_rows(&self.data, rows, slots),
            KvFormat::Packed => ops::write_rows(&self.data, &pack_rows(rows, self.codec)?, slots),
        }
    }

    /// A copy of the physical rows `range`: `[n, dim]` bf16.
    ///
    /// # Errors
    /// The range passes the end of the pool.
    pub fn read(&self, range: Range<u32>) -> Result<Tensor> {
        let rows = read_rows(&self.data, range)?;
        match self.format {
            KvFormat::Bf16 => Ok(rows),
            KvFormat::Packed => unpack_rows(&rows, self.codec),
        }
    }

    /// Copies `n` rows from row `from` on to row `to` on.
    ///
    /// # Errors
    /// Either range passes the end of the pool.
    pub fn copy_rows(&mut self, from: u32, to: u32, n: u32) -> Result<()> {
        copy_rows(&self.data, from, to, n)
    }

    /// The physical rows `rows` in packed form, `[n, row_bytes]` U8, whatever the pool's format.
    pub(crate) fn export(&self, rows: Vec<u32>) -> Result<Tensor> {
        let rows = gather_rows(&self.data, rows)?;
        match self.format {
            KvFormat::Bf16 => pack_rows(&rows, self.codec),
            KvFormat::Packed => Ok(rows),
        }
    }

    /// The opposite of [`export`](Self::export): `packed: [n, row_bytes]` U8 to the rows `rows`.
    pub(crate) fn import(&mut self, packed: &Tensor, rows: &[u32]) -> Result<()> {
        self.codec.check(&packed.flatten_all()?.to_vec1::<u8>()?)?;
        let slots = slots_tensor(rows, self.data.device())?;
        match self.format {
            KvFormat::Bf16 => {
                ops::write_rows(&self.data, &unpack_rows(packed, self.codec)?, &slots)
            }
            KvFormat::Packed => ops::write_rows(&self.data, packed, &slots),
        }
    }
}

fn checked_len(rows: usize, width: usize) -> Result<usize> {
    rows.checked_mul(width)
        .filter(|len| *len <= isize::MAX as usize / 4)
        .ok_or(Error::Capacity {
            what: "rows of a cache",
            needed: rows,
            available: 0,
        })
}

/// `[rows, dim]` zeros whose pages the operating system supplies at first touch.
fn lazy_zeros_bf16(rows: usize, dim: usize, device: &Device) -> Result<Tensor> {
    let len = checked_len(rows, dim)?;
    if !device.is_cpu() {
        return Ok(Tensor::zeros((rows, dim), DType::BF16, device)?);
    }
    // `vec![0u16; n]` asks the allocator for zeroed memory; `vec![bf16::ZERO; n]` would write it all.
    let zeros: Vec<bf16> = vec![0u16; len].reinterpret_into();
    Ok(Tensor::from_vec(zeros, (rows, dim), device)?)
}

pub(crate) fn read_rows(pool: &Tensor, range: Range<u32>) -> Result<Tensor> {
    let len = range.end.saturating_sub(range.start) as usize;
    Ok(pool
        .narrow(0, range.start as usize, len)?
        .force_contiguous()?)
}

pub(crate) fn gather_rows(pool: &Tensor, rows: Vec<u32>) -> Result<Tensor> {
    if rows.is_empty() {
        return Ok(pool.narrow(0, 0, 0)?);
    }
    let n = rows.len();
    Ok(pool.index_select(&Tensor::from_vec(rows, n, pool.device())?, 0)?)
}

pub(crate) fn slots_tensor(rows: &[u32], device: &Device) -> Result<Tensor> {
    i32_tensor(rows.iter().map(|&row| row as i32).collect(), device)
}

pub(crate) fn copy_rows(pool: &Tensor, from: u32, to: u32, n: u32) -> Result<()> {
    let rows = read_rows(pool, from..from + n)?;
    if n > 0 {
        // Refuses a range past the end.
        pool.slice_set(&rows, 0, to as usize)?;
    }
    Ok(())
}
