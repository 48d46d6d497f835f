//! Everything a model remembers between steps, owned by the caller.

use candle_core::Device;
use deepseek_v41_attention::{CacheGeometry, CompressedCache, KvFormat, WindowCache};
use deepseek_v41_core::{Error, Result};

use crate::{Config, LayerPlan};

mod layout;
mod restore;
mod save;
mod sequence;
mod synthetic;

pub use restore::Restored;
pub(crate) use sequence::Sequence;

/// How much a [`ModelState`] can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences at a time.
    pub max_seqs: usize,
    /// Longest sequence in tokens.
    pub max_len: usize,
    /// How many of its newest tokens a sequence can take back without recomputing.
    pub max_rollback: usize,
    /// How KV rows are stored. No choice changes a result.
    pub kv_format: KvFormat,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_seqs: 1,
            max_len: 4096,
            max_rollback: 64,
            kv_format: KvFormat::default(),
        }
    }
}

/// A sequence of one [`ModelState`]; stale once released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    pub(crate) slot: u32,
    generation: u32,
}

/// The caches of every layer and the tokens of every sequence.
///
/// Weights are not in here: many states can share one [`Transformer`](crate::Transformer), also from
/// different threads.
#[derive(Debug)]
pub struct ModelState {
    pub(crate) geometry: CacheGeometry,
    kv_format: KvFormat,
    pub(crate) window: Vec<WindowCache>,
    /// One for each of [`LayerPlan::sources`].
    pub(crate) compressed: Vec<CompressedCache>,
    /// One for each draft layer, written for tokens that are there to stay.
    pub(crate) draft: Vec<WindowCache>,
    slots: Vec<Slot>,
    /// Steps captured with the addresses of these caches.
    #[cfg(feature = "cuda")]
    pub(crate) replays: crate::replay::Replays,
    /// Counted as long as the caches above exist: fields go in this order.
    #[cfg(feature = "cuda")]
    _user: Option<deepseek_v41_core::cuda::StreamUser>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    sequence: Option<Sequence>,
}

impl ModelState {
    /// Empty caches on `device`. Memory of CPU caches is committed as it is written.
    ///
    /// # Errors
    /// [`Error::Config`] for limits of 0 or pools that cannot be addressed, or no memory.
    pub fn new(cfg: &Config, limits: Limits, device: &Device) -> Result<Self> {
        let plan = LayerPlan::new(cfg)?;
        if limits.max_len > cfg.max_position_embeddings {
            return Err(Error::Capacity {
                what: "context length in tokens",
                needed: limits.max_len,
                available: cfg.max_position_embeddings,
            });
        }
        let geometry = CacheGeometry {
            window: cfg.window_size,
            max_rollback: limits.max_rollback,
            max_len: limits.max_len,
            max_seqs: limits.max_seqs,
        };
        geometry.validate(&plan.ratios())?;
        // Before the first allocation.
        #[cfg(feature = "cuda")]
        let user = match device {
            Device::Cuda(dev) => Some(deepseek_v41_core::cuda::StreamUser::new(dev)),
            _ => None,
        };
        let rings = |n: usize| -> Result<Vec<_>> {
            let ring = || WindowCache::new(geometry, cfg.head_dim, limits.kv_format, device);
            (0..n).map(|_| ring()).collect()
        };
        let window = rings(cfg.n_layers)?;
        let draft = rings(if cfg.dspark_block_size > 0 {
            cfg.n_mtp_layers
        } else {
            0
        })?;
        let compressed = plan
            .sources()
            .iter()
            .map(|s| {
                let (dim, index) = (cfg.head_dim, Some(cfg.index_head_dim));
                CompressedCache::new(geometry, s.ratio, dim, index, limits.kv_format, device)
            })
            .collect::<Result<_>>()?;
        let slots = (0..limits.max_seqs).map(|_| Slot::default()).collect();
        Ok(Self {
            geometry,
            kv_format: limits.kv_format,
            window,
            compressed,
            draft,
            slots,
            #[cfg(feature = "cuda")]
            replays: crate::replay::Replays::default(),
            #[cfg(feature = "cuda")]
            _user: user,
        })
    }

    /// Whether a GPU's steps and draft steps of a few tokens may be captured and replayed, which they are from the
    /// second one of a layout on; the default. No result depends on it. What is captured stays in the GPU's
    /// memory until the state goes or this is turned off.
    ///
    /// Nothing is captured while another state works on the same [`Device`]. While one is captured, other
    /// threads must not use tensors of that device: turn it off where they might. Does nothing on the CPU.
    pub fn set_replay(&mut self, on: bool) {
        #[cfg(feature = "cuda")]
        self.replays.set(on);
        #[cfg(not(feature = "cuda"))]
        let _ = on;
    }

    /// How many steps of this state were replayed.
    pub fn replayed(&self) -> u64 {
        #[cfg(feature = "cuda")]
        return self.replays.steps.replayed();
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// How many draft steps of this state were replayed.
    pub fn replayed_drafts(&self) -> u64 {
        #[cfg(feature = "cuda")]
        return self.replays.drafts.replayed();
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// Starts an empty sequence.
    ///
    /// # Errors
    /// [`Error::Capacity`] when every slot is taken.
    pub fn create(&mut self) -> Result<SequenceId> {
        let available = self.slots.len();
        let Some((i, slot)) = self
            .slots
            .iter_mut()
            .enumerate()
            .find(|(_, s)| s.sequence.is_none())
        else {
            return Err(Error::Capacity {
                what: "sequences",
                needed: available + 1,
                available,
            });
        };
        slot.sequence = Some(Sequence::default());
        Ok(SequenceId {
            slot: i as u32,
            generation: slot.generation,
        })
    }

    /// Ends a sequence; its id is invalid from now on.
    ///
    /// # Errors
    /// The id is not of a live sequence of this state.
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        self.sequence(id)?;
        let slot = &mut self.slots[id.slot as usize];
        slot.sequence = None;
        slot.generation = slot.generation.wrapping_add(1);
        Ok(())
    }

    /// Takes back the newest tokens: the sequence is as if only its first `len` had ever been run.
    ///
    /// # Errors
    /// [`Error::Value`] when it has fewer tokens than `len`, [`Error::Capacity`] when `len` lies
    /// further back than the rings' slack, [`Limits::max_rollback`], behind the longest the sequence
    /// has been: run its tokens again in a new sequence instead.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let max_rollback = self.geometry.max_rollback;
        let sequence = self.sequence_mut(id)?;
        sequence.check_rewind(len, max_rollback)?;
        sequence.truncate(len);
        Ok(())
    }

    /// A second sequence that begins with the first `len` tokens of `id`; both go on independently.
    ///
    /// # Errors
    /// As [`ModelState::truncate`], and [`Error::Capacity`] when every slot is taken.
    pub fn fork(&mut self, id: SequenceId, len: usize) -> Result<SequenceId> {
        let mut copy = self.sequence(id)?.clone();
        copy.check_rewind(len, self.geometry.max_rollback)?;
        copy.truncate(len);
        let new = self.create()?;
        let (from, to) = (id.slot, new.slot);
        let copied = self
            .window
            .iter_mut()
            .chain(&mut self.draft)
            .try_for_each(|cache| cache.copy_slot(from, to))
            .and_then(|()| {
                self.compressed
                    .iter_mut()
                    .try_for_each(|c| c.copy_slot(from, to, len as u32))
            });
        if let Err(err) = copied {
            self.release(new)?;
            return Err(err);
        }
        *self.sequence_mut(new)? = copy;
        Ok(new)
    }

    /// Tokens in the sequence.
    ///
    /// # Errors
    /// As [`ModelState::release`].
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequence(id)?.ids.len())
    }

    /// Whether no sequence is live.
    pub fn is_empty(&self) -> bool {
        self.slots.iter().all(|s| s.sequence.is_none())
    }

    /// Sequences that can still be created.
    pub fn available(&self) -> usize {
        self.slots.iter().filter(|s| s.sequence.is_none()).count()
    }

    /// Tokens of all sequences together.
    pub fn tokens(&self) -> usize {
        self.slots
            .iter()
            .filter_map(|s| s.sequence.as_ref())
            .map(|s| s.ids.len())
            .sum()
    }

    /// Tokens of the sequence that the draft head has seen.
    ///
    /// # Errors
    /// As [`ModelState::release`].
    pub fn drafted(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequence(id)?.drafted)
    }

    /// The sequence's token ids.
    ///
    /// # Errors
    /// As [`ModelState::release`].
    pub fn token_ids(&self, id: SequenceId) -> Result<&[u32]> {
        Ok(&self.sequence(id)?.ids)
    }

    /// Whether any of the first `len` positions came from a picture.
    ///
    /// # Errors
    /// As [`ModelState::release`].
    pub fn has_images(&self, id: SequenceId, len: usize) -> Result<bool> {
        Ok(self
            .sequence(id)?
            .image_mask
            .iter()
            .take(len)
            .any(|m| *m != 0))
    }

    /// The limits it was made with.
    pub fn limits(&self) -> Limits {
        Limits {
            max_seqs: self.geometry.max_seqs,
            max_len: self.geometry.max_len,
            max_rollback: self.geometry.max_rollback,
            kv_format: self.kv_format,
        }
    }

    /// Bytes the caches take once they are full.
    pub fn memory_usage(&self) -> usize {
        let window: usize = self
            .window
            .iter()
            .chain(&self.draft)
            .map(WindowCache::memory_usage)
            .sum();
        let compressed: usize = self
            .compressed
            .iter()
            .map(CompressedCache::memory_usage)
            .sum();
        window + compressed
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.slots
            .get(id.slot as usize)
            .filter(|slot| slot.generation == id.generation)
            .and_then(|slot| slot.sequence.as_ref())
            .ok_or_else(|| unknown(id))
    }

    pub(crate) fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.slots
            .get_mut(id.slot as usize)
            .filter(|slot| slot.generation == id.generation)
            .and_then(|slot| slot.sequence.as_mut())
            .ok_or_else(|| unknown(id))
    }
}

fn unknown(id: SequenceId) -> Error {
    Error::value(
        "sequence",
        format!("{id:?} is not a live sequence of this state"),
    )
}
