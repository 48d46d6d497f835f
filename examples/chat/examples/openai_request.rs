//! Answers one API request: JSON in, JSON or server-sent events out.
//!
//!     echo '{"model": "tiny", "messages": [{"role": "user", "content": "What is a lantern?"}],
//!            "thinking": {"type": "disabled"}, "temperature": 0}' |
//!         cargo run --release -p deepseek-v41-examples-chat --example openai_request
//!
//! With `"stream": true` the answer comes in chunks. `--protocol messages` and `--protocol responses` take
//! Anthropic's and OpenAI's newer requests. A request that cannot be answered gives the error object that
//! clients of these protocols expect, and exit code 1.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::{io::Read, path::PathBuf, process::ExitCode};

use clap::Parser;
use deepseek_v41::chat::{ChatError, recipe::request::ConversionError};
use deepseek_v41_examples_chat::{
    open,
    respond::{Protocol, respond},
};

#[derive(Parser)]
#[command(about = "Answers one API request")]
struct Args {
    /// File with the request; `-` or nothing reads the standard input.
    request: Option<PathBuf>,
    /// chat, messages or responses.
    #[arg(long, default_value = "chat")]
    protocol: Protocol,
    /// Checkpoint directory; without it the embedded model is used.
    #[arg(long)]
    model: Option<PathBuf>,
    /// What requests may call the model; may be given several times.
    #[arg(long, default_values_t = ["tiny".to_owned()])]
    name: Vec<String>,
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let args = Args::parse();
    let json = match args.request.filter(|file| file.as_os_str() != "-") {
        Some(file) => std::fs::read_to_string(file)?,
        None => {
            let mut json = String::new();
            std::io::stdin().read_to_string(&mut json)?;
            json
        }
    };
    let model = open(args.model.as_deref())?;
    let mut out = std::io::stdout().lock();
    match respond(&model, args.protocol, &args.name, &json, &mut out) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(err) => {
            let err = match err {
                ChatError::Request(err) => err,
                err @ ChatError::Model(_) => ConversionError::internal(err.to_string()),
                err => ConversionError::bad_request(err.to_string()),
            };
            println!("{}", serde_json::to_string(&err.into_error_response())?);
            Ok(ExitCode::FAILURE)
        }
    }
}
