//! Asks about pictures.
//!
//!     cargo run --release -p deepseek-v41-examples-chat --example vision -- --image tests/data/tiny/picture.png
//!     cargo run --release -p deepseek-v41-examples-chat --example vision -- \
//!         --model DIR --image one.png --image two.jpg --prompt "What has changed?"
//!
//! The embedded model names coloured shapes on a plain background, one picture at a time.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::{io::Write, path::PathBuf, time::Instant};

use clap::Parser;
use deepseek_v41::{GenerateOptions, Prompt, chat::Conversation};
use deepseek_v41_examples_chat::open;

#[derive(Parser)]
#[command(about = "Asks about pictures")]
struct Args {
    /// Checkpoint directory; without it the embedded model is used.
    #[arg(long)]
    model: Option<PathBuf>,
    /// A PNG, JPEG, WebP or GIF file; may be given several times.
    #[arg(long, required = true)]
    image: Vec<PathBuf>,
    /// The question.
    #[arg(long, default_value = "What is in the picture?")]
    prompt: String,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let model = open(args.model.as_deref())?;
    let files = args
        .image
        .iter()
        .map(std::fs::read)
        .collect::<Result<Vec<_>, _>>()?;
    let template = model.chat_template();
    let conversation = Conversation {
        messages: vec![template.user_with_images(files, args.prompt)],
        thinking_mode: false,
        ..Conversation::default()
    };
    let start = Instant::now();
    let prompt = template.render(&conversation, None)?.to_prompt(&model)?;
    if let Prompt::WithImages { ids, images } = &prompt {
        let spans: Vec<usize> = images.iter().map(|span| span.rows.dims()[0]).collect();
        let ms = start.elapsed().as_millis();
        eprintln!(
            "{} tokens, pictures of {spans:?} tokens read in {ms} ms",
            ids.len()
        );
    }
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        ..GenerateOptions::default()
    };
    for text in model.generate(prompt, &options)?.text() {
        print!("{}", text?);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
