//! What a model remembers of its sequences: window rings, compressed rows, open groups.
//!
//! # Rewinding
//! Nothing here has to be undone when a sequence loses its newest tokens: ring rows beyond the new
//! length are overwritten before anyone reads them again (the rings have `max_rollback` rows of
//! slack, so the rows before the new length are still there), and compressed rows beyond it are not
//! visible until they are written anew.
//!
//! # Handles
//! A pool's tensor is a counted handle and its writes are in place, so a reader may hold a clone. The
//! methods that write still take `&mut self`: who changes a cache shows in the signatures.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result};

use crate::config::AttentionConfig;
use crate::ops::{self, IndexSpan};
use crate::plan::{CompressPlan, WindowPlan};
use crate::pool::{Entering, KvFormat, KvPool, copy_rows, gather_rows, slots_tensor};
use crate::rows::RowQuant;
use crate::slots::{CacheGeometry, SlotMap};

/// Rows of one sequence on their way out of or into a cache, by name.
pub type SlotRows = Vec<(String, Tensor)>;

/// The sliding-window KV of one layer: a ring for every sequence slot.
#[derive(Debug)]
pub struct WindowCache {
    geometry: CacheGeometry,
    kv: KvPool,
}

impl WindowCache {
    /// A cache of zeros for rows of `head_dim`.
    ///
    /// # Errors
    /// A geometry that does not validate, or no memory on the device.
    pub fn new(
        geometry: CacheGeometry,
        head_dim: usize,
        format: KvFormat,
        device: &Device,
    ) -> Result<Self> {
        geometry.validate(&[])?;
        let rows = geometry.ring_capacity() * geometry.max_seqs;
        let kv = KvPool::new(rows, head_dim, RowQuant::Window, format, device)?;
        Ok(Self { geometry, kv })
    }

    /// The pool of rings.
    pub fn kv(&self) -> &KvPool {
        &self.kv
    }

    /// Puts this step's KV rows `kv: [T, head_dim]` into the rings.
    ///
    /// Comes after the step's attention: a chunk's own rows may push out rows that its first tokens
    /// still see.
    ///
    /// # Errors
    /// The plan was made for another step or geometry.
    pub fn write(&mut self, kv: &Tensor, plan: &WindowPlan) -> Result<()> {
        self.kv.write(kv, &plan.ring_slots)
    }

    /// The same in two halves: the rings for the step's attention, which the rows enter behind it.
    pub(crate) fn entering<'a>(&'a mut self, kv: &'a Tensor, plan: &'a WindowPlan) -> Entering<'a> {
        Entering::new(&mut self.kv, kv, plan)
    }

    /// Puts `rows: [n, head_dim]` into the ring rows `slots: [n]` i32, skipping `-1`.
    pub(crate) fn write_rows(&mut self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        self.kv.write(rows, slots)
    }

    /// Makes the ring of slot `to` equal to that of slot `from`.
    ///
    /// # Errors
    /// A slot outside of the geometry.
    pub fn copy_slot(&mut self, from: u32, to: u32) -> Result<()> {
        copy_slot_rows(&self.geometry, from, to, |slot| {
            self.geometry.ring(slot).rows()
        })?
        .map_or(Ok(()), |(from, to, n)| self.kv.copy_rows(from, to, n))
    }

    /// The rows that a sequence of `len` tokens needs to go on: its last `min(len, window)`
    /// positions in ascending order, as `window`, in the packed form of [`RowCodec`](crate::RowCodec).
    ///
    /// The slack is not saved: a sequence brought back can lose tokens only once it has new ones.
    ///
    /// # Errors
    /// A slot outside of the geometry.
    pub fn export_slot(&self, slot: u32, len: u32) -> Result<SlotRows> {
        self.geometry.check_slot(slot)?;
        let rows = ring_rows(&self.geometry.ring(slot), self.saved(len))?;
        Ok(vec![("window".into(), self.kv.export(rows)?)])
    }

    /// The opposite of [`export_slot`](Self::export_slot) with the same `len`.
    ///
    /// # Errors
    /// A row set is missing or does not fit `len`.
    pub fn import_slot(&mut self, slot: u32, len: u32, rows: &[(String, Tensor)]) -> Result<()> {
        self.geometry.check_slot(slot)?;
        let at = ring_rows(&self.geometry.ring(slot), self.saved(len))?;
        let width = self.kv.codec().row_bytes();
        self.kv
            .import(find_rows(rows, "window", at.len(), width, DType::U8)?, &at)
    }

    /// Bytes of a full cache.
    pub fn memory_usage(&self) -> usize {
        self.kv.capacity_bytes()
    }

    fn saved(&self, len: u32) -> Range<u32> {
        len.saturating_sub(self.geometry.window as u32)..len
    }
}

/// The compressed KV of one source layer, its index keys and its open groups.
#[derive(Debug)]
pub struct CompressedCache {
    geometry: CacheGeometry,
    ratio: usize,
    kv: KvPool,
    index_k: Option<KvPool>,
    /// `[rows, 2 * head_dim]` f32: `[kv | score]` of the newest tokens; a group of one needs none.
    pending: Option<Tensor>,
}

impl CompressedCache {
    /// A cache of zeros for rows of `head_dim`, with index keys of `index_head_dim` where the owner
    /// makes them.
    ///
    /// # Errors
    /// A geometry that does not validate, or no memory on the device.
    pub fn new(
        geometry: CacheGeometry,
        ratio: usize,
        head_dim: usize,
        index_head_dim: Option<usize>,
        format: KvFormat,
        device: &Device,
    ) -> Result<Self> {
        geometry.validate(&[ratio])?;
        let rows = geometry.compressed_capacity(ratio) * geometry.max_seqs;
        let key_format = match device {
            Device::Cpu => format,
            _ => KvFormat::Packed,
        };
        let pending = match ratio {
            1 => None,
            _ => {
                let rows = geometry.pending_capacity(ratio) * geometry.max_seqs;
                Some(Tensor::zeros((rows, 2 * head_dim), DType::F32, device)?)
            }
        };
        Ok(Self {
            geometry,
            ratio,
            kv: KvPool::new(rows, head_dim, RowQuant::Compressed, format, device)?,
            index_k: index_head_dim
                .map(|dim| KvPool::new(rows, dim, RowQuant::Index, key_format, device))
                .transpose()?,
            pending,
        })
    }

    /// The cache that a layer of this configuration owns; `None` if it owns none.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_layer(
        cfg: &AttentionConfig,
        geometry: CacheGeometry,
        format: KvFormat,
        device: &Device,
    ) -> Result<Option<Self>> {
        let Some(ratio) = cfg.role.ratio().filter(|_| cfg.role.owns_kv()) else {
            return Ok(None);
        };
        let keys = cfg.owns_index_k.then_some(cfg.index.head_dim);
        Self::new(geometry, ratio, cfg.head_dim, keys, format, device).map(Some)
    }

    /// Tokens a row stands for.
    pub fn ratio(&self) -> usize {
        self.ratio
    }

    /// The pool of compressed rows.
    pub fn kv(&self) -> &KvPool {
        &self.kv
    }

    /// The pool of index keys, row for row beside [`kv`](Self::kv).
    ///
    /// # Errors
    /// [`Error::MissingSource`] if the owner makes no index keys.
    pub fn index_k(&self) -> Result<&KvPool> {
        self.index_k.as_ref().ok_or(Error::MissingSource {
            what: "an index key",
        })
    }

    /// `[rows, 2 * head_dim]` f32, the open groups; `None` at ratio 1.
    pub fn pending(&self) -> Option<&Tensor> {
        self.pending.as_ref()
    }

    /// Where the compressed rows of `slot` lie.
    pub fn rows(&self, slot: u32) -> SlotMap {
        self.geometry.compressed(slot, self.ratio)
    }

    /// `span` of the cache `other`, which has the same sequence slots, in this cache: the same logical
    /// rows of the same sequence.
    pub(crate) fn moved(&self, span: &IndexSpan, other: &Self) -> Result<IndexSpan> {
        let slot = span.base / other.rows(0).capacity().max(1);
        let rows = self.rows(slot);
        if span.visible > rows.capacity() {
            return Err(Error::Capacity {
                what: "index keys of another source",
                needed: span.visible as usize,
                available: rows.capacity() as usize,
            });
        }
        Ok(IndexSpan {
            base: rows.rows().start,
            visible: span.visible,
        })
    }

    /// Writes the compressed rows `kv: [G, head_dim]` of the groups this step completes.
    ///
    /// # Errors
    /// The plan was made for another step, ratio or geometry.
    pub fn write_kv(&mut self, kv: &Tensor, plan: &CompressPlan) -> Result<()> {
        self.kv.write(kv, &plan.group_slots)
    }

    /// Writes the index keys `keys: [G, index_head_dim]` of the groups this step completes.
    ///
    /// # Errors
    /// As [`write_kv`](Self::write_kv), or a cache without index keys.
    pub fn write_index_k(&mut self, keys: &Tensor, plan: &CompressPlan) -> Result<()> {
        match &mut self.index_k {
            Some(pool) => pool.write(keys, &plan.group_slots),
            None => Err(Error::MissingSource {
                what: "an index key",
            }),
        }
    }

    /// Writes the entries of this step's tokens, `kv` and `score: [T, head_dim]` f32, to the open
    /// groups. Does nothing at ratio 1.
    ///
    /// # Errors
    /// As [`write_kv`](Self::write_kv).
    pub fn write_pending(
        &mut self,
        kv: &Tensor,
        score: &Tensor,
        plan: &CompressPlan,
    ) -> Result<()> {
        match &self.pending {
            Some(pool) => {
                ops::write_rows(pool, &Tensor::cat(&[kv, score], 1)?, &plan.pending_slots)
            }
            None => Ok(()),
        }
    }

    /// Makes slot `to` equal to slot `from`, whose sequence has `len` tokens.
    ///
    /// # Errors
    /// A slot outside of the geometry.
    pub fn copy_slot(&mut self, from: u32, to: u32, len: u32) -> Result<()> {
        let (geometry, ratio) = (self.geometry, self.ratio);
        let live = |slot| {
            let rows = geometry.compressed(slot, ratio).rows();
            rows.start..rows.start + len / ratio as u32
        };
        if let Some((from, to, n)) = copy_slot_rows(&geometry, from, to, live)? {
            self.kv.copy_rows(from, to, n)?;
            if let Some(keys) = &mut self.index_k {
                keys.copy_rows(from, to, n)?;
            }
        }
        let open = |slot| geometry.pending(slot, ratio).rows();
        if let (Some(pending), Some((from, to, n))) =
            (&self.pending, copy_slot_rows(&geometry, from, to, open)?)
        {
            copy_rows(pending, from, to, n)?;
        }
        Ok(())
    }

    /// The rows that a sequence of `len` tokens needs to go on: `kv` and `index_k` of its finished
    /// groups in the packed form of [`RowCodec`](crate::RowCodec), `pending` (f32) of the open one.
    ///
    /// # Errors
    /// A slot or length outside of the geometry.
    pub fn export_slot(&self, slot: u32, len: u32) -> Result<SlotRows> {
        let live: Vec<u32> = self.live(slot, len)?.collect();
        let mut rows = vec![("kv".to_string(), self.kv.export(live.clone())?)];
        if let Some(keys) = &self.index_k {
            rows.push(("index_k".into(), keys.export(live)?));
        }
        if let Some(pending) = &self.pending {
            let at = ring_rows(&self.geometry.pending(slot, self.ratio), self.open(len))?;
            rows.push(("pending".into(), gather_rows(pending, at)?));
        }
        Ok(rows)
    }

    /// The opposite of [`export_slot`](Self::export_slot) with the same `len`.
    ///
    /// # Errors
    /// A row set is missing or does not fit `len`.
    pub fn import_slot(&mut self, slot: u32, len: u32, rows: &[(String, Tensor)]) -> Result<()> {
        let live: Vec<u32> = self.live(slot, len)?.collect();
        let width = self.kv.codec().row_bytes();
        let kv = find_rows(rows, "kv", live.len(), width, DType::U8)?;
        let keys = match &self.index_k {
            Some(pool) => {
                let width = pool.codec().row_bytes();
                Some(find_rows(rows, "index_k", live.len(), width, DType::U8)?)
            }
            None => None,
        };
        if let Some(pending) = &self.pending {
            let at = ring_rows(&self.geometry.pending(slot, self.ratio), self.open(len))?;
            let rows = find_rows(rows, "pending", at.len(), pending.dims()[1], DType::F32)?;
            ops::write_rows(pending, rows, &slots_tensor(&at, pending.device())?)?;
        }
        self.kv.import(kv, &live)?;
        match (&mut self.index_k, keys) {
            (Some(pool), Some(keys)) => pool.import(keys, &live),
            _ => Ok(()),
        }
    }

    /// Bytes of a full cache.
    pub fn memory_usage(&self) -> usize {
        let keys = self.index_k.as_ref().map_or(0, KvPool::capacity_bytes);
        let pending = self.pending.as_ref().map_or(0, |p| p.elem_count() * 4);
        self.kv.capacity_bytes() + keys + pending
    }

    fn live(&self, slot: u32, len: u32) -> Result<Range<u32>> {
        self.geometry.check_slot(slot)?;
        let map = self.rows(slot);
        let (rows, start) = (len / self.ratio as u32, map.rows().start);
        if rows > map.capacity() {
            return Err(Error::Capacity {
                what: "compressed rows of a sequence",
                needed: rows as usize,
                available: map.capacity() as usize,
            });
        }
        Ok(start..start + rows)
    }

    /// Positions of the open group of a sequence of `len` tokens.
    fn open(&self, len: u32) -> Range<u32> {
        len - len % self.ratio as u32..len
    }
}

/// `(from, to, n)` in physical rows, `None` if there is nothing to copy.
fn copy_slot_rows(
    geometry: &CacheGeometry,
    from: u32,
    to: u32,
    rows: impl Fn(u32) -> Range<u32>,
) -> Result<Option<(u32, u32, u32)>> {
    geometry.check_slot(from)?;
    geometry.check_slot(to)?;
    let (from, to) = (rows(from), rows(to));
    let n = from.len() as u32;
    Ok((from != to && n > 0).then_some((from.start, to.start, n)))
}

fn ring_rows(map: &SlotMap, positions: Range<u32>) -> Result<Vec<u32>> {
    positions.map(|pos| map.row(pos)).collect()
}

fn find_rows<'a>(
    rows: &'a [(String, Tensor)],
    name: &'static str,
    n: usize,
    dim: usize,
    dtype: DType,
) -> Result<&'a Tensor> {
    let found = rows.iter().find(|(key, _)| key == name);
    let Some((_, rows)) = found else {
        return Err(Error::MissingSource { what: name });
    };
    if rows.dims() != [n, dim] || rows.dtype() != dtype {
        return Err(Error::value(
            format!("saved rows `{name}`"),
            format!(
                "expected [{n}, {dim}] {dtype:?}, found {:?} {:?}",
                rows.shape(),
                rows.dtype()
            ),
        ));
    }
    Ok(rows)
}
