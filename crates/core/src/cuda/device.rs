//! Opening a GPU, and what it is.

use std::{
    collections::HashMap,
    sync::{Mutex, OnceLock},
};

use candle_core::{
    CudaDevice, Device,
    cuda_backend::{DeviceId, cudarc::driver::sys},
};

use super::{driver, lock};
use crate::{DeviceError, Error, Result};

/// The oldest compute capability that the kernels' PTX serves.
const OLDEST: (i32, i32) = (8, 0);

/// The oldest driver that takes what CUDA 13 compiled.
const OLDEST_DRIVER: i32 = 13_000;

/// Opens GPU `ordinal` with a stream of its own.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    open_with(ordinal, false)
}

/// Opens GPU `ordinal` as if it were no Hopper card: operations on this device take the kernels that every card from
/// 8.0 on has. For comparing the two.
///
/// # Errors
/// As [`open_device`](crate::open_device).
pub fn open_baseline(ordinal: usize) -> Result<Device> {
    open_with(ordinal, true)
}

fn open_with(ordinal: usize, baseline: bool) -> Result<Device> {
    let name = format!("cuda:{ordinal}");
    driver_is_new_enough(&name)?;
    let dev = CudaDevice::new_with_stream(ordinal).map_err(|e| match Error::from(e) {
        Error::Device { reason, .. } => Error::device(name.as_str(), reason),
        // candle appends a backtrace where those are on.
        err => {
            let says = err.to_string();
            let first = says.lines().next().unwrap_or_default();
            Error::device(name.as_str(), DeviceError::NoGpu(first.to_owned()))
        }
    })?;
    let state = DeviceState::ask(&dev)?;
    if state.capability < OLDEST {
        return Err(Error::device(name, DeviceError::TooOld(state.capability)));
    }
    let hopper = state.hopper && !baseline;
    lock(&STATES).insert(dev.id(), DeviceState { hopper, ..state });
    // SAFETY: this device's tensors are used on its one stream only, which orders allocation, use and
    // release.
    unsafe { dev.disable_event_tracking() };
    keep_freed_memory(&dev)?;
    Ok(Device::Cuda(dev))
}

fn driver_is_new_enough(name: &str) -> Result<()> {
    let mut version = 0;
    // SAFETY: the version is written before the call returns; it needs no context.
    let asked = unsafe { sys::cuDriverGetVersion(&mut version) };
    // A driver that does not answer says why when it is opened.
    if asked.result().is_ok() && version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        let says = format!("the driver is for CUDA {major}.{minor}");
        return Err(Error::device(name, DeviceError::Driver(says)));
    }
    Ok(())
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

/// Whether operations on this device take the `_sm90` modules.
///
/// # Errors
/// The driver does not answer.
pub fn is_hopper(dev: &CudaDevice) -> Result<bool> {
    Ok(device_state(dev)?.hopper)
}

/// What is known of each device, by the handle that was opened.
static STATES: OnceLock<Mutex<HashMap<DeviceId, DeviceState>>> = OnceLock::new();

#[derive(Clone, Copy)]
struct DeviceState {
    capability: (i32, i32),
    /// Whether operations take the kernels for Hopper.
    hopper: bool,
    multiprocessors: usize,
}

impl DeviceState {
    fn ask(dev: &CudaDevice) -> Result<Self> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let stream = dev.cuda_stream();
        let multiprocessors = stream.context().attribute(attribute);
        let capability = capability(dev)?;
        Ok(Self {
            capability,
            hopper: capability == (9, 0),
            multiprocessors: multiprocessors
                .map_err(|e| driver("multiprocessors", e))?
                .max(1) as usize,
        })
    }
}

fn device_state(dev: &CudaDevice) -> Result<DeviceState> {
    let mut states = lock(&STATES);
    if let Some(state) = states.get(&dev.id()) {
        return Ok(*state);
    }
    // Opened by candle.
    let state = DeviceState::ask(dev)?;
    states.insert(dev.id(), state);
    Ok(state)
}
