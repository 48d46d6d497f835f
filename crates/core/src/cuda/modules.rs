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
use deepseek_v41_kernels::Module;

use super::lock;
use crate::{DeviceError, Error, Result};

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
pub(super) fn function(
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
                let says = format!("{shared} bytes of shared memory a block: {e}");
                Error::device(name, DeviceError::Refused(says))
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
    let reason = match DeviceError::from_text(&e.to_string()) {
        DeviceError::Other(says) => DeviceError::Refused(says),
        known => known,
    };
    Error::device(format!("kernel module {module} {kernel}"), reason)
}
