//! Whole golden models: a prompt and every decode step, in both key modes.

use std::path::Path;

use candle_core::Device;
use deepseek_v41::Error;
use deepseek_v41_examples::golden_model::{Distance, GoldenModel, Mode};
use serde_json::Value;

use crate::{
    report::{Check, Report},
    tolerance::{DRAFT_FLOOR, DRAFTS_FLOOR, EXACT, MODEL_FLOOR, MODEL_NOISE, OTHER_MODE},
};

/// `name` of the manifest's models; `entry` has the distances between two valid runs of the official code.
pub(crate) fn run(dir: &Path, name: &str, entry: &Value, device: &Device, report: &mut Report) {
    // fp4 and top-k turn a last bit into another selection. Where that happened between two runs of the
    // official code, its recorded selections are replayed, and the distance is that of such runs.
    let replay = entry["noise_free"]["selections_that_differ"].as_u64() != Some(0);
    let noise = &entry[if replay { "noise_forced" } else { "noise_free" }];
    // None: the model was recorded with the keys as published only. Empty: it makes no difference.
    let steps = entry["own_index_k_differs_at_steps"].as_array();
    let modes_differ = steps.is_some_and(|steps| !steps.is_empty());
    for mode in Mode::ALL {
        let label = match mode {
            Mode::Reference => "keys as published",
            Mode::OwnKeys if steps.is_some() => "own keys",
            Mode::OwnKeys => continue,
        };
        let case = format!("model_{name} ({label})");
        let distance = || {
            let model = GoldenModel::load(&dir.join(format!("model_{name}")), mode, device)?;
            let rows: Vec<usize> = (0..model.sequences()?).collect();
            let all = model.run(&rows, replay)?;
            let pictures = model.image_rows()?;
            let pictures = match pictures.is_empty() {
                true => None,
                false => Some(model.run(&pictures, replay)?),
            };
            Ok::<_, Error>((all, pictures))
        };
        match distance() {
            Ok((all, pictures)) => {
                let mut checks = checks(&all, pictures.as_ref(), noise, device);
                checks.extend(drafts(&all, mode, entry, noise));
                checks.extend(modes_differ.then(|| selections(&all)).flatten());
                report.compared(case, checks);
            }
            Err(error) => report.failed(case, error),
        }
    }
}

/// Distances over all sequences, and over those with pictures alone.
fn checks(
    all: &Distance,
    pictures: Option<&Distance>,
    noise: &Value,
    device: &Device,
) -> Vec<Check> {
    let floats = |values: &Value| -> Vec<f64> {
        match values {
            Value::Array(list) => list.iter().filter_map(Value::as_f64).collect(),
            Value::Object(map) => map.values().filter_map(Value::as_f64).collect(),
            _ => Vec::new(),
        }
    };
    // NaN is the greatest in this order, so it is not lost.
    let worst = |values: &[f64]| {
        values
            .iter()
            .copied()
            .max_by(f64::total_cmp)
            .unwrap_or(f64::NAN)
    };
    let limit = |part: &str| (MODEL_NOISE * worst(&floats(&noise[part]))).max(MODEL_FLOOR);
    let mut checks = Vec::new();
    for (of, distance) in [("", Some(all)), (", with pictures", pictures)] {
        let Some(distance) = distance else { continue };
        let prefill: Vec<f64> = distance.prefill.iter().map(|(_, error)| *error).collect();
        for (what, errors, noise) in [
            ("logits of every step", &distance.logits, "logits_rel_rms"),
            ("layers of the prefill", &prefill, "prefill_rel_rms"),
        ] {
            checks.push(Check {
                what: format!("{what}{of}"),
                values: errors.len(),
                error: worst(errors),
                allowed: limit(noise),
                unit: "relative rms".into(),
            });
        }
    }
    // The text model is given the recorded run's rows; those of the tower here are compared by themselves.
    if pictures.is_some() && device.is_cpu() {
        let (differing, values) = all.own_pictures.values;
        checks.push(Check {
            what: "rows of pictures".into(),
            values,
            error: differing as f64,
            allowed: EXACT,
            unit: "differing from the wide run".into(),
        });
    }
    // A GPU adds in another order, as one more valid run of the official code would.
    if pictures.is_some() && !device.is_cpu() {
        let share = |(error, noise): &(f64, f64)| error / (MODEL_NOISE * noise).max(MODEL_FLOOR);
        let shares: Vec<f64> = all.own_pictures.pictures.iter().map(share).collect();
        checks.push(Check {
            what: "rows of pictures".into(),
            values: all.own_pictures.values.1,
            error: worst(&shares),
            allowed: 1.0,
            unit: "of the relative rms allowed from the wide run".into(),
        });
    }
    checks
}

/// The draft head's blocks, where the recording has them. For a model's own keys it has their tokens alone, and not
/// which experts the head chose: those cannot be replayed, and the distance is that of free runs.
fn drafts(all: &Distance, mode: Mode, entry: &Value, noise: &Value) -> Vec<Check> {
    let drafts = &all.drafts;
    let (equal, values) = drafts.places;
    if values == 0 {
        return Vec::new();
    }
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let noise_of_tokens = match mode {
        Mode::Reference => noise,
        Mode::OwnKeys => &entry["noise_free"],
    };
    let differing = 1.0 - number(&noise_of_tokens["spec_ids_equal"]);
    let mut checks = vec![Check {
        what: "tokens of drafted blocks".into(),
        values,
        error: 1.0 - equal as f64 / values as f64,
        allowed: (MODEL_NOISE * differing).max(DRAFTS_FLOOR),
        unit: "share differing".into(),
    }];
    if mode == Mode::OwnKeys {
        return checks;
    }
    for (what, error, part) in [
        (
            "logits of drafts",
            drafts.logits,
            "spec_logits_rel_rms_same_prefix",
        ),
        (
            "confidences of drafts",
            drafts.confidence,
            "spec_confidence_rel_rms_same_prefix",
        ),
    ] {
        checks.push(Check {
            what: what.into(),
            values: drafts.tokens.1,
            error,
            allowed: (MODEL_NOISE * number(&noise[part])).max(DRAFT_FLOOR),
            unit: "relative rms".into(),
        });
    }
    checks
}

/// Which keys were scored shows in what was selected, before replay hides it.
fn selections(distance: &Distance) -> Option<Check> {
    let differing = |(equal, all): (usize, usize)| 1.0 - equal as f64 / all.max(1) as f64;
    let (own, other) = (distance.decode_selections, distance.other_selections);
    (other.1 > 0).then(|| Check {
        what: "own selections in decode".into(),
        values: own.1,
        error: differing(own),
        allowed: OTHER_MODE * differing(other),
        unit: format!(
            "share differing; {:.4} from the other mode",
            differing(other)
        ),
    })
}
