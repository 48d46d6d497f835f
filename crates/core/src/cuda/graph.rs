//! Work captured once and replayed: one call to the driver instead of one for each kernel.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::{
    CudaDevice,
    cuda_backend::cudarc::driver::{CudaGraph, sys},
};

use super::{
    driver, lock,
    scratch::{Capturing, Scratch, join},
};
use crate::Result;

/// Users of each stream, by its handle.
static USERS: OnceLock<Mutex<HashMap<usize, usize>>> = OnceLock::new();

/// Whoever enqueues work on a device's stream over and over.
///
/// While work is captured, whatever another thread enqueues on the same stream would become part of it.
/// So nothing is captured while a stream has more than one user, and no second one comes during a capture.
/// Tensors that one user's steps made are for its own thread to read.
#[derive(Debug)]
pub struct StreamUser {
    stream: usize,
}

impl StreamUser {
    /// One user more of the stream of `dev`.
    pub fn new(dev: &CudaDevice) -> Self {
        let stream = dev.cuda_stream().cu_stream() as usize;
        *lock(&USERS).entry(stream).or_insert(0) += 1;
        Self { stream }
    }
}

impl Drop for StreamUser {
    fn drop(&mut self) {
        let mut users = lock(&USERS);
        match users.get_mut(&self.stream) {
            Some(n) if *n > 1 => *n -= 1,
            _ => {
                users.remove(&self.stream);
            }
        }
    }
}

/// Captured launches with the addresses they were captured with.
pub struct Graph {
    graph: CudaGraph,
    /// Where its intermediate results are; goes after the graph.
    _scratch: Option<Arc<Scratch>>,
}

// SAFETY: a graph may be used from any thread, one at a time; the only method takes it mutably.
unsafe impl Send for Graph {}
// SAFETY: nothing can be done with a shared one.
unsafe impl Sync for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl Graph {
    /// Captures what `work` launches on the stream of `dev`, without running it; `None` while the stream
    /// has another [`StreamUser`].
    ///
    /// Memory that `work` allocates is the graph's, and must be free again when it returns. With `scratch` it is
    /// taken there, and launches may begin while the one ahead still runs: see
    /// [`OVERLAPPING`](super::kernels::OVERLAPPING). An operation that copies from the host is refused: a
    /// replay would read what is long gone.
    ///
    /// # Errors
    /// Those of `work`, or the driver cannot capture it; nothing has run then.
    ///
    /// # Safety
    /// Every address that `work` uses and does not allocate must be valid, and hold what `work` expects,
    /// whenever the graph is launched.
    pub unsafe fn capture(
        dev: &CudaDevice,
        scratch: Option<&Arc<Scratch>>,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Option<Self>> {
        let stream = dev.cuda_stream();
        let users = lock(&USERS);
        if users
            .get(&(stream.cu_stream() as usize))
            .is_some_and(|n| *n > 1)
        {
            return Ok(None);
        }
        // Allocations on the scratch's stream are not part of the capture, and a stricter mode might refuse them.
        let mode = match scratch {
            Some(_) => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            None => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        };
        stream
            .begin_capture(mode)
            .map_err(|e| driver("graph capture", e))?;
        // With it candle refuses copies from the host, as nothing was cached for them before.
        let refusing = dev.enable_cuda_graph_htod_cache();
        let capturing = Capturing::new(scratch);
        let done = work().and_then(|()| join());
        let settled = capturing.finish();
        drop(refusing);
        // A release that the capture refused is recorded in the context and would be reported by the next
        // call, whatever that is.
        let released = stream.context().check_err();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags);
        done?;
        released.map_err(|e| driver("graph capture", e))?;
        settled.map_err(|e| driver("graph capture", e))?;
        let graph = graph.map_err(|e| driver("graph capture", e))?;
        drop(users);
        Ok(graph.map(|graph| Self {
            graph,
            _scratch: scratch.cloned(),
        }))
    }

    /// Puts the captured work on the stream it was captured on.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn launch(&mut self) -> Result<()> {
        self.graph.launch().map_err(|e| driver("graph launch", e))
    }
}
