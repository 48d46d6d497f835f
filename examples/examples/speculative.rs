//! Speculative decoding with the embedded model's draft head: the same text in fewer passes.
//!
//!     cargo run --release --example speculative
//!     cargo run --release --example speculative -- "Once upon a time"
//!
//! Without an argument it runs the four prompts with which the official decoding loop was recorded, 64 tokens
//! each, of whose drafts that loop accepts 3.05 a pass.

use std::time::{Duration, Instant};

use deepseek_v41::{
    DeepSeekV41, Error, Event, GenerateOptions, Prompt, Result, Speculation,
    speculative::{DraftLength, PromptLookup, SpeculationStats},
};
use serde_json::Value;

const RECORDED: &str = include_str!("../../tests/data/tiny/expected.json");

#[derive(Default)]
struct Run {
    text: String,
    tokens: Vec<u32>,
    decoding: Duration,
    stats: SpeculationStats,
}

fn run(model: &DeepSeekV41, prompt: &Prompt, n: usize, speculation: Speculation) -> Result<Run> {
    let options = GenerateOptions {
        max_tokens: n,
        ignore_eos: true,
        speculation,
        ..GenerateOptions::default()
    };
    let mut generation = model.generate(prompt.clone(), &options)?;
    let (mut run, mut start) = (Run::default(), Instant::now());
    for event in &mut generation {
        match event? {
            Event::Token(token) => {
                if run.tokens.is_empty() {
                    // The first token comes out of the prompt's pass.
                    start = Instant::now();
                }
                run.tokens.push(token.token);
            }
            Event::Text(piece) => run.text.push_str(&piece),
            Event::Done { .. } => {}
        }
    }
    run.decoding = start.elapsed();
    run.stats = generation.speculation().clone();
    Ok(run)
}

/// The prompts as given or recorded, and how many tokens to continue them by.
fn prompts() -> Result<(Vec<Prompt>, usize)> {
    if let Some(text) = std::env::args().nth(1) {
        return Ok((vec![Prompt::Text(text)], 256));
    }
    let unreadable = |reason: String| Error::value("expected.json", reason);
    let recorded: Value = serde_json::from_str(RECORDED).map_err(|e| unreadable(e.to_string()))?;
    let prompts = recorded["prompts"].as_array().into_iter().flatten();
    let text = |p: &Value| Some(Prompt::Rendered(p["prompt"].as_str()?.to_owned()));
    let prompts: Option<Vec<_>> = prompts.map(text).collect();
    let none = || unreadable("a prompt without a text".into());
    Ok((prompts.ok_or_else(none)?, 64))
}

fn main() -> Result<()> {
    let model = DeepSeekV41::tiny()?;
    let (prompts, n) = prompts()?;
    let mut plain = Vec::new();
    for prompt in &prompts {
        let run = run(&model, prompt, n, Speculation::Off)?;
        match prompt {
            Prompt::Text(text) | Prompt::Rendered(text) => println!("{text}{}\n", run.text),
            _ => println!("{}\n", run.text),
        }
        plain.push(run.tokens);
    }
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
        "{:<28} {:>6} {:>16} {:>7} {:>10} {:>6}  stood at place 1, 2, ..",
        "", "passes", "accepted a pass", "wasted", "tokens/s", "same"
    );
    for (name, speculation) in ways {
        let (mut total, mut decoding, mut tokens, mut same) =
            (SpeculationStats::default(), Duration::ZERO, 0, true);
        for (prompt, plain) in prompts.iter().zip(&plain) {
            let run = run(&model, prompt, n, speculation.clone())?;
            total += &run.stats;
            decoding += run.decoding;
            tokens += run.tokens.len() - 1;
            same &= run.tokens == *plain;
        }
        let places = total.per_position.iter();
        let places: Vec<String> = places
            .map(|(verified, stood)| format!("{:.0} %", 100.0 * *stood as f64 / *verified as f64))
            .collect();
        println!(
            "{name:<28} {:>6} {:>16.2} {:>7} {:>10.0} {same:>6}  {}",
            total.passes,
            total.mean_accepted(),
            total.wasted(),
            tokens as f64 / decoding.as_secs_f64(),
            places.join(" "),
        );
    }
    Ok(())
}
