//! Replaying the official code's recorded runs of whole (tiny) models.
//!
//! A case is a directory with a checkpoint and `expected.safetensors`: token ids that are fed one
//! prompt and then one token at a time, with logits after each step and, for models whose top-k flips
//! on rounding, the selections to replay.

mod drafts;
mod pictures;
mod recorder;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Error, Result, Weights,
    core::LoadPolicy,
    engram::TokenMap,
    model::{
        Chunk, Config, DSpark, ForwardBatch, IndexKeys, Limits, ModelState, SequenceId, Transformer,
    },
};

pub use self::{
    drafts::DraftDistance,
    pictures::{PictureDistance, PictureRows},
};
use self::{
    drafts::{DraftPass, DraftSums},
    pictures::Pictures,
    recorder::Recorder,
};
use crate::expected::Expected;

/// Which of the two recorded runs is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The official code as written, stale index keys included.
    Reference,
    /// Every source publishes its own keys at every step.
    OwnKeys,
}

impl Mode {
    /// Both modes.
    pub const ALL: [Self; 2] = [Self::Reference, Self::OwnKeys];

    /// The model setting that reproduces the mode.
    pub fn index_keys(self) -> IndexKeys {
        match self {
            Self::Reference => IndexKeys::LastPublished,
            Self::OwnKeys => IndexKeys::Owner,
        }
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Reference => "",
            Self::OwnKeys => "own_index_k.",
        }
    }
}

/// How far a run was from the recorded one.
#[derive(Debug, Clone, Default)]
pub struct Distance {
    /// Relative rms of the logits, step by step over all rows; entry 0 is the prefill.
    pub logits: Vec<f64>,
    /// Relative rms of the intermediate values of the prefill, by the recorded name.
    pub prefill: Vec<(String, f64)>,
    /// Index selections (one a token and layer) equal to those recorded in the mode that ran, and
    /// their number. Counted before replaying.
    pub selections: (usize, usize),
    /// The same against the recording of the other mode, decode steps only.
    pub other_selections: (usize, usize),
    /// As `selections`, decode steps only.
    pub decode_selections: (usize, usize),
    /// Expert selections equal to the recorded ones, and their number.
    pub routes: (usize, usize),
    /// The draft head's blocks, where the recording has them.
    pub drafts: DraftDistance,
    /// Rows of pictures, as the tower here makes them.
    pub own_pictures: PictureDistance,
}

/// A golden model, loaded.
pub struct GoldenModel {
    transformer: Transformer,
    draft_head: Option<DSpark>,
    pictures: Option<Pictures>,
    expected: Expected,
    mode: Mode,
}

impl GoldenModel {
    /// Loads the checkpoint and the recording of `dir`.
    ///
    /// # Errors
    /// Files that are missing or not what they should be.
    pub fn load(dir: &Path, mode: Mode, device: &Device) -> Result<Self> {
        let mut cfg = Config::from_file(dir.join("config.json"))?;
        cfg.index_keys = mode.index_keys();
        let expected = Expected::open(&dir.join("expected.safetensors"))?;
        let map = match cfg.engram() {
            None => None,
            Some(engram) => {
                let ids = expected
                    .integers("token_map")?
                    .iter()
                    .map(|v| *v as u32)
                    .collect();
                Some(TokenMap::new(
                    ids,
                    engram.compressed_vocab_size,
                    engram.pad_id,
                )?)
            }
        };
        // The recording lies beside the shards: the index says which files are weights.
        let weights = Weights::open(dir, LoadPolicy::Mmap)?;
        let transformer = Transformer::new(&cfg, map, weights.var_builder(device))?;
        let drafts = cfg.dspark_block_size > 0 && expected.contains("spec.ids");
        let draft_head = match drafts {
            true => Some(DSpark::new(&transformer, weights.var_builder(device))?),
            false => None,
        };
        let pictures = match cfg.vision_enabled() {
            true => Some(Pictures::load(dir, &weights, device)?),
            false => None,
        };
        Ok(Self {
            transformer,
            draft_head,
            pictures,
            expected,
            mode,
        })
    }

    /// The backbone.
    pub fn transformer(&self) -> &Transformer {
        &self.transformer
    }

    /// The draft head, where the checkpoint has one and the recording has drafts.
    pub fn draft_head(&self) -> Option<&DSpark> {
        self.draft_head.as_ref()
    }

    /// Runs the recorded tokens and pictures, the rows of pictures being those of the recorded run.
    /// `replay` uses the recorded selections instead of the model's own; `rows` are the sequences to run.
    ///
    /// # Errors
    /// What the model refuses, or a recording without the tensors of its kind.
    pub fn run(&self, rows: &[usize], replay: bool) -> Result<Distance> {
        self.run_with(rows, replay, PictureRows::Recorded)
    }

    /// [`run`](Self::run) with other rows of pictures.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with(
        &self,
        rows: &[usize],
        replay: bool,
        pictures: PictureRows,
    ) -> Result<Distance> {
        let cfg = self.transformer.config();
        let shape = self.expected.shape("ids")?.to_vec();
        let (batch, length) = (shape[0], shape[1]);
        let steps = self.expected.shape("logits")?[0];
        let prefill = length - steps;
        let ids = self.expected.integers("ids")?;
        let token = |row: usize, at: usize| ids[row * length + at] as u32;

        let limits = Limits {
            max_seqs: rows.len(),
            max_len: length,
            max_rollback: 0,
            ..Limits::default()
        };
        let mut state = ModelState::new(cfg, limits, self.transformer.device())?;
        let seqs: Vec<SequenceId> = rows.iter().map(|_| state.create()).collect::<Result<_>>()?;
        let mut distance = Distance::default();
        let mut drafts = DraftSums::default();
        for step in 0..steps {
            let range = if step == 0 {
                0..prefill
            } else {
                prefill + step - 1..prefill + step
            };
            let chunks = rows.iter().zip(&seqs).map(|(row, seq)| {
                Ok(Chunk {
                    seq: *seq,
                    token_ids: range.clone().map(|at| token(*row, at)).collect(),
                    // All of them lie in the prompt.
                    images: match &self.pictures {
                        Some(all) if step == 0 => {
                            all.spans(&self.expected, *row, pictures, &mut distance.own_pictures)?
                        }
                        _ => Vec::new(),
                    },
                })
            });
            let batch_in = ForwardBatch {
                chunks: chunks.collect::<Result<_>>()?,
                target_hidden: self.draft_head.is_some(),
                ..ForwardBatch::default()
            };
            let mut probe = Recorder {
                golden: self,
                rows,
                batch,
                tokens: range.len(),
                step,
                replay,
                distance: &mut distance,
                error: None,
            };
            let out = self
                .transformer
                .forward_probed(&batch_in, &mut state, &mut probe)?;
            if let Some(err) = probe.error {
                return Err(err);
            }
            let key = format!("{}logits", self.mode.prefix());
            let wanted = self.expected.rows(&key, &[step], rows)?;
            distance.logits.push(rel_rms(&out.logits, &wanted)?);
            if let (Some(head), Some(hidden)) = (&self.draft_head, &out.target_hidden) {
                let next: Vec<u32> = rows.iter().map(|row| token(*row, range.end)).collect();
                let mut pass = DraftPass {
                    golden: self,
                    rows,
                    batch,
                    step,
                    replay,
                };
                pass.run(head, hidden, &seqs, &next, &mut state, &mut drafts)?;
            }
        }
        distance.drafts = drafts.distance();
        Ok(distance)
    }

    /// Sequences of the recording.
    ///
    /// # Errors
    /// A recording without ids.
    pub fn sequences(&self) -> Result<usize> {
        Ok(self.expected.shape("ids")?[0])
    }

    /// Sequences without pictures.
    ///
    /// # Errors
    /// A recording without ids.
    pub fn text_rows(&self) -> Result<Vec<usize>> {
        Ok((0..self.sequences()?)
            .filter(|row| !self.has_images(*row))
            .collect())
    }

    /// Sequences with pictures.
    ///
    /// # Errors
    /// A recording without ids.
    pub fn image_rows(&self) -> Result<Vec<usize>> {
        Ok((0..self.sequences()?)
            .filter(|row| self.has_images(*row))
            .collect())
    }

    fn has_images(&self, row: usize) -> bool {
        self.expected.contains(&format!("image.{row}.0.info"))
    }
}

/// `rms(value - wanted) / rms(wanted)`.
///
/// # Errors
/// Different numbers of elements.
pub fn rel_rms(value: &Tensor, wanted: &[f32]) -> Result<f64> {
    let value = value
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?;
    let value = value.to_vec1::<f32>()?;
    if value.len() != wanted.len() {
        let reason = format!(
            "{} values against {} recorded ones",
            value.len(),
            wanted.len()
        );
        return Err(Error::shape("rel_rms", reason));
    }
    let mut sums = (0.0, 0.0);
    for (a, b) in value.iter().zip(wanted) {
        let (a, b) = (f64::from(*a), f64::from(*b));
        sums.0 += (a - b) * (a - b);
        sums.1 += b * b;
    }
    Ok(if sums.0 == 0.0 {
        0.0
    } else {
        (sums.0 / sums.1).sqrt()
    })
}
