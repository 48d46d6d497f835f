//! Weights that are stored as plain numbers.

use bytes::Bytes;
use candle_core::Tensor;

use super::{FEW_INPUTS, Isa, Lanes, Stretch, WeightRows, accumulate_by_decoding};
#[cfg(target_arch = "x86_64")]
use super::{
    avx2::{self, Bf16, F32},
    avx512::{self, StoredPair},
};

/// bf16 weights as stored: little-endian, row-major `[rows, cols]`.
#[derive(Debug, Clone)]
pub struct Bf16Rows {
    bytes: Bytes,
    rows: usize,
    cols: usize,
    device: Option<Tensor>,
}

/// f32 weights as stored: little-endian, row-major `[rows, cols]`.
#[derive(Debug, Clone)]
pub struct F32Rows {
    bytes: Bytes,
    rows: usize,
    cols: usize,
    device: Option<Tensor>,
}

impl Bf16Rows {
    /// `None` when the byte length is not `rows * cols * 2`.
    pub fn new(bytes: Bytes, rows: usize, cols: usize) -> Option<Self> {
        (rows.checked_mul(cols)?.checked_mul(2)? == bytes.len()).then_some(Self {
            bytes,
            rows,
            cols,
            device: None,
        })
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// With a copy of the weight on a GPU, `[rows, cols]` bf16 or f32; the bytes stay where they are.
    #[must_use]
    pub fn with_device(self, device: Option<Tensor>) -> Self {
        Self { device, ..self }
    }

    /// The copy on a GPU.
    pub fn device(&self) -> Option<&Tensor> {
        self.device.as_ref()
    }
}

impl F32Rows {
    /// `None` when the byte length is not `rows * cols * 4`.
    pub fn new(bytes: Bytes, rows: usize, cols: usize) -> Option<Self> {
        (rows.checked_mul(cols)?.checked_mul(4)? == bytes.len()).then_some(Self {
            bytes,
            rows,
            cols,
            device: None,
        })
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// With a copy of the weight on a GPU, `[rows, cols]` bf16 or f32; the bytes stay where they are.
    #[must_use]
    pub fn with_device(self, device: Option<Tensor>) -> Self {
        Self { device, ..self }
    }

    /// The copy on a GPU.
    pub fn device(&self) -> Option<&Tensor> {
        self.device.as_ref()
    }
}

impl WeightRows for Bf16Rows {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn decode(&self, row: usize, k0: usize, out: &mut [f32]) {
        let start = (row * self.cols + k0) * 2;
        let bytes = &self.bytes[start..start + out.len() * 2];
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
        }
    }

    fn accumulate(&self, isa: Isa, stretch: &Stretch<'_>, sums: &mut [Lanes]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 if stretch.inputs() <= FEW_INPUTS => {
                let first = (stretch.rows.start * self.cols + stretch.cols.start) * 2;
                stored::<Bf16>(isa, &self.bytes[first..], 2 * self.cols, stretch, sums);
            }
            _ => accumulate_by_decoding(self, isa, stretch, sums),
        }
    }

    fn totals(&self, isa: Isa, stretch: &Stretch<'_>, totals: &mut [f32]) -> bool {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                let rows = &self.bytes[stretch.rows.start * self.cols * 2..];
                // SAFETY: it is only named where the processor has it.
                unsafe { avx512::stored_totals::<Bf16>(rows, 2 * self.cols, stretch, totals) }
            }
            _ => false,
        }
    }
}

impl WeightRows for F32Rows {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn decode(&self, row: usize, k0: usize, out: &mut [f32]) {
        let start = (row * self.cols + k0) * 4;
        let bytes = &self.bytes[start..start + out.len() * 4];
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
    }

    fn accumulate(&self, isa: Isa, stretch: &Stretch<'_>, sums: &mut [Lanes]) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 if stretch.inputs() <= FEW_INPUTS => {
                let first = (stretch.rows.start * self.cols + stretch.cols.start) * 4;
                stored::<F32>(isa, &self.bytes[first..], 4 * self.cols, stretch, sums);
            }
            _ => accumulate_by_decoding(self, isa, stretch, sums),
        }
    }

    fn totals(&self, isa: Isa, stretch: &Stretch<'_>, totals: &mut [f32]) -> bool {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                let rows = &self.bytes[stretch.rows.start * self.cols * 4..];
                // SAFETY: it is only named where the processor has it.
                unsafe { avx512::stored_totals::<F32>(rows, 4 * self.cols, stretch, totals) }
            }
            _ => false,
        }
    }
}

/// Products of a few inputs with rows as they are stored.
#[cfg(target_arch = "x86_64")]
fn stored<S: StoredPair>(
    isa: Isa,
    w: &[u8],
    row_bytes: usize,
    stretch: &Stretch<'_>,
    sums: &mut [Lanes],
) {
    // SAFETY: either is only named where the processor has it, and AVX2 on all of these.
    unsafe {
        match isa {
            Isa::Avx512 => avx512::stored::<S>(w, row_bytes, stretch, sums),
            _ => avx2::stored::<S>(w, row_bytes, stretch, 0, sums),
        }
    }
}
