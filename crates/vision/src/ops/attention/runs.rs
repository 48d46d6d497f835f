//! Which patches belong to which image.

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::Tensor;
use deepseek_v41_core::{Error, Result};

/// Patches of several images end to end: how many each has.
#[derive(Debug, Clone)]
pub struct PatchRuns {
    lens: Vec<usize>,
    patches: usize,
    /// `[images + 1]` i32, where each image begins and the last one ends, off the CPU.
    #[cfg(feature = "cuda")]
    starts: Option<Tensor>,
}

impl PatchRuns {
    /// `lens` patches of each image, for tensors on `device`.
    ///
    /// # Errors
    /// [`Error::Capacity`]: more patches in all than an i32 counts. [`Error::Device`] on a GPU that
    /// refuses the copy.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn new(lens: &[usize], device: &Device) -> Result<Self> {
        let patches = lens
            .iter()
            .fold(0usize, |sum, len| sum.saturating_add(*len));
        if i32::try_from(patches).is_err() {
            return Err(Error::Capacity {
                what: "patches of a pass",
                needed: patches,
                available: i32::MAX as usize,
            });
        }
        Ok(Self {
            #[cfg(feature = "cuda")]
            starts: match device {
                Device::Cpu => None,
                _ => Some(starts(lens, device)?),
            },
            lens: lens.to_vec(),
            patches,
        })
    }

    /// One image of `n` patches.
    ///
    /// # Errors
    /// As [`PatchRuns::new`].
    pub fn one(n: usize, device: &Device) -> Result<Self> {
        Self::new(&[n], device)
    }

    /// Patches of each image.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Patches of all images.
    pub fn patches(&self) -> usize {
        self.patches
    }

    /// `[images + 1]` i32 on `device`.
    #[cfg(feature = "cuda")]
    pub(crate) fn starts(&self, device: &Device) -> Result<Tensor> {
        match &self.starts {
            Some(there) if there.device().same_device(device) => Ok(there.clone()),
            _ => starts(&self.lens, device),
        }
    }
}

/// The sums of `lens`, which fit.
#[cfg(feature = "cuda")]
fn starts(lens: &[usize], device: &Device) -> Result<Tensor> {
    let ends = lens.iter().scan(0, |sum, len| {
        *sum += *len as i32;
        Some(*sum)
    });
    let starts: Vec<i32> = std::iter::once(0).chain(ends).collect();
    deepseek_v41_core::upload(starts, lens.len() + 1, device)
}
