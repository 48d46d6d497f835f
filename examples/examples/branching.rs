//! Texts that branch: one beginning run once and continued several ways, a text rewound and told
//! differently, and one put on the disk and taken up again.
//!
//!     cargo run --release --example branching -- "Once upon a time"
#![allow(clippy::print_stdout, reason = "what this program is for")]

use deepseek_v41::{
    DeepSeekV41, GenerateOptions, Result, Sampler, SamplingParams, Session, TokenHistory,
    model::{Chunk, ForwardBatch, Limits, ModelState},
    tokenizer::{AddedTokens, SpecialTokens},
};

/// Forks of one sequence, continued together: every pass runs the newest token of each.
fn branches(model: &DeepSeekV41, prompt: &str, n: usize, tokens: usize) -> Result<()> {
    let limits = Limits {
        max_seqs: n + 1,
        ..Limits::default()
    };
    let mut state = ModelState::new(model.config(), limits, model.transformer().device())?;
    let mut ids = vec![model.special_ids().bos];
    ids.extend(model.tokenizer().encode(prompt, AddedTokens::AsText)?);
    let trunk = state.create()?;
    let (last, before) = ids.split_last().expect("a prompt begins with a token");
    model
        .transformer()
        .forward(&ForwardBatch::one(trunk, before), &mut state)?;

    let mut branches = Vec::new();
    for seed in 0..n as u64 {
        let params = SamplingParams {
            temperature: 0.9,
            seed: Some(seed),
            ..Default::default()
        };
        branches.push((
            state.fork(trunk, before.len())?,
            Sampler::new(params)?,
            vec![*last],
        ));
    }
    for _ in 0..tokens {
        let newest = |text: &[u32]| text[text.len() - 1..].to_vec();
        let chunks = branches
            .iter()
            .map(|(seq, _, text)| Chunk::text(*seq, newest(text)));
        let batch = ForwardBatch {
            chunks: chunks.collect(),
            ..ForwardBatch::default()
        };
        let logits = model
            .transformer()
            .forward(&batch, &mut state)?
            .logits
            .to_vec2::<f32>()?;
        for ((_, sampler, text), row) in branches.iter_mut().zip(logits) {
            let token = sampler.sample(&row, TokenHistory::default())?.token;
            text.push(token);
        }
    }
    for (i, (_, _, text)) in branches.iter().enumerate() {
        let said = model.tokenizer().decode(&text[1..], SpecialTokens::Skip)?;
        println!("branch {i}: {prompt}{said}");
    }
    Ok(())
}

fn tell(session: &mut Session<'_>, prompt: &str, seed: u64) -> Result<String> {
    let sampling = SamplingParams {
        temperature: 0.9,
        seed: Some(seed),
        ..Default::default()
    };
    let options = GenerateOptions {
        sampling,
        max_tokens: 24,
        ..GenerateOptions::default()
    };
    session.generate(prompt, &options)?.text().collect()
}

fn main() -> Result<()> {
    let prompt = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "Once upon a time".into());
    let model = DeepSeekV41::tiny()?;
    branches(&model, &prompt, 3, 24)?;

    let limits = Limits::default();
    let mut session = model.session(limits)?;
    let first = tell(&mut session, &prompt, 1)?;
    println!("\ntold:      {prompt}{first}");
    let path = std::env::temp_dir().join("deepseek-v41-branching.safetensors");
    session.save(&path)?;
    let size = std::fs::metadata(&path).map_or(0, |m| m.len());
    println!("saved:     {} tokens, {size} bytes", session.len()?);

    // Half of what was said is taken back; the caches need no copy for that.
    let end = session.len()? - 12;
    session.truncate(end)?;
    println!("rewound:   …{}", tell(&mut session, "", 2)?);

    // The file knows nothing of that. Another day, in another process:
    let mut session = Session::restore(&model, limits, &path)?;
    println!("restored:  …{}", tell(&mut session, "", 3)?);
    std::fs::remove_file(&path).ok();
    Ok(())
}
