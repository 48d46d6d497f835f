//! candle's `LogitsProcessor` choosing the tokens: step by step over the model, and as a hook of a generation, which
//! keeps streaming, stop strings and speculation.
//!
//!     cargo run --release -p deepseek-v41-examples-chat --example logits_processor

use std::io::Write;

use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use deepseek_v41::{
    AddedTokens, DeepSeekV41, Error, Event, GenerateOptions, Result, SpecialTokens, Speculation,
    model::{ForwardBatch, Limits, LogitRows, ModelState},
    speculative::DraftLength,
};

const PROMPT: &str = "Once upon a time";
const TOKENS: usize = 48;

fn processor() -> LogitsProcessor {
    let sampling = Sampling::TopKThenTopP {
        k: 20,
        p: 0.9,
        temperature: 0.7,
    };
    LogitsProcessor::from_sampling(7, sampling)
}

/// The loop by hand: a pass, a row of logits, a token.
fn step_by_step(model: &DeepSeekV41) -> Result<Vec<u32>> {
    let transformer = model.transformer();
    let limits = Limits {
        max_len: 256,
        ..Limits::default()
    };
    let mut state = ModelState::new(model.config(), limits, transformer.device())?;
    let seq = state.create()?;
    let mut chunk = vec![model.special_ids().bos];
    chunk.extend(model.tokenizer().encode(PROMPT, AddedTokens::AsText)?);
    let (mut processor, mut tokens) = (processor(), Vec::new());
    while tokens.len() < TOKENS {
        let batch = ForwardBatch {
            logits: LogitRows::Last,
            ..ForwardBatch::one(seq, chunk)
        };
        // `[1, vocab]` f32.
        let logits = transformer.forward(&batch, &mut state)?.logits;
        let token = processor.sample(&logits.squeeze(0)?)?;
        tokens.push(token);
        chunk = vec![token];
    }
    Ok(tokens)
}

/// The same as a hook that rules out every token but the one chosen.
fn as_a_hook(model: &DeepSeekV41, speculation: Speculation) -> Result<Vec<u32>> {
    let options = GenerateOptions {
        max_tokens: TOKENS,
        ignore_eos: true,
        speculation,
        ..GenerateOptions::default()
    };
    let mut generation = model.generate(PROMPT, &options)?;
    let mut processor = processor();
    generation
        .sampler()
        .add_hook(move |_: &[u32], logits: &mut [f32]| -> Result<()> {
            let row = Tensor::from_slice(logits, logits.len(), &Device::Cpu)?;
            let chosen = processor.sample(&row)? as usize;
            let kept = *logits
                .get(chosen)
                .ok_or_else(|| Error::value("token", format!("{chosen} is none")))?;
            logits.fill(f32::NEG_INFINITY);
            logits[chosen] = kept;
            Ok(())
        });
    let mut tokens = Vec::new();
    for event in generation {
        match event? {
            Event::Token(token) => tokens.push(token.token),
            Event::Text(text) => {
                print!("{text}");
                std::io::stdout().flush().ok();
            }
            Event::Done { .. } => println!(),
        }
    }
    Ok(tokens)
}

fn main() -> Result<()> {
    let model = DeepSeekV41::tiny()?;
    let by_hand = step_by_step(&model)?;
    let text = model.tokenizer().decode(&by_hand, SpecialTokens::Skip)?;
    println!("by hand:   {PROMPT}{text}");
    print!("as a hook: {PROMPT}");
    let hooked = as_a_hook(&model, Speculation::Off)?;
    print!("guessed:   {PROMPT}");
    let guessed = as_a_hook(&model, Speculation::DraftHead(DraftLength::Full))?;
    println!(
        "the same tokens: {}",
        by_hand == hooked && hooked == guessed
    );
    Ok(())
}
