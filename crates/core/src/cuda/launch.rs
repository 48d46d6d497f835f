//! One kernel launch: arguments in the order of the kernel's signature, sizes checked to fit their type.

use std::{ffi::c_void, marker::PhantomData};

use candle_core::{CudaDevice, cuda_backend::cudarc::driver::sys};
use deepseek_v41_kernels::Module;

use super::{
    Ptr, Scope, driver,
    modules::{cluster_of, kernel, switched_on},
    scratch::captured_stream,
};
use crate::{Error, Result};

/// The widest y and z dimension of a grid.
pub const MAX_GRID_YZ: usize = 65_535;

/// A kernel and the arguments given so far.
pub struct Launch<'a> {
    dev: &'a CudaDevice,
    module: Module,
    name: &'static str,
    args: Vec<Arg>,
    too_large: Option<usize>,
    cluster: usize,
    borrows: PhantomData<&'a ()>,
}

#[derive(Clone, Copy)]
enum Arg {
    Ptr(u64),
    I32(i32),
    U32(u32),
    I64(i64),
    U64(u64),
    F32(f32),
    /// A struct of twelve words.
    Scopes([u64; 12]),
}

impl Arg {
    /// Where the driver reads it from.
    fn address(&self) -> *mut c_void {
        let at: *const c_void = match self {
            Self::Ptr(v) | Self::U64(v) => (&raw const *v).cast(),
            Self::I32(v) => (&raw const *v).cast(),
            Self::U32(v) => (&raw const *v).cast(),
            Self::I64(v) => (&raw const *v).cast(),
            Self::F32(v) => (&raw const *v).cast(),
            Self::Scopes(v) => (&raw const *v).cast(),
        };
        at.cast_mut()
    }
}

impl<'a> Launch<'a> {
    /// Kernel `name` of `module`.
    pub fn new(dev: &'a CudaDevice, module: Module, name: &'static str) -> Self {
        Self {
            dev,
            module,
            name,
            args: Vec::with_capacity(26),
            too_large: None,
            cluster: 1,
            borrows: PhantomData,
        }
    }

    /// A pointer.
    #[must_use]
    pub fn ptr(self, ptr: Ptr<'a>) -> Self {
        self.push(Arg::Ptr(ptr.address()))
    }

    /// A pointer, or null.
    #[must_use]
    pub fn maybe(self, ptr: Option<Ptr<'a>>) -> Self {
        self.push(Arg::Ptr(ptr.map_or(0, Ptr::address)))
    }

    /// An `int`.
    #[must_use]
    pub fn int(mut self, n: usize) -> Self {
        match i32::try_from(n) {
            Ok(n) => self.push(Arg::I32(n)),
            Err(_) => {
                self.too_large = Some(n);
                self.push(Arg::I32(0))
            }
        }
    }

    /// An `int64_t`.
    #[must_use]
    pub fn long(self, n: usize) -> Self {
        self.push(Arg::I64(n as i64))
    }

    /// A `uint32_t`.
    #[must_use]
    pub fn u32(self, n: u32) -> Self {
        self.push(Arg::U32(n))
    }

    /// A `uint64_t`.
    #[must_use]
    pub fn u64(self, n: u64) -> Self {
        self.push(Arg::U64(n))
    }

    /// A `float`.
    #[must_use]
    pub fn f32(self, x: f32) -> Self {
        self.push(Arg::F32(x))
    }

    /// Three [`Scope`]s by value.
    #[must_use]
    pub fn scopes(mut self, scopes: [Scope<'a>; 3]) -> Self {
        let mut words = [0; 12];
        for (words, scope) in words.chunks_exact_mut(4).zip(scopes) {
            match scope.words() {
                Some(own) => words.copy_from_slice(&own),
                None => self.too_large = Some(scope.n),
            }
        }
        self.push(Arg::Scopes(words))
    }

    /// In clusters of `size` neighbouring blocks, which the grid's width is a multiple of.
    #[must_use]
    pub fn clusters(mut self, size: usize) -> Self {
        self.cluster = size;
        self
    }

    fn push(mut self, arg: Arg) -> Self {
        self.args.push(arg);
        self
    }

    /// Puts the launch on the device's stream. An empty grid launches nothing.
    ///
    /// # Errors
    /// A size that does not fit its argument or the grid, a kernel that cannot be loaded, or a refused
    /// launch.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number, order and type; tensors are as large as the
    /// sizes among them say; grid, block and shared memory are what the kernel asks for.
    pub unsafe fn launch(
        self,
        grid: (usize, usize, usize),
        block: usize,
        shared: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.start(grid, block, shared, false) }
    }

    /// The same for a kernel whose blocks wait for each other: all of them run at once, or none does.
    ///
    /// # Errors
    /// As [`launch`](Self::launch); also a grid that the device does not hold at once.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_cooperative(
        self,
        grid: (usize, usize, usize),
        block: usize,
        shared: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.start(grid, block, shared, true) }
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn start(
        self,
        grid: (usize, usize, usize),
        block: usize,
        shared: usize,
        cooperative: bool,
    ) -> Result<()> {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        if let Some(n) = self.too_large {
            return Err(Error::Capacity {
                what: self.name,
                needed: n,
                available: i32::MAX as usize,
            });
        }
        let yz = grid.1.max(grid.2);
        if yz > MAX_GRID_YZ || grid.0 > i32::MAX as usize {
            let (needed, available) = if yz > MAX_GRID_YZ {
                (yz, MAX_GRID_YZ)
            } else {
                (grid.0, i32::MAX as usize)
            };
            return Err(Error::Capacity {
                what: self.name,
                needed,
                available,
            });
        }
        let kernel = kernel(self.dev, self.module, self.name, shared, self.cluster)?;
        let captured = captured_stream();
        let overlaps = kernel.overlaps && captured.is_some();
        let stream = captured.unwrap_or_else(|| self.dev.cuda_stream());
        let failed = |e| driver(self.name, e);
        stream.context().bind_to_thread().map_err(failed)?;
        let mut attributes = Vec::with_capacity(3);
        if self.cluster > 1 {
            attributes.push(cluster_of(self.cluster));
        }
        if cooperative {
            attributes.push(switched_on(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            ));
        }
        if overlaps {
            attributes.push(switched_on(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            ));
        }
        let mut args: Vec<_> = self.args.iter().map(Arg::address).collect();
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0 as u32,
            gridDimY: grid.1 as u32,
            gridDimZ: grid.2 as u32,
            blockDimX: block as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let function = kernel.function.cu_function();
        // SAFETY: the caller's promise; arguments and attributes are read before the call returns.
        let started = unsafe {
            sys::cuLaunchKernelEx(&config, function, args.as_mut_ptr(), std::ptr::null_mut())
        };
        started.result().map_err(failed)
    }
}
