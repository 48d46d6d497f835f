//! Packed e2m1 weights with one e8m0 scale per row and 32 columns.

use bytes::Bytes;
use deepseek_v41_core::{
    Error, Result,
    cpu::{FEW_INPUTS, Isa, Lanes, Stretch, WeightRows, accumulate_by_decoding},
};

#[cfg(target_arch = "x86_64")]
use super::fp4_avx2;
#[cfg(feature = "cuda")]
use crate::cuda::DeviceCodes;
use crate::formats::{e2m1, e8m0};

/// Columns that share a weight scale.
pub const FP4_GROUP: usize = 32;

/// `[rows, cols/2]` bytes of two e2m1 codes (even column in the low nibble) and `[rows, cols/32]`
/// e8m0 bytes. Unlike fp8 tiles, a scale belongs to one row.
///
/// The bytes are those of the file and are shared, not copied. The value of an element is
/// `e2m1(code) * 2^(byte - 127)` in f32: exact, infinite where it passes f32's range (byte 254 with
/// magnitudes of 2 and more), NaN where the byte is 255, zero codes included.
#[derive(Debug, Clone)]
pub struct Fp4Weight {
    packed: Bytes,
    scales: Bytes,
    rows: usize,
    cols: usize,
    #[cfg(feature = "cuda")]
    device: Option<DeviceCodes>,
}

impl Fp4Weight {
    /// Joins codes and scales; `cols` counts elements, not bytes.
    ///
    /// # Errors
    /// `cols` is not a multiple of 32, or a length does not fit.
    pub fn new(packed: Bytes, scales: Bytes, rows: usize, cols: usize) -> Result<Self> {
        let fits = cols.is_multiple_of(FP4_GROUP)
            && rows.checked_mul(cols / 2) == Some(packed.len())
            && rows * (cols / FP4_GROUP) == scales.len();
        if !fits {
            return Err(Error::shape(
                "fp4 weight",
                format!(
                    "[{rows}, {cols}]: {} bytes of codes and {} scales do not fit",
                    packed.len(),
                    scales.len()
                ),
            ));
        }
        Ok(Self {
            packed,
            scales,
            rows,
            cols,
            #[cfg(feature = "cuda")]
            device: None,
        })
    }

    /// The stored bytes of codes.
    pub fn packed(&self) -> &Bytes {
        &self.packed
    }

    /// The stored scale bytes.
    pub fn scales(&self) -> &Bytes {
        &self.scales
    }

    /// With a copy on a GPU; the bytes stay where they are.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn with_device(self, device: DeviceCodes) -> Self {
        Self {
            device: Some(device),
            ..self
        }
    }

    /// The copy on a GPU.
    #[cfg(feature = "cuda")]
    pub fn device(&self) -> Option<&DeviceCodes> {
        self.device.as_ref()
    }

    /// Bytes of codes and scales.
    pub fn byte_len(&self) -> usize {
        self.packed.len() + self.scales.len()
    }

    /// The e8m0 bytes of `row`, one per 32 columns.
    fn row_scales(&self, row: usize) -> &[u8] {
        let per_row = self.cols / FP4_GROUP;
        &self.scales[row * per_row..][..per_row]
    }
}

impl WeightRows for Fp4Weight {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn decode(&self, row: usize, k0: usize, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if Isa::detect() != Isa::Portable && k0.is_multiple_of(FP4_GROUP) {
            let whole = out.len() / FP4_GROUP * FP4_GROUP;
            let packed = &self.packed[(row * self.cols + k0) / 2..][..whole / 2];
            let (groups, rest) = out.split_at_mut(whole);
            // SAFETY: the processor has AVX2.
            unsafe { fp4_avx2::decode(packed, &self.row_scales(row)[k0 / FP4_GROUP..], groups) };
            return self.decode_portable(row, k0 + whole, rest);
        }
        self.decode_portable(row, k0, out);
    }

    fn accumulate(&self, isa: Isa, stretch: &Stretch<'_>, sums: &mut [Lanes]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if stretch.inputs() <= FEW_INPUTS => {
                // SAFETY: the variant exists only with AVX2.
                unsafe { fp4_avx2::accumulate(&self.packed, &self.scales, stretch, 0, sums) };
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if stretch.inputs() <= FEW_INPUTS => {
                // SAFETY: the variant exists only with these instructions.
                unsafe {
                    super::fp4_avx512::accumulate(&self.packed, &self.scales, stretch, sums);
                }
            }
            _ => accumulate_by_decoding(self, isa, stretch, sums),
        }
    }

    fn totals(&self, isa: Isa, stretch: &Stretch<'_>, totals: &mut [f32]) -> bool {
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the variant exists only with these instructions.
            Isa::Avx512 => unsafe {
                super::fp4_avx512::totals(&self.packed, &self.scales, stretch, totals)
            },
            _ => false,
        }
    }
}

impl Fp4Weight {
    /// The definition of an element's value.
    fn decode_portable(&self, row: usize, k0: usize, out: &mut [f32]) {
        let packed = &self.packed[row * (self.cols / 2)..][..self.cols / 2];
        let scales = self.row_scales(row);
        for (i, out) in out.iter_mut().enumerate() {
            let k = k0 + i;
            let code = packed[k / 2] >> (k % 2 * 4);
            *out = e2m1::decode(code) * e8m0::decode(scales[k / FP4_GROUP]);
        }
    }
}
