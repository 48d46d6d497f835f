//! Loaded kernels.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::{
    CudaDevice,
    cuda_backend::cudarc::{
        driver::{CudaContext, CudaFunction, CudaModule, DriverError, sys},
        nvrtc::Ptx,
    },
};
use deepseek_v41_kernels::{Module, OVERLAPPING};

use super::{driver, lock};
use crate::{DeviceError, Error, Result};

/// A loaded kernel.
#[derive(Clone)]
pub(super) struct Kernel {
    pub(super) function: CudaFunction,
    /// It may begin while the one ahead of it still runs.
    pub(super) overlaps: bool,
}

/// A kernel, the dynamic shared memory it may use, and what was asked about it.
struct Loaded {
    kernel: Kernel,
    shared: usize,
    /// It may be launched in clusters of more than [`PORTABLE_CLUSTER`].
    wide: bool,
    /// Clusters that the device holds at once, by blocks of one, threads and shared memory of a block.
    at_once: HashMap<(usize, usize, usize), usize>,
}

type KernelKey = (usize, &'static str, &'static str);

/// Shared memory a kernel may use without asking.
const FREE_SHARED: usize = 48 << 10;

/// Shared memory that a block can have at all.
const MAX_SHARED: usize = 227 << 10;

/// The largest cluster that a kernel may be launched in without asking.
const PORTABLE_CLUSTER: usize = 8;

/// The oldest PTX version whose code waits for the kernel ahead; older code leaves that out.
const WAITS: i32 = 90;

/// The kernel `name` of `module`, allowed `shared` bytes of dynamic shared memory and clusters of `cluster` blocks.
pub(super) fn kernel(
    dev: &CudaDevice,
    module: Module,
    name: &'static str,
    shared: usize,
    cluster: usize,
) -> Result<Kernel> {
    with_loaded(dev, module, name, (shared, cluster), |loaded| {
        Ok(loaded.kernel.clone())
    })
}

/// Clusters of `size` blocks of kernel `name` that the device holds at once; none where a block does not
/// fit at all.
///
/// # Errors
/// A kernel that cannot be loaded, or a driver that does not answer.
pub fn clusters_at_once(
    dev: &CudaDevice,
    module: Module,
    name: &'static str,
    size: usize,
    (block, shared): (usize, usize),
) -> Result<usize> {
    if shared > MAX_SHARED {
        return Ok(0);
    }
    with_loaded(dev, module, name, (shared, size), |loaded| {
        let key = (size, block, shared);
        if let Some(n) = loaded.at_once.get(&key) {
            return Ok(*n);
        }
        let mut cluster = cluster_of(size);
        let config = sys::CUlaunchConfig {
            gridDimX: size as u32,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: block as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: dev.cuda_stream().cu_stream(),
            attrs: &mut cluster,
            numAttrs: 1,
        };
        let mut n = 0;
        let function = loaded.kernel.function.cu_function();
        // SAFETY: a loaded kernel, and a description that outlives the call.
        unsafe { sys::cuOccupancyMaxActiveClusters(&mut n, function, &config) }
            .result()
            .map_err(|e| driver(name, e))?;
        let n = usize::try_from(n).unwrap_or(0);
        loaded.at_once.insert(key, n);
        Ok(n)
    })
}

/// The attribute of launches in clusters of `size` blocks.
pub(super) fn cluster_of(size: usize) -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
        x: size as u32,
        y: 1,
        z: 1,
    };
    attribute(
        sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        value,
    )
}

/// An attribute that is on.
pub(super) fn switched_on(id: sys::CUlaunchAttributeID) -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    // Of either switch, an int at the start.
    value.cooperative = 1;
    attribute(id, value)
}

fn attribute(
    id: sys::CUlaunchAttributeID,
    value: sys::CUlaunchAttributeValue,
) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id,
        pad: [0; 4],
        value,
    }
}

fn with_loaded<R>(
    dev: &CudaDevice,
    module: Module,
    name: &'static str,
    (shared, cluster): (usize, usize),
    ask: impl FnOnce(&mut Loaded) -> Result<R>,
) -> Result<R> {
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
            let version = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
            let overlaps = OVERLAPPING.contains(&name)
                && function
                    .get_attribute(version)
                    .map_err(|e| driver(name, e))?
                    >= WAITS;
            kernels.entry(key).or_insert(Loaded {
                kernel: Kernel { function, overlaps },
                shared: FREE_SHARED,
                wide: false,
                at_once: HashMap::new(),
            })
        }
    };
    if shared > loaded.shared {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        loaded
            .kernel
            .function
            .set_attribute(attribute, shared as i32)
            .map_err(|e| {
                let says = format!("{shared} bytes of shared memory a block: {e}");
                Error::device(name, DeviceError::Refused(says))
            })?;
        loaded.shared = shared;
    }
    if cluster > PORTABLE_CLUSTER && !loaded.wide {
        let attribute =
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        let function = &loaded.kernel.function;
        function.set_attribute(attribute, 1).map_err(|e| {
            let says = format!("clusters of {cluster} blocks: {e}");
            Error::device(name, DeviceError::Refused(says))
        })?;
        loaded.wide = true;
    }
    ask(loaded)
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
    let reason = match DeviceError::from_text(&e.to_string()) {
        DeviceError::Other(says) => DeviceError::Refused(says),
        known => known,
    };
    Error::device(format!("kernel module {module} {kernel}"), reason)
}
