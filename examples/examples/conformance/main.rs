//! Compares this implementation with saved results of the official one.
//!
//! ```text
//! cargo run --release --example conformance -- tests/data/golden
//! cargo run --release --example conformance -- tests/data/tiny
//! ```
//!
//! With `--features chat` also prompts and answers of conversations, and the tiny model's picture.
//!
//! The directory holds `manifest.json` and the files it names (single operations and whole models), or
//! `expected.json` beside a tiny model. Prints what was compared, the worst error, what is allowed and the
//! verdict; cases of a kind this program does not know are listed as skipped. The exit code is 1 when
//! anything failed.

mod case;
mod encoding;
mod models;
mod ops;
mod report;
mod suite;
mod tiny;
mod tolerance;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use deepseek_v41::{Error, Result, core::open_device};
use report::Report;
use suite::{object, read_json};

/// Compares this implementation with saved results of the official one.
#[derive(Parser)]
struct Args {
    /// A directory with manifest.json, or with a tiny model's expected.json.
    dir: PathBuf,
    /// One JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
    /// Where to compute: cpu, or cuda (the first GPU) in a build that has it.
    #[arg(long, default_value = "cpu")]
    device: String,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(report) => {
            let text = if args.json {
                report.json()
            } else {
                report.table()
            };
            print_whole(&text);
            if report.passed() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(err) => {
            print_error(&err);
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<Report> {
    suite::run(&args.dir, &open_device(&args.device)?)
}

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
fn print_whole(text: &str) {
    print!("{text}");
}

#[allow(clippy::print_stderr, reason = "a program's errors go there")]
fn print_error(err: &Error) {
    eprintln!("error: {err}");
}
