//! The operations of this crate on a GPU. Hashing stays on the host, where the token ids are.

use candle_core::{CudaDevice, Device, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Mapped, Out, bytes_to_device, kernels,
        ops::{device, supported},
    },
};
use half::bf16;

use crate::table::EngramTable;

/// Tables up to this many bytes go to the GPU.
pub const DEVICE_TABLE_BYTES: usize = 8 << 30;

/// Where a GPU finds the rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TablePlacement {
    /// A table of up to [`DEVICE_TABLE_BYTES`] on the device, a larger one mapped; on the host where the
    /// system does not pin it.
    #[default]
    Auto,
    /// A copy in the device's memory.
    Device,
    /// In host memory, pinned and mapped: kernels read the rows they need over the bus.
    Mapped,
    /// In host memory: the host reads the rows and uploads them.
    Host,
}

/// A table that kernels read.
#[derive(Debug, Clone)]
pub(crate) struct DeviceTable {
    bytes: TableBytes,
    rows: usize,
    head_dim: usize,
}

#[derive(Debug, Clone)]
enum TableBytes {
    /// `[rows * head_dim]` codes and `[rows * head_dim / 32]` scales, U8.
    Device(Tensor, Tensor),
    /// The same as pieces 0 and 1.
    Mapped(Mapped),
}

impl DeviceTable {
    /// Makes `table` readable from `on`; `None` on the CPU, or where the host is to read it.
    pub(crate) fn new(
        table: &EngramTable,
        on: &Device,
        placement: TablePlacement,
    ) -> Result<Option<Self>> {
        use TablePlacement::{Auto, Device as OnDevice, Host, Mapped as InPlace};
        let Device::Cuda(dev) = on else {
            return Ok(None);
        };
        let small = table.codes().len() <= DEVICE_TABLE_BYTES;
        let bytes = match placement {
            Host => return Ok(None),
            OnDevice => Self::copied(table, dev)?,
            Auto if small => Self::copied(table, dev)?,
            InPlace => Self::mapped(table, dev)?,
            Auto => match Self::mapped(table, dev) {
                Ok(bytes) => bytes,
                Err(error) => {
                    tracing::info!("an Engram table stays with the host: {error}");
                    return Ok(None);
                }
            },
        };
        Ok(Some(Self {
            bytes,
            rows: table.rows(),
            head_dim: table.head_dim(),
        }))
    }

    fn copied(table: &EngramTable, dev: &CudaDevice) -> Result<TableBytes> {
        let codes = bytes_to_device(table.codes(), dev)?;
        Ok(TableBytes::Device(
            codes,
            bytes_to_device(table.scales(), dev)?,
        ))
    }

    fn mapped(table: &EngramTable, dev: &CudaDevice) -> Result<TableBytes> {
        let pieces = [table.codes().clone(), table.scales().clone()];
        Ok(TableBytes::Mapped(Mapped::new(&pieces, dev)?))
    }

    /// `hashes: [T, columns]` u32 → `[T, columns * head_dim]` bf16. A row past the table reads as zeros.
    pub(crate) fn lookup(&self, hashes: &Tensor) -> Result<Tensor> {
        const OP: &str = "engram_lookup";
        let hashes = hashes.contiguous()?;
        let dev = device(&hashes)?;
        let (t, columns) = hashes.dims2()?;
        let hd = self.head_dim;
        let out = Out::<bf16>::new(dev, t * columns * hd)?;
        let (codes, scales) = match &self.bytes {
            TableBytes::Device(codes, scales) => (
                Held::new(codes, OP).ptr::<u8>()?,
                Held::new(scales, OP).ptr::<u8>()?,
            ),
            TableBytes::Mapped(mapped) => (mapped.ptr(0), mapped.ptr(1)),
        };
        let launch = Launch::new(dev, kernels::ENGRAM_LOOKUP, "engram_lookup")
            .ptr(Held::new(&hashes, OP).ptr::<u32>()?)
            .ptr(codes)
            .ptr(scales)
            .ptr(out.ptr())
            .int(t)
            .int(columns)
            .int(columns)
            .int(hd)
            .u32(0)
            .u32(self.rows as u32);
        // SAFETY: T * columns rows out, each of hd / 16 threads; rows past the table are not read.
        unsafe { launch.launch(((t * columns * hd / 16).div_ceil(64), 1, 1), 64, 0)? };
        out.into_tensor((t, columns * hd))
    }
}

/// [`engram_gate`](crate::engram_gate) with the two halves of its weight, `[C, dim]` bf16 each.
///
/// # Errors
/// A width the kernel is not made for, or a failed launch.
pub fn engram_gate(
    stream: &Tensor,
    kv: &Tensor,
    (q_weight, k_weight): (&Tensor, &Tensor),
    image_mask: Option<&Tensor>,
    eps: f32,
) -> Result<Tensor> {
    const OP: &str = "engram_gate";
    let (stream, kv) = (stream.contiguous()?, kv.contiguous()?);
    let dev = device(&stream)?;
    let (t, c, dim) = stream.dims3()?;
    let rows = kv.dim(0)?;
    supported(dim.is_multiple_of(8), OP, dim, "widths of multiples of 8")?;
    let mask = image_mask.map(Tensor::contiguous).transpose()?;
    // Tokens without a row of `kv` pass through: then the output starts as the stream.
    let padded = (rows < t).then(|| stream.force_contiguous()).transpose()?;
    let out = Out::<bf16>::new(dev, if padded.is_some() { 0 } else { t * c * dim })?;
    let target = match &padded {
        Some(padded) => Held::new(padded, OP).ptr::<bf16>()?,
        None => out.ptr(),
    };
    let launch = Launch::new(dev, kernels::ENGRAM_GATE, "engram_gate")
        .ptr(Held::new(&stream, OP).ptr::<bf16>()?)
        .ptr(Held::new(&kv, OP).ptr::<bf16>()?)
        .ptr(Held::new(q_weight, OP).ptr::<bf16>()?)
        .ptr(Held::new(k_weight, OP).ptr::<bf16>()?)
        .maybe(
            mask.as_ref()
                .map(|m| Held::new(m, OP).ptr::<u8>())
                .transpose()?,
        )
        .ptr(target)
        .int(dim)
        .f32(eps)
        .f32((dim as f64).powf(-0.5) as f32);
    // SAFETY: stream and output [T, C, dim], kv [rows, C + 1, dim], a block a copy of the first `rows`
    // tokens; the output is this function's own.
    unsafe { launch.launch((c, rows, 1), 256, 0)? };
    match padded {
        Some(padded) => Ok(padded),
        None => out.into_tensor((t, c, dim)),
    }
}
