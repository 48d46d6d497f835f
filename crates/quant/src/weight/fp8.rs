//! e4m3 weights with one e8m0 scale per square tile.

use bytes::Bytes;
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, FEW_INPUTS, Isa, Lanes, Stretch, WeightRows, accumulate_by_decoding},
};

#[cfg(target_arch = "x86_64")]
use super::fp8_avx2::{self, Band, STEP};
#[cfg(feature = "cuda")]
use crate::cuda::DeviceCodes;
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
    codes: Bytes,
    scales: Bytes,
    rows: usize,
    cols: usize,
    tile: usize,
    rounded: bool,
    #[cfg(feature = "cuda")]
    device: Option<DeviceCodes>,
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
            #[cfg(feature = "cuda")]
            device: None,
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

    /// The stored codes.
    pub fn codes(&self) -> &Bytes {
        &self.codes
    }

    /// The stored scale bytes.
    pub fn scales(&self) -> &Bytes {
        &self.scales
    }

    /// Side of a tile.
    pub fn tile(&self) -> usize {
        self.tile
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
        self.codes.len() + self.scales.len()
    }

    /// The e8m0 bytes that `row` uses, one per tile along the columns.
    fn row_scales(&self, row: usize) -> &[u8] {
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
        #[cfg(target_arch = "x86_64")]
        if Isa::detect() != Isa::Portable && self.has_whole_steps() && k0.is_multiple_of(STEP) {
            return self.decode_avx2(row, k0, out);
        }
        self.decode_portable(row, k0, out);
    }

    fn accumulate(&self, isa: Isa, stretch: &Stretch<'_>, sums: &mut [Lanes]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 if stretch.inputs() <= FEW_INPUTS && self.has_whole_steps() => {
                self.accumulate_in_registers(isa, stretch, sums);
            }
            _ => accumulate_by_decoding(self, isa, stretch, sums),
        }
    }

    fn totals(&self, isa: Isa, stretch: &Stretch<'_>, totals: &mut [f32]) -> bool {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if self.has_whole_steps() => self.totals_in_registers(stretch, totals),
            _ => false,
        }
    }
}

impl Fp8Weight {
    /// The definition of an element's value.
    fn decode_portable(&self, row: usize, k0: usize, out: &mut [f32]) {
        let codes = &self.codes[row * self.cols + k0..][..out.len()];
        let scales = self.row_scales(row);
        for (i, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            let scale = scales[(k0 + i) / self.tile];
            let value = e4m3::decode(*code) * e8m0::decode(scale);
            *out = if self.must_round(scale) {
                cpu::widen(cpu::round_bf16(value))
            } else {
                value
            };
        }
    }

    /// Whether the bf16 form of a value is asked for and differs: 2^-9 times a scale below 2^-124 is
    /// less than the smallest bf16.
    fn must_round(&self, scale: u8) -> bool {
        self.rounded && scale < 3
    }

    #[cfg(target_arch = "x86_64")]
    fn has_whole_steps(&self) -> bool {
        self.tile.is_multiple_of(STEP)
    }

    #[cfg(target_arch = "x86_64")]
    fn decode_avx2(&self, row: usize, k0: usize, out: &mut [f32]) {
        let codes = &self.codes[row * self.cols + k0..][..out.len()];
        let scales = self.row_scales(row);
        let whole = out.len() / STEP * STEP;
        let mut at = if scales.iter().any(|s| self.must_round(*s)) {
            whole
        } else {
            0
        };
        self.decode_portable(row, k0, &mut out[..at]);
        while at < whole {
            let (first, per_tile) = ((k0 + at) / STEP, self.tile / STEP);
            let (codes, out) = (&codes[at..whole], &mut out[at..whole]);
            // SAFETY: only reached with AVX2.
            let steps = unsafe { fp8_avx2::decode(codes, scales, per_tile, first, out) };
            at += steps * STEP;
            if let Some(out) = out.get_mut(steps * STEP..(steps + 1) * STEP) {
                self.decode_portable(row, k0 + at, out);
                at += STEP;
            }
        }
        self.decode_portable(row, k0 + whole, &mut out[whole..]);
    }

    /// `false` where a band would need more care than lanes in registers.
    #[cfg(target_arch = "x86_64")]
    fn totals_in_registers(&self, s: &Stretch<'_>, totals: &mut [f32]) -> bool {
        let (len, sums_stride) = (s.cols.len(), s.rows.len());
        cpu::with_scratch(s.inputs() * len, |folded| {
            let mut row = s.rows.start;
            while row < s.rows.end {
                let count = (self.tile - row % self.tile).min(s.rows.end - row);
                if !self.fold(row, s, folded) {
                    return false;
                }
                let b = Band {
                    codes: &self.codes[row * self.cols..],
                    row_bytes: self.cols,
                    rows: count,
                    len,
                    xs: folded,
                    sums_stride,
                };
                // SAFETY: only called with these instructions.
                if !unsafe { super::fp8_avx512::totals(&b, &mut totals[row - s.rows.start..]) } {
                    return false;
                }
                row += count;
            }
            true
        })
    }

    /// Rows of one band of tiles share their scales, which are folded into the inputs.
    #[cfg(target_arch = "x86_64")]
    fn accumulate_in_registers(&self, isa: Isa, s: &Stretch<'_>, sums: &mut [Lanes]) {
        let (m, len, rows) = (s.inputs(), s.cols.len(), s.rows.len());
        cpu::with_scratch(m * len, |folded| {
            let mut row = s.rows.start;
            while row < s.rows.end {
                let count = (self.tile - row % self.tile).min(s.rows.end - row);
                let sums = &mut sums[row - s.rows.start..];
                let done = self.fold(row, s, folded).then(|| {
                    let codes = &self.codes[row * self.cols + s.cols.start..];
                    let (row_bytes, xs, sums_stride) = (self.cols, &*folded, rows);
                    let b = Band {
                        codes,
                        row_bytes,
                        rows: count,
                        len,
                        xs,
                        sums_stride,
                    };
                    // SAFETY: each variant exists only with its instructions, and AVX2 on all here.
                    unsafe {
                        match isa {
                            Isa::Avx512 => super::fp8_avx512::band(&b, sums),
                            _ => fp8_avx2::band(&b, sums),
                        }
                    }
                });
                // NaN codes, or numbers near the ends of f32: rare enough to be slow.
                for r in done.unwrap_or_else(|| (0..count).collect()) {
                    let one = Stretch {
                        rows: row + r..row + r + 1,
                        ..s.clone()
                    };
                    let mut lanes: Vec<Lanes> = (0..m).map(|i| sums[i * rows + r]).collect();
                    accumulate_by_decoding(self, Isa::Avx2, &one, &mut lanes);
                    for (i, lanes) in lanes.into_iter().enumerate() {
                        sums[i * rows + r] = lanes;
                    }
                }
                row += count;
            }
        });
    }

    /// Writes the stretch's inputs with the scales of `row` folded in; `false` where that would cost
    /// bits.
    #[cfg(target_arch = "x86_64")]
    fn fold(&self, row: usize, s: &Stretch<'_>, folded: &mut [f32]) -> bool {
        let scales = &self.row_scales(row)[s.cols.start / self.tile..];
        if scales.iter().any(|scale| self.must_round(*scale)) {
            return false;
        }
        // SAFETY: only reached with AVX2.
        unsafe { fp8_avx2::fold_scales(s, scales, self.tile, folded) }
    }
}
