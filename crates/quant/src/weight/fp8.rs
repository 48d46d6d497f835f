//! e4m3 weights with one e8m0 scale per square tile.

use bytes::Bytes;
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, WeightRows},
};

use crate::formats::{e4m3, e8m0};

/// Side of the tiles of a released checkpoint.
pub const FP8_TILE: usize = 32;

/// `[rows, cols]` e4m3 codes, row-major, and `[ceil(rows/tile), cols/tile]` e8m0 bytes.
///
/// The bytes are those of the file and are shared, not copied. The value of an element is
/// `e4m3(code) * 2^(byte - 127)` in f32: exact down to the smallest code and byte, infinite where it
/// passes f32's range (byte 254 with codes of 2 and more), NaN where the code or the byte is NaN. A
/// NaN scale therefore reaches every output of its rows, zero codes included, instead of hiding
/// behind them.
#[derive(Debug, Clone)]
pub struct Fp8Weight {
    pub(crate) codes: Bytes,
    pub(crate) scales: Bytes,
    rows: usize,
    cols: usize,
    tile: usize,
    rounded: bool,
}

impl Fp8Weight {
    /// Joins codes and scales.
    ///
    /// # Errors
    /// `tile` is 0, `cols` is not a multiple of it (rows need not be), or a length does not fit.
    pub fn new(codes: Bytes, scales: Bytes, rows: usize, cols: usize, tile: usize) -> Result<Self> {
        let fits = tile > 0
            && cols.is_multiple_of(tile)
            && rows.checked_mul(cols) == Some(codes.len())
            && rows.div_ceil(tile) * (cols / tile) == scales.len();
        if !fits {
            return Err(Error::shape(
                "fp8 weight",
                format!(
                    "[{rows}, {cols}] in tiles of {tile}: {} codes and {} scales do not fit",
                    codes.len(),
                    scales.len()
                ),
            ));
        }
        Ok(Self {
            codes,
            scales,
            rows,
            cols,
            tile,
            rounded: false,
        })
    }

    /// The same weight with the values of its bf16 form. They differ only below scales of 2^-124,
    /// where the steps of bf16 are coarser than those of the codes.
    pub fn rounded_to_bf16(self) -> Self {
        Self {
            rounded: true,
            ..self
        }
    }

    /// Side of a tile.
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// Bytes of codes and scales.
    pub fn byte_len(&self) -> usize {
        self.codes.len() + self.scales.len()
    }

    /// The e8m0 bytes that `row` uses, one per tile along the columns.
    pub(crate) fn row_scales(&self, row: usize) -> &[u8] {
        let per_row = self.cols / self.tile;
        &self.scales[row / self.tile * per_row..][..per_row]
    }
}

impl WeightRows for Fp8Weight {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn decode(&self, row: usize, k0: usize, out: &mut [f32]) {
        let codes = &self.codes[row * self.cols + k0..][..out.len()];
        let scales = self.row_scales(row);
        for (i, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            let value = e4m3::decode(*code) * e8m0::decode(scales[(k0 + i) / self.tile]);
            *out = if self.rounded {
                cpu::widen(cpu::round_bf16(value))
            } else {
                value
            };
        }
    }
}
