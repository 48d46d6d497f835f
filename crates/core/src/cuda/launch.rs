//! One kernel launch: arguments in the order of the kernel's signature, sizes checked to fit their type.

use std::marker::PhantomData;

use candle_core::{
    CudaDevice,
    cuda_backend::cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg},
};
use deepseek_v41_kernels::Module;

use super::{Ptr, Scope, driver, function};
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
    Scopes(Words<12>),
}

/// A struct that a kernel takes by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Words<const N: usize>([u64; N]);

// SAFETY: plain words without padding, passed by value.
unsafe impl<const N: usize> DeviceRepr for Words<N> {}

impl<'a> Launch<'a> {
    /// Kernel `name` of `module`.
    pub fn new(dev: &'a CudaDevice, module: Module, name: &'static str) -> Self {
        Self {
            dev,
            module,
            name,
            args: Vec::with_capacity(26),
            too_large: None,
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
        self.push(Arg::Scopes(Words(words)))
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
        let function = function(self.dev, self.module, self.name, shared)?;
        let stream = self.dev.cuda_stream();
        let mut builder = stream.launch_builder(&function);
        for arg in &self.args {
            match arg {
                Arg::Ptr(v) | Arg::U64(v) => builder.arg(v),
                Arg::I32(v) => builder.arg(v),
                Arg::U32(v) => builder.arg(v),
                Arg::I64(v) => builder.arg(v),
                Arg::F32(v) => builder.arg(v),
                Arg::Scopes(v) => builder.arg(v),
            };
        }
        let config = LaunchConfig {
            grid_dim: (grid.0 as u32, grid.1 as u32, grid.2 as u32),
            block_dim: (block as u32, 1, 1),
            shared_mem_bytes: shared as u32,
        };
        // SAFETY: the caller's promise.
        let started = unsafe {
            match cooperative {
                true => builder.launch_cooperative(config),
                false => builder.launch(config),
            }
        };
        started.map_err(|e| driver(self.name, e))?;
        Ok(())
    }
}
