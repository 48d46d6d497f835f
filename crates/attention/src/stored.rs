//! How a pool's rows lie in memory, by format and device.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result, upload};

use crate::ops;
use crate::packed::{RowCodec, unpack_rows};
use crate::pool::{copy_rows, gather_rows, read_rows};
#[cfg(feature = "cuda")]
use crate::rows::RowQuant;

/// The rows of a pool as operations take them.
#[derive(Debug, Clone, Copy)]
pub enum StoredRows<'a> {
    /// `[rows, D]` bf16; on the CPU also `[rows, row_bytes]` U8, packed rows one after the other
    /// ([`RowCodec`]), of which the width tells the form.
    Whole(&'a Tensor),
    /// Packed rows on a GPU.
    Planes(&'a RowPlanes),
}

impl<'a> From<&'a Tensor> for StoredRows<'a> {
    fn from(rows: &'a Tensor) -> Self {
        Self::Whole(rows)
    }
}

impl<'a> StoredRows<'a> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Whole(rows) => rows.dims().first().copied().unwrap_or(0),
            Self::Planes(planes) => planes.rows(),
        }
    }

    /// Whether these are rows of `dim` values.
    pub(crate) fn fit(&self, dim: usize) -> bool {
        match self {
            Self::Whole(rows) => match (rows.dims(), rows.dtype()) {
                (&[_, width], DType::BF16) => width == dim,
                (&[_, width], DType::U8) => RowCodec::of_width(width, dim).is_some(),
                _ => false,
            },
            Self::Planes(planes) => planes.codec.dim() == dim,
        }
    }

    /// The one tensor that they are on the CPU.
    pub(crate) fn whole(&self, op: &'static str) -> Result<&'a Tensor> {
        match self {
            Self::Whole(rows) => Ok(rows),
            Self::Planes(_) => Err(Error::shape(op, "rows of a GPU's pool on the CPU")),
        }
    }

    /// Shape and dtype, for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Whole(rows) => format!("{:?} {:?}", rows.shape(), rows.dtype()),
            Self::Planes(planes) => format!("packed rows of {}", planes.codec.dim()),
        }
    }
}

/// Packed rows as a GPU holds them: codes and scales apart, so that rows of both begin at addresses that
/// kernels can load from at full width.
#[derive(Debug)]
pub struct RowPlanes {
    codes: Tensor,
    scales: Tensor,
    codec: RowCodec,
    #[cfg(feature = "cuda")]
    counts: Option<Tensor>,
}

/// Queries at a time that [`RowPlanes::counts`] serves.
#[cfg(feature = "cuda")]
pub(crate) const COUNTED: usize = 16;

impl RowPlanes {
    /// `rows` rows of zeros.
    pub(crate) fn new(rows: usize, codec: RowCodec, device: &Device) -> Result<Self> {
        let plane = |width: usize| Tensor::zeros((rows, width), DType::U8, device);
        Ok(Self {
            codes: plane(codec.code_bytes())?,
            scales: plane(codec.scale_bytes())?,
            #[cfg(feature = "cuda")]
            counts: (codec.quant() == RowQuant::Index)
                .then(|| Tensor::zeros(2048 * COUNTED + 2, DType::U32, device))
                .transpose()?,
            codec,
        })
    }

    /// Of index keys: `[COUNTED, 2048]` u32 in which selections from their scores count, which leave them zero, and two words
    /// by which their blocks wait for each other.
    #[cfg(feature = "cuda")]
    pub(crate) fn counts(&self) -> Option<&Tensor> {
        self.counts.as_ref()
    }

    /// `[rows, D]` (fp8) or `[rows, D / 2]` (fp4) U8, as in the packed form.
    pub fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// `[rows, D / group]` U8, as in the packed form.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// The format of the rows.
    pub fn codec(&self) -> RowCodec {
        self.codec
    }

    pub(crate) fn rows(&self) -> usize {
        self.codes.dims()[0]
    }

    /// Packs `rows: [n, D]` bf16 into the physical rows `slots: [n]` i32, skipping `-1`. Values that were
    /// not rounded by the format become its nearest; the CPU refuses them.
    pub(crate) fn write(&self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        let n = rows.dims().first().copied().unwrap_or(0);
        let fits = rows.dims() == [n, self.codec.dim()]
            && rows.dtype() == DType::BF16
            && slots.dims() == [n]
            && slots.dtype() == DType::I32;
        if !fits {
            return Err(Error::shape(
                "pack_rows",
                format!(
                    "expected [n, {}] bf16 and [n] i32, found {:?} {:?} and {:?} {:?}",
                    self.codec.dim(),
                    rows.shape(),
                    rows.dtype(),
                    slots.shape(),
                    slots.dtype()
                ),
            ));
        }
        #[cfg(feature = "cuda")]
        return crate::cuda::pack_rows(self, rows, slots);
        #[cfg(not(feature = "cuda"))]
        Err(Error::Unsupported {
            what: "packed rows in planes without the feature `cuda`".into(),
        })
    }

    /// Puts `packed: [n, row_bytes]` U8 into the physical rows `slots: [n]` i32.
    pub(crate) fn write_packed(&self, packed: &Tensor, slots: &Tensor) -> Result<()> {
        let (codes, scales) = (self.codec.code_bytes(), self.codec.scale_bytes());
        let plane = |start, width| packed.narrow(1, start, width)?.contiguous();
        ops::write_rows(&self.codes, &plane(0, codes)?, slots)?;
        ops::write_rows(&self.scales, &plane(codes, scales)?, slots)
    }

    /// The physical rows `rows` in packed form, `[n, row_bytes]` U8.
    pub(crate) fn gather_packed(&self, rows: Vec<u32>) -> Result<Tensor> {
        if rows.is_empty() {
            return self.join(None);
        }
        let codes = gather_rows(&self.codes, rows.clone())?;
        self.join(Some((codes, gather_rows(&self.scales, rows)?)))
    }

    /// The physical rows `range`, `[n, D]` bf16.
    pub(crate) fn read(&self, range: Range<u32>) -> Result<Tensor> {
        let codes = read_rows(&self.codes, range.clone())?;
        let scales = read_rows(&self.scales, range)?;
        let some = (codes.elem_count() > 0).then_some((codes, scales));
        unpack_rows(&self.join(some)?, self.codec)
    }

    pub(crate) fn copy_rows(&self, from: u32, to: u32, n: u32) -> Result<()> {
        copy_rows(&self.codes, from, to, n)?;
        copy_rows(&self.scales, from, to, n)
    }

    fn join(&self, planes: Option<(Tensor, Tensor)>) -> Result<Tensor> {
        match planes {
            Some((codes, scales)) => Ok(Tensor::cat(&[&codes, &scales], 1)?),
            None => {
                let shape = (0, self.codec.row_bytes());
                upload(Vec::<u8>::new(), shape, self.codes.device())
            }
        }
    }
}
