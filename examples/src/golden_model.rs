//! Replaying the official code's recorded runs of whole (tiny) models.
//!
//! A case is a directory with a checkpoint and `expected.safetensors`: token ids that are fed one
//! prompt and then one token at a time, with logits after each step and, for models whose top-k flips
//! on rounding, the selections to replay.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Error, Result, Weights,
    core::LoadPolicy,
    engram::TokenMap,
    model::{
        Chunk, Config, DSpark, DraftRequest, ForwardBatch, ImageSpan, IndexKeys, Limits,
        ModelState, Probe, ProbePoint, SequenceId, Transformer,
    },
    moe::Routing,
};
use deepseek_v41_vision::{ImagePatches, VisionConfig, VisionEncoder};

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
}

/// How far drafted blocks were from the recorded ones. A position counts while all drafts before it
/// agree: after that the two draft different texts.
#[derive(Debug, Clone, Default)]
pub struct DraftDistance {
    /// Drafted tokens equal to the recorded ones, and their number.
    pub tokens: (usize, usize),
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

/// A golden model, loaded.
pub struct GoldenModel {
    transformer: Transformer,
    draft_head: Option<DSpark>,
    vision: Option<VisionEncoder>,
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
        let vision = match cfg.vision_enabled() {
            true => Some(VisionEncoder::new(
                &vision_config(&dir.join("config.json"))?,
                weights.var_builder(&Device::Cpu),
            )?),
            false => None,
        };
        Ok(Self {
            transformer,
            draft_head,
            vision,
            expected,
            mode,
        })
    }

    /// The recorded pictures of a sequence, read by the tower.
    fn images(&self, row: usize) -> Result<Vec<ImageSpan>> {
        let mut spans = Vec::new();
        let Some(vision) = &self.vision else {
            return Ok(spans);
        };
        let ratio = self.transformer.config().vision_downsample_ratio;
        for n in 0.. {
            let key = |part: &str| format!("image.{row}.{n}.{part}");
            if !self.expected.contains(&key("info")) {
                break;
            }
            let info = self.expected.integers(&key("info"))?;
            let patches = self.expected.tensor(&key("patches"), &Device::Cpu)?;
            let image = ImagePatches::new(patches, info[1] as usize, info[2] as usize, ratio)?;
            let types: Vec<i64> = image.span_types().iter().map(|t| t.code()).collect();
            if types != self.expected.integers(&key("types"))? {
                return Err(Error::value(
                    key("types"),
                    format!("laid out here as {types:?}"),
                ));
            }
            spans.push(ImageSpan {
                start: info[0] as usize,
                rows: vision.encode_span(&image)?,
            });
        }
        Ok(spans)
    }

    /// Runs the recorded tokens and pictures. `replay` uses the recorded selections instead of the
    /// model's own; `rows` are the sequences to run.
    ///
    /// # Errors
    /// What the model refuses, or a recording without the tensors of its kind.
    pub fn run(&self, rows: &[usize], replay: bool) -> Result<Distance> {
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
                    images: if step == 0 {
                        self.images(*row)?
                    } else {
                        Vec::new()
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

/// The tower's part of the inference config.
fn vision_config(path: &Path) -> Result<VisionConfig> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::checkpoint(path, e.to_string()))
}

/// The draft head's turn after one step.
struct DraftPass<'a> {
    golden: &'a GoldenModel,
    rows: &'a [usize],
    batch: usize,
    step: usize,
    replay: bool,
}

#[derive(Default)]
struct DraftSums {
    tokens: (usize, usize),
    logits: Sums,
    confidence: Sums,
}

impl DraftSums {
    fn distance(&self) -> DraftDistance {
        DraftDistance {
            tokens: self.tokens,
            logits: self.logits.rel_rms(),
            confidence: self.confidence.rel_rms(),
        }
    }
}

impl DraftPass<'_> {
    /// Feeds the step's tokens to the rings; after a decode step also drafts, and compares.
    fn run(
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

/// Compares with the recording as the pass goes along, and feeds its selections back.
struct Recorder<'a> {
    golden: &'a GoldenModel,
    rows: &'a [usize],
    batch: usize,
    tokens: usize,
    step: usize,
    replay: bool,
    distance: &'a mut Distance,
    error: Option<Error>,
}

impl Recorder<'_> {
    /// The recorded name of a selection in this step.
    fn key(&self, mode: Mode, what: &str, layer: usize) -> String {
        match self.step {
            0 => format!("prefill.{what}{layer}"),
            step => format!("{}step{step}.{what}{layer}", mode.prefix()),
        }
    }

    /// A recorded selection `[rows * tokens, k]`, `None` where the recording has none.
    fn recorded(&self, mode: Mode, what: &str, layer: usize) -> Option<Vec<Vec<i64>>> {
        let key = self.key(mode, what, layer);
        let expected = &self.golden.expected;
        let all = expected
            .contains(&key)
            .then(|| expected.integers(&key).ok())??;
        let k = all.len() / (self.batch * self.tokens);
        let per_row = self.tokens * k;
        let rows = self
            .rows
            .iter()
            .flat_map(|row| all[row * per_row..(row + 1) * per_row].chunks(k));
        Some(rows.map(<[i64]>::to_vec).collect())
    }

    /// Recorded index selections as compressed positions: the reference counts them from the end of
    /// the window part of its keys.
    fn positions(&self, mode: Mode, layer: usize) -> Option<Vec<Vec<i64>>> {
        let window = self.golden.transformer.config().window_size;
        let offset = if self.step == 0 { self.tokens } else { window } as i64;
        let mut rows = self.recorded(mode, "idx", layer)?;
        rows.iter_mut()
            .flatten()
            .filter(|v| **v >= 0)
            .for_each(|v| *v -= offset);
        Some(rows)
    }

    fn keep<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|e| self.error = Some(e)).ok()
    }
}

/// How many of `own` select the same set as `wanted`.
fn equal_sets(own: &[Vec<i64>], wanted: &[Vec<i64>]) -> (usize, usize) {
    let set = |row: &[i64]| {
        let mut row: Vec<i64> = row.iter().copied().filter(|v| *v >= 0).collect();
        row.sort_unstable();
        row
    };
    let equal = own
        .iter()
        .zip(wanted)
        .filter(|(a, b)| set(a) == set(b))
        .count();
    (equal, wanted.len())
}

fn add(total: &mut (usize, usize), part: (usize, usize)) {
    total.0 += part.0;
    total.1 += part.1;
}

impl Probe for Recorder<'_> {
    fn value(&mut self, layer: usize, point: ProbePoint, value: &Tensor) -> Result<()> {
        let what = match point {
            ProbePoint::Engram => "engram",
            ProbePoint::Attn => "attn",
            ProbePoint::Ffn => "ffn",
            ProbePoint::Stream => "layer",
            ProbePoint::PreMix => "premix",
        };
        let name = format!("{what}{layer}");
        let key = format!("prefill.{name}");
        if self.step == 0 && self.golden.expected.contains(&key) {
            let wanted = self.golden.expected.rows(&key, &[], self.rows)?;
            self.distance.prefill.push((name, rel_rms(value, &wanted)?));
        }
        Ok(())
    }

    fn routed(&mut self, layer: usize, own: &Routing) {
        let Some(wanted) = self.recorded(self.golden.mode, "route", layer) else {
            return;
        };
        let Some(own) = self.keep(integers(&own.experts)) else {
            return;
        };
        add(&mut self.distance.routes, equal_sets(&own, &wanted));
    }

    fn replay_experts(&mut self, layer: usize) -> Option<Tensor> {
        let rows = self
            .replay
            .then(|| self.recorded(self.golden.mode, "route", layer))??;
        let (t, k) = (rows.len(), rows[0].len());
        let flat: Vec<u32> = rows.into_iter().flatten().map(|v| v as u32).collect();
        let tensor = Tensor::from_vec(flat, (t, k), self.golden.transformer.device());
        self.keep(tensor.map_err(Error::from))
    }

    fn wants_selections(&self) -> bool {
        true
    }

    fn selected(&mut self, layer: usize, own: &Tensor) {
        let Some(own) = self.keep(integers(own)) else {
            return;
        };
        let (mode, other) = match self.golden.mode {
            Mode::Reference => (Mode::Reference, Mode::OwnKeys),
            Mode::OwnKeys => (Mode::OwnKeys, Mode::Reference),
        };
        if let Some(wanted) = self.positions(mode, layer) {
            let equal = equal_sets(&own, &wanted);
            add(&mut self.distance.selections, equal);
            if self.step > 0 {
                add(&mut self.distance.decode_selections, equal);
            }
        }
        if self.step > 0
            && let Some(wanted) = self.positions(other, layer)
        {
            add(
                &mut self.distance.other_selections,
                equal_sets(&own, &wanted),
            );
        }
    }

    fn replay_selection(&mut self, layer: usize) -> Option<Tensor> {
        let rows = self
            .replay
            .then(|| self.positions(self.golden.mode, layer))??;
        let (t, k) = (rows.len(), rows[0].len());
        let flat: Vec<i32> = rows.into_iter().flatten().map(|v| v as i32).collect();
        let tensor = Tensor::from_vec(flat, (t, k), self.golden.transformer.device());
        self.keep(tensor.map_err(Error::from))
    }
}

/// A 2D integer tensor on the host.
fn integers(t: &Tensor) -> Result<Vec<Vec<i64>>> {
    Ok(t.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2()?)
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
