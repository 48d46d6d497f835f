//! A pool of rows, and the format they are stored in.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result};
use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::ops;
use crate::packed::{RowCodec, pack_rows, unpack_rows};
use crate::plan::{WindowPlan, i32_tensor};
use crate::rows::RowQuant;
use crate::stored::{RowPlanes, StoredRows};

/// How the rows of KV and index-key pools are stored.
///
/// Only writing into a pool and reading from it know the format; results are the same bits. A GPU keeps
/// index keys packed in either format: its scores are then the same by construction, and faster.
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
    data: RowData,
    codec: RowCodec,
}

/// The memory of a pool.
#[derive(Debug)]
enum RowData {
    /// `[rows, dim]` bf16.
    Bf16(Tensor),
    /// `[rows, row_bytes]` U8, on the CPU.
    Packed(Tensor),
    /// Packed, on a GPU.
    Planes(RowPlanes),
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
        let data = match format {
            KvFormat::Bf16 => RowData::Bf16(lazy_zeros_bf16(rows, dim, device)?),
            // All-zero bytes are rows of zeros.
            KvFormat::Packed => {
                checked_len(rows, codec.row_bytes())?;
                match device {
                    Device::Cpu => {
                        let shape = (rows, codec.row_bytes());
                        RowData::Packed(Tensor::zeros(shape, DType::U8, device)?)
                    }
                    _ => RowData::Planes(RowPlanes::new(rows, codec, device)?),
                }
            }
        };
        Ok(Self { data, codec })
    }

    /// Physical rows.
    pub fn rows(&self) -> usize {
        self.stored().rows()
    }

    /// The packed form of this pool's rows, whatever they are stored as.
    pub fn codec(&self) -> RowCodec {
        self.codec
    }

    /// The rows as operations take them, shared with the pool: later writes show in them.
    pub fn stored(&self) -> StoredRows<'_> {
        match &self.data {
            RowData::Bf16(rows) | RowData::Packed(rows) => StoredRows::Whole(rows),
            RowData::Planes(planes) => StoredRows::Planes(planes),
        }
    }

    /// Where the rows are.
    pub fn device(&self) -> &Device {
        match &self.data {
            RowData::Bf16(rows) | RowData::Packed(rows) => rows.device(),
            RowData::Planes(planes) => planes.codes().device(),
        }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        match self.data {
            RowData::Bf16(_) => self.codec.dim() * DType::BF16.size_in_bytes(),
            RowData::Packed(_) | RowData::Planes(_) => self.codec.row_bytes(),
        }
    }

    /// Bytes the pool takes when every row has been written.
    pub fn capacity_bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    /// Writes `rows: [n, dim]` bf16 to the physical rows `slots: [n]` i32, skipping `-1`.
    ///
    /// # Errors
    /// Shapes that do not fit, on the CPU a row outside of the pool and, in a packed pool, a row that was
    /// not rounded by the pool's format (on a GPU its values become the format's nearest).
    pub fn write(&mut self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        self.put(rows, slots)
    }

    /// [`write`](Self::write) for those whose caller holds the pool mutably.
    fn put(&self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        match &self.data {
            RowData::Bf16(data) => ops::write_rows(data, rows, slots),
            RowData::Packed(data) => ops::write_rows(data, &pack_rows(rows, self.codec)?, slots),
            RowData::Planes(planes) => planes.write(rows, slots),
        }
    }

    /// A copy of the physical rows `range`: `[n, dim]` bf16.
    ///
    /// # Errors
    /// The range passes the end of the pool.
    pub fn read(&self, range: Range<u32>) -> Result<Tensor> {
        match &self.data {
            RowData::Bf16(data) => read_rows(data, range),
            RowData::Packed(data) => unpack_rows(&read_rows(data, range)?, self.codec),
            RowData::Planes(planes) => planes.read(range),
        }
    }

    /// Copies `n` rows from row `from` on to row `to` on.
    ///
    /// # Errors
    /// Either range passes the end of the pool.
    pub fn copy_rows(&mut self, from: u32, to: u32, n: u32) -> Result<()> {
        match &self.data {
            RowData::Bf16(data) | RowData::Packed(data) => copy_rows(data, from, to, n),
            RowData::Planes(planes) => planes.copy_rows(from, to, n),
        }
    }

    /// The physical rows `rows` in packed form, `[n, row_bytes]` U8, whatever the pool's format.
    ///
    /// # Errors
    /// A row outside of the pool, or one that was not rounded by the pool's format.
    pub fn export(&self, rows: Vec<u32>) -> Result<Tensor> {
        self.check_rows(&rows)?;
        match &self.data {
            RowData::Bf16(data) => pack_rows(&gather_rows(data, rows)?, self.codec),
            RowData::Packed(data) => gather_rows(data, rows),
            RowData::Planes(planes) => planes.gather_packed(rows),
        }
    }

    /// The opposite of [`export`](Self::export): `packed: [n, row_bytes]` U8 to the rows `rows`.
    ///
    /// # Errors
    /// Another shape or dtype, bytes that no row packs to.
    pub fn import(&mut self, packed: &Tensor, rows: &[u32]) -> Result<()> {
        self.check_rows(rows)?;
        let width = self.codec.row_bytes();
        if packed.dims() != [rows.len(), width] || packed.dtype() != DType::U8 {
            return Err(Error::shape(
                "packed rows",
                format!(
                    "expected [{}, {width}] U8, found {:?} {:?}",
                    rows.len(),
                    packed.shape(),
                    packed.dtype()
                ),
            ));
        }
        self.codec.check(&packed.flatten_all()?.to_vec1::<u8>()?)?;
        let slots = slots_tensor(rows, self.device())?;
        match &self.data {
            RowData::Bf16(data) => ops::write_rows(data, &unpack_rows(packed, self.codec)?, &slots),
            RowData::Packed(data) => ops::write_rows(data, packed, &slots),
            RowData::Planes(planes) => planes.write_packed(packed, &slots),
        }
    }

    /// On a GPU nothing else would.
    fn check_rows(&self, rows: &[u32]) -> Result<()> {
        match rows.iter().find(|&&row| row as usize >= self.rows()) {
            None => Ok(()),
            Some(row) => Err(Error::value(
                "row of a pool",
                format!("{row} is not one of {}", self.rows()),
            )),
        }
    }
}

/// A step's rows on their way into a pool of rings that is still being read: they enter it once nobody reads any more.
#[derive(Debug)]
pub(crate) struct Entering<'a> {
    pool: &'a KvPool,
    /// `[T, dim]` bf16.
    rows: &'a Tensor,
    plan: &'a WindowPlan,
}

impl<'a> Entering<'a> {
    /// `rows` for their places in `pool`.
    pub(crate) fn new(pool: &'a mut KvPool, rows: &'a Tensor, plan: &'a WindowPlan) -> Self {
        Self { pool, rows, plan }
    }

    /// The pool as it is without them.
    pub(crate) fn stored(&self) -> StoredRows<'a> {
        self.pool.stored()
    }

    /// The rows, and `[T]` i32 their places, -1 for one that is not kept.
    #[cfg(feature = "cuda")]
    pub(crate) fn rows(&self) -> (&'a Tensor, &'a Tensor) {
        (self.rows, &self.plan.ring_slots)
    }

    /// Whether they may enter while the others are being read: with one token a sequence none is read where another
    /// goes, since a ring holds at least the window.
    #[cfg(feature = "cuda")]
    pub(crate) fn apart(&self) -> bool {
        self.plan.present_idxs.dims().last() == Some(&1)
    }

    /// Puts them in.
    ///
    /// # Errors
    /// As [`KvPool::write`].
    pub(crate) fn enter(self) -> Result<()> {
        self.pool.put(self.rows, &self.plan.ring_slots)
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
