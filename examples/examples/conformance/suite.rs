//! Everything a directory has to compare.

use std::path::Path;

use candle_core::Device;
use deepseek_v41::{Error, Result};
use serde_json::Value;

use crate::{encoding, models, ops, report::Report, tiny};

/// Compares the cases of `dir`, computed on `device`.
pub(crate) fn run(dir: &Path, device: &Device) -> Result<Report> {
    let mut report = Report::default();
    if dir.join("manifest.json").is_file() {
        golden(dir, device, &mut report)?;
    } else if dir.join("expected.json").is_file() {
        tiny::run(dir, device, &mut report)?;
    } else {
        return Err(Error::checkpoint(
            dir,
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
        encoding::run(dir, file, report);
    }
    for (name, entry) in object(&manifest["models"]) {
        models::run(dir, name, entry, device, report);
    }
    Ok(())
}

/// The entries of a JSON object; none if it is something else.
pub(crate) fn object(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .map(|(k, v)| (k.as_str(), v))
}

/// A JSON file as Python writes it: with NaN and Infinity where there is no number, read as null.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
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
