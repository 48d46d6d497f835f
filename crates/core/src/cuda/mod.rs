//! CUDA: opening a device, loading kernels, launching them.
//!
//! Operations with more operands than candle's custom ops take are device branches in their public
//! functions: operands are borrowed ([`Held`]), outputs allocated ([`Out`]), a kernel launched on the
//! device's stream ([`Launch`]). Nothing here waits for the device; memory is freed in stream order.
//!
//! Loaded modules are kept for the life of the process, one entry for each device and module: loading
//! one twice would cost its upload again and gain nothing. It is the only global state.

mod launch;
pub mod ops;

use std::{
    collections::HashMap,
    marker::PhantomData,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use candle_core::{
    CudaDevice, CudaStorage, DType, Device, Layout, Shape, Storage, Tensor,
    cuda_backend::{
        CudaDType,
        cudarc::{
            driver::{
                CudaContext, CudaFunction, CudaModule, CudaSlice, DevicePtr as _, DeviceRepr,
                DriverError, ValidAsZeroBits, sys,
            },
            nvrtc::Ptx,
        },
    },
    op::BackpropOp,
};
pub use deepseek_v41_kernels as kernels;
use deepseek_v41_kernels::Module;

pub use self::launch::{Launch, MAX_GRID_YZ};
use crate::{Error, Result};

/// The oldest compute capability that the kernels' PTX serves.
const OLDEST: (i32, i32) = (8, 0);

/// Opens GPU `ordinal` with a stream of its own.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    let dev = CudaDevice::new_with_stream(ordinal).map_err(|e| {
        // candle appends a backtrace where those are on.
        let e = e.to_string();
        let first = e.lines().next().unwrap_or_default();
        Error::device(
            format!("cuda:{ordinal}"),
            format!("{first}; {}", hint_no_gpu()),
        )
    })?;
    let capability = capability(&dev)?;
    if capability < OLDEST {
        return Err(Error::device(
            format!("cuda:{ordinal}"),
            format!(
                "compute capability {}.{} is older than 8.0, for which there are no kernels: use the CPU",
                capability.0, capability.1
            ),
        ));
    }
    // SAFETY: this device's tensors are used on its one stream only, which orders allocation, use and
    // release.
    unsafe { dev.disable_event_tracking() };
    keep_freed_memory(&dev)?;
    Ok(Device::Cuda(dev))
}

/// Lets the driver's pool keep what is freed.
///
/// By default it hands everything unused back at each synchronisation, which is once a token, and maps it
/// anew for the next step.
fn keep_freed_memory(dev: &CudaDevice) -> Result<()> {
    let stream = dev.cuda_stream();
    let mut threshold = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the handle is this context's device, and the attribute is a u64, which is read before the
    // call returns.
    let set = unsafe {
        let mut pool = std::ptr::null_mut();
        sys::cuDeviceGetDefaultMemPool(&mut pool, stream.context().cu_device())
            .result()
            .and_then(|()| {
                sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()).result()
            })
    };
    set.map_err(|e| driver("memory pool", e))
}

fn hint_no_gpu() -> &'static str {
    "there is no usable GPU: `nvidia-smi` should list it and show a driver for CUDA 13 (580 or later); \
     without one use the device `cpu`"
}

/// Compute capability, such as `(9, 0)`.
///
/// # Errors
/// The driver does not answer.
pub fn capability(dev: &CudaDevice) -> Result<(i32, i32)> {
    dev.cuda_stream()
        .context()
        .compute_capability()
        .map_err(|e| driver("compute capability", e))
}

/// Multiprocessors of the device.
///
/// # Errors
/// The driver does not answer.
pub fn multiprocessors(dev: &CudaDevice) -> Result<usize> {
    let state = device_state(dev)?;
    Ok(state.multiprocessors)
}

/// Whether the `_sm90` modules run here.
///
/// # Errors
/// The driver does not answer.
pub fn is_hopper(dev: &CudaDevice) -> Result<bool> {
    Ok(device_state(dev)?.capability == (9, 0))
}

#[derive(Clone, Copy)]
struct DeviceState {
    capability: (i32, i32),
    multiprocessors: usize,
}

fn device_state(dev: &CudaDevice) -> Result<DeviceState> {
    static STATES: OnceLock<Mutex<HashMap<usize, DeviceState>>> = OnceLock::new();
    let stream = dev.cuda_stream();
    let ctx = stream.context();
    let mut states = lock(&STATES);
    if let Some(state) = states.get(&ctx.ordinal()) {
        return Ok(*state);
    }
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let state = DeviceState {
        capability: capability(dev)?,
        multiprocessors: ctx
            .attribute(attribute)
            .map_err(|e| driver("multiprocessors", e))?
            .max(1) as usize,
    };
    states.insert(ctx.ordinal(), state);
    Ok(state)
}

fn lock<K, V>(cell: &OnceLock<Mutex<HashMap<K, V>>>) -> std::sync::MutexGuard<'_, HashMap<K, V>> {
    // A panic while holding it cannot leave a map half-written: entries are inserted whole.
    cell.get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// A loaded kernel and the dynamic shared memory it may use.
#[derive(Clone)]
struct Loaded {
    function: CudaFunction,
    shared: usize,
}

type KernelKey = (usize, &'static str, &'static str);

/// Shared memory a kernel may use without asking.
const FREE_SHARED: usize = 48 << 10;

/// The kernel `name` of `module`, allowed `shared` bytes of dynamic shared memory.
fn function(
    dev: &CudaDevice,
    module: Module,
    name: &'static str,
    shared: usize,
) -> Result<CudaFunction> {
    static KERNELS: OnceLock<Mutex<HashMap<KernelKey, Loaded>>> = OnceLock::new();
    let stream = dev.cuda_stream();
    let ctx = stream.context();
    let key = (ctx.ordinal(), module.name, name);
    let mut kernels = lock(&KERNELS);
    let loaded = match kernels.get_mut(&key) {
        Some(loaded) => loaded,
        None => {
            let function = load_module(ctx, module)?
                .load_function(name)
                .map_err(|e| refused(module.name, name, e))?;
            kernels.entry(key).or_insert(Loaded {
                function,
                shared: FREE_SHARED,
            })
        }
    };
    if shared > loaded.shared {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        loaded
            .function
            .set_attribute(attribute, shared as i32)
            .map_err(|e| {
                Error::device(
                    name,
                    format!(
                        "{shared} bytes of shared memory a block are more than this GPU has: {e}"
                    ),
                )
            })?;
        loaded.shared = shared;
    }
    Ok(loaded.function.clone())
}

fn load_module(ctx: &Arc<CudaContext>, module: Module) -> Result<Arc<CudaModule>> {
    type Loaded = HashMap<(usize, &'static str), Arc<CudaModule>>;
    static MODULES: OnceLock<Mutex<Loaded>> = OnceLock::new();
    let key = (ctx.ordinal(), module.name);
    let mut modules = lock(&MODULES);
    if let Some(found) = modules.get(&key) {
        return Ok(found.clone());
    }
    let loaded = ctx
        .load_module(Ptx::from_binary(module.image.to_vec()))
        .map_err(|e| refused(module.name, "", e))?;
    modules.insert(key, loaded.clone());
    Ok(loaded)
}

fn refused(module: &str, kernel: &str, e: DriverError) -> Error {
    Error::device(
        format!("kernel module {module} {kernel}"),
        format!(
            "{e}; the driver refuses code built with CUDA 13: it takes driver 580 or later and compute \
             capability 8.0 or later. Update the driver or use the device `cpu`"
        ),
    )
}

/// A driver error as ours, with what to do where that is known.
pub fn driver(what: &str, e: DriverError) -> Error {
    let hint = match e.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "; the GPU's memory is full: lower max_len, max_seqs or the chunk length, or use another GPU"
        }
        sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            "; a kernel read outside of its tensors, the process cannot use this GPU any more"
        }
        _ => "",
    };
    Error::device(what, format!("{e}{hint}"))
}

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
        // SAFETY: every element is written by the launch that the output is made for, or is padding that
        // nothing reads.
        let slice = unsafe { dev.cuda_stream().alloc::<T>(len.max(1)) }
            .map_err(|e| driver("allocation", e))?;
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
