//! A conversation in the terminal, with the embedded model or any checkpoint.
//!
//!     cargo run --release -p deepseek-v41-examples-chat --example chat
//!     cargo run --release -p deepseek-v41-examples-chat --example chat -- --think --model DIR
//!     echo "What is a lantern?" | cargo run --release -p deepseek-v41-examples-chat --example chat
//!
//! Every line is a message. `/image FILE` puts a picture into the next one, `/undo` takes the last question
//! and its answer back, `/quit` or the end of the input ends. The history stays in the model's caches: after
//! each answer the number of tokens that had to be read says so.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::{
    io::{BufRead, IsTerminal, Write},
    path::PathBuf,
};

use clap::Parser;
use deepseek_v41::{
    GenerateOptions, SamplingParams,
    chat::{ChatError, ChatSession, Conversation, Effort, OutputChunk, system, user},
    model::Limits,
};
use deepseek_v41_examples_chat::open;

#[derive(Parser)]
#[command(about = "Talks with a model")]
struct Args {
    /// Checkpoint directory; without it the embedded model is used.
    #[arg(long)]
    model: Option<PathBuf>,
    /// What the model is told before the conversation.
    #[arg(long)]
    system: Option<String>,
    /// Let the model reason before it answers.
    #[arg(long)]
    think: bool,
    /// How thoroughly: 1 to 100, or low, high, xhigh, max. Implies --think.
    #[arg(long)]
    effort: Option<String>,
    /// Most tokens of one answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,
    /// Most tokens of the conversation.
    #[arg(long, default_value_t = 4096)]
    context: usize,
    /// 0 always takes the most probable token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Makes sampling reproducible.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let model = open(args.model.as_deref())?;
    let effort = args
        .effort
        .as_deref()
        .map(str::parse::<Effort>)
        .transpose()?;
    let settings = Conversation {
        messages: args.system.into_iter().map(system).collect(),
        thinking_mode: args.think || effort.is_some(),
        ..Conversation::default()
    };
    // Slack to undo whole turns at no cost.
    let limits = Limits {
        max_len: args.context,
        max_rollback: args.context.min(1024),
        ..Limits::default()
    };
    let mut chat = ChatSession::new(&model, settings, limits)?;
    if let Some(effort) = effort {
        chat = chat.with_effort(effort);
    }
    let sampling = SamplingParams {
        temperature: args.temperature,
        seed: args.seed,
        ..SamplingParams::default()
    };
    let options = GenerateOptions {
        sampling,
        max_tokens: args.max_tokens,
        ..GenerateOptions::default()
    };

    let mut pictures = Vec::new();
    prompt();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((line.trim(), "")) {
            ("", _) => {}
            ("/quit", _) => break,
            ("/undo", _) => match chat.undo()? {
                true => eprintln!("[{} turns left]", chat.turns()),
                false => eprintln!("[nothing to undo]"),
            },
            ("/image", file) => match std::fs::read(file.trim()) {
                Ok(bytes) => pictures.push(bytes),
                Err(err) => eprintln!("[{file}: {err}]"),
            },
            _ => {
                let message = match pictures.is_empty() {
                    true => user(line),
                    false => chat.template().user_with_images(pictures.drain(..), line),
                };
                // A question too many, or a broken picture, does not end the conversation.
                if let Err(err) = answer(&mut chat, message, &options) {
                    eprintln!("[{err}]");
                }
            }
        }
        prompt();
    }
    Ok(())
}

fn answer(
    chat: &mut ChatSession<'_>,
    message: deepseek_v41::chat::InputMessage,
    options: &GenerateOptions,
) -> Result<(), ChatError> {
    let mut turn = chat.send([message], options)?;
    let usage = turn.prompt_usage();
    let mut reasoning = false;
    for chunk in &mut turn {
        match chunk? {
            OutputChunk::Reasoning { content, .. } => {
                if !std::mem::replace(&mut reasoning, true) {
                    print!("(");
                }
                print!("{content}");
            }
            OutputChunk::Content { content, .. } => {
                if std::mem::take(&mut reasoning) {
                    println!(")");
                }
                print!("{content}");
            }
            _ => {}
        }
        std::io::stdout().flush().ok();
    }
    println!("{}", if reasoning { ")" } else { "" });
    let (read, all) = (
        usage.prompt_tokens - usage.prompt_cache_hit_tokens,
        usage.prompt_tokens,
    );
    eprintln!(
        "[read {read} of {all} tokens, wrote {}]",
        turn.answer().usage.completion_tokens
    );
    Ok(())
}

fn prompt() {
    if std::io::stdin().is_terminal() {
        print!("> ");
        std::io::stdout().flush().ok();
    }
}
