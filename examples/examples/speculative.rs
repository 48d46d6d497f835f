//! Speculative decoding with the embedded model's draft head: the same text in fewer passes.
//!
//!     cargo run --release --example speculative -- "Once upon a time"

use std::time::{Duration, Instant};

use deepseek_v41::{
    DeepSeekV41, Event, GenerateOptions, Result, Speculation,
    speculative::{DraftLength, PromptLookup, SpeculationStats},
};

struct Run {
    text: String,
    tokens: Vec<u32>,
    decoding: Duration,
    stats: SpeculationStats,
}

fn run(model: &DeepSeekV41, prompt: &str, speculation: Speculation) -> Result<Run> {
    let options = GenerateOptions {
        max_tokens: 256,
        ignore_eos: true,
        speculation,
        ..GenerateOptions::default()
    };
    let mut generation = model.generate(prompt, &options)?;
    let (mut text, mut tokens, mut start) = (String::new(), Vec::new(), Instant::now());
    for event in &mut generation {
        match event? {
            Event::Token(token) => {
                if tokens.is_empty() {
                    // The first token comes out of the prompt's pass.
                    start = Instant::now();
                }
                tokens.push(token.token);
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::Done { .. } => {}
        }
    }
    let decoding = start.elapsed();
    Ok(Run {
        text,
        tokens,
        decoding,
        stats: generation.speculation().clone(),
    })
}

fn main() -> Result<()> {
    let prompt = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "Once upon a time".into());
    let model = DeepSeekV41::tiny()?;
    let plain = run(&model, &prompt, Speculation::Off)?;
    println!("{prompt}{}\n", plain.text);
    let ways = [
        ("plain", Speculation::Off),
        (
            "prompt lookup",
            Speculation::PromptLookup(PromptLookup::default()),
        ),
        ("draft head", Speculation::DraftHead(DraftLength::Full)),
        (
            "draft head, confidence 0.5",
            Speculation::DraftHead(DraftLength::Confidence(0.5)),
        ),
    ];
    println!(
        "{:<28} {:>6} {:>16} {:>10} {:>8}",
        "", "passes", "accepted a pass", "tokens/s", "same"
    );
    for (name, speculation) in ways {
        let run = run(&model, &prompt, speculation)?;
        println!(
            "{name:<28} {:>6} {:>16.2} {:>10.0} {:>8}",
            run.stats.passes,
            run.stats.mean_accepted(),
            (run.tokens.len() - 1) as f64 / run.decoding.as_secs_f64(),
            run.tokens == plain.tokens,
        );
    }
    Ok(())
}
