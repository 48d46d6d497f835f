//! Memory for what captured launches hand to each other.

use std::{cell::RefCell, fmt, sync::Arc};

use candle_core::{
    CudaDevice, Tensor,
    cuda_backend::cudarc::driver::{
        CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr, DriverError, sys,
    },
};

use super::driver;
use crate::{Error, Result};

thread_local! {
    /// What launches of this thread are captured with.
    static CAPTURING: RefCell<Option<Captured>> = const { RefCell::new(None) };
}

/// Memory for the intermediate results of captured work, and a stream for what may run beside it.
///
/// Allocations that the captured stream makes become nodes between its launches, and a launch behind such a
/// node cannot begin early. So while work is captured its results come from here.
pub struct Scratch {
    /// Of what runs in the captured stream's order.
    own: Pool,
    /// Of what runs beside it: neither is given what the other had.
    beside: Pool,
    side: Arc<CudaStream>,
    forked: CudaEvent,
    joined: CudaEvent,
    /// Runs the graphs.
    runs: Arc<CudaStream>,
}

/// A pool of memory and a stream that orders its allocations and runs nothing.
///
/// Memory is taken and given back in the order in which the host makes launches, which is the order in which
/// those run. When the capture ends all of it is free again and stays in the pool, for the graph's launches to
/// use, and for those of other graphs that one stream runs one after the other.
struct Pool {
    pool: sys::CUmemoryPool,
    stream: Arc<CudaStream>,
}

// SAFETY: a handle to a pool, which the driver lets any thread use; it is destroyed once.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}

impl Pool {
    fn new(ctx: &Arc<CudaContext>) -> std::result::Result<Self, DriverError> {
        let stream = ctx.new_stream()?;
        let mut pool = std::ptr::null_mut();
        let mut keep = u64::MAX;
        // SAFETY: zeros are a valid description (no type, no handles, no place), of which type and place are
        // then set: two words, kind and ordinal.
        unsafe {
            let mut props: sys::CUmemPoolProps = std::mem::zeroed();
            props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            let device = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32;
            (&raw mut props.location)
                .cast::<[i32; 2]>()
                .write([device, ctx.ordinal() as i32]);
            sys::cuMemPoolCreate(&mut pool, &props).result()?;
        }
        let own = Self { pool, stream };
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: a u64, read before the call returns.
        unsafe { sys::cuMemPoolSetAttribute(own.pool, threshold, (&raw mut keep).cast()) }
            .result()?;
        Ok(own)
    }

    fn take<T: DeviceRepr>(&self, len: usize) -> Result<CudaSlice<T>> {
        let mut address = 0;
        // SAFETY: `len` elements of the pool, which the slice gives back on the same stream. Whoever asks for
        // memory without a value writes it first.
        unsafe {
            sys::cuMemAllocFromPoolAsync(
                &mut address,
                len * size_of::<T>(),
                self.pool,
                self.stream.cu_stream(),
            )
            .result()
            .map_err(|e| driver("allocation", e))?;
            Ok(self.stream.upgrade_device_ptr(address, len))
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let ctx = self.stream.context();
        // SAFETY: made by `new`, destroyed here alone.
        ctx.record_err(unsafe { sys::cuMemPoolDestroy(self.pool) }.result());
    }
}

impl Scratch {
    /// For work captured on the stream of `dev`; `None` where events follow every tensor, which ties it to the
    /// stream it is from.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(dev: &CudaDevice) -> Result<Option<Arc<Self>>> {
        let runs = dev.cuda_stream();
        let ctx = runs.context();
        if ctx.is_event_tracking() {
            return Ok(None);
        }
        let made = || -> std::result::Result<Self, DriverError> {
            Ok(Self {
                own: Pool::new(ctx)?,
                beside: Pool::new(ctx)?,
                side: ctx.new_stream()?,
                forked: ctx.new_event(None)?,
                joined: ctx.new_event(None)?,
                runs: runs.clone(),
            })
        };
        made()
            .map(|own| Some(Arc::new(own)))
            .map_err(|e| driver("memory pool", e))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A graph may still run in the pools' memory.
        self.runs.context().record_err(self.runs.synchronize());
    }
}

struct Captured {
    scratch: Arc<Scratch>,
    /// Launches go to the side stream.
    beside: bool,
    /// What work on the side stream uses, until it is joined.
    used: Option<Vec<Tensor>>,
}

/// Launches of this thread are captured while it lives.
pub(super) struct Capturing {
    scratch: Option<Arc<Scratch>>,
}

impl Capturing {
    /// With results from `scratch`, if there is one: launches may then overlap.
    pub(super) fn new(scratch: Option<&Arc<Scratch>>) -> Self {
        let captured = scratch.map(|scratch| Captured {
            scratch: scratch.clone(),
            beside: false,
            used: None,
        });
        CAPTURING.with(|own| *own.borrow_mut() = captured);
        Self {
            scratch: scratch.cloned(),
        }
    }

    /// Waits until what was given back is there for the graph.
    pub(super) fn finish(self) -> std::result::Result<(), DriverError> {
        let Some(scratch) = &self.scratch else {
            return Ok(());
        };
        scratch.own.stream.synchronize()?;
        scratch.beside.stream.synchronize()
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        CAPTURING.with(|own| *own.borrow_mut() = None);
    }
}

/// The stream that a launch of this thread goes to instead of its device's, while work is captured in a way
/// that lets launches overlap.
pub(super) fn captured_stream() -> Option<Arc<CudaStream>> {
    CAPTURING.with(|own| {
        let own = own.borrow();
        own.as_ref().map(|own| match own.beside {
            true => own.scratch.side.clone(),
            false => own.scratch.runs.clone(),
        })
    })
}

/// `len` elements for a result of captured work; `None` while nothing is captured.
pub(super) fn taken<T: DeviceRepr>(len: usize) -> Result<Option<CudaSlice<T>>> {
    CAPTURING.with(|own| {
        let own = own.borrow();
        let pool = own.as_ref().map(|own| match own.beside {
            true => &own.scratch.beside,
            false => &own.scratch.own,
        });
        pool.map(|pool| pool.take(len)).transpose()
    })
}

/// `work`, whose launches run beside what is launched after it until [`join`], where a step is captured;
/// elsewhere they are launched in turn. `uses` are the tensors it reads, beside those that outlive the step.
///
/// Only launches by [`Launch`](super::Launch) go aside: `work` does nothing else, or a capture is refused. Its
/// results are not to be used, nor to be dropped, before the join.
///
/// # Errors
/// Those of `work`, or of the driver; while a step is captured, work of another kind.
pub fn beside<R>(uses: &[&Tensor], work: impl FnOnce() -> Result<R>) -> Result<R> {
    let forked = CAPTURING.with(|own| {
        let mut own = own.borrow_mut();
        let Some(own) = own.as_mut().filter(|own| !own.beside) else {
            return Ok(None);
        };
        let scratch = &own.scratch;
        scratch.forked.record(&scratch.runs)?;
        scratch.side.wait(&scratch.forked)?;
        own.beside = true;
        let used = own.used.get_or_insert_default();
        used.extend(uses.iter().map(|&tensor| tensor.clone()));
        Ok(Some(scratch.runs.clone()))
    });
    let forked = forked.map_err(|e| driver("graph capture", e))?;
    let Some(runs) = forked else {
        return work();
    };
    let before = newest(&runs)?;
    let done = work();
    CAPTURING.with(|own| {
        if let Some(own) = own.borrow_mut().as_mut() {
            own.beside = false;
        }
    });
    match newest(&runs)? == before {
        true => done,
        // Its launches on the side stream would not wait for it.
        false => Err(Error::Unsupported {
            what: "an operation of candle's beside a captured step".into(),
        }),
    }
}

/// What the next node of a captured stream comes after.
fn newest(stream: &CudaStream) -> Result<Vec<usize>> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut count) = (0, 0);
    let (mut graph, mut edges) = (std::ptr::null_mut(), std::ptr::null());
    let mut nodes: *const sys::CUgraphNode = std::ptr::null();
    // SAFETY: all are written before the call returns; the nodes stay readable until the stream is used again.
    unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream.cu_stream(),
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        )
        .result()
        .map_err(|e| driver("graph capture", e))?;
        Ok(match nodes.is_null() {
            true => Vec::new(),
            false => std::slice::from_raw_parts(nodes, count)
                .iter()
                .map(|node| *node as usize)
                .collect(),
        })
    }
}

/// What is launched from here on comes after all work that runs [`beside`].
///
/// # Errors
/// Those of the driver.
pub fn join() -> Result<()> {
    // What was kept is dropped outside of the borrow: giving memory back asks for it, too.
    let used = CAPTURING.with(|own| {
        let mut own = own.borrow_mut();
        let Some(own) = own.as_mut().filter(|own| own.used.is_some()) else {
            return Ok(None);
        };
        let scratch = &own.scratch;
        scratch.joined.record(&scratch.side)?;
        scratch.runs.wait(&scratch.joined)?;
        Ok(own.used.take())
    });
    used.map(drop).map_err(|e| driver("graph capture", e))
}
