//! Replayed draft steps against launched ones, bit for bit, and how long each takes.

use std::time::Instant;

use candle_core::Tensor;
use deepseek_v41::{
    DeepSeekV41, Error, Result,
    attention::KvFormat,
    core::best,
    model::{
        Chunk, Draft, DraftRequest, ForwardBatch, Limits, LogitRows, ModelState, SequenceId,
        most_likely,
    },
};

use crate::{correctness::Report, data::Random};

/// Where drafted tokens are chosen.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Chosen {
    There,
    OnTheHost,
}

/// What one run of the script gives.
struct Run {
    /// Tokens of every block.
    tokens: Vec<Vec<u32>>,
    /// Bits of confidences, and of logits where they come back.
    bits: Vec<Vec<u32>>,
    /// The files of sequences put away, with the draft layers' rings.
    saved: Vec<Vec<u8>>,
    steps: usize,
    replayed: u64,
}

struct Script<'a> {
    model: &'a DeepSeekV41,
    state: ModelState,
    chosen: Chosen,
    rng: Random,
    run: Run,
}

/// A sequence's part in a round: so many tokens are run, so many of them stay, and whether a block is drafted.
type Part = (SequenceId, usize, usize, bool);

impl Script<'_> {
    fn ids(&self, n: usize) -> Vec<u32> {
        (0..n).map(|_| 3 + self.rng.below(3000) as u32).collect()
    }

    /// Runs tokens, takes back those that do not stay, and shows the rest to the draft head.
    fn round(&mut self, parts: &[Part]) -> Result<()> {
        let chunk = |(seq, run, ..): &Part| Chunk::text(*seq, self.ids(*run));
        let batch = ForwardBatch {
            chunks: parts.iter().map(chunk).collect(),
            logits: LogitRows::All,
            target_hidden: true,
            best: true,
        };
        let out = self.model.transformer().forward(&batch, &mut self.state)?;
        let hidden = out.target_hidden.ok_or(Error::MissingSource {
            what: "hidden states",
        })?;
        let (mut rows, mut requests, mut at) = (Vec::new(), Vec::new(), 0);
        for &(seq, run, stay, drafts) in parts {
            let len = self.state.len(seq)? + stay - run;
            self.state.truncate(seq, len)?;
            if stay > 0 {
                rows.push(hidden.narrow(0, at, stay)?);
            }
            at += run;
            requests.push(DraftRequest {
                seq,
                committed: stay,
                next: drafts.then(|| 3 + self.rng.below(3000) as u32),
            });
        }
        let hidden = match rows.is_empty() {
            true => hidden.narrow(0, 0, 0)?,
            false => Tensor::cat(&rows, 0)?,
        };
        self.draft(&requests, &hidden)
    }

    fn draft(&mut self, requests: &[DraftRequest], hidden: &Tensor) -> Result<()> {
        let head = self.model.draft_head()?;
        let mut choose = |_: usize, _: usize, logits: &[f32]| most_likely(best(logits));
        let drafts = match self.chosen {
            Chosen::There => head.draft_best(requests, hidden, &mut self.state)?,
            Chosen::OnTheHost => head.draft(requests, hidden, &mut self.state, &mut choose)?,
        };
        for draft in drafts {
            let Draft {
                tokens,
                logits,
                confidence,
            } = draft.unwrap_or(Draft {
                tokens: Vec::new(),
                logits: Vec::new(),
                confidence: Vec::new(),
            });
            let values = logits.iter().flatten().chain(&confidence);
            self.run.bits.push(values.map(|v| v.to_bits()).collect());
            self.run.tokens.push(tokens);
        }
        self.run.steps += 1;
        Ok(())
    }

    fn put_away(&mut self, seq: SequenceId) -> Result<SequenceId> {
        let file = std::env::temp_dir().join(format!("gpu_check-{}.drafts", std::process::id()));
        let transformer = self.model.transformer();
        self.state.save(seq, &[], transformer, &file)?;
        self.state.release(seq)?;
        let bytes = std::fs::read(&file).map_err(|e| Error::io(&file, e))?;
        self.run.saved.push(bytes);
        let back = self.state.restore(transformer, &file)?.seq;
        std::fs::remove_file(&file).map_err(|e| Error::io(&file, e))?;
        Ok(back)
    }
}

/// Prompts, rounds of which one to six tokens stay, two sequences in one draft step with a block each or for one of
/// them, a fork, a sequence put away and brought back: always the same tokens.
fn script(model: &DeepSeekV41, replay: bool, format: KvFormat, chosen: Chosen) -> Result<Run> {
    let limits = Limits {
        max_len: 1024,
        max_seqs: 3,
        kv_format: format,
        ..Limits::default()
    };
    let transformer = model.transformer();
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    state.set_replay(replay);
    let (a, b) = (state.create()?, state.create()?);
    let mut script = Script {
        model,
        state,
        chosen,
        rng: Random::new(47),
        run: Run {
            tokens: Vec::new(),
            bits: Vec::new(),
            saved: Vec::new(),
            steps: 0,
            replayed: 0,
        },
    };
    // From the first token on, past the window and round the rings.
    script.round(&[(a, 1, 1, true)])?;
    for i in 0..60 {
        script.round(&[(a, 6, 1 + i * 5 % 6, true)])?;
    }
    script.round(&[(b, 40, 40, true)])?;
    for i in 0..20 {
        script.round(&[(a, 6, 1 + i % 6, true), (b, 6, 6 - i % 5, true)])?;
        script.round(&[(a, 1, 1, true), (b, 3, 3, i % 2 == 0)])?;
        script.round(&[(b, 6, 1 + i % 3, true)])?;
        // Again from where it is, with nothing new.
        script.draft(
            &[DraftRequest {
                seq: b,
                committed: 0,
                next: Some(7 + i as u32),
            }],
            &Tensor::zeros(
                (0, hidden_width(model)),
                candle_core::DType::BF16,
                transformer.device(),
            )?,
        )?;
    }
    let c = script.state.fork(a, script.state.len(a)?)?;
    for i in 0..8 {
        script.round(&[(c, 6, 1 + i % 6, true)])?;
        script.round(&[(a, 6, 6 - i % 6, true), (c, 2, 2, true)])?;
    }
    let c = script.put_away(c)?;
    for i in 0..8 {
        script.round(&[(c, 6, 1 + i % 6, true), (a, 1, 1, true)])?;
    }
    let a = script.put_away(a)?;
    script.round(&[(a, 4, 4, true)])?;
    script.run.replayed = script.state.replayed_drafts();
    Ok(script.run)
}

fn hidden_width(model: &DeepSeekV41) -> usize {
    let cfg = model.config();
    cfg.dspark_target_layer_ids.len() * cfg.dim
}

fn differing<T: PartialEq>(a: &[T], b: &[T]) -> f64 {
    let pairs = a.iter().zip(b).filter(|(a, b)| a != b).count();
    (pairs + a.len().abs_diff(b.len())) as f64
}

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
pub(crate) fn tiny(model: &DeepSeekV41, r: &mut Report) -> Result<()> {
    let mut tokens = None;
    for chosen in [Chosen::OnTheHost, Chosen::There] {
        let launched = script(model, false, KvFormat::Bf16, chosen)?;
        r.holds("launched drafts", "none replayed", launched.replayed == 0);
        let first = tokens.get_or_insert_with(|| launched.tokens.clone());
        let place = match chosen {
            Chosen::There => "chosen there",
            Chosen::OnTheHost => "chosen on the host",
        };
        let differ = differing(first, &launched.tokens);
        r.error("drafted tokens, wherever chosen", place, differ, 0.0);
        for (name, format, replay) in [
            ("replayed drafts = launched", KvFormat::Bf16, true),
            ("packed drafts = bf16", KvFormat::Packed, false),
            (
                "packed, replayed drafts = bf16, launched",
                KvFormat::Packed,
                true,
            ),
        ] {
            let run = script(model, replay, format, chosen)?;
            let shape = format!("{place}, {} of {} replayed", run.replayed, run.steps);
            let differ = differing(&launched.tokens, &run.tokens);
            r.error(
                name,
                &shape,
                differ + differing(&launched.bits, &run.bits),
                0.0,
            );
            let differ = differing(&launched.saved, &run.saved);
            r.error("the same files after drafts", &shape, differ, 0.0);
            if replay {
                let half = run.replayed * 2 > run.steps as u64;
                r.holds("half of the drafts replayed", &shape, half);
            }
        }
    }
    for (replay, chosen) in [
        (false, Chosen::OnTheHost),
        (true, Chosen::OnTheHost),
        (false, Chosen::There),
        (true, Chosen::There),
    ] {
        let [pass, draft] = seconds(model, replay, chosen)?.map(|mut times| {
            if replay {
                // The second of a layout is captured; before it comes one behind the prompt.
                println!(
                    "       launched in {:.0} µs, captured and replayed in {:.0}, then",
                    times[1] * 1e6,
                    times[2] * 1e6
                );
            }
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        println!(
            "       tiny model, {}: a pass over 6 tokens {:.0} µs, a draft step, {}, {:.0} µs",
            if replay { "replayed" } else { "launched" },
            pass * 1e6,
            match chosen {
                Chosen::There => "its tokens read back",
                Chosen::OnTheHost => "its logits read back and chosen from",
            },
            draft * 1e6
        );
    }
    Ok(())
}

/// Seconds of passes over a token and five drafts, most likely tokens read back, and of the draft step after each if
/// three of them stood; behind a prompt of 300.
fn seconds(model: &DeepSeekV41, replay: bool, chosen: Chosen) -> Result<[Vec<f64>; 2]> {
    let transformer = model.transformer();
    let head = model.draft_head()?;
    let limits = Limits {
        max_len: 2048,
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    state.set_replay(replay);
    let seq = state.create()?;
    let (mut passes, mut drafts) = (Vec::new(), Vec::new());
    let mut ids: Vec<u32> = (0..300).map(|i| 3 + i * 7 % 3000).collect();
    let mut stay = ids.len();
    for i in 0..80 {
        let run = ids.len();
        let batch = ForwardBatch {
            logits: LogitRows::All,
            target_hidden: true,
            best: true,
            ..ForwardBatch::one(seq, std::mem::take(&mut ids))
        };
        let start = Instant::now();
        let out = transformer.forward(&batch, &mut state)?;
        let hidden = match (out.best, out.target_hidden) {
            (Some(best), Some(hidden)) => {
                best.to_vec1::<u32>()?;
                hidden.narrow(0, 0, stay)?
            }
            _ => return Err(Error::MissingSource { what: "a result" }),
        };
        passes.push(start.elapsed().as_secs_f64());
        state.truncate(seq, state.len(seq)? + stay - run)?;
        let request = DraftRequest {
            seq,
            committed: stay,
            next: Some(5 + i),
        };
        let mut choose = |_: usize, _: usize, logits: &[f32]| most_likely(best(logits));
        let start = Instant::now();
        match chosen {
            Chosen::There => head.draft_best(&[request], &hidden, &mut state)?,
            Chosen::OnTheHost => head.draft(&[request], &hidden, &mut state, &mut choose)?,
        };
        drafts.push(start.elapsed().as_secs_f64());
        ids.extend([5 + i, 8 + i, 9, 7, 11, 12]);
        stay = 4;
    }
    Ok([passes, drafts])
}
