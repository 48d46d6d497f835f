//! The model: tokens in, logits out.

use std::sync::Arc;

use candle_core::Device;
use deepseek_v41_attention::{AttnPlan, ChunkSpec, plan::check_chunks};
use deepseek_v41_core::{
    Comm, Error, Fingerprint, LocalComm, Result, RmsNorm, Rope, VarBuilder, argmax, cpu, upload,
};
use deepseek_v41_engram::{Engram, EngramHashes, EngramLayout, NgramWindow, TokenMap, engram_hash};
use deepseek_v41_quant::{Linear, WeightFormat};
use half::bf16;

use crate::{
    Config, ForwardBatch, ForwardOutput, LayerPlan, ModelState, Probe,
    block::Block,
    embed::{Embedding, check_chunk, image_mask},
};

/// The backbone. Immutable once loaded: what changes between steps is in [`ModelState`].
#[derive(Debug)]
pub struct Transformer {
    pub(crate) cfg: Config,
    pub(crate) plan: LayerPlan,
    pub(crate) device: Device,
    pub(crate) embed: Embedding,
    pub(crate) blocks: Vec<Block>,
    pub(crate) engram: Option<EngramLayers>,
    pub(crate) norm: RmsNorm,
    pub(crate) head: Linear,
    pub(crate) window_rope: Rope,
    pub(crate) compressed_rope: Rope,
    ratios: Vec<usize>,
    pub(crate) source_ratios: Vec<usize>,
    fingerprint: u64,
    pub(crate) ranks: usize,
    /// Whom captured steps belong to.
    #[cfg(feature = "cuda")]
    pub(crate) identity: Arc<()>,
}

#[derive(Debug)]
pub(crate) struct EngramLayers {
    layout: EngramLayout,
    map: TokenMap,
    pub(crate) layers: Vec<Engram>,
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
            #[cfg(feature = "cuda")]
            identity: Arc::default(),
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

    /// Every ratio of compression, each once.
    pub(crate) fn ratios(&self) -> &[usize] {
        &self.ratios
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
    /// On a GPU a step of a few tokens that is laid out like earlier ones is replayed, see
    /// [`ModelState::set_replay`]; the result is the same, bit for bit.
    ///
    /// # Errors
    /// [`Error::Value`] for token ids outside of the vocabulary or a sequence that is not live,
    /// [`Error::Shape`] for image spans that do not fit, [`Error::Capacity`] when a sequence would
    /// outgrow the state; all of these before anything is written. After a failure in the middle of
    /// a step the sequences of its batch can only be released.
    pub fn forward(&self, batch: &ForwardBatch, state: &mut ModelState) -> Result<ForwardOutput> {
        pooled(&self.device, self.ranks, || self.step(batch, state, None))
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
        self.step(batch, state, Some(probe))
    }

    fn step(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        probe: Option<&mut dyn Probe>,
    ) -> Result<ForwardOutput> {
        let chunks = self.check_step(batch, state)?;
        if batch.tokens() == 0 {
            return self.empty_output(batch);
        }
        let masks: Vec<_> = batch.chunks.iter().map(image_mask).collect();
        let parts = match probe {
            None => self.parts(batch, &chunks, &masks),
            Some(_) => None,
        };
        let mut output = match parts {
            Some(parts) => {
                let inputs = self.parts_inputs(batch, state)?;
                begin(batch, state)?;
                self.side_by_side(batch, state, &inputs, &parts)?
            }
            None => {
                let on_gpu = !self.device.is_cpu();
                let plan = AttnPlan::on_host(&chunks, &state.geometry, &self.ratios, on_gpu)?;
                let inputs = self.inputs(batch, state, plan, &masks)?;
                begin(batch, state)?;
                match probe {
                    Some(probe) => self.compute_once(batch, state, &inputs, probe)?,
                    None => self.unobserved(batch, state, &inputs)?,
                }
            }
        };
        if batch.best && output.best.is_none() {
            output.best = Some(argmax(&output.logits)?);
        }
        for (chunk, mask) in batch.chunks.iter().zip(&masks) {
            let sequence = state.sequence_mut(chunk.seq)?;
            sequence.append(&chunk.token_ids, mask.as_deref());
            sequence.broken = false;
        }
        Ok(output)
    }

    /// Checks the batch; changes nothing.
    fn check_step(&self, batch: &ForwardBatch, state: &ModelState) -> Result<Vec<ChunkSpec>> {
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
        check_chunks(&chunks, &state.geometry)?;
        Ok(chunks)
    }

    fn empty_output(&self, batch: &ForwardBatch) -> Result<ForwardOutput> {
        let width = self.cfg.dspark_target_layer_ids.len() * self.cfg.dim;
        let hidden = batch.target_hidden && width > 0;
        Ok(ForwardOutput {
            logits: upload(Vec::<f32>::new(), (0, self.cfg.vocab_size), &self.device)?,
            target_hidden: hidden
                .then(|| upload(Vec::<bf16>::new(), (0, width), &self.device))
                .transpose()?,
            best: batch
                .best
                .then(|| upload(Vec::<u32>::new(), 0, &self.device))
                .transpose()?,
        })
    }
}

/// From here on an error leaves the batch's sequences half written.
fn begin(batch: &ForwardBatch, state: &mut ModelState) -> Result<()> {
    for chunk in &batch.chunks {
        state.sequence_mut(chunk.seq)?.broken = true;
    }
    Ok(())
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

/// Runs a pass where handing parts of its small operations to other threads is cheap. Not beside other
/// ranks: they wait for each other, which threads of the pool must not.
pub(crate) fn pooled<R: Send>(device: &Device, ranks: usize, pass: impl FnOnce() -> R + Send) -> R {
    match device.is_cpu() && ranks == 1 {
        true => cpu::in_pool(pass),
        false => pass(),
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

    pub(crate) fn hash(&self, batch: &ForwardBatch, state: &ModelState) -> Result<EngramHashes> {
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
