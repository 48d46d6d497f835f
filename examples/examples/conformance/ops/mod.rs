//! Cases of single operations, one module for each group of the manifest.

mod attention;
mod attn;
mod basic;
mod compressor;
mod draft;
mod engram;
mod gate;
mod gemm;
mod moe;
mod quant;
mod vision;

use std::path::Path;

use candle_core::Device;
use deepseek_v41::Result;
use deepseek_v41_examples::expected::Expected;
use serde_json::Value;

use crate::{case::Case, object, report::Report};

/// Compares one case; `false` if it is of a kind this program does not know.
type Run = fn(&mut Case<'_>) -> Result<bool>;

fn runner(group: &str) -> Option<Run> {
    Some(match group {
        "quant" => quant::run,
        "gemm" => gemm::run,
        "attn" => attn::run,
        "basic" => basic::run,
        "gate" => gate::run,
        "moe" => moe::run,
        "compressor" => compressor::run,
        "attention" => attention::run,
        "draft" => draft::run,
        "engram" => engram::run,
        "token_map" => engram::token_map,
        "vision" => vision::run,
        _ => return None,
    })
}

/// Cases of a group that are a file of their own.
fn side_file(file: &str) -> Run {
    match file {
        "image_plans.json" => |case| vision::plans(case).map(|()| true),
        "dspark_schedule.json" => |case| draft::schedules(case).map(|()| true),
        _ => |_| Ok(false),
    }
}

/// Every case of a group; `entry` is its part of the manifest: the file, and a description of each case.
pub(crate) fn run_group(
    dir: &Path,
    group: &str,
    entry: &Value,
    device: &Device,
    report: &mut Report,
) {
    let names = object(&entry["cases"]);
    let Some(run) = runner(group) else {
        for (name, _) in names {
            report.skipped(format!("{group}/{name}"), "unknown kind");
        }
        return;
    };
    let file = dir.join(entry["file"].as_str().unwrap_or(""));
    let data = match Expected::open(&file) {
        Ok(data) => data,
        Err(error) => return report.failed(group.into(), error),
    };
    let side = entry["side_file"].as_str();
    let side = side.map(|file| (file, &Value::Null, side_file(file)));
    let names = names.map(|(name, spec)| (name, spec, run));
    for (name, spec, run) in names.chain(side) {
        // A sentence about other cases.
        if name.ends_with("_note") {
            continue;
        }
        let case = Case {
            name,
            spec,
            data: &data,
            dir,
            device,
            checks: Vec::new(),
        };
        run_case(case, group, run, report);
    }
}

/// The token map and the hashes of the released model, which have a file of their own.
pub(crate) fn run_released(dir: &Path, entry: &Value, device: &Device, report: &mut Report) {
    if entry.is_null() {
        return;
    }
    match Expected::open(&dir.join("engram_released.safetensors")) {
        Err(error) => report.failed("released".into(), error),
        Ok(data) => {
            let case = Case {
                name: "engram_released",
                spec: entry,
                data: &data,
                dir,
                device,
                checks: Vec::new(),
            };
            run_case(case, "released", engram::released, report);
        }
    }
}

fn run_case(mut case: Case<'_>, group: &str, run: Run, report: &mut Report) {
    let name = format!("{group}/{}", case.name);
    match run(&mut case) {
        Ok(true) => report.compared(name, case.checks),
        Ok(false) => report.skipped(name, "unknown kind"),
        Err(error) => report.failed(name, error),
    }
}
