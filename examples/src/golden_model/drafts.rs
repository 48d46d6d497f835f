//! The draft head's blocks against the recorded ones.

use candle_core::Tensor;
use deepseek_v41::{
    Result,
    model::{DSpark, DraftRequest, ModelState, Probe, SequenceId},
};

use super::{GoldenModel, Mode};

/// How far drafted blocks were from the recorded ones. A position counts while all drafts before it
/// agree: after that the two draft different texts.
#[derive(Debug, Clone, Default)]
pub struct DraftDistance {
    /// Drafted tokens equal to the recorded ones, and their number.
    pub tokens: (usize, usize),
    /// Tokens of blocks equal to the recorded ones at their place, whatever is before them, and their number. As the
    /// manifest counts them: the token a block is given is one of it.
    pub places: (usize, usize),
    /// Relative rms of the logits of counting positions, all together.
    pub logits: f64,
    /// The same of the confidences.
    pub confidence: f64,
}

/// Sums for a relative rms over many pieces.
#[derive(Default)]
struct Sums(f64, f64);

impl Sums {
    fn add(&mut self, value: &[f32], wanted: &[f32]) {
        for (a, b) in value.iter().zip(wanted) {
            let (a, b) = (f64::from(*a), f64::from(*b));
            self.0 += (a - b) * (a - b);
            self.1 += b * b;
        }
    }

    fn rel_rms(&self) -> f64 {
        if self.0 == 0.0 {
            0.0
        } else {
            (self.0 / self.1).sqrt()
        }
    }
}

/// The draft head's turn after one step.
pub(super) struct DraftPass<'a> {
    pub(super) golden: &'a GoldenModel,
    pub(super) rows: &'a [usize],
    pub(super) batch: usize,
    pub(super) step: usize,
    pub(super) replay: bool,
}

#[derive(Default)]
pub(super) struct DraftSums {
    tokens: (usize, usize),
    places: (usize, usize),
    logits: Sums,
    confidence: Sums,
}

impl DraftSums {
    pub(super) fn distance(&self) -> DraftDistance {
        DraftDistance {
            tokens: self.tokens,
            places: self.places,
            logits: self.logits.rel_rms(),
            confidence: self.confidence.rel_rms(),
        }
    }
}

impl DraftPass<'_> {
    /// Feeds the step's tokens to the rings; after a decode step also drafts, and compares.
    pub(super) fn run(
        &mut self,
        head: &DSpark,
        hidden: &Tensor,
        seqs: &[SequenceId],
        next: &[u32],
        state: &mut ModelState,
        sums: &mut DraftSums,
    ) -> Result<()> {
        let committed = hidden.dims()[0] / seqs.len();
        let drafting = self.step > 0;
        let requests: Vec<DraftRequest> = seqs
            .iter()
            .zip(next)
            .map(|(seq, next)| DraftRequest {
                seq: *seq,
                committed,
                next: drafting.then_some(*next),
            })
            .collect();
        let mut choose = |_: usize, _: usize, logits: &[f32]| Ok(argmax(logits));
        let drafts = head.draft_probed(&requests, hidden, state, &mut choose, self)?;
        let expected = &self.golden.expected;
        for (row, draft) in self.rows.iter().zip(drafts) {
            let Some(draft) = draft else { continue };
            let at = [self.step - 1];
            let size = draft.tokens.len();
            let ids = expected.integers("spec.ids")?;
            let ids = &ids[(at[0] * self.batch + row) * (size + 1)..][1..=size];
            // Logits and confidences exist for the mode as written alone.
            let recorded = self.golden.mode == Mode::Reference;
            let logits = expected.rows("spec.logits", &at, &[*row])?;
            let confidence = expected.rows("spec.confidence", &at, &[*row])?;
            let vocab = logits.len() / size;
            let ids = match recorded {
                true => ids.to_vec(),
                false if expected.contains("own_index_k.spec.ids") => {
                    let own = expected.integers("own_index_k.spec.ids")?;
                    own[(at[0] * self.batch + row) * (size + 1)..][1..=size].to_vec()
                }
                false => continue,
            };
            sums.tokens.1 += size;
            sums.places.1 += size + 1;
            let equal = |(a, b): &(&u32, &i64)| i64::from(**a) == **b;
            sums.places.0 += 1 + draft.tokens.iter().zip(&ids).filter(equal).count();
            for (j, id) in ids.iter().enumerate() {
                if recorded {
                    sums.logits
                        .add(&draft.logits[j], &logits[j * vocab..(j + 1) * vocab]);
                    sums.confidence
                        .add(&draft.confidence[j..=j], &confidence[j..=j]);
                }
                if i64::from(draft.tokens[j]) != *id {
                    break;
                }
                sums.tokens.0 += 1;
            }
        }
        Ok(())
    }
}

impl Probe for DraftPass<'_> {
    fn replay_experts(&mut self, layer: usize) -> Option<Tensor> {
        let stage = layer - self.golden.transformer.config().n_layers;
        let key = format!("spec{}.route{stage}", self.step);
        let expected = &self.golden.expected;
        // Recorded for the run as written alone; the routes of draft layers hardly differ.
        let recorded =
            self.replay && self.golden.mode == Mode::Reference && expected.contains(&key);
        let all = recorded.then(|| expected.integers(&key).ok())??;
        let k = expected.shape(&key).ok()?.get(1).copied()?;
        let per_row = all.len() / self.batch;
        let rows = self
            .rows
            .iter()
            .flat_map(|row| &all[row * per_row..(row + 1) * per_row]);
        let flat: Vec<u32> = rows.map(|v| *v as u32).collect();
        let t = flat.len() / k;
        Tensor::from_vec(flat, (t, k), self.golden.transformer.device()).ok()
    }
}

/// The largest logit, the lowest index among equals.
fn argmax(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (i, v)| {
            if *v > best.1 { (i, *v) } else { best }
        });
    best.0 as u32
}
