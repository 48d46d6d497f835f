//! Steps captured as CUDA graphs.
//!
//! A step of one token is about seventeen launches a layer, each of which takes the host longer than the GPU.
//! What the launches are depends on the step's layout alone: the shapes of its host values, which
//! [`AttnPlan::on_host`](deepseek_v41_attention::AttnPlan::on_host) makes the same for many positions. So
//! the launches of a layout are captured when it comes for the second time; from then on a step copies its
//! host values to where the captured ones were and launches the graph.

use std::sync::{Arc, Weak};

use candle_core::{CudaDevice, DType, Device, Tensor};
use deepseek_v41_core::{
    Error, Result, argmax,
    cuda::{Graph, Scratch, Staged},
};

use crate::{
    ForwardBatch, ForwardOutput, ModelState, Transformer,
    probe::NoProbe,
    step::{Rows, StepInputs},
};

/// Tokens of a step that is worth keeping.
const MAX_TOKENS: usize = 16;
/// Layouts kept at a time.
const MAX_KEPT: usize = 64;

/// What launches depend on.
type Layout = Vec<usize>;

/// The captured steps of one state.
#[derive(Debug)]
pub(crate) struct Replays {
    on: bool,
    /// The model they were captured with.
    model: Weak<()>,
    /// Layouts that came once.
    seen: Vec<Layout>,
    /// The one used last at the end.
    kept: Vec<Kept>,
    /// Where they keep what is between their launches.
    scratch: Option<Arc<Scratch>>,
    steps: u64,
}

/// One captured step.
#[derive(Debug)]
struct Kept {
    layout: Layout,
    graph: Graph,
    inputs: Staged,
    logits: Tensor,
    target_hidden: Option<Tensor>,
    best: Option<Tensor>,
}

impl Default for Replays {
    fn default() -> Self {
        Self {
            on: true,
            model: Weak::new(),
            seen: Vec::new(),
            kept: Vec::new(),
            scratch: None,
            steps: 0,
        }
    }
}

impl Replays {
    pub(crate) fn set(&mut self, on: bool) {
        *self = Self {
            on,
            steps: self.steps,
            ..Self::default()
        };
    }

    /// Steps replayed so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }
}

impl StepInputs {
    /// Host tensors in the order of [`StepInputs::map`].
    fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut all = Vec::new();
        self.map(&mut |tensor| {
            all.push(tensor.clone());
            Ok(tensor.clone())
        })?;
        Ok(all)
    }

    /// The inputs on `dev`, and the memory they share.
    pub(crate) fn staged(&self, dev: &CudaDevice) -> Result<(Self, Staged)> {
        let staged = Staged::new(dev, &self.tensors()?)?;
        let mut at = staged.tensors().iter();
        let moved = self.map(&mut |_| {
            let own = at.next().cloned();
            own.ok_or_else(|| Error::shape("step", "fewer tensors than before"))
        })?;
        Ok((moved, staged))
    }

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
        for tensor in tensors {
            layout.push(tensor.rank());
            layout.extend(tensor.dims());
        }
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
        if !state.replays.on || self.ranks > 1 {
            return Ok(None);
        }
        let tensors = inputs.tensors()?;
        let Some(layout) = inputs.layout(batch, &tensors) else {
            return Ok(None);
        };
        if !std::ptr::eq(state.replays.model.as_ptr(), Arc::as_ptr(&self.identity)) {
            state.replays.set(true);
            state.replays.model = Arc::downgrade(&self.identity);
        }
        let known = state.replays.kept.iter().position(|k| k.layout == layout);
        if let Some(at) = known {
            let mut kept = state.replays.kept.remove(at);
            kept.inputs.refill(&tensors)?;
            kept.graph.launch()?;
            let output = kept.output();
            state.replays.steps += 1;
            state.replays.kept.push(kept);
            return output.map(Some);
        }
        // The first step of a layout loads its kernels, which a capture must not.
        if !state.replays.seen.contains(&layout) {
            if state.replays.seen.len() > 4 * MAX_KEPT {
                state.replays.seen.clear();
            }
            state.replays.seen.push(layout);
            return Ok(None);
        }
        match self.captured(dev, layout, batch, state, inputs) {
            Ok(Some(mut kept)) => {
                kept.graph.launch()?;
                let output = kept.output()?;
                state.replays.steps += 1;
                if state.replays.kept.len() == MAX_KEPT {
                    state.replays.kept.remove(0);
                }
                state.replays.kept.push(kept);
                Ok(Some(output))
            }
            Ok(None) => Ok(None),
            Err(err) => {
                tracing::warn!("steps are not replayed, since one could not be captured: {err}");
                state.replays.set(false);
                Ok(None)
            }
        }
    }

    /// Captures the step without running it.
    fn captured(
        &self,
        dev: &CudaDevice,
        layout: Layout,
        batch: &ForwardBatch,
        state: &mut ModelState,
        inputs: &StepInputs,
    ) -> Result<Option<Kept>> {
        if state.replays.scratch.is_none() {
            state.replays.scratch = Scratch::new(dev)?;
        }
        let scratch = state.replays.scratch.clone();
        let (inputs, staged) = inputs.staged(dev)?;
        let (t, cfg) = (inputs.plan.tokens, &self.cfg);
        let zeros = |width, dtype| Tensor::zeros((t, width), dtype, &self.device);
        let logits = zeros(cfg.vocab_size, DType::F32)?;
        let width = cfg.dspark_target_layer_ids.len() * cfg.dim;
        let target_hidden = (batch.target_hidden && width > 0)
            .then(|| zeros(width, DType::BF16))
            .transpose()?;
        let best = batch
            .best
            .then(|| Tensor::zeros(t, DType::U32, &self.device))
            .transpose()?;
        let work = || {
            let output = self.compute(batch, state, &inputs, &mut NoProbe)?;
            logits.slice_set(&output.logits, 0, 0)?;
            if let Some(best) = &best {
                best.slice_set(&argmax(&output.logits)?, 0, 0)?;
            }
            match (&target_hidden, &output.target_hidden) {
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
            logits,
            target_hidden,
            best,
        }))
    }
}

impl Kept {
    /// Copies of the results, which the next replay writes over.
    fn output(&self) -> Result<ForwardOutput> {
        Ok(ForwardOutput {
            logits: self.logits.copy()?,
            target_hidden: self.target_hidden.as_ref().map(Tensor::copy).transpose()?,
            best: self.best.as_ref().map(Tensor::copy).transpose()?,
        })
    }
}
