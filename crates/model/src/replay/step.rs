//! Captured steps.

use candle_core::{CudaDevice, DType, Device, Tensor};
use deepseek_v41_core::{Error, Result, argmax, cuda::Graph};

use super::{HostInputs, Kept, Layout, MAX_TOKENS, Turn};
use crate::{
    ForwardBatch, ForwardOutput, ModelState, Transformer,
    probe::NoProbe,
    step::{Rows, StepInputs},
};

impl HostInputs for StepInputs {
    fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let mut map = |tensor: &Option<Tensor>| tensor.as_ref().map(&mut *f).transpose();
        let (ids, image_mask) = (map(&self.ids)?, map(&self.image_mask)?);
        Ok(Self {
            plan: self.plan.map(f)?,
            ropes: self.ropes.map(f)?,
            ids,
            carried: f(&self.carried)?,
            engram: self.engram.iter().map(&mut *f).collect::<Result<_>>()?,
            image_mask,
            published: self.published.clone(),
            rows: match &self.rows {
                Rows::Some(rows) => Rows::Some(f(rows)?),
                Rows::All => Rows::All,
                Rows::None => Rows::None,
            },
        })
    }
}

impl StepInputs {
    /// Everything that launches depend on; `None` for steps that are not replayed.
    fn layout(&self, batch: &ForwardBatch, tensors: &[Tensor]) -> Option<Layout> {
        let all_rows = matches!(self.rows, Rows::All);
        if self.plan.tokens > MAX_TOKENS
            || self.ids.is_none()
            || self.published.is_some()
            || !all_rows
        {
            return None;
        }
        let asked = [batch.target_hidden, batch.best].map(usize::from);
        let mut layout = vec![self.plan.tokens, asked[0], asked[1]];
        for plan in &self.plan.compress {
            let one_sequence = plan.spans.windows(2).all(|s| s[0].base == s[1].base);
            layout.extend([plan.columns as usize, usize::from(one_sequence)]);
        }
        super::shapes(tensors, &mut layout);
        Some(layout)
    }
}

impl Transformer {
    /// The step by way of a captured one; `None` where it has to be launched piece by piece.
    pub(crate) fn replay(
        &self,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &StepInputs,
    ) -> Result<Option<ForwardOutput>> {
        let Device::Cuda(dev) = &self.device else {
            return Ok(None);
        };
        if !state.replays.steps.on || self.ranks > 1 {
            return Ok(None);
        }
        let tensors = inputs.tensors()?;
        let Some(layout) = inputs.layout(batch, &tensors) else {
            return Ok(None);
        };
        let kept = match state.replays.steps.turn(&self.identity, layout) {
            Turn::Launch => return Ok(None),
            Turn::Replay(mut kept) => {
                kept.inputs.refill(&tensors)?;
                kept
            }
            Turn::Capture(layout) => match self.captured(dev, layout, batch, state, inputs) {
                Ok(Some(kept)) => kept,
                Ok(None) => return Ok(None),
                Err(err) => {
                    state.replays.steps.refused("steps", &err);
                    return Ok(None);
                }
            },
        };
        state.replays.steps.run(kept, copies)
    }

    /// Captures the step without running it.
    fn captured(
        &self,
        dev: &CudaDevice,
        layout: Layout,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &StepInputs,
    ) -> Result<Option<Kept<ForwardOutput>>> {
        let scratch = state.replays.scratch(dev)?;
        let (inputs, staged) = inputs.staged(dev)?;
        let (t, cfg) = (inputs.plan.tokens, &self.cfg);
        let zeros = |width, dtype| Tensor::zeros((t, width), dtype, &self.device);
        let width = cfg.dspark_target_layer_ids.len() * cfg.dim;
        let outputs = ForwardOutput {
            logits: zeros(cfg.vocab_size, DType::F32)?,
            target_hidden: (batch.target_hidden && width > 0)
                .then(|| zeros(width, DType::BF16))
                .transpose()?,
            best: batch
                .best
                .then(|| Tensor::zeros(t, DType::U32, &self.device))
                .transpose()?,
        };
        let work = || {
            let own = self.compute(batch, state, &inputs, &mut NoProbe)?;
            outputs.logits.slice_set(&own.logits, 0, 0)?;
            if let Some(best) = &outputs.best {
                best.slice_set(&argmax(&own.logits)?, 0, 0)?;
            }
            match (&outputs.target_hidden, &own.target_hidden) {
                (Some(kept), Some(own)) => kept.slice_set(own, 0, 0)?,
                (None, None) => {}
                _ => return Err(Error::shape("step", "hidden states that nobody asked for")),
            }
            Ok(())
        };
        // SAFETY: a step uses the weights, which are those of the model that replays it (its identity was
        // compared) and never move; the state's caches, which live as long as the state that keeps the
        // graph and are written in place; `staged` and the outputs, which are kept beside the graph.
        #[allow(unsafe_code)]
        let graph = unsafe { Graph::capture(dev, scratch.as_ref(), work)? };
        Ok(graph.map(|graph| Kept {
            layout,
            graph,
            inputs: staged,
            outputs,
        }))
    }
}

/// Copies of the results, which the next replay writes over.
fn copies(of: &ForwardOutput) -> Result<ForwardOutput> {
    Ok(ForwardOutput {
        logits: of.logits.copy()?,
        target_hidden: of.target_hidden.as_ref().map(Tensor::copy).transpose()?,
        best: of.best.as_ref().map(Tensor::copy).transpose()?,
    })
}
