//! Continues a prompt with any checkpoint, or with the embedded model.
//!
//!     cargo run --release --example generate -- --prompt "Once upon a time" --max-tokens 64
//!     cargo run --release --example generate -- --model DIR --prompt P --temperature 0.7 --seed 1 --json
//!
//! With `--json` every line is one object: the prompt's progress, each token with its text, and at the
//! end why it ended, the tokens used and the speed.

use std::{io::Write, path::PathBuf, time::Instant};

use clap::Parser;
use deepseek_v41::{
    DeepSeekV41, Event, FinishReason, GenerateOptions, LoadOptions, LoadPolicy, Prompt, Result,
    SamplingParams, core::open_device,
};
use serde_json::json;

#[derive(Parser)]
#[command(about = "Continues a prompt")]
struct Args {
    /// Checkpoint directory; without it the embedded model is used.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The text to continue.
    #[arg(long)]
    prompt: String,
    /// The prompt is already rendered: names of control tokens are the tokens, nothing is added.
    #[arg(long)]
    rendered: bool,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 always takes the most probable token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Keep the most probable tokens that together reach this probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keep this many of the most probable tokens; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Makes sampling reproducible.
    #[arg(long)]
    seed: Option<u64>,
    /// A string that ends the text; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// Go on after the end-of-text token.
    #[arg(long)]
    ignore_eos: bool,
    /// Where to compute: cpu, or cuda (cuda:1, ..) in a build with the feature `cuda`.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Read the checkpoint's files whole instead of mapping them.
    #[arg(long)]
    no_mmap: bool,
    /// One JSON object a line instead of text.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let policy = if args.no_mmap {
        LoadPolicy::Read
    } else {
        LoadPolicy::Mmap
    };
    let load = LoadOptions {
        device: open_device(&args.device)?,
        policy,
        ..LoadOptions::default()
    };
    let model = match &args.model {
        Some(dir) => DeepSeekV41::load_with(dir, &load)?,
        None => DeepSeekV41::tiny_with(&load)?,
    };
    let options = GenerateOptions {
        sampling: SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: args.seed,
            ..SamplingParams::default()
        },
        max_tokens: args.max_tokens,
        stop: args.stop,
        ignore_eos: args.ignore_eos,
        ..GenerateOptions::default()
    };
    let prompt = match args.rendered {
        true => Prompt::Rendered(args.prompt),
        false => Prompt::Text(args.prompt),
    };
    run(&model, prompt, &options, args.json)
}

fn run(model: &DeepSeekV41, prompt: Prompt, options: &GenerateOptions, json: bool) -> Result<()> {
    let start = Instant::now();
    let mut first = None;
    // Text follows the token that completed it: a token's line is written with the next event.
    let mut line: Option<(u32, String)> = None;
    for event in model.generate(prompt, options)? {
        let event = event?;
        if let (true, Some((id, text)), false) = (json, &line, matches!(event, Event::Text(_))) {
            println!("{}", json!({"id": id, "text": text}));
            line = None;
        }
        match event {
            Event::Token(token) => {
                first.get_or_insert_with(Instant::now);
                line = Some((token.token, String::new()));
            }
            Event::Text(text) if json => line = line.map(|(id, _)| (id, text)),
            Event::Text(text) => {
                print!("{text}");
                std::io::stdout().flush().ok();
            }
            Event::Done { reason, usage } => {
                let first = first.unwrap_or(start);
                let rate = |n: usize, seconds: f64| {
                    if seconds > 0.0 {
                        n as f64 / seconds
                    } else {
                        0.0
                    }
                };
                // The first token comes out of the prompt's own pass.
                let decoded = usage.completion_tokens.saturating_sub(1);
                let prefill = rate(usage.prompt_tokens, (first - start).as_secs_f64());
                let decode = rate(decoded, first.elapsed().as_secs_f64());
                if json {
                    println!(
                        "{}",
                        json!({
                            "finish_reason": name(&reason),
                            "usage": {
                                "prompt_tokens": usage.prompt_tokens,
                                "completion_tokens": usage.completion_tokens,
                            },
                            "prompt_tokens_per_second": prefill,
                            "tokens_per_second": decode,
                        })
                    );
                } else {
                    println!();
                    eprintln!(
                        "{} + {} tokens, {prefill:.0} and {decode:.0} a second",
                        usage.prompt_tokens, usage.completion_tokens
                    );
                }
            }
        }
    }
    Ok(())
}

fn name(reason: &FinishReason) -> String {
    match reason {
        FinishReason::StopToken(_) => "stop".into(),
        FinishReason::StopString(text) => format!("stop string {text:?}"),
        FinishReason::MaxTokens => "max_tokens".into(),
        FinishReason::ContextFull => "context_full".into(),
    }
}
