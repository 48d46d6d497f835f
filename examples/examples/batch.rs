//! Several requests at once through the engine, and the same requests one after the other.
//!
//!     cargo run --release --example batch
//!     cargo run --release --example batch -- --speculative --max-tokens 128 "Once upon a time" "The hen said"
#![allow(clippy::print_stdout, reason = "what this program is for")]

use std::{collections::BTreeMap, time::Instant};

use clap::Parser;
use deepseek_v41::{
    DeepSeekV41, Event, GenerateOptions, Result, Speculation,
    engine::{Engine, EngineLimits},
    model::Limits,
    speculative::DraftLength,
};

#[derive(Parser)]
#[command(about = "Continues several prompts at once")]
struct Args {
    /// The prompts.
    prompts: Vec<String>,
    /// Most tokens for each.
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
    /// Requests served at a time.
    #[arg(long, default_value_t = 8)]
    slots: usize,
    /// Draft with the checkpoint's draft head.
    #[arg(long)]
    speculative: bool,
}

fn main() -> Result<()> {
    let mut args = Args::parse();
    if args.prompts.is_empty() {
        let names = [
            "boy", "girl", "painter", "miller", "baker", "farmer", "sailor", "king",
        ];
        let prompt = |name| format!("Once upon a time, a friendly {name} called");
        args.prompts = names.map(prompt).to_vec();
    }
    let speculation = match args.speculative {
        true => Speculation::DraftHead(DraftLength::Full),
        false => Speculation::Off,
    };
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        speculation,
        ..Default::default()
    };
    let model = DeepSeekV41::tiny()?;

    let start = Instant::now();
    let (mut alone, mut alone_tokens) = (Vec::new(), 0);
    for prompt in &args.prompts {
        let mut text = String::new();
        for event in model.generate(prompt.as_str(), &options)? {
            match event? {
                Event::Text(piece) => text.push_str(&piece),
                Event::Done { usage, .. } => alone_tokens += usage.completion_tokens,
                Event::Token(_) => {}
            }
        }
        alone.push(text);
    }
    let alone_time = start.elapsed();

    let state = Limits {
        max_seqs: args.slots,
        max_len: 2048,
        ..Limits::default()
    };
    let mut engine = Engine::new(
        &model,
        EngineLimits {
            state,
            ..EngineLimits::default()
        },
    )?;
    let start = Instant::now();
    let mut texts = BTreeMap::new();
    for prompt in &args.prompts {
        texts.insert(engine.submit(prompt.as_str(), &options)?, String::new());
    }
    let mut tokens = 0;
    while !engine.is_idle() {
        for update in engine.step() {
            match update.event? {
                Event::Text(piece) => texts.entry(update.id).or_default().push_str(&piece),
                Event::Done { usage, .. } => tokens += usage.completion_tokens,
                Event::Token(_) => {}
            }
        }
    }
    let time = start.elapsed();

    for ((prompt, text), alone) in args.prompts.iter().zip(texts.values()).zip(&alone) {
        println!(
            "{prompt}{text}{}",
            if text == alone {
                ""
            } else {
                "   [differs from alone]"
            }
        );
    }
    println!("\n{:?}", engine.stats());
    let rate = |tokens: usize, time: std::time::Duration| tokens as f64 / time.as_secs_f64();
    println!(
        "together {:.0} tokens/s, one after the other {:.0}",
        rate(tokens, time),
        rate(alone_tokens, alone_time)
    );
    Ok(())
}
