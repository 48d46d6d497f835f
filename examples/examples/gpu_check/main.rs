//! The GPU against the CPU: every operation, whole models, and how fast.
//!
//! ```text
//! cargo run --release --features cuda --example gpu_check -- correctness [tests/data/golden [GROUP,GROUP..]] [--baseline]
//! cargo run --release --features cuda --example gpu_check -- conformance [tests/data/golden]
//! cargo run --release --features cuda --example gpu_check -- bench [layer | packed | vision | sampling]
//! ```
//!
//! `correctness` computes every operation on both devices from fresh random data, at odd shapes and at
//! the release's, then golden models and the embedded one; each line has the worst relative error and
//! the bound it must keep; with `--baseline` by the kernels that cards other than Hopper run. `conformance` is the example of that name on the GPU. `bench` prints a table of times and what share of the measured ceilings they
//! are. One file does it all: build it where there is no GPU, strip it, carry it to where there is one.

#[cfg(feature = "cuda")]
mod bench;
#[cfg(feature = "cuda")]
mod correctness;
#[cfg(feature = "cuda")]
mod data;
#[cfg(feature = "cuda")]
mod drafts;
#[cfg(feature = "cuda")]
mod errors;
#[cfg(feature = "cuda")]
mod layer;
#[cfg(feature = "cuda")]
mod packed;
#[cfg(feature = "cuda")]
mod replay;
#[cfg(feature = "cuda")]
mod state;
#[cfg(feature = "cuda")]
mod whole;

// The conformance suite, for a machine that one file is carried to.
#[cfg(feature = "cuda")]
#[path = "../conformance/case.rs"]
mod case;
#[cfg(feature = "cuda")]
#[path = "../conformance/encoding.rs"]
mod encoding;
#[cfg(feature = "cuda")]
#[path = "../conformance/models.rs"]
mod models;
#[cfg(feature = "cuda")]
#[path = "../conformance/ops/mod.rs"]
mod ops;
#[cfg(feature = "cuda")]
#[path = "../conformance/report.rs"]
mod report;
#[cfg(feature = "cuda")]
#[path = "../conformance/suite.rs"]
mod suite;
#[cfg(feature = "cuda")]
#[path = "../conformance/tiny/mod.rs"]
mod tiny;
#[cfg(feature = "cuda")]
#[path = "../conformance/tolerance.rs"]
mod tolerance;

use std::process::ExitCode;

#[cfg(feature = "cuda")]
use suite::{object, read_json};

#[cfg(not(feature = "cuda"))]
#[allow(clippy::print_stderr, reason = "a program's errors go there")]
fn main() -> ExitCode {
    eprintln!(
        "gpu_check needs kernels: install nvcc with kernels/install-cuda.sh, source the env.sh it names, \
         then run with `--features cuda`"
    );
    ExitCode::FAILURE
}

#[cfg(feature = "cuda")]
#[allow(clippy::print_stderr, reason = "a program's errors go there")]
fn main() -> ExitCode {
    let (flags, args): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.starts_with("--"));
    let flag = |name: &str| flags.iter().any(|flag| flag == name);
    let run = || -> deepseek_v41::Result<bool> {
        let device = match flag("--baseline") {
            true => deepseek_v41::core::cuda::open_baseline(0)?,
            false => deepseek_v41::core::open_device("cuda")?,
        };
        match args.first().map(String::as_str) {
            Some("correctness") => {
                let golden = args.get(1).map_or("tests/data/golden", String::as_str);
                let only = args.get(2).map_or("", String::as_str);
                let mut report = correctness::Report::default();
                report.group("errors", only, |r| errors::errors(&device, r));
                correctness::ops(&device, only, &mut report);
                report.group("golden", only, |r| {
                    whole::golden(golden.as_ref(), &device, r)
                });
                report.group("replay", only, |r| replay::tiny(&device, r));
                report.group("packed", only, |r| packed::tiny(&device, r));
                report.group("state", only, |r| state::tiny(&device, r));
                report.group("tiny", only, |r| whole::tiny(&device, r));
                Ok(report.finish())
            }
            Some("conformance") => {
                let dir = args.get(1).map_or("tests/data/golden", String::as_str);
                let report = suite::run(dir.as_ref(), &device)?;
                print_whole(&if flag("--json") {
                    report.json()
                } else {
                    report.table()
                });
                Ok(report.passed())
            }
            Some("bench") => {
                let only = args.get(1).map_or("", String::as_str);
                bench::run(&device, only).map(|()| true)
            }
            _ => Err(deepseek_v41::Error::Unsupported {
                what: "expected `correctness [DIR]`, `conformance [DIR]` or `bench`".into(),
            }),
        }
    };
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(err) => {
            eprintln!("error: {err}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "cuda")]
#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
fn print_whole(text: &str) {
    print!("{text}");
}
