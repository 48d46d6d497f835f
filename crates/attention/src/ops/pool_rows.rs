//! Rows of a pool as an operation reads them, whatever they are stored as.

use std::borrow::Cow;

use candle_core::{CpuStorage, Layout};
use deepseek_v41_core::cpu::contiguous;
use half::bf16;

use crate::packed::RowCodec;

/// The rows of a pool.
#[derive(Debug, Clone, Copy)]
pub enum PoolRows<'a> {
    /// `[rows, D]`.
    Bf16(&'a [bf16]),
    /// `[rows, row_bytes]`.
    Packed(&'a [u8], RowCodec),
}

/// One row of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PoolRow<'a> {
    Bf16(&'a [bf16]),
    Packed(&'a [u8], RowCodec),
}

impl<'a> PoolRows<'a> {
    /// The rows of a pool for which [`StoredRows::fit`](crate::StoredRows) holds.
    pub(super) fn new(
        storage: &'a CpuStorage,
        layout: &Layout,
        dim: usize,
        op: &'static str,
    ) -> candle_core::Result<Self> {
        match (storage, layout.dims()) {
            (CpuStorage::U8(_), &[_, width]) => match RowCodec::of_width(width, dim) {
                Some(codec) => Ok(Self::Packed(contiguous::<u8>(storage, layout, op)?, codec)),
                None => candle_core::bail!("{op}: {width} bytes are no packed row of {dim} values"),
            },
            _ => Ok(Self::Bf16(contiguous::<bf16>(storage, layout, op)?)),
        }
    }

    /// Number of rows of `dim` values.
    pub(super) fn count(&self, dim: usize) -> usize {
        match self {
            Self::Bf16(rows) => rows.len() / dim,
            Self::Packed(rows, codec) => rows.len() / codec.row_bytes(),
        }
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn row(&self, i: usize, dim: usize) -> PoolRow<'a> {
        match *self {
            Self::Bf16(rows) => PoolRow::Bf16(&rows[i * dim..][..dim]),
            Self::Packed(rows, codec) => {
                let bytes = codec.row_bytes();
                PoolRow::Packed(&rows[i * bytes..][..bytes], codec)
            }
        }
    }
}

impl<'a> PoolRow<'a> {
    /// The row's values.
    pub(super) fn values(&self) -> Cow<'a, [bf16]> {
        match *self {
            Self::Bf16(row) => Cow::Borrowed(row),
            Self::Packed(row, codec) => {
                let mut out = vec![bf16::ZERO; codec.dim()];
                codec.decode(row, &mut out);
                Cow::Owned(out)
            }
        }
    }
}
