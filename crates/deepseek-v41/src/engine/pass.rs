//! One pass: drafts for all, one forward pass, and each request's part of what came out.

use std::ops::Range;

use candle_core::{DType, Tensor};
use deepseek_v41_core::Result;
use deepseek_v41_model::{Chunk, ForwardBatch, ForwardOutput, LogitRows};

use super::{
    Engine, Update,
    job::{Drafts, Job},
};
use crate::{
    continuation::Verified,
    sampling::Rows,
    session::spans_within,
    speculative::{DraftItem, Proposal, propose_all, schedule, sigmoid},
};

/// A request's part of a pass.
struct Part {
    /// Its place among the running.
    at: usize,
    chunk: Chunk,
    proposal: Proposal,
}

impl<'m> Engine<'m> {
    /// Who takes part in the next pass, by place among the running.
    pub(super) fn planned(&self) -> Vec<usize> {
        let has_work = |job: &Job<'_>| job.is_decoding() || job.piece > 0;
        let jobs = self
            .running
            .iter()
            .enumerate()
            .filter(|(_, job)| has_work(job));
        match jobs.clone().find(|(_, job)| job.alone) {
            Some((at, _)) => vec![at],
            None => jobs.map(|(at, _)| at).collect(),
        }
    }

    /// Runs what was planned and reports what came of it.
    pub(super) fn pass(&mut self) {
        let planned = self.planned();
        if planned.is_empty() {
            return;
        }
        for &at in &planned {
            let job = &mut self.running[at];
            job.mark = Some(job.text.sampler.mark());
        }
        let mut failure = self.try_pass(&planned).err();
        let mut again = Vec::new();
        for (at, mut job) in std::mem::take(&mut self.running).into_iter().enumerate() {
            if failure.is_none() || !planned.contains(&at) {
                self.settle(job);
                continue;
            }
            // Its caches may be half written, and what was drawn for its drafts came to nothing.
            self.free(&mut job);
            if let Some(mark) = job.mark.take() {
                job.text.sampler.rewind(mark);
            }
            match planned.len() {
                1 => {
                    job.error = failure.take();
                    self.settle(job);
                }
                _ => {
                    job.alone = true;
                    again.push(job);
                }
            }
        }
        for job in again.into_iter().rev() {
            self.waiting.push_front(job);
        }
    }

    /// One pass over the `planned`. What concerns one request alone is left in its `error`.
    fn try_pass(&mut self, planned: &[usize]) -> Result<()> {
        let parts = self.parts(planned)?;
        let want_hidden = planned
            .iter()
            .any(|at| matches!(self.running[*at].drafts, Drafts::Head(_)));
        let rows = parts
            .iter()
            .map(|part| part.proposal.tokens.len() + 1)
            .max()
            .unwrap_or(0);
        let device = self.model.transformer().device();
        let batch = ForwardBatch {
            chunks: parts.iter().map(|part| part.chunk.clone()).collect(),
            logits: LogitRows::Newest(rows),
            target_hidden: want_hidden,
            best: planned
                .iter()
                .any(|at| self.running[*at].text.sampler.chosen_on(device)),
        };
        let out = self.model.transformer().forward(&batch, &mut self.state)?;
        self.stats.steps += 1;
        self.stats.tokens += batch.tokens();
        self.stats.widest = self.stats.widest.max(parts.len());
        let (mut row, mut token) = (0, 0);
        for part in &parts {
            let len = part.chunk.token_ids.len();
            let hidden = out
                .target_hidden
                .as_ref()
                .map(|h| h.narrow(0, token, len))
                .transpose()?;
            self.absorb(part, &out, row..row + len.min(rows), hidden)?;
            row += len.min(rows);
            token += len;
        }
        Ok(())
    }

    fn parts(&mut self, planned: &[usize]) -> Result<Vec<Part>> {
        let mut proposals = self.propose(planned)?;
        if !self.limits.sps_by_batch.is_empty() {
            share_drafts(&mut proposals, &self.limits.sps_by_batch);
        }
        let mut parts = Vec::with_capacity(planned.len());
        for (&at, proposal) in planned.iter().zip(proposals) {
            let job = &self.running[at];
            let Some(seq) = job.seq else { continue };
            let end = job.run + if job.is_decoding() { 1 } else { job.piece };
            let mut token_ids = job.ids[job.run..end].to_vec();
            token_ids.extend(&proposal.tokens);
            let images = spans_within(&job.images, job.run, end);
            parts.push(Part {
                at,
                chunk: Chunk {
                    seq,
                    token_ids,
                    images,
                },
                proposal,
            });
        }
        Ok(parts)
    }

    /// Guesses for those of the `planned` that decode; the draft head's in one step.
    fn propose(&mut self, planned: &[usize]) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); planned.len()];
        let (mut items, mut owners) = (Vec::new(), Vec::new());
        let max_rollback = self.limits.state.max_rollback;
        let jobs = self.running.iter_mut().enumerate();
        for (at, job) in jobs.filter(|(_, job)| job.is_decoding()) {
            let Some(place) = planned.iter().position(|p| *p == at) else {
                continue;
            };
            let max = job.text.max_drafts(max_rollback);
            match (&job.drafts, job.seq) {
                (Drafts::Lookup(lookup), _) => {
                    proposals[place].tokens = lookup.guess(&job.ids, max).to_vec();
                }
                (Drafts::Head(head), Some(seq)) => {
                    owners.push(place);
                    items.push(DraftItem {
                        seq,
                        hidden: match job.unseen.take() {
                            Some(hidden) => hidden,
                            None => no_hidden(self.model)?,
                        },
                        next: job.ids.last().copied(),
                        sampler: &mut job.text.sampler,
                        max,
                        by: head,
                    });
                }
                _ => {}
            }
        }
        if !items.is_empty() {
            let drafted = propose_all(self.model.draft_head()?, items, &mut self.state)?;
            for (place, proposal) in owners.into_iter().zip(drafted) {
                proposals[place] = proposal;
            }
        }
        Ok(proposals)
    }

    /// Takes a request's part of a pass: the `rows` after its newest tokens, `hidden` of all of them.
    fn absorb(
        &mut self,
        part: &Part,
        out: &ForwardOutput,
        rows: Range<usize>,
        hidden: Option<Tensor>,
    ) -> Result<()> {
        let job = &mut self.running[part.at];
        job.mark = None;
        let (ran, drafts) = (part.chunk.token_ids.len(), part.proposal.tokens.len());
        let mut kept = ran;
        if job.is_decoding() || job.ends_prompt(job.run + ran) {
            let rows = Rows::of(
                out,
                rows.end - drafts - 1,
                drafts + 1,
                &mut job.text.sampler,
            )?;
            let mut verified = Verified::default();
            job.error = job.text.verify(&part.proposal, &rows, &mut verified).err();
            job.extend();
            kept = ran - drafts + verified.kept;
            self.stats.drafted += drafts;
            self.stats.accepted += verified.kept;
        }
        job.run += kept;
        if kept < ran {
            self.state.truncate(part.chunk.seq, job.run)?;
        }
        if let (Drafts::Head(_), Some(hidden)) = (&job.drafts, hidden) {
            job.unseen = Some(hidden.narrow(0, 0, kept)?);
        }
        Ok(())
    }

    /// What a request's state after a pass means for it.
    fn settle(&mut self, mut job: Job<'m>) {
        self.report(&mut job);
        if job.error.is_none() && !job.text.is_finished() && !job.is_decoding() {
            // The next piece of its prompt brings new ones.
            job.error = self.show_unseen(&mut job).err();
        }
        if let Some(err) = job.error.take() {
            self.free(&mut job);
            self.updates.push(Update {
                id: job.id,
                event: Err(err),
            });
            return;
        }
        if job.text.is_finished() {
            self.keep_finished(job);
            return;
        }
        if job.cut == Some(job.run) {
            self.keep_fork(&job);
            job.cut = None;
        }
        job.alone &= !job.is_decoding();
        self.running.push(job);
    }

    /// Shows the draft head what a request has run.
    pub(super) fn show_unseen(&mut self, job: &mut Job<'m>) -> Result<()> {
        let (Drafts::Head(head), Some(seq), Some(hidden)) =
            (&job.drafts, job.seq, job.unseen.take())
        else {
            return Ok(());
        };
        let sampler = &mut job.text.sampler;
        let item = DraftItem {
            seq,
            hidden,
            next: None,
            sampler,
            max: 0,
            by: head,
        };
        propose_all(self.model.draft_head()?, vec![item], &mut self.state)?;
        Ok(())
    }
}

/// Cuts proposals to the lengths that together promise the most tokens a second.
fn share_drafts(proposals: &mut [Proposal], sps_by_batch: &[f64]) {
    let confidence = |p: &Proposal| p.confidence.iter().map(|c| sigmoid(*c)).collect();
    let confidences: Vec<Vec<f64>> = proposals.iter().map(confidence).collect();
    for (proposal, n) in proposals
        .iter_mut()
        .zip(schedule(&confidences, sps_by_batch))
    {
        // Guesses without a confidence are left as they are.
        if !proposal.confidence.is_empty() {
            proposal.tokens.truncate(n);
            proposal.probs.truncate(n);
        }
    }
}

fn no_hidden(model: &crate::DeepSeekV41) -> Result<Tensor> {
    let cfg = model.config();
    let width = cfg.dspark_target_layer_ids.len() * cfg.dim;
    Ok(Tensor::zeros(
        (0, width),
        DType::BF16,
        model.transformer().device(),
    )?)
}
