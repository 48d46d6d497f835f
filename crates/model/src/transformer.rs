//! The model: tokens in, logits out.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use deepseek_v41_attention::{
    AttnPlan, ChunkSpec, CompressedCache, IndexKeySource, LayerCache, RopeTables,
    SharedAttentionRuntime, WindowCache, last_published,
};
use deepseek_v41_core::{
    Comm, Error, Fingerprint, LocalComm, Result, RmsNorm, Rope, VarBuilder, cpu, upload,
};
use deepseek_v41_engram::{Engram, EngramHashes, EngramLayout, NgramWindow, TokenMap, engram_hash};
use deepseek_v41_hyperconn::{Flow, PreMix, hc_expand, hc_mean, hc_pre};
use deepseek_v41_quant::{Linear, WeightFormat};
use half::bf16;

use crate::{
    Config, ForwardBatch, ForwardOutput, IndexKeys, LayerPlan, LogitRows, ModelState, Probe,
    ProbePoint,
    block::{Block, Step},
    embed::{Embedding, check_chunk, image_mask},
    probe::NoProbe,
};

/// The backbone. Immutable once loaded: what changes between steps is in [`ModelState`].
#[derive(Debug)]
pub struct Transformer {
    cfg: Config,
    plan: LayerPlan,
    device: Device,
    embed: Embedding,
    blocks: Vec<Block>,
    engram: Option<EngramLayers>,
    norm: RmsNorm,
    head: Linear,
    window_rope: Rope,
    compressed_rope: Rope,
    ratios: Vec<usize>,
    source_ratios: Vec<usize>,
    fingerprint: u64,
    ranks: usize,
}

#[derive(Debug)]
struct EngramLayers {
    layout: EngramLayout,
    map: TokenMap,
    layers: Vec<Engram>,
    lookback: usize,
}

impl Transformer {
    /// Loads the backbone on a single rank.
    ///
    /// `token_map` is needed by models with Engram layers: it depends on the tokenizer, not on the
    /// weights.
    ///
    /// # Errors
    /// [`Error::Config`], or [`Error::Weight`] naming the tensor that is missing or does not fit.
    pub fn new(cfg: &Config, token_map: Option<TokenMap>, vb: VarBuilder) -> Result<Self> {
        Self::with_comm(cfg, token_map, Arc::new(LocalComm), vb)
    }

    /// [`Transformer::new`] as one rank of several. Attention heads and experts are split; the
    /// embedding, the head and the caches are replicated.
    ///
    /// # Errors
    /// As [`Transformer::new`].
    pub fn with_comm(
        cfg: &Config,
        token_map: Option<TokenMap>,
        comm: Arc<dyn Comm>,
        vb: VarBuilder,
    ) -> Result<Self> {
        cfg.validate()?;
        let plan = LayerPlan::new(cfg)?;
        let fingerprint = fingerprint(cfg, token_map.as_ref(), &vb);
        let layers = vb.pp("layers");
        let blocks = plan.layers().iter().enumerate();
        let blocks = blocks
            .map(|(i, role)| Block::new(cfg, i, role, &comm, layers.pp(i)))
            .collect::<Result<_>>()?;
        Ok(Self {
            embed: Embedding::new(cfg.vocab_size, cfg.dim, vb.pp("embed"))?,
            blocks,
            engram: EngramLayers::new(cfg, token_map, &layers)?,
            norm: RmsNorm::new(cfg.dim, cfg.norm_eps, vb.pp("norm"))?,
            head: Linear::new(cfg.dim, cfg.vocab_size, WeightFormat::F32, vb.pp("head"))?,
            window_rope: Rope::new(&cfg.window_rope())?,
            compressed_rope: Rope::new(&cfg.compressed_rope())?,
            ratios: plan.ratios(),
            source_ratios: plan.sources().iter().map(|s| s.ratio).collect(),
            device: vb.device().clone(),
            ranks: comm.world_size(),
            cfg: cfg.clone(),
            plan,
            fingerprint,
        })
    }

    /// The configuration it was loaded with.
    pub fn config(&self) -> &Config {
        &self.cfg
    }

    /// Who reads what from whom.
    pub fn plan(&self) -> &LayerPlan {
        &self.plan
    }

    /// Where the weights are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A hash over everything that cached rows depend on: the configuration, the whole checkpoint
    /// (see [`Weights::fingerprint`](deepseek_v41_core::Weights::fingerprint)) and the token map.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(crate) fn embed(&self) -> &Embedding {
        &self.embed
    }

    pub(crate) fn head(&self) -> &Linear {
        &self.head
    }

    /// Runs a step: appends every chunk to its sequence in `state`.
    ///
    /// A row of the result depends on its own sequence alone, bit for bit: not on the other chunks,
    /// not on how the sequence was cut into chunks, not on the number of threads.
    ///
    /// # Errors
    /// [`Error::Value`] for token ids outside of the vocabulary or a sequence that is not live,
    /// [`Error::Shape`] for image spans that do not fit, [`Error::Capacity`] when a sequence would
    /// outgrow the state; all of these before anything is written. After a failure in the middle of
    /// a step the sequences of its batch can only be released.
    pub fn forward(&self, batch: &ForwardBatch, state: &mut ModelState) -> Result<ForwardOutput> {
        pooled(&self.device, self.ranks, || {
            self.forward_probed(batch, state, &mut NoProbe)
        })
    }

    /// [`Transformer::forward`] under observation.
    ///
    /// # Errors
    /// As [`Transformer::forward`], and those of the probe.
    pub fn forward_probed(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        probe: &mut dyn Probe,
    ) -> Result<ForwardOutput> {
        let plan = self.plan_step(batch, state)?;
        if plan.tokens == 0 {
            return self.empty_output(batch);
        }
        let hashes = self
            .engram
            .as_ref()
            .map(|e| e.hash(batch, state))
            .transpose()?;
        let masks: Vec<_> = batch.chunks.iter().map(image_mask).collect();
        for chunk in &batch.chunks {
            state.sequence_mut(chunk.seq)?.broken = true;
        }
        let output = self.run(batch, state, &plan, hashes.as_ref(), &masks, probe)?;
        for (chunk, mask) in batch.chunks.iter().zip(&masks) {
            let sequence = state.sequence_mut(chunk.seq)?;
            sequence.append(&chunk.token_ids, mask.as_deref());
            sequence.broken = false;
        }
        Ok(output)
    }

    /// Checks the batch and lays out the step; changes nothing.
    fn plan_step(&self, batch: &ForwardBatch, state: &ModelState) -> Result<AttnPlan> {
        let mut chunks = Vec::with_capacity(batch.chunks.len());
        for chunk in &batch.chunks {
            let sequence = state.sequence(chunk.seq)?;
            sequence.check_whole()?;
            check_chunk(&self.cfg, chunk)?;
            let (start, len) = (sequence.ids.len(), chunk.token_ids.len());
            let needed = start.saturating_add(len);
            if needed > state.geometry.max_len {
                return Err(Error::Capacity {
                    what: "context length in tokens",
                    needed,
                    available: state.geometry.max_len,
                });
            }
            let (slot, start, len) = (chunk.seq.slot, start as u32, len as u32);
            chunks.push(ChunkSpec { slot, start, len });
        }
        AttnPlan::new(&chunks, &state.geometry, &self.ratios, &self.device)
    }

    fn run(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        plan: &AttnPlan,
        hashes: Option<&EngramHashes>,
        masks: &[Option<Vec<u8>>],
        probe: &mut dyn Probe,
    ) -> Result<ForwardOutput> {
        let image_mask = self.flat_mask(batch, masks)?;
        let ropes = RopeTables::new(plan, &self.window_rope, &self.compressed_rope, &self.device)?;
        let published = self.published_keys(batch, state, plan)?;
        let mut step = Step {
            plan,
            ropes: &ropes,
            image_mask: image_mask.as_ref(),
            shared: SharedAttentionRuntime::new(),
            probe,
        };
        let stream = hc_expand(&self.embed.forward_chunks(&batch.chunks)?, self.cfg.hc_mult)?;
        let carried = PreMix::one_hot(plan.tokens, self.cfg.hc_mult, &self.device)?;
        let mut flow = Flow::new(stream, carried);
        let mut targets = Vec::new();
        for (i, (block, role)) in self.blocks.iter().zip(self.plan.layers()).enumerate() {
            if let (Some(e), Some(engram), Some(hashes)) = (role.engram, &self.engram, hashes) {
                let layer = &engram.layers[e];
                let rows = layer.gather(&hashes.tensor(e, &layer.hash_device())?)?;
                flow.map(|stream| layer.forward(stream, &rows, step.image_mask))?;
                step.probe.value(i, ProbePoint::Engram, flow.stream()?)?;
            }
            if batch.target_hidden && role.draft_target {
                targets.push(hc_mean(flow.stream()?)?);
            }
            let ModelState {
                window, compressed, ..
            } = &mut *state;
            let tokens = published.as_ref().map(|p| p.of_layer(i));
            let lent = Lent::new(&mut window[i], compressed, role.source, role.role.owns_kv());
            let keys = tokens.map(|tokens| lent.keys(tokens));
            let index_k = keys
                .as_deref()
                .map_or(IndexKeySource::Owner, IndexKeySource::PerToken);
            let cache = LayerCache {
                window: lent.window,
                source: lent.source,
                kv: lent.kv,
                index_k,
            };
            block.forward(&mut flow, cache, &mut step)?;
        }
        let (stream, carried) = flow.finish()?;
        let logits = self.logits(batch, &stream, carried)?;
        let target_hidden = match targets.len() {
            0 => None,
            _ => Some(Tensor::cat(&targets, 1)?),
        };
        Ok(ForwardOutput {
            logits,
            target_hidden,
        })
    }

    /// Collapses the stream of the wanted rows and projects it to the vocabulary.
    fn logits(&self, batch: &ForwardBatch, stream: &Tensor, carried: PreMix) -> Result<Tensor> {
        let rows = match batch.logits {
            LogitRows::All => None,
            LogitRows::None => Some(Vec::new()),
            LogitRows::Last => Some(newest_rows(batch, 1)),
            LogitRows::Newest(n) => Some(newest_rows(batch, n)),
        };
        let xs = match rows {
            None => hc_pre(stream, &carried)?,
            Some(rows) if rows.is_empty() => {
                return upload(Vec::<f32>::new(), (0, self.cfg.vocab_size), &self.device);
            }
            Some(rows) => {
                let n = rows.len();
                let rows = Tensor::from_vec(rows, n, &self.device)?;
                let carried =
                    PreMix::from_tensor(carried.tensor().contiguous()?.index_select(&rows, 0)?)?;
                hc_pre(&stream.index_select(&rows, 0)?, &carried)?
            }
        };
        self.head.forward(&self.norm.forward(&xs)?)
    }

    fn empty_output(&self, batch: &ForwardBatch) -> Result<ForwardOutput> {
        let width = self.cfg.dspark_target_layer_ids.len() * self.cfg.dim;
        let hidden = batch.target_hidden && width > 0;
        Ok(ForwardOutput {
            logits: upload(Vec::<f32>::new(), (0, self.cfg.vocab_size), &self.device)?,
            target_hidden: hidden
                .then(|| upload(Vec::<bf16>::new(), (0, width), &self.device))
                .transpose()?,
        })
    }

    fn flat_mask(&self, batch: &ForwardBatch, masks: &[Option<Vec<u8>>]) -> Result<Option<Tensor>> {
        if masks.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut flat = Vec::with_capacity(batch.tokens());
        for (chunk, mask) in batch.chunks.iter().zip(masks) {
            match mask {
                Some(mask) => flat.extend_from_slice(mask),
                None => flat.resize(flat.len() + chunk.token_ids.len(), 0),
            }
        }
        let n = flat.len();
        Ok(Some(Tensor::from_vec(flat, n, &self.device)?))
    }

    /// For [`IndexKeys::LastPublished`]: whose keys every token scores in every layer.
    fn published_keys(
        &self,
        batch: &ForwardBatch,
        state: &ModelState,
        plan: &AttnPlan,
    ) -> Result<Option<PublishedKeys>> {
        if self.cfg.index_keys == IndexKeys::Owner {
            return Ok(None);
        }
        let mut prefill = Vec::with_capacity(plan.tokens);
        for chunk in &batch.chunks {
            let (sequence, len) = (state.sequence(chunk.seq)?, chunk.token_ids.len());
            let first = if sequence.ids.is_empty() {
                len as u32
            } else {
                sequence.prefill
            };
            prefill.resize(prefill.len() + len, first);
        }
        let layers = (0..self.plan.layers().len()).map(|layer| {
            let upto = self
                .plan
                .sources()
                .iter()
                .filter(|s| s.layer <= layer)
                .count();
            let tokens = plan.positions.iter().zip(&prefill);
            tokens
                .map(|(pos, first)| last_published(&self.source_ratios, upto, *first, *pos))
                .collect()
        });
        Ok(Some(PublishedKeys(layers.collect())))
    }
}

fn fingerprint(cfg: &Config, token_map: Option<&TokenMap>, vb: &VarBuilder) -> u64 {
    let mut hash = Fingerprint::new();
    // A derived `Debug` has every field, so that none can be forgotten here; should its text ever
    // change, saved sequences are refused and not misread. How long a text may become changes no row.
    let cfg = Config {
        max_position_embeddings: 0,
        ..cfg.clone()
    };
    hash.update_framed(format!("{cfg:?}").as_bytes());
    hash.update(&vb.weights().fingerprint().to_le_bytes());
    for id in token_map.map_or(&[][..], TokenMap::ids) {
        hash.update(&id.to_le_bytes());
    }
    hash.finish()
}

/// Rows of the last `n` tokens of every chunk.
fn newest_rows(batch: &ForwardBatch, n: usize) -> Vec<u32> {
    let mut rows = Vec::new();
    let mut end = 0;
    for chunk in &batch.chunks {
        let start = end;
        end += chunk.token_ids.len();
        rows.extend(start.max(end.saturating_sub(n)) as u32..end as u32);
    }
    rows
}

/// Runs a pass where handing parts of its small operations to other threads is cheap. Not beside other
/// ranks: they wait for each other, which threads of the pool must not.
pub(crate) fn pooled<R: Send>(device: &Device, ranks: usize, pass: impl FnOnce() -> R + Send) -> R {
    match device.is_cpu() && ranks == 1 {
        true => cpu::in_pool(pass),
        false => pass(),
    }
}

/// `[layer][token]` → the source whose keys are scored.
struct PublishedKeys(Vec<Vec<Option<usize>>>);

impl PublishedKeys {
    fn of_layer(&self, layer: usize) -> &[Option<usize>] {
        &self.0[layer]
    }
}

/// A layer's caches, split so that its own is mutable and all others can be read.
struct Lent<'a> {
    window: &'a mut WindowCache,
    source: Option<&'a mut CompressedCache>,
    kv: Option<&'a CompressedCache>,
    before: &'a [CompressedCache],
    after: &'a [CompressedCache],
}

impl<'a> Lent<'a> {
    fn new(
        window: &'a mut WindowCache,
        caches: &'a mut [CompressedCache],
        reads: Option<usize>,
        owns: bool,
    ) -> Self {
        match reads {
            Some(own) if owns => {
                let (before, rest) = caches.split_at_mut(own);
                let (source, after) = match rest.split_first_mut() {
                    Some((source, after)) => (Some(source), &*after),
                    None => (None, &[][..]),
                };
                Self {
                    window,
                    source,
                    kv: None,
                    before,
                    after,
                }
            }
            reads => {
                let caches = &*caches;
                let kv = reads.and_then(|r| caches.get(r));
                Self {
                    window,
                    source: None,
                    kv,
                    before: caches,
                    after: &[],
                }
            }
        }
    }

    /// The caches named by `sources`; `None` for the layer's own.
    fn keys(&self, sources: &[Option<usize>]) -> Vec<Option<&'a CompressedCache>> {
        let own = self.source.is_some().then_some(self.before.len());
        let cache = |i: usize| match own {
            Some(own) if i == own => None,
            Some(own) if i > own => self.after.get(i - own - 1),
            _ => self.before.get(i),
        };
        sources
            .iter()
            .map(|source| source.and_then(cache))
            .collect()
    }
}

impl EngramLayers {
    fn new(cfg: &Config, map: Option<TokenMap>, layers: &VarBuilder) -> Result<Option<Self>> {
        let Some(engram) = cfg.engram() else {
            return Ok(None);
        };
        let Some(map) = map else {
            return Err(Error::config(
                "engram_layer_ids",
                "a model with Engram layers needs the compressed token map of its tokenizer",
            ));
        };
        let layout = EngramLayout::new(&engram)?;
        let ids = engram.layer_ids.iter().enumerate();
        let layers = ids
            .map(|(i, layer)| Engram::new(&engram, i, layers.pp(layer).pp("engram")))
            .collect::<Result<_>>()?;
        Ok(Some(Self {
            layout,
            map,
            layers,
            lookback: engram.max_ngram_size - 1,
        }))
    }

    fn hash(&self, batch: &ForwardBatch, state: &ModelState) -> Result<EngramHashes> {
        let masks: Vec<_> = batch.chunks.iter().map(image_mask).collect();
        let mut windows = Vec::with_capacity(batch.chunks.len());
        for (chunk, mask) in batch.chunks.iter().zip(&masks) {
            let sequence = state.sequence(chunk.seq)?;
            let (history, history_image_mask) = sequence.history(self.lookback);
            windows.push(NgramWindow {
                history,
                history_image_mask,
                start: sequence.ids.len(),
                ids: &chunk.token_ids,
                image_mask: mask.as_deref(),
            });
        }
        engram_hash(&windows, &self.layout, &self.map)
    }
}
