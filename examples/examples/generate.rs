//! Continues a prompt with any checkpoint, or with the embedded model.
//!
//!     cargo run --release --example generate -- --prompt "Once upon a time" --max-tokens 64
//!     cargo run --release --example generate -- --model DIR --prompt P --temperature 0.7 --seed 1 --json
//!     cargo run --release --example generate -- --prompt "Once upon a time" --speculative
//!
//! With `--json` every line is one object: the prompt's progress, each token with its text, and at the
//! end why it ended, the tokens used and the speed.

use std::{io::Write, ops::ControlFlow, path::PathBuf, time::Instant};

use clap::Parser;
use deepseek_v41::{
    DeepSeekV41, Event, FinishReason, GenerateOptions, LoadOptions, LoadPolicy, Prompt, Result,
    Sampled, SamplingParams, Speculation,
    core::open_device,
    speculative::{DraftLength, PromptLookup},
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
    /// Keep tokens at least this fraction as probable as the best.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Divides positive logits of tokens seen before and multiplies negative ones.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Subtracted from the logits of tokens generated before.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtracted from the logits of generated tokens once for every time they occurred.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// ID=BIAS, added to a token's logit; may be given several times, and BIAS may be -inf.
    #[arg(long, value_parser = token_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// With --json, also write each token's log-probability and those of this many of the most probable ones.
    #[arg(long)]
    logprobs: Option<usize>,
    /// Guess tokens ahead, by the draft head or, in a checkpoint without one, from the text itself: the
    /// same text in fewer passes.
    #[arg(long)]
    speculative: bool,
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
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            logit_bias: args.logit_bias,
            seed: args.seed,
            logprobs: args.logprobs.is_some(),
            top_logprobs: args.logprobs.unwrap_or(0),
        },
        max_tokens: args.max_tokens,
        stop: args.stop,
        ignore_eos: args.ignore_eos,
        speculation: match (args.speculative, model.draft_head()) {
            (false, _) => Speculation::Off,
            (true, Ok(_)) => Speculation::DraftHead(DraftLength::Full),
            (true, Err(_)) => Speculation::PromptLookup(PromptLookup::default()),
        },
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
    let mut line: Option<(Sampled, String)> = None;
    let mut generation = model
        .generate(prompt, options)?
        .on_prefill(move |done, total| {
            if json {
                println!("{}", json!({"prompt_tokens": done, "of": total}));
            }
            ControlFlow::Continue(())
        });
    while let Some(event) = generation.next() {
        let event = event?;
        if let (true, false) = (json, matches!(event, Event::Text(_)))
            && let Some((token, text)) = line.take()
        {
            println!("{}", token_line(&token, &text));
        }
        match event {
            Event::Token(token) => {
                first.get_or_insert_with(Instant::now);
                line = Some((token, String::new()));
            }
            Event::Text(text) if json => line = line.map(|(token, _)| (token, text)),
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
                let guesses = generation.speculation();
                let (passes, accepted) = (guesses.passes, guesses.mean_accepted());
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
                            "passes": passes,
                            "drafts_accepted": guesses.accepted,
                            "drafts_wasted": guesses.wasted(),
                        })
                    );
                    continue;
                }
                println!();
                let used = format!("{} + {}", usage.prompt_tokens, usage.completion_tokens);
                eprint!("{used} tokens, {prefill:.0} and {decode:.0} a second");
                if options.speculation != Speculation::Off {
                    eprint!("; {passes} passes, {accepted:.2} guesses accepted a pass");
                }
                eprintln!();
            }
        }
    }
    Ok(())
}

fn token_line(token: &Sampled, text: &str) -> serde_json::Value {
    let mut line = json!({"id": token.token, "text": text});
    if let Some(logprob) = token.logprob {
        line["logprob"] = json!(logprob);
        let top = token.top_logprobs.iter();
        let top = top.map(|t| json!({"id": t.token, "logprob": t.logprob}));
        line["top_logprobs"] = top.collect();
    }
    line
}

/// `ID=BIAS`.
fn token_bias(given: &str) -> std::result::Result<(u32, f32), String> {
    let parts = given.split_once('=');
    let parts = parts.and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parts.ok_or_else(|| format!("{given}: expected ID=BIAS, as in 17=-2.5"))
}

fn name(reason: &FinishReason) -> String {
    match reason {
        FinishReason::StopToken(_) => "stop".into(),
        FinishReason::StopString(text) => format!("stop string {text:?}"),
        FinishReason::MaxTokens => "max_tokens".into(),
        FinishReason::ContextFull => "context_full".into(),
        FinishReason::Cancelled => "cancelled".into(),
    }
}
