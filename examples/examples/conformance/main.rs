//! Compares this implementation with saved results of the official one.
//!
//! ```text
//! cargo run --release --example conformance -- tests/data/golden
//! cargo run --release --example conformance -- tests/data/tiny
//! ```
//!
//! The directory holds `manifest.json` and the files it names (single operations and whole models), or
//! `expected.json` beside a tiny model. Prints what was compared, the worst error, what is allowed and the
//! verdict; cases of a kind this program does not know are listed as skipped. The exit code is 1 when
//! anything failed.

mod case;
mod models;
mod ops;
mod report;
mod tiny;
mod tolerance;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use candle_core::Device;
use clap::Parser;
use deepseek_v41::{Error, Result};
use report::Report;
use serde_json::Value;

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
    let device = device(&args.device)?;
    let mut report = Report::default();
    if args.dir.join("manifest.json").is_file() {
        golden(&args.dir, &device, &mut report)?;
    } else if args.dir.join("expected.json").is_file() {
        tiny::run(&args.dir, &device, &mut report)?;
    } else {
        return Err(Error::checkpoint(
            &args.dir,
            "holds neither manifest.json (golden data) nor expected.json (a tiny model's)",
        ));
    }
    Ok(report)
}

/// Every case of a golden directory.
fn golden(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    let manifest = read_json(&dir.join("manifest.json"))?;
    for (group, entry) in object(&manifest["ops"]) {
        ops::run_group(dir, group, entry, device, report);
    }
    ops::run_released(dir, &manifest["released"], device, report);
    if let Some(file) = manifest["encoding"].as_str() {
        report.skipped(file.into(), "prompt encoding is not compared yet");
    }
    for (name, entry) in object(&manifest["models"]) {
        models::run(dir, name, entry, device, report);
    }
    Ok(())
}

fn device(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(Device::new_cuda(0)?),
        other => Err(Error::Unsupported {
            what: format!("device `{other}`: expected cpu or cuda"),
        }),
    }
}

/// The entries of a JSON object; none if it is something else.
fn object(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .map(|(k, v)| (k.as_str(), v))
}

/// A JSON file as Python writes it: with NaN and Infinity where there is no number, read as null.
fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_str(&without_nan(&text))
        .map_err(|e| Error::checkpoint(path, format!("not JSON: {e}")))
}

fn without_nan(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Every other piece between quotes that are not escaped is a string's content.
    let (mut rest, mut in_string) = (text, false);
    while !rest.is_empty() {
        let stop = |c: char| c == '"' || (in_string && c == '\\');
        let end = rest.find(stop).unwrap_or(rest.len());
        let (piece, tail) = rest.split_at(end);
        match in_string {
            true => out.push_str(piece),
            // "-Infinity" first: what is left of it would be a minus without a number.
            false => out.push_str(
                &piece
                    .replace("-Infinity", "null")
                    .replace("Infinity", "null")
                    .replace("NaN", "null"),
            ),
        }
        // A quote, or a backslash and whatever it escapes.
        let taken = match tail.chars().next() {
            Some('"') => {
                in_string = !in_string;
                1
            }
            Some(_) => tail.chars().take(2).map(char::len_utf8).sum(),
            None => 0,
        };
        out.push_str(&tail[..taken]);
        rest = &tail[taken..];
    }
    out
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
