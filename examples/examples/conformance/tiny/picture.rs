//! A picture from its file to the answer.

use std::path::Path;

use candle_core::Device;

use crate::report::Report;

#[cfg(not(feature = "chat"))]
pub(super) fn run(_: &Path, _: &Device, report: &mut Report) {
    let why = "picture files need an image decoder: build with `--features chat`";
    report.skipped("tiny/picture".into(), why);
}

/// `picture.png` and `expected_picture.json` of `dir`.
#[cfg(feature = "chat")]
pub(super) fn run(dir: &Path, device: &Device, report: &mut Report) {
    match compare(dir, device) {
        Ok(checks) => report.compared("tiny/picture".into(), checks),
        Err(error) => report.failed("tiny/picture".into(), error),
    }
}

#[cfg(feature = "chat")]
fn compare(dir: &Path, device: &Device) -> deepseek_v41::Result<Vec<crate::report::Check>> {
    use deepseek_v41::{
        AddedTokens, Error, LoadOptions, SpecialTokens,
        model::{Chunk, ForwardBatch, Limits, ModelState},
    };

    use super::{check, load, most_likely};
    use crate::{suite::read_json, tolerance::TINY_LOGITS_MEDIAN};

    #[derive(serde::Deserialize)]
    struct Recording {
        prompt: String,
        prompt_ids: Vec<u32>,
        token_types: Vec<i64>,
        greedy_ids: Vec<u32>,
        text: String,
        /// Of the first step.
        top5: Vec<(u32, f32)>,
    }

    let path = dir.join("expected_picture.json");
    let want: Recording = serde_json::from_value(read_json(&path)?)
        .map_err(|e| Error::checkpoint(&path, format!("not a recording: {e}")))?;
    let file = dir.join("picture.png");
    let file = std::fs::read(&file).map_err(|e| Error::io(file, e))?;
    let options = LoadOptions {
        device: device.clone(),
        ..LoadOptions::default()
    };
    let model = load(dir, &options)?;
    let ids = model
        .tokenizer()
        .encode(&want.prompt, AddedTokens::Recognise)?;
    let prompt = model.vision()?.prompt(&ids, &[file])?;
    let types: Vec<i64> = prompt.types.iter().map(|t| t.code()).collect();
    let layout = [
        ("ids of the prompt", prompt.ids == want.prompt_ids),
        ("types of its tokens", types == want.token_types),
    ];

    let transformer = model.transformer();
    let limits = Limits {
        max_len: prompt.ids.len() + want.greedy_ids.len(),
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, transformer.device())?;
    let seq = state.create()?;
    let mut chunk = Chunk {
        seq,
        token_ids: prompt.ids,
        images: prompt.images,
    };
    let (mut greedy, mut top) = (Vec::new(), Vec::new());
    for _ in 0..want.greedy_ids.len() {
        let batch = ForwardBatch {
            chunks: vec![chunk],
            ..ForwardBatch::default()
        };
        let logits = transformer.forward(&batch, &mut state)?.logits;
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        if greedy.is_empty() {
            let at = |(id, _): &(u32, f32)| logits.get(*id as usize).copied();
            top.extend(want.top5.iter().map(|v| at(v).unwrap_or(f32::NAN)));
        }
        let next = most_likely(&logits);
        greedy.push(next);
        chunk = Chunk {
            seq,
            token_ids: vec![next],
            images: Vec::new(),
        };
    }
    let answer = model.tokenizer().decode(&greedy, SpecialTokens::Skip)?;
    let top5: Vec<f32> = want.top5.iter().map(|(_, logit)| *logit).collect();
    let exact =
        |(what, same): (&str, bool)| check(what, 1, f64::from(u8::from(!same)), 0.0, "differing");
    let mut checks: Vec<_> = layout.into_iter().map(exact).collect();
    checks.push(exact(("greedy tokens", greedy == want.greedy_ids)));
    checks.push(exact(("text of the answer", answer == want.text)));
    checks.push(check(
        "five largest logits of the first step",
        top5.len(),
        crate::case::relative_rms(&top, &top5),
        TINY_LOGITS_MEDIAN,
        "relative rms",
    ));
    Ok(checks)
}
