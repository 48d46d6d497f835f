//! Opening a GPU, and what it is.

use std::{
    collections::HashMap,
    sync::{Mutex, OnceLock},
};

use candle_core::{CudaDevice, Device, cuda_backend::cudarc::driver::sys};

use super::{driver, lock};
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
