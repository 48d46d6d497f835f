//! A small step in parts, side by side on the threads of its pass.
//!
//! Where the operations of a step are too small to be shared among threads, its tokens are: each part runs
//! all layers on a thread of its own, as the chunks they are, and what is worked on stays in that thread's
//! cache. Parts meet only where a token attends to earlier ones: a part enters a layer's caches when the
//! part before it has left them, so that after the first layer all parts are at work, each a little
//! behind the one before. Results are those of the whole step, bit for bit, since they do not depend on how
//! a sequence is cut into chunks.

mod draft;

use std::{
    ops::Range,
    sync::{
        Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
        atomic::{AtomicUsize, Ordering},
    },
};

use candle_core::Tensor;
use deepseek_v41_attention::{
    AttnPlan, ChunkSpec, CompressedCache, IndexKeySource, LayerCache, RopeTables, WindowCache,
};
use deepseek_v41_core::{Error, Result, cpu};
use deepseek_v41_hyperconn::PreMix;

use crate::{
    Chunk, Config, ForwardBatch, ForwardOutput, IndexKeys, ModelState, PlannedLayer, Transformer,
    block::Attend,
    lent::Caches,
    probe::NoProbe,
    step::{Passed, Rows, StepInputs},
};

/// Tokens of a part beyond which products for all of them, shared among all threads, are better.
const PART_TOKENS: usize = 24;

/// Operations of a token in a layer from which on they are worth sharing one by one.
const LARGE_LAYER: usize = 8_000_000;

/// Some neighbouring tokens of a step.
pub(crate) struct Part {
    rows: Range<usize>,
    batch: ForwardBatch,
    chunks: Vec<ChunkSpec>,
}

/// What the parts of a step share.
pub(crate) struct PartsInputs {
    /// For each Engram layer what it reads, `[T, ..]`.
    engram: Vec<Tensor>,
    rows: Rows,
}

impl Transformer {
    /// The parts to run side by side, if that is the way to run this step.
    pub(crate) fn parts(
        &self,
        batch: &ForwardBatch,
        chunks: &[ChunkSpec],
        masks: &[Option<Vec<u8>>],
    ) -> Option<Vec<Part>> {
        let fits = self.device.is_cpu()
            && self.ranks == 1
            // The others score keys that later layers have yet to write.
            && self.cfg.index_keys == IndexKeys::Owner
            && masks.iter().all(Option::is_none);
        let parts = parts(&self.cfg, batch.tokens());
        (fits && parts > 1).then(|| split(batch, chunks, parts))
    }

    /// What the parts of a step share.
    pub(crate) fn parts_inputs(
        &self,
        batch: &ForwardBatch,
        state: &ModelState,
    ) -> Result<PartsInputs> {
        Ok(PartsInputs {
            engram: self.engram_inputs(batch, state)?,
            rows: Rows::of(batch)?,
        })
    }

    /// [`Transformer::compute`] part by part.
    pub(crate) fn side_by_side(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &PartsInputs,
        parts: &[Part],
    ) -> Result<ForwardOutput> {
        let geometry = state.geometry;
        let shared = Shared {
            window: state.window.iter_mut().map(Mutex::new).collect(),
            compressed: state.compressed.iter_mut().map(RwLock::new).collect(),
            left: parts.iter().map(|_| AtomicUsize::new(0)).collect(),
        };
        let run = |number: usize| -> Result<Passed> {
            let Part {
                rows,
                batch,
                chunks,
            } = &parts[number];
            let mut turn = Turn {
                shared: &shared,
                number,
                done: false,
            };
            let plan = AttnPlan::on_host(chunks, &geometry, self.ratios(), false)?;
            let inputs = self.part_of(inputs, plan, rows)?;
            let passed = self.layers(batch, &mut turn, &inputs, &mut NoProbe)?;
            turn.done = true;
            Ok(passed)
        };
        let mut passed: Vec<Option<Result<Passed>>> = parts.iter().map(|_| None).collect();
        cpu::for_each_piece(LARGE_LAYER, &mut passed, 1, |number, passed| {
            passed[0] = Some(run(number));
        });
        // The first error is the cause of those after it.
        let passed: Vec<Passed> = passed.into_iter().flatten().collect::<Result<_>>()?;
        let rows = |of: fn(&Passed) -> &Tensor| -> Result<Tensor> {
            let rows: Vec<_> = passed.iter().map(of).collect();
            Ok(Tensor::cat(&rows, 0)?)
        };
        let hidden: Option<Vec<_>> = passed.iter().map(|p| p.target_hidden.as_ref()).collect();
        let whole = Passed {
            stream: rows(|p| &p.stream)?,
            carried: PreMix::from_tensor(rows(|p| p.carried.tensor())?)?,
            target_hidden: match hidden {
                Some(hidden) if batch.target_hidden => Some(Tensor::cat(&hidden, 0)?),
                _ => None,
            },
        };
        self.finish(&inputs.rows, whole)
    }

    /// The inputs of some rows of a step.
    fn part_of(
        &self,
        whole: &PartsInputs,
        plan: AttnPlan,
        rows: &Range<usize>,
    ) -> Result<StepInputs> {
        let cpu = &self.device;
        Ok(StepInputs {
            ropes: RopeTables::new(&plan, &self.window_rope, &self.compressed_rope, cpu)?,
            plan,
            ids: None,
            carried: PreMix::one_hot(rows.len(), self.cfg.hc_mult, cpu)?
                .tensor()
                .clone(),
            engram: whole
                .engram
                .iter()
                .map(|t| Ok(t.narrow(0, rows.start, rows.len())?))
                .collect::<Result<_>>()?,
            image_mask: None,
            published: None,
            rows: Rows::None,
        })
    }
}

/// In how many parts to run so many tokens on the threads of this pass.
pub(crate) fn parts(cfg: &Config, tokens: usize) -> usize {
    let parts = tokens.min(cpu::team_size());
    match tokens <= parts * PART_TOKENS && layer_work(cfg) < LARGE_LAYER {
        true => parts,
        false => 1,
    }
}

/// Where the parts begin and end.
fn cuts(tokens: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    (0..parts).map(move |i| tokens * i / parts..tokens * (i + 1) / parts)
}

/// About the operations of a token in one layer: attention's projections and its experts.
fn layer_work(cfg: &Config) -> usize {
    let heads = cfg.n_heads * cfg.head_dim;
    let attention = cfg.dim * (cfg.q_lora_rank + cfg.head_dim + cfg.o_groups * cfg.o_lora_rank)
        + heads * (cfg.q_lora_rank + cfg.o_lora_rank);
    let experts = 3 * cfg.dim * cfg.moe_inter_dim * (1 + cfg.n_activated_experts);
    2 * (attention + experts)
}

/// `n` parts of about as many tokens.
fn split(batch: &ForwardBatch, specs: &[ChunkSpec], n: usize) -> Vec<Part> {
    let part = |rows: Range<usize>| {
        let (mut chunks, mut texts, mut first) = (Vec::new(), Vec::new(), 0);
        for (chunk, spec) in batch.chunks.iter().zip(specs) {
            let len = chunk.token_ids.len();
            let own = rows.start.clamp(first, first + len) - first
                ..rows.end.clamp(first, first + len) - first;
            first += len;
            if own.is_empty() {
                continue;
            }
            chunks.push(ChunkSpec {
                slot: spec.slot,
                start: spec.start + own.start as u32,
                len: own.len() as u32,
            });
            texts.push(Chunk::text(chunk.seq, &chunk.token_ids[own]));
        }
        Part {
            rows,
            batch: ForwardBatch {
                chunks: texts,
                target_hidden: batch.target_hidden,
                ..ForwardBatch::default()
            },
            chunks,
        }
    };
    cuts(batch.tokens(), n).map(part).collect()
}

/// The caches of a step's parts.
struct Shared<'a> {
    window: Vec<Mutex<&'a mut WindowCache>>,
    compressed: Vec<RwLock<&'a mut CompressedCache>>,
    /// For each part how many layers' caches it has left; [`GONE`] if it will write no more.
    left: Vec<AtomicUsize>,
}

/// A part that failed.
const GONE: usize = usize::MAX;

/// One part's way through the layers.
struct Turn<'s, 'a> {
    shared: &'s Shared<'a>,
    number: usize,
    done: bool,
}

impl Turn<'_, '_> {
    /// Until the part before this one has left the caches of `layer`.
    fn wait(&self, layer: usize) -> Result<()> {
        let Some(before) = self.number.checked_sub(1) else {
            return Ok(());
        };
        let left = &self.shared.left[before];
        let left = cpu::spin(|| Some(left.load(Ordering::Acquire)).filter(|left| *left > layer));
        match left {
            GONE => Err(Error::MissingSource {
                what: "the rows of earlier tokens, which failed",
            }),
            _ => Ok(()),
        }
    }
}

impl Drop for Turn<'_, '_> {
    fn drop(&mut self) {
        if !self.done {
            self.shared.left[self.number].store(GONE, Ordering::Release);
        }
    }
}

impl Caches for Turn<'_, '_> {
    fn lend(
        &mut self,
        layer: usize,
        role: &PlannedLayer,
        _: Option<&[Option<usize>]>,
        attend: &mut Attend<'_>,
    ) -> Result<Tensor> {
        self.wait(layer)?;
        let Shared {
            window,
            compressed,
            left,
        } = self.shared;
        let owns = role.role.owns_kv();
        let cache = role.source.and_then(|source| compressed.get(source));
        let mut source = cache.filter(|_| owns).map(write);
        let kv = cache.filter(|_| !owns).map(read);
        let o = attend(LayerCache {
            window: &mut lock(&window[layer]),
            source: source.as_mut().map(|source| &mut ***source),
            kv: kv.as_ref().map(|kv| &***kv),
            index_k: IndexKeySource::Owner,
        })?;
        left[self.number].store(layer + 1, Ordering::Release);
        Ok(o)
    }
}

/// A lock that someone panicked with serves a step that is going to end with that panic.
fn free<G>(tried: std::result::Result<G, TryLockError<G>>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    cpu::spin(|| free(of.try_lock()))
}

fn write<T>(of: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    cpu::spin(|| free(of.try_write()))
}

fn read<T>(of: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    cpu::spin(|| free(of.try_read()))
}
