//! Captured draft steps.

use candle_core::{CudaDevice, DType, Tensor};
use deepseek_v41_core::{Error, Result, cuda::Graph};

use super::{HostInputs, Kept, Layout, MAX_TOKENS, Turn};
use crate::{
    DSpark, ModelState,
    dspark::{Blocks, DraftInputs},
};

/// What a captured draft step reads beside its staged inputs, and what it gives.
#[derive(Debug)]
pub(crate) struct Outputs {
    /// `[M, targets * dim]` bf16, the hidden states of the committed tokens.
    hidden: Tensor,
    blocks: Blocks,
}

impl HostInputs for DraftInputs {
    fn map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let mut map = |tensor: &Option<Tensor>| tensor.as_ref().map(&mut *f).transpose();
        let (rows, next) = (map(&self.rows)?, map(&self.next)?);
        Ok(Self {
            plan: self.plan.map(f)?,
            ropes: self.ropes.map(f)?,
            ids: self.ids.clone(),
            rows,
            next,
            carried: f(&self.carried)?,
        })
    }
}

impl DraftInputs {
    /// Everything that launches depend on; `None` for draft steps that are not replayed.
    fn layout(&self, choose: bool, tensors: &[Tensor]) -> Option<Layout> {
        let (committed, rows) = (self.plan.main_positions.len(), self.ids.len());
        if committed.max(rows) > MAX_TOKENS || rows == 0 || self.rows.is_none() {
            return None;
        }
        let mut layout = vec![usize::from(choose)];
        super::shapes(tensors, &mut layout);
        Some(layout)
    }
}

impl DSpark {
    /// The draft step by way of a captured one, up to choices if `choose`; `None` where it has to be launched
    /// piece by piece. What it gives is good until the next one of this state.
    pub(crate) fn replay(
        &self,
        dev: &CudaDevice,
        inputs: &DraftInputs,
        target_hidden: &Tensor,
        state: &mut ModelState,
        choose: bool,
    ) -> Result<Option<Blocks>> {
        if !state.replays.drafts.on || self.ranks > 1 {
            return Ok(None);
        }
        let tensors = inputs.tensors()?;
        let Some(layout) = inputs.layout(choose, &tensors) else {
            return Ok(None);
        };
        let kept = match state.replays.drafts.turn(&self.identity, layout) {
            Turn::Launch => return Ok(None),
            Turn::Replay(mut kept) => {
                kept.inputs.refill(&tensors)?;
                kept
            }
            Turn::Capture(layout) => match self.captured(dev, layout, inputs, state, choose) {
                Ok(Some(kept)) => kept,
                Ok(None) => return Ok(None),
                Err(err) => {
                    state.replays.drafts.refused("draft steps", &err);
                    return Ok(None);
                }
            },
        };
        if target_hidden.dims()[0] > 0 {
            let hidden = &kept.outputs.hidden;
            hidden.slice_set(&target_hidden.contiguous()?, 0, 0)?;
        }
        state.replays.drafts.run(kept, |own| Ok(own.blocks.clone()))
    }

    /// Captures the draft step without running it.
    fn captured(
        &self,
        dev: &CudaDevice,
        layout: Layout,
        inputs: &DraftInputs,
        state: &mut ModelState,
        choose: bool,
    ) -> Result<Option<Kept<Outputs>>> {
        let scratch = state.replays.scratch(dev)?;
        let (inputs, staged) = inputs.staged(dev)?;
        let cfg = &self.cfg;
        let zeros = |shape: (usize, usize), dtype| Tensor::zeros(shape, dtype, &self.device);
        let (committed, rows) = (inputs.plan.main_positions.len(), inputs.ids.len());
        let width = cfg.dspark_target_layer_ids.len() * cfg.dim;
        let blocks = match choose {
            true => Blocks::Chosen {
                codes: zeros((rows / self.block_size(), self.block_size()), DType::U32)?,
                confidence: zeros((rows, 1), DType::F32)?.flatten_all()?,
            },
            false => Blocks::Hidden {
                xs: zeros((rows, cfg.dim), DType::BF16)?,
                logits: zeros((rows, cfg.vocab_size), DType::F32)?,
            },
        };
        let outputs = Outputs {
            // Rows that only fill up stay what they are, here or from an earlier step: nobody reads what is
            // made of them.
            hidden: zeros((committed.max(1), width), DType::BF16)?,
            blocks,
        };
        let work = || {
            self.commit(&inputs, &outputs.hidden, &mut state.draft)?;
            match (self.blocks(&inputs, state, choose, None)?, &outputs.blocks) {
                (Blocks::Hidden { xs, logits }, Blocks::Hidden { xs: x, logits: l }) => {
                    x.slice_set(&xs, 0, 0)?;
                    l.slice_set(&logits, 0, 0)?;
                }
                (
                    Blocks::Chosen { codes, confidence },
                    Blocks::Chosen {
                        codes: c,
                        confidence: p,
                    },
                ) => {
                    c.slice_set(&codes, 0, 0)?;
                    p.slice_set(&confidence, 0, 0)?;
                }
                _ => return Err(Error::shape("draft", "choices that nobody asked for")),
            }
            Ok(())
        };
        // SAFETY: a draft step uses the weights, which are those of the head that replays it (its identity was
        // compared) and never move; the state's rings, which live as long as the state that keeps the graph and
        // are written in place; `staged`, the hidden states and the outputs, which are kept beside the graph.
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
