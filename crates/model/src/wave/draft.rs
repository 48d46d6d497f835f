//! The blocks of a draft step in parts: every row attends to all rows of its block, so the parts meet in
//! each layer.

use std::ops::Range;

use candle_core::Tensor;
use deepseek_v41_attention::{DraftPlan, DraftRopes};
use deepseek_v41_core::{Result, cpu};
use deepseek_v41_hyperconn::{Flow, PreMix, hc_pre};

use super::{LARGE_LAYER, cuts};
use crate::{DSpark, ModelState, probe::NoProbe};

/// Some rows of the blocks of a draft step, between two layers.
struct BlockPart {
    rows: Range<usize>,
    flow: Flow,
    /// Their queries and rows in the layer they have entered.
    entered: Option<(Tensor, Tensor)>,
    done: Result<()>,
}

impl DSpark {
    /// The stages over the blocks' stream, rows side by side: where all rows attend to all, the parts wait
    /// for each other. → `[blocks * block_size, dim]`, collapsed but not normed.
    pub(crate) fn side_by_side(
        &self,
        parts: usize,
        stream: &Tensor,
        carried: &PreMix,
        plan: &DraftPlan,
        ropes: &DraftRopes,
        state: &ModelState,
    ) -> Result<Tensor> {
        let part = |rows: Range<usize>| -> Result<BlockPart> {
            let of = |t: &Tensor| t.narrow(0, rows.start, rows.len());
            let carried = PreMix::from_tensor(of(carried.tensor())?)?;
            Ok(BlockPart {
                flow: Flow::new(of(stream)?, carried),
                rows,
                entered: None,
                done: Ok(()),
            })
        };
        let rows = plan.block_positions.len();
        let mut parts: Vec<_> = cuts(rows, parts).map(part).collect::<Result<_>>()?;
        for at in 0..=self.stages.len() {
            let kv = match at {
                0 => None,
                _ => {
                    let rows = parts.iter().filter_map(|p| p.entered.as_ref());
                    let rows: Vec<_> = rows.map(|(_, kv)| kv).collect();
                    Some(Tensor::cat(&rows, 0)?)
                }
            };
            let (before, next) = (at.checked_sub(1), self.stages.get(at));
            let run = |part: &mut BlockPart| -> Result<()> {
                let flow = &mut part.flow;
                if let (Some(before), Some(kv), Some((q, _))) = (before, &kv, part.entered.take()) {
                    let (stage, cache) = (&self.stages[before], &state.draft[before]);
                    flow.leave(stage.attn.attend(&q, kv, &part.rows, plan, ropes, cache)?)?;
                    stage.ffn.forward(flow, None, &mut NoProbe)?;
                }
                if let Some(stage) = next {
                    let xs = flow.enter(&stage.hc_attn, &stage.attn_norm)?;
                    part.entered = Some(stage.attn.prepare(&xs, &part.rows, ropes)?);
                }
                Ok(())
            };
            cpu::for_each_piece(LARGE_LAYER, &mut parts, 1, |_, part| {
                part[0].done = run(&mut part[0]);
            });
            for part in &mut parts {
                std::mem::replace(&mut part.done, Ok(()))?;
            }
        }
        let out = parts
            .into_iter()
            .map(|part| {
                let (stream, carried) = part.flow.finish()?;
                hc_pre(&stream, &carried)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Tensor::cat(&out, 0)?)
    }
}
