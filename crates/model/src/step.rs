//! One step: what the host makes of a batch, and the layers that compute with it.
//!
//! The two are apart so that nothing is copied from the host while layers run: a GPU gets all of a step's
//! host values at once, and can replay the layers with new ones.

use candle_core::{Device, Tensor};
use deepseek_v41_attention::{AttnPlan, RopeTables, SharedAttentionRuntime, last_published};
use deepseek_v41_core::{Result, upload};
use deepseek_v41_hyperconn::{Flow, PreMix, hc_expand, hc_mean, hc_pre};

#[cfg(feature = "cuda")]
use crate::replay::HostInputs;
use crate::{
    ForwardBatch, ForwardOutput, IndexKeys, LogitRows, ModelState, Probe, ProbePoint, Transformer,
    block::{Attend, Step},
    lent::{Caches, PublishedKeys},
    probe::NoProbe,
};

/// The host values of one step.
pub(crate) struct StepInputs {
    pub(crate) plan: AttnPlan,
    pub(crate) ropes: RopeTables,
    /// `[T]` u32 token ids, where the embedding is on a GPU and no row comes from a picture.
    pub(crate) ids: Option<Tensor>,
    /// `[T, C]` f32, the mix that the first layer starts from.
    pub(crate) carried: Tensor,
    /// For each Engram layer its hashes or rows, `[T, ..]`.
    pub(crate) engram: Vec<Tensor>,
    pub(crate) image_mask: Option<Tensor>,
    pub(crate) published: Option<PublishedKeys>,
    pub(crate) rows: Rows,
}

/// What a step's layers end with.
pub(crate) struct Passed {
    /// `[T, C, dim]` bf16.
    pub(crate) stream: Tensor,
    pub(crate) carried: PreMix,
    /// `[T, targets * dim]` bf16, if asked for.
    pub(crate) target_hidden: Option<Tensor>,
}

/// Which rows become logits.
pub(crate) enum Rows {
    All,
    None,
    /// `[n]` u32.
    Some(Tensor),
}

impl Rows {
    /// Those that the batch asks for.
    pub(crate) fn of(batch: &ForwardBatch) -> Result<Self> {
        match batch.logits {
            LogitRows::All => Ok(Self::All),
            LogitRows::None => Ok(Self::None),
            LogitRows::Last => newest_rows(batch, 1),
            LogitRows::Newest(n) => newest_rows(batch, n),
        }
    }
}

impl Transformer {
    /// What the host makes of `batch`: tensors on the CPU.
    pub(crate) fn inputs(
        &self,
        batch: &ForwardBatch,
        state: &ModelState,
        plan: AttnPlan,
        masks: &[Option<Vec<u8>>],
    ) -> Result<StepInputs> {
        let cpu = &Device::Cpu;
        let text = masks.iter().all(Option::is_none);
        let ids = match text && self.embed.is_on_device() {
            true => {
                let ids = batch
                    .chunks
                    .iter()
                    .flat_map(|c| c.token_ids.iter().copied());
                Some(upload(ids.collect(), plan.tokens, cpu)?)
            }
            false => None,
        };
        let carried = PreMix::one_hot(plan.tokens, self.cfg.hc_mult, cpu)?;
        Ok(StepInputs {
            ropes: RopeTables::new(&plan, &self.window_rope, &self.compressed_rope, cpu)?,
            published: self.published_keys(batch, state, &plan)?,
            image_mask: flat_mask(batch, masks)?,
            carried: carried.tensor().clone(),
            plan,
            ids,
            engram: self.engram_inputs(batch, state)?,
            rows: Rows::of(batch)?,
        })
    }

    /// For each Engram layer what it reads, `[T, ..]`.
    pub(crate) fn engram_inputs(
        &self,
        batch: &ForwardBatch,
        state: &ModelState,
    ) -> Result<Vec<Tensor>> {
        let Some(own) = &self.engram else {
            return Ok(Vec::new());
        };
        let hashes = own.hash(batch, state)?;
        let layers = own.layers.iter().enumerate();
        layers
            .map(|(e, layer)| layer.host_input(&hashes.tensor(e, &Device::Cpu)?))
            .collect()
    }

    /// The layers over a step that nobody looks into.
    pub(crate) fn unobserved(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &StepInputs,
    ) -> Result<ForwardOutput> {
        #[cfg(feature = "cuda")]
        if let Some(output) = self.replay(batch, state, inputs)? {
            return Ok(output);
        }
        self.compute_once(batch, state, inputs, &mut NoProbe)
    }

    /// The layers, with inputs that serve this step alone.
    pub(crate) fn compute_once(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &StepInputs,
        probe: &mut dyn Probe,
    ) -> Result<ForwardOutput> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(dev) = &self.device {
            let (inputs, _) = inputs.staged(dev)?;
            return self.compute(batch, state, &inputs, probe);
        }
        self.compute(batch, state, inputs, probe)
    }

    /// The layers and the head: `inputs` are where they compute.
    pub(crate) fn compute(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &StepInputs,
        probe: &mut dyn Probe,
    ) -> Result<ForwardOutput> {
        let passed = self.layers(batch, state, inputs, probe)?;
        self.finish(&inputs.rows, passed)
    }

    /// What comes out of a step whose layers are done.
    pub(crate) fn finish(&self, rows: &Rows, passed: Passed) -> Result<ForwardOutput> {
        Ok(ForwardOutput {
            logits: self.logits(rows, &passed.stream, &passed.carried)?,
            target_hidden: passed.target_hidden,
            best: None,
        })
    }

    /// The layers over all tokens of a step.
    pub(crate) fn layers(
        &self,
        batch: &ForwardBatch,
        caches: &mut dyn Caches,
        inputs: &StepInputs,
        probe: &mut dyn Probe,
    ) -> Result<Passed> {
        let mut step = Step {
            plan: &inputs.plan,
            ropes: &inputs.ropes,
            image_mask: inputs.image_mask.as_ref(),
            shared: SharedAttentionRuntime::new(),
            probe,
        };
        let stream = match &inputs.ids {
            Some(ids) => self.embed.copies(ids, self.cfg.hc_mult)?,
            None => hc_expand(&self.embed.forward_chunks(&batch.chunks)?, self.cfg.hc_mult)?,
        };
        let mut flow = Flow::new(stream, PreMix::from_tensor(inputs.carried.clone())?);
        let mut targets = Vec::new();
        for (i, (block, role)) in self.blocks.iter().zip(self.plan.layers()).enumerate() {
            if let (Some(e), Some(engram)) = (role.engram, &self.engram) {
                let layer = &engram.layers[e];
                let rows = layer.rows(&inputs.engram[e])?;
                flow.map(|stream| layer.forward(stream, &rows, step.image_mask))?;
                step.probe.value(i, ProbePoint::Engram, flow.stream()?)?;
            }
            if batch.target_hidden && role.draft_target {
                targets.push(hc_mean(flow.stream()?)?);
            }
            let published = inputs.published.as_ref().map(|p| p.of_layer(i));
            let mut lend = |attend: &mut Attend<'_>| caches.lend(i, role, published, attend);
            block.forward(&mut flow, &mut lend, &mut step)?;
        }
        let (stream, carried) = flow.finish()?;
        Ok(Passed {
            stream,
            carried,
            target_hidden: match targets.len() {
                0 => None,
                _ => Some(Tensor::cat(&targets, 1)?),
            },
        })
    }

    /// Collapses the stream of the wanted rows and projects it to the vocabulary.
    fn logits(&self, rows: &Rows, stream: &Tensor, carried: &PreMix) -> Result<Tensor> {
        let xs = match rows {
            Rows::All => hc_pre(stream, carried)?,
            Rows::None => {
                return upload(Vec::<f32>::new(), (0, self.cfg.vocab_size), &self.device);
            }
            Rows::Some(rows) => {
                let carried = carried.tensor().contiguous()?.index_select(rows, 0)?;
                hc_pre(
                    &stream.index_select(rows, 0)?,
                    &PreMix::from_tensor(carried)?,
                )?
            }
        };
        self.head.forward(&self.norm.forward(&xs)?)
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

fn flat_mask(batch: &ForwardBatch, masks: &[Option<Vec<u8>>]) -> Result<Option<Tensor>> {
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
    Ok(Some(Tensor::from_vec(flat, n, &Device::Cpu)?))
}

/// Rows of the last `n` tokens of every chunk.
fn newest_rows(batch: &ForwardBatch, n: usize) -> Result<Rows> {
    let mut rows = Vec::new();
    let mut end = 0;
    for chunk in &batch.chunks {
        let start = end;
        end += chunk.token_ids.len();
        rows.extend(start.max(end.saturating_sub(n)) as u32..end as u32);
    }
    Ok(match rows.len() {
        0 => Rows::None,
        all if all == end => Rows::All,
        some => Rows::Some(upload(rows, some, &Device::Cpu)?),
    })
}
