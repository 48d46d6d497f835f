//! The n-gram table, kept as the checkpoint stores it.

use bytes::Bytes;
use deepseek_v41_core::{Error, RawTensor, Result, StoredDtype, VarBuilder};

/// Columns that share one scale.
pub const SCALE_BLOCK: usize = 32;

/// Rows of e4m3 codes, each with one e8m0 scale per [`SCALE_BLOCK`] columns.
///
/// The released tables are about 100 GB each, so the bytes are normally a mapped file: a lookup reads
/// the rows it needs and nothing else, and cloning shares the mapping.
///
/// Values are `e4m3 * 2^(scale - 127)`. A scale byte of 255 or a code of 0x7f / 0xff is NaN and stays
/// NaN; products beyond f32 are infinite, and those below bf16's smallest subnormal round to zero.
#[derive(Debug, Clone)]
pub struct EngramTable {
    rows: usize,
    head_dim: usize,
    codes: Bytes,
    scales: Bytes,
}

impl EngramTable {
    /// A table from its bytes: `codes: [rows, head_dim]`, `scales: [rows, head_dim / 32]`.
    ///
    /// # Errors
    /// `head_dim` is not a positive multiple of 32, or the byte counts do not match.
    pub fn from_bytes(rows: usize, head_dim: usize, codes: Bytes, scales: Bytes) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(SCALE_BLOCK) {
            return Err(Error::config(
                "engram_head_dim",
                format!("{head_dim} is not a positive multiple of {SCALE_BLOCK}"),
            ));
        }
        let fits = |width: usize, bytes: &Bytes| rows.checked_mul(width) == Some(bytes.len());
        if !fits(head_dim, &codes) || !fits(head_dim / SCALE_BLOCK, &scales) {
            return Err(Error::shape(
                "engram table",
                format!(
                    "{rows} rows of {head_dim} do not take {} codes and {} scales",
                    codes.len(),
                    scales.len()
                ),
            ));
        }
        Ok(Self {
            rows,
            head_dim,
            codes,
            scales,
        })
    }

    /// Reads `weight` and `scale` under `vb`.
    ///
    /// # Errors
    /// Missing tensors, other shapes, or dtypes other than F8_E4M3 / F8_E8M0 (or both U8).
    pub fn new(rows: usize, head_dim: usize, vb: VarBuilder) -> Result<Self> {
        let blocks = head_dim / SCALE_BLOCK;
        let read = |name, dtype, width| -> Result<RawTensor> {
            vb.raw(name, &[dtype, StoredDtype::U8], &[rows, width])
        };
        let codes = read("weight", StoredDtype::F8_E4M3, head_dim)?;
        let scales = read("scale", StoredDtype::F8_E8M0, blocks)?;
        Self::from_bytes(rows, head_dim, codes.bytes, scales.bytes)
    }

    /// `[rows, head_dim]` e4m3 codes.
    pub fn codes(&self) -> &Bytes {
        &self.codes
    }

    /// `[rows, head_dim / 32]` e8m0 bytes.
    pub fn scales(&self) -> &Bytes {
        &self.scales
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of one row.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Codes and scales of one row.
    ///
    /// # Panics
    /// `row >= rows()`; callers check indices once for a whole lookup.
    #[inline]
    pub fn row(&self, row: usize) -> (&[u8], &[u8]) {
        let blocks = self.head_dim / SCALE_BLOCK;
        (
            &self.codes[row * self.head_dim..(row + 1) * self.head_dim],
            &self.scales[row * blocks..(row + 1) * blocks],
        )
    }

    /// Refuses row numbers the table does not have.
    ///
    /// # Errors
    /// `Error::Value` naming the first one.
    pub fn check_rows(&self, rows: &[u32]) -> Result<()> {
        match rows.iter().find(|&&row| row as usize >= self.rows) {
            None => Ok(()),
            Some(row) => Err(Error::value(
                format!("engram row {row}"),
                format!("the table has {} rows", self.rows),
            )),
        }
    }
}
