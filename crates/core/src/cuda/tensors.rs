//! Operands and results of launches.

use std::marker::PhantomData;

use candle_core::{
    CudaDevice, CudaStorage, DType, Device, Layout, Shape, Storage, Tensor,
    cuda_backend::{
        CudaDType,
        cudarc::driver::{CudaSlice, DevicePtr as _, DeviceRepr, ValidAsZeroBits},
    },
    op::BackpropOp,
};

use super::{driver, scratch::taken};
use crate::{Error, Result};

/// The address of elements on the device, valid while what it was borrowed from lives.
#[derive(Debug, Clone, Copy)]
pub struct Ptr<'a> {
    address: u64,
    owner: PhantomData<&'a ()>,
}

impl Ptr<'_> {
    /// No operand.
    pub const NULL: Self = Self {
        address: 0,
        owner: PhantomData,
    };

    /// An address that whoever asked for it keeps valid.
    pub(super) fn at(address: u64) -> Self {
        Self {
            address,
            owner: PhantomData,
        }
    }

    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self {
            address: self.address + bytes as u64,
            ..self
        }
    }

    /// The device address.
    pub fn address(self) -> u64 {
        self.address
    }
}

/// Elements of a contiguous CUDA tensor, for `cuda_fwd`.
///
/// # Errors
/// Another dtype, or a layout with holes.
pub fn contiguous<'a, T: CudaDType + DeviceRepr + 'static>(
    storage: &'a CudaStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<Ptr<'a>> {
    let slice = storage.as_cuda_slice::<T>()?;
    let Some((start, _)) = layout.contiguous_offsets() else {
        return Err(candle_core::Error::RequiresContiguous { op }.bt().into());
    };
    Ok(address(slice).offset(start * size_of::<T>()))
}

fn address<T: 'static>(slice: &CudaSlice<T>) -> Ptr<'_> {
    let (address, _) = slice.device_ptr(slice.stream());
    Ptr {
        address,
        owner: PhantomData,
    }
}

/// A tensor borrowed for a launch.
///
/// Its storage cannot go while the tensor is borrowed. Its lock is not held: what runs on the device is
/// ordered by the stream.
pub struct Held<'a> {
    tensor: &'a Tensor,
    op: &'static str,
}

impl<'a> Held<'a> {
    /// Borrows `tensor` for `op`.
    pub fn new(tensor: &'a Tensor, op: &'static str) -> Self {
        Self { tensor, op }
    }

    /// Where its elements are.
    ///
    /// # Errors
    /// Not on a GPU, another dtype, or not contiguous.
    pub fn ptr<T: CudaDType + DeviceRepr + 'static>(&self) -> Result<Ptr<'a>> {
        if !self.tensor.is_contiguous() {
            return Err(candle_core::Error::RequiresContiguous { op: self.op }
                .bt()
                .into());
        }
        self.start::<T>()
    }

    /// Where its first element is; a view need not be contiguous.
    ///
    /// # Errors
    /// Not on a GPU, or another dtype.
    pub fn start<T: CudaDType + DeviceRepr + 'static>(&self) -> Result<Ptr<'a>> {
        let (storage, layout) = self.tensor.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => {
                let address = address(storage.as_cuda_slice::<T>()?).address;
                let start = Ptr {
                    address,
                    owner: PhantomData,
                };
                Ok(start.offset(layout.start_offset() * size_of::<T>()))
            }
            _ => Err(Error::shape(self.op, "operands are on different devices")),
        }
    }
}

/// An output or workspace on the device; one element at least, since an allocation cannot be empty.
pub struct Out<T> {
    slice: CudaSlice<T>,
    dev: CudaDevice,
}

impl<T: CudaDType + DeviceRepr + ValidAsZeroBits + 'static> Out<T> {
    /// `len` elements of whatever the memory held.
    ///
    /// # Errors
    /// [`Error::Device`]: the memory is full.
    pub fn new(dev: &CudaDevice, len: usize) -> Result<Self> {
        let slice = match taken(len.max(1))? {
            Some(slice) => slice,
            // SAFETY: every element is written by the launch that the output is made for, or is padding that
            // nothing reads.
            None => unsafe { dev.cuda_stream().alloc::<T>(len.max(1)) }
                .map_err(|e| driver("allocation", e))?,
        };
        Ok(Self {
            slice,
            dev: dev.clone(),
        })
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::Device`]: the memory is full.
    pub fn zeros(dev: &CudaDevice, len: usize) -> Result<Self> {
        // A captured step's own memory too: a graph sets no other.
        let slice = dev
            .cuda_stream()
            .alloc_zeros::<T>(len.max(1))
            .map_err(|e| driver("allocation", e))?;
        Ok(Self {
            slice,
            dev: dev.clone(),
        })
    }

    /// Copies `values` to elements `at..`.
    ///
    /// # Errors
    /// They do not fit, or the copy fails.
    pub fn write(&mut self, at: usize, values: &[T]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let stream = self.dev.cuda_stream();
        let Some(mut part) = self.slice.try_slice_mut(at..at + values.len()) else {
            return Err(Error::shape("upload", "more values than there is room for"));
        };
        stream
            .memcpy_htod(values, &mut part)
            .map_err(|e| driver("upload", e))
    }

    /// Where it is.
    pub fn ptr(&self) -> Ptr<'_> {
        address(&self.slice)
    }

    /// As storage, for `cuda_fwd`.
    pub fn into_storage(self) -> CudaStorage {
        CudaStorage::wrap_cuda_slice(self.slice, self.dev)
    }

    /// As a tensor.
    ///
    /// # Errors
    /// An empty shape that cannot be had.
    pub fn into_tensor(self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let len = self.slice.len();
        let flat = Tensor::from_storage(
            Storage::Cuda(self.into_storage()),
            len,
            BackpropOp::none(),
            false,
        );
        match shape.elem_count() {
            n if n == len => Ok(flat.reshape(shape)?),
            n => Ok(flat.narrow(0, 0, n)?.reshape(shape)?),
        }
    }
}

/// Bytes of a file on the device, as U8.
///
/// # Errors
/// [`Error::Device`]: the memory is full.
pub fn bytes_to_device(bytes: &[u8], dev: &CudaDevice) -> Result<Tensor> {
    let mut out = Out::<u8>::new(dev, bytes.len())?;
    out.write(0, bytes)?;
    out.into_tensor(bytes.len())
}

/// Whether every value survives a trip through bf16.
pub fn fits_bf16(values: &[f32]) -> bool {
    values
        .iter()
        .all(|v| v.is_nan() || half::bf16::from_f32(*v).to_f32() == *v)
}

/// A weight that kernels take as bf16: `[..]` f32 values that were stored as bf16.
///
/// # Errors
/// [`Error::Unsupported`] when rounding would change a value.
pub fn bf16_weight(weight: &Tensor, name: &str) -> Result<Tensor> {
    let values = weight
        .to_device(&Device::Cpu)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    if !fits_bf16(&values) {
        return Err(Error::Unsupported {
            what: format!(
                "`{name}` on CUDA: stored wider than bf16, which the kernels read. Use the CPU"
            ),
        });
    }
    Ok(weight.to_dtype(DType::BF16)?.contiguous()?)
}
