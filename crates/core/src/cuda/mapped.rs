//! Host memory that kernels read where it lies.

use std::{ffi::c_void, sync::Arc};

use bytes::Bytes;
use candle_core::{CudaDevice, cuda_backend::cudarc::driver::sys};

use super::{Ptr, driver};
use crate::Result;

/// The pages that are registered one by one; a piece need not fill its first and last.
const PAGE: usize = 4096;
const DEVICE_MAP: u32 = 2;
const READ_ONLY: u32 = 8;

/// Byte ranges of the host, pinned and mapped into a GPU's address space: nothing is copied.
///
/// For tables larger than the GPU's memory, of which a step reads a few rows. Kernels only read them:
/// what is mapped may be a file that is mapped for reading alone.
#[derive(Debug, Clone)]
pub struct Mapped {
    // Dropped in this order: no kernel may read what is unmapped, nor anything be unmapped that is gone.
    pages: Arc<Pages>,
    pieces: Vec<Bytes>,
}

#[derive(Debug)]
struct Pages {
    dev: CudaDevice,
    /// `(host address, bytes, device address)` of whole pages, without overlaps.
    ranges: Vec<(usize, usize, u64)>,
    /// The pieces keep their memory for as long as it is registered.
    _owners: Vec<Bytes>,
}

impl Mapped {
    /// Pins and maps `pieces`.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device): the system refuses to pin so much memory, or memory of
    /// this kind.
    pub fn new(pieces: &[Bytes], dev: &CudaDevice) -> Result<Self> {
        let mut wanted: Vec<(usize, usize)> = pieces
            .iter()
            .filter(|piece| !piece.is_empty())
            .map(|piece| {
                let start = piece.as_ptr() as usize;
                let first = start / PAGE * PAGE;
                (first, (start + piece.len()).next_multiple_of(PAGE))
            })
            .collect();
        wanted.sort_unstable();
        // A page is registered once, whoever shares it.
        let mut merged: Vec<(usize, usize)> = Vec::new();
        for (first, end) in wanted {
            match merged.last_mut() {
                Some(last) if first <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((first, end)),
            }
        }
        let mut pages = Pages {
            dev: dev.clone(),
            ranges: Vec::with_capacity(merged.len()),
            _owners: pieces.to_vec(),
        };
        for (first, end) in merged {
            let address = register(dev, first, end - first)?;
            pages.ranges.push((first, end - first, address));
        }
        Ok(Self {
            pages: Arc::new(pages),
            pieces: pieces.to_vec(),
        })
    }

    /// Where a kernel finds piece `i`; null for an empty one.
    pub fn ptr(&self, i: usize) -> Ptr<'_> {
        let Some(piece) = self.pieces.get(i) else {
            return Ptr::NULL;
        };
        let start = piece.as_ptr() as usize;
        self.pages
            .ranges
            .iter()
            .find(|(first, len, _)| (*first..first + len).contains(&start))
            .map_or(Ptr::NULL, |(first, _, address)| {
                Ptr::at(*address).offset(start - first)
            })
    }
}

/// Registers whole pages and gives their device address.
fn register(dev: &CudaDevice, first: usize, len: usize) -> Result<u64> {
    const WHAT: &str = "mapping host memory";
    let stream = dev.cuda_stream();
    stream
        .context()
        .bind_to_thread()
        .map_err(|e| driver(WHAT, e))?;
    let start = first as *mut c_void;
    // Where the GPU can do without the right to write, files mapped for reading can be registered.
    // SAFETY: the pages exist, since bytes of each are borrowed; nothing but reads of kernels follows, and
    // they are unregistered before they go.
    unsafe {
        sys::cuMemHostRegister_v2(start, len, DEVICE_MAP | READ_ONLY)
            .result()
            .or_else(|_| sys::cuMemHostRegister_v2(start, len, DEVICE_MAP).result())
            .map_err(|e| driver(WHAT, e))?;
        let mut address = 0;
        match sys::cuMemHostGetDevicePointer_v2(&mut address, start, 0).result() {
            Ok(()) => Ok(address),
            Err(e) => {
                // The first error is the one to report.
                let _ = sys::cuMemHostUnregister(start).result();
                Err(driver(WHAT, e))
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let stream = self.dev.cuda_stream();
        // Kernels that read the pages may still be queued; without a context there are none.
        if stream.context().bind_to_thread().is_err() || stream.synchronize().is_err() {
            return;
        }
        for (first, ..) in &self.ranges {
            // SAFETY: registered by `new` once, and no kernel reads it any more.
            let unregistered = unsafe { sys::cuMemHostUnregister(*first as *mut c_void) };
            if let Err(e) = unregistered.result() {
                tracing::warn!("unmapping host memory: {e}");
            }
        }
    }
}
