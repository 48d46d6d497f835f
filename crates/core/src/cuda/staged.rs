//! The host values of a step, copied to the device together.

use candle_core::{
    CudaDevice, DType, Device, Storage, Tensor, WithDType,
    cuda_backend::{
        CudaDType,
        cudarc::driver::{DeviceRepr, result},
    },
};
use half::bf16;

use super::{Held, driver};
use crate::{Error, Result, upload};

/// Bytes to whose multiples every tensor is aligned.
const ALIGN: usize = 64;

/// Host tensors on the device: one piece of memory, and one copy, for each dtype.
///
/// Their places stay the same when new values come, which is what work captured with them needs.
#[derive(Debug)]
pub struct Staged {
    pieces: Vec<Piece>,
    tensors: Vec<Tensor>,
}

/// All tensors of one dtype.
#[derive(Debug)]
struct Piece {
    dtype: DType,
    all: Tensor,
}

/// Elements and first element of the tensors of one dtype.
type Layout = (usize, Vec<(usize, usize)>);

impl Staged {
    /// Copies `tensors`, contiguous ones of the CPU of dtype I32, U32, F32, BF16 or U8, to `dev`.
    ///
    /// # Errors
    /// Another tensor, or a full memory.
    pub fn new(dev: &CudaDevice, tensors: &[Tensor]) -> Result<Self> {
        let device = Device::Cuda(dev.clone());
        let mut pieces: Vec<Piece> = Vec::new();
        let mut placed = vec![None; tensors.len()];
        for tensor in tensors {
            let dtype = tensor.dtype();
            if pieces.iter().any(|piece| piece.dtype == dtype) || tensor.elem_count() == 0 {
                continue;
            }
            let (len, at) = layout(tensors, dtype);
            let all = match dtype {
                DType::I32 => gathered::<i32>(tensors, len, &at, &device)?,
                DType::U32 => gathered::<u32>(tensors, len, &at, &device)?,
                DType::F32 => gathered::<f32>(tensors, len, &at, &device)?,
                DType::BF16 => gathered::<bf16>(tensors, len, &at, &device)?,
                DType::U8 => gathered::<u8>(tensors, len, &at, &device)?,
                _ => return Err(Error::shape("staged", format!("a tensor of {dtype:?}"))),
            };
            for (i, start) in at {
                let own = &tensors[i];
                let part = all.narrow(0, start, own.elem_count())?;
                placed[i] = Some(part.reshape(own.shape())?);
            }
            pieces.push(Piece { dtype, all });
        }
        let tensors = placed.into_iter().zip(tensors).map(|(placed, own)| {
            // Those without elements have no place.
            placed.map_or_else(|| empty(own, &device), Ok)
        });
        Ok(Self {
            tensors: tensors.collect::<Result<_>>()?,
            pieces,
        })
    }

    /// The tensors on the device, in the order given.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Copies the values of `tensors`, of the same dtypes and shapes, to where the first ones are.
    ///
    /// # Errors
    /// Other dtypes or shapes, or a failed copy.
    pub fn refill(&mut self, tensors: &[Tensor]) -> Result<()> {
        let same = |(a, b): (&Tensor, &Tensor)| a.dtype() == b.dtype() && a.dims() == b.dims();
        if tensors.len() != self.tensors.len() || !self.tensors.iter().zip(tensors).all(same) {
            return Err(Error::shape("staged", "tensors of other shapes"));
        }
        for Piece { dtype, all } in &self.pieces {
            let (len, at) = layout(tensors, *dtype);
            match dtype {
                DType::I32 => overwrite(all, &values::<i32>(tensors, len, &at)?)?,
                DType::U32 => overwrite(all, &values::<u32>(tensors, len, &at)?)?,
                DType::F32 => overwrite(all, &values::<f32>(tensors, len, &at)?)?,
                DType::BF16 => overwrite(all, &values::<bf16>(tensors, len, &at)?)?,
                _ => overwrite(all, &values::<u8>(tensors, len, &at)?)?,
            }
        }
        Ok(())
    }
}

fn layout(tensors: &[Tensor], dtype: DType) -> Layout {
    let align = ALIGN / dtype.size_in_bytes().max(1);
    let (mut len, mut at) = (0, Vec::new());
    for (i, tensor) in tensors.iter().enumerate() {
        if tensor.dtype() == dtype && tensor.elem_count() > 0 {
            at.push((i, len));
            len += tensor.elem_count().next_multiple_of(align);
        }
    }
    (len, at)
}

fn values<T: WithDType>(tensors: &[Tensor], len: usize, at: &[(usize, usize)]) -> Result<Vec<T>> {
    let mut out = vec![T::zero(); len];
    for (i, start) in at {
        let (storage, layout) = tensors[*i].storage_and_layout();
        let own = match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(storage), Some((from, to))) => &storage.as_slice::<T>()?[from..to],
            _ => {
                return Err(Error::shape(
                    "staged",
                    "a tensor that is not one piece of the host",
                ));
            }
        };
        out[*start..*start + own.len()].copy_from_slice(own);
    }
    Ok(out)
}

fn gathered<T: WithDType>(
    tensors: &[Tensor],
    len: usize,
    at: &[(usize, usize)],
    device: &Device,
) -> Result<Tensor> {
    Ok(Tensor::from_vec(
        values::<T>(tensors, len, at)?,
        len,
        device,
    )?)
}

fn overwrite<T: CudaDType + DeviceRepr + 'static>(all: &Tensor, values: &[T]) -> Result<()> {
    let Device::Cuda(dev) = all.device() else {
        return Err(Error::shape("staged", "not on the GPU"));
    };
    let to = Held::new(all, "staged").ptr::<T>()?.address();
    let stream = dev.cuda_stream();
    stream
        .context()
        .bind_to_thread()
        .map_err(|e| driver("upload", e))?;
    // SAFETY: `all` has as many elements as were gathered for it, for the same shapes; the driver has
    // taken the values from pageable memory when the call returns.
    unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }
        .map_err(|e| driver("upload", e))
}

fn empty(own: &Tensor, device: &Device) -> Result<Tensor> {
    let shape = own.shape();
    match own.dtype() {
        DType::I32 => upload(Vec::<i32>::new(), shape, device),
        DType::U32 => upload(Vec::<u32>::new(), shape, device),
        DType::F32 => upload(Vec::<f32>::new(), shape, device),
        DType::BF16 => upload(Vec::<bf16>::new(), shape, device),
        _ => upload(Vec::<u8>::new(), shape, device),
    }
}
