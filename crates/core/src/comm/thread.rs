use std::sync::{Arc, Barrier, Mutex, PoisonError};

use candle_core::Tensor;

use super::Comm;
use crate::{Error, Result};

/// Ranks as threads of one process, for tests and for trying a sharded layout on one machine.
///
/// Each rank must run on its own thread: a collective blocks until every rank has called it.
#[derive(Debug)]
pub struct ThreadComm {
    rank: usize,
    shared: Arc<Exchange>,
}

#[derive(Debug)]
struct Exchange {
    slots: Mutex<Vec<Option<Tensor>>>,
    barrier: Barrier,
}

impl ThreadComm {
    /// One communicator per rank, in rank order.
    pub fn group(world_size: usize) -> Vec<Self> {
        let shared = Arc::new(Exchange {
            slots: Mutex::new(vec![None; world_size]),
            barrier: Barrier::new(world_size),
        });
        (0..world_size)
            .map(|rank| Self {
                rank,
                shared: shared.clone(),
            })
            .collect()
    }

    /// Every rank's tensor. The second barrier keeps a fast rank from overwriting its slot in the
    /// next call while a slow one still reads.
    fn exchange(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
        let lock = || {
            self.shared
                .slots
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        lock()[self.rank] = Some(xs.clone());
        self.shared.barrier.wait();
        let all: Option<Vec<Tensor>> = lock().iter().cloned().collect();
        self.shared.barrier.wait();
        all.ok_or_else(|| Error::shape("thread_comm", "a rank left its slot empty"))
    }
}

impl Comm for ThreadComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared
            .slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor> {
        let all = self.exchange(xs)?;
        let mut sum = all[0].clone();
        for other in &all[1..] {
            sum = (sum + other)?;
        }
        Ok(sum)
    }

    fn all_gather(&self, xs: &Tensor, dim: usize) -> Result<Tensor> {
        Ok(Tensor::cat(&self.exchange(xs)?, dim)?)
    }
}
