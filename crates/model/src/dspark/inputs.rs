//! What the host makes of a draft step's requests.

use candle_core::{Device, Tensor};
use deepseek_v41_attention::{ChunkSpec, DraftChunk, DraftPlan, DraftRopes};
use deepseek_v41_core::{Error, Result, upload};
use deepseek_v41_hyperconn::PreMix;

use super::{DSpark, DraftRequest};
use crate::{ModelState, embed::check_id};

/// The host values of one draft step.
pub(crate) struct DraftInputs {
    pub(crate) plan: DraftPlan,
    pub(crate) ropes: DraftRopes,
    /// Token ids of the blocks' rows, `[Q]`: a request's next token and noise behind it.
    pub(crate) ids: Vec<u32>,
    /// `ids`, where the embedding is on a GPU.
    pub(crate) rows: Option<Tensor>,
    /// `[blocks]` u32, each block's first, where they are.
    pub(crate) next: Option<Tensor>,
    /// `[Q, C]` f32, the mix that the first stage starts from.
    pub(crate) carried: Tensor,
}

impl DSpark {
    /// What the host makes of `requests`: tensors on the CPU. Changes nothing.
    pub(super) fn inputs(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &ModelState,
    ) -> Result<DraftInputs> {
        let cpu = &Device::Cpu;
        let plan = self.plan(requests, target_hidden, state)?;
        let noise = self.cfg.dspark_noise_token_id as u32;
        let next: Vec<u32> = requests.iter().filter_map(|r| r.next).collect();
        let mut ids = Vec::with_capacity(plan.block_positions.len());
        for id in &next {
            check_id(&self.cfg, *id)?;
            ids.push(*id);
            ids.resize(ids.len() + self.block_size() - 1, noise);
        }
        let on_device = |ids: &[u32]| -> Result<_> {
            let moved = self.embed.is_on_device();
            moved
                .then(|| upload(ids.to_vec(), ids.len(), cpu))
                .transpose()
        };
        Ok(DraftInputs {
            ropes: DraftRopes::new(&plan, &self.rope, cpu)?,
            carried: PreMix::one_hot(ids.len(), self.cfg.hc_mult, cpu)?
                .tensor()
                .clone(),
            plan,
            rows: on_device(&ids)?,
            next: on_device(&next)?,
            ids,
        })
    }

    fn plan(
        &self,
        requests: &[DraftRequest],
        target_hidden: &Tensor,
        state: &ModelState,
    ) -> Result<DraftPlan> {
        let mut chunks = Vec::with_capacity(requests.len());
        for request in requests {
            let sequence = state.sequence(request.seq)?;
            let (start, len) = (sequence.drafted, request.committed);
            if start + len != sequence.ids.len() {
                return Err(Error::value(
                    "committed tokens",
                    format!(
                        "{len} after {start} do not reach the sequence's {} tokens",
                        sequence.ids.len()
                    ),
                ));
            }
            let committed = ChunkSpec {
                slot: request.seq.slot,
                start: start as u32,
                len: len as u32,
            };
            chunks.push(DraftChunk {
                committed,
                draft: request.next.is_some(),
            });
        }
        let (m, width) = target_hidden.dims2()?;
        let committed: usize = requests.iter().map(|r| r.committed).sum();
        let expected = self.cfg.dspark_target_layer_ids.len() * self.cfg.dim;
        if m != committed || width != expected {
            return Err(Error::shape(
                "draft",
                format!("expected target_hidden [{committed}, {expected}], found [{m}, {width}]"),
            ));
        }
        let on_gpu = !self.device.is_cpu();
        DraftPlan::on_host(&chunks, self.block_size(), &state.geometry, on_gpu)
    }
}
