//! What a state promises, on the GPU: copies that go on like the original, captures that end where another state
//! begins, requests served together like each alone.

use std::collections::BTreeMap;

use candle_core::Device;
use deepseek_v41::{
    DeepSeekV41, Event, GenerateOptions, LoadOptions, Result,
    engine::{Engine, EngineLimits},
    model::{ForwardBatch, Limits, ModelState, SequenceId},
    tokenizer::AddedTokens,
};

use crate::{correctness::Report, data::Random};

/// Logits closer than this are a tie that another order of additions may decide otherwise; two valid runs of
/// the official code agree where they are further apart.
const TIE: f32 = 0.15;

const PROMPTS: [&str; 4] = [
    "Once upon a time",
    "The miller had a daughter who",
    "Once upon a time, a friendly painter called",
    "A king",
];

fn limits() -> Limits {
    Limits {
        max_len: 256,
        max_seqs: 4,
        ..Limits::default()
    }
}

/// Bits of the logits of each of `ids`, run one at a time.
fn run(
    model: &DeepSeekV41,
    state: &mut ModelState,
    seq: SequenceId,
    ids: &[u32],
) -> Result<Vec<Vec<u32>>> {
    let one = |id: &u32| -> Result<Vec<u32>> {
        let batch = ForwardBatch::one(seq, vec![*id]);
        let logits = model.transformer().forward(&batch, state)?.logits;
        let row = logits.flatten_all()?.to_vec1::<f32>()?;
        Ok(row.into_iter().map(f32::to_bits).collect())
    };
    ids.iter().map(one).collect()
}

pub(crate) fn tiny(gpu: &Device, r: &mut Report) -> Result<()> {
    let model = DeepSeekV41::tiny_with(&LoadOptions {
        device: gpu.clone(),
        ..LoadOptions::default()
    })?;
    let rng = Random::new(43);
    let ids = |n: usize| -> Vec<u32> { (0..n).map(|_| 3 + rng.below(3000) as u32).collect() };
    // Past the window; the continuation stays within one width of the indexing passes.
    let (prompt, next) = (ids(70), ids(24));
    let started = |replay: bool| -> Result<(ModelState, SequenceId)> {
        let transformer = model.transformer();
        let mut state = ModelState::new(transformer.config(), limits(), transformer.device())?;
        state.set_replay(replay);
        let seq = state.create()?;
        transformer.forward(&ForwardBatch::one(seq, prompt.clone()), &mut state)?;
        Ok((state, seq))
    };
    let launched = {
        let (mut state, seq) = started(false)?;
        run(&model, &mut state, seq, &next)?
    };

    let (mut state, seq) = started(true)?;
    let file = std::env::temp_dir().join(format!("gpu_check.{}.state", std::process::id()));
    state.save(seq, &[], model.transformer(), &file)?;
    let original = run(&model, &mut state, seq, &next[..3])?;
    r.holds("replayed = launched", "3 tokens", original == launched[..3]);
    // Back over the three.
    let fork = state.fork(seq, prompt.len())?;
    let restored = state.restore(model.transformer(), &file);
    std::fs::remove_file(&file).ok();
    for (what, copy) in [("fork", fork), ("save and restore", restored?.seq)] {
        let same = run(&model, &mut state, copy, &next)? == launched;
        r.holds("continues as launched", what, same);
    }
    let rest = run(&model, &mut state, seq, &next[3..])?;
    r.holds(
        "continues as launched",
        "the original",
        rest == launched[3..],
    );
    r.holds("steps were replayed", "one state", state.replayed() > 0);
    drop(state);

    // A second user of the stream: nothing may be captured.
    let (mut state, seq) = started(true)?;
    let (second, _) = started(true)?;
    let half = next.len() / 2;
    let same = run(&model, &mut state, seq, &next[..half])? == launched[..half];
    r.holds("two states", "as launched", same);
    r.holds("two states", "nothing replayed", state.replayed() == 0);
    drop(second);
    let same = run(&model, &mut state, seq, &next[half..])? == launched[half..];
    r.holds("the second one gone", "as launched", same);
    r.holds(
        "the second one gone",
        "replayed again",
        state.replayed() > 0,
    );
    drop(state);
    engine(&model, r)
}

/// Requests together against each alone. A row's sums depend on how many tokens a pass has, so texts may part
/// where two tokens are about equally likely.
#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
fn engine(model: &DeepSeekV41, r: &mut Report) -> Result<()> {
    let options = GenerateOptions {
        max_tokens: 48,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let mut alone = Vec::new();
    for prompt in PROMPTS {
        let mut tokens = Vec::new();
        for event in model.generate(prompt, &options)? {
            if let Event::Token(token) = event? {
                tokens.push(token.token);
            }
        }
        alone.push(tokens);
    }
    let engine_limits = EngineLimits {
        state: limits(),
        ..EngineLimits::default()
    };
    let mut engine = Engine::new(model, engine_limits)?;
    let mut together = BTreeMap::new();
    for prompt in PROMPTS {
        together.insert(engine.submit(prompt, &options)?, Vec::new());
    }
    while !engine.is_idle() {
        for update in engine.step() {
            if let Event::Token(token) = update.event? {
                together.entry(update.id).or_default().push(token.token);
            }
        }
    }
    for ((prompt, alone), together) in PROMPTS.iter().zip(&alone).zip(together.values()) {
        let same = alone
            .iter()
            .zip(together)
            .take_while(|(a, b)| a == b)
            .count();
        let whole = same == alone.len() && together.len() == alone.len();
        let margin = match whole {
            true => 0.0,
            false => margin(model, prompt, &alone[..same])?,
        };
        println!(
            "       engine, `{prompt}`: {same} of {} tokens as alone, two best {margin:.3} apart there",
            alone.len()
        );
        r.holds("engine = alone, but for ties", prompt, margin < TIE);
    }
    Ok(())
}

/// How far the two likeliest tokens behind `prompt` and `tokens` are apart.
fn margin(model: &DeepSeekV41, prompt: &str, tokens: &[u32]) -> Result<f32> {
    let mut ids = vec![model.special_ids().bos];
    ids.extend(model.tokenizer().encode(prompt, AddedTokens::AsText)?);
    ids.extend(tokens);
    let transformer = model.transformer();
    let mut state = ModelState::new(transformer.config(), limits(), transformer.device())?;
    let seq = state.create()?;
    let out = transformer.forward(&ForwardBatch::one(seq, ids), &mut state)?;
    let mut row = out.logits.flatten_all()?.to_vec1::<f32>()?;
    row.sort_by(|a, b| b.total_cmp(a));
    Ok(row[0] - row[1])
}
