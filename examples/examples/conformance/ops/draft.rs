//! The draft head's own heads, and the decisions on its drafts.

use candle_core::{DType, Tensor};
use deepseek_v41::{
    Result, SamplingParams, TokenHistory,
    quant::{Linear, WeightFormat},
    sampling::probs,
    speculative::{DraftLength, accept, schedule},
};

use serde::Deserialize;

use crate::{
    case::{Case, f32s},
    suite::read_json,
    tolerance::{DRAFT_HEADS, NEXT_DIST},
};

/// Two kinds in one group: the manifest describes all decisions by one pattern.
pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    match case.name {
        "draft_heads" => heads(case),
        "accept_I_tT" => decisions(case),
        _ => return Ok(false),
    }?;
    Ok(true)
}

fn heads(case: &mut Case<'_>) -> Result<()> {
    let linear = |part: &str| -> Result<Linear> {
        let shape = case.shape(part)?;
        let (out, input) = (shape[0], shape[1]);
        let weights = case.weights_named(&[(part, "weight")]);
        Linear::new(input, out, WeightFormat::F32, weights)
    };
    let ids = case.ids("ids")?;
    let n = ids.len();
    let ids = Tensor::from_vec(ids, n, case.device)?;
    let embed = case.tensor("markov_embed")?.index_select(&ids, 0)?;
    let bias = linear("markov_head")?.forward(&embed)?;
    let hidden = Tensor::cat(&[case.tensor("hidden")?, case.tensor("prev_embed")?], 2)?;
    let confidence = linear("confidence")?.forward(&hidden.flatten(0, 1)?)?;
    case.exact_tensor(&embed, "embed")?;
    let (want_bias, want_confidence) = (case.f32s("bias")?, case.f32s("confidence_logits")?);
    case.close("bias", &f32s(&bias)?, &want_bias, DRAFT_HEADS)?;
    let confidence = f32s(&confidence.to_dtype(DType::F32)?)?;
    case.close(
        "confidence_logits",
        &confidence,
        &want_confidence,
        DRAFT_HEADS,
    )
}

fn decisions(case: &mut Case<'_>) -> Result<()> {
    let names = case.data.names();
    let cases: Vec<String> = names
        .filter_map(|name| name.strip_suffix(".tokens").map(str::to_owned))
        .filter(|name| name.starts_with("accept_"))
        .collect();
    let (mut kept, mut want_kept, mut next, mut want_next) = (vec![], vec![], vec![], vec![]);
    for name in cases {
        let key = |part: &str| format!("{name}.{part}");
        let (_, temperature) = name.rsplit_once("_t").unwrap_or_default();
        let temperature = temperature
            .parse()
            .map_err(|_| case.bad("no temperature in a name"))?;
        let params = SamplingParams {
            temperature,
            ..SamplingParams::default()
        };
        let rows = |part: &str| -> Result<Vec<Vec<f32>>> {
            let vocab = case.data.shape(&key(part))?[1];
            let logits = case.data.floats(&key(part))?;
            let rows = logits.chunks(vocab);
            rows.map(|row| probs(row, &params, TokenHistory::default()))
                .collect()
        };
        let (draft, target) = (rows("draft_logits")?, rows("target_logits")?);
        let tokens = case.data.integers(&key("tokens"))?;
        let tokens: Vec<u32> = tokens.into_iter().map(|v| v as u32).collect();
        let mut u = case.data.floats(&key("u"))?.into_iter();
        let accepted = accept(
            &tokens,
            |j| Ok(&draft[j]),
            |j| Ok(target[j].clone()),
            || u.next().map_or(1.0, f64::from),
        )?;
        kept.push(accepted.kept as i64);
        want_kept.extend(case.data.integers(&key("accepted"))?);
        next.extend(accepted.next);
        want_next.extend(case.data.floats(&key("next_dist"))?);
    }
    case.exact("accepted", &kept, &want_kept)?;
    case.close("next_dist", &next, &want_next, NEXT_DIST)
}

/// A batch of drafts and how many of each are to be verified.
#[derive(Deserialize)]
struct Schedule {
    confidence: Vec<Vec<f64>>,
    sps_by_batch: Vec<f64>,
    lengths: Vec<usize>,
    #[serde(rename = "threshold_0.7")]
    threshold: Vec<usize>,
}

/// Draft lengths, in a file of their own.
pub(super) fn schedules(case: &mut Case<'_>) -> Result<()> {
    let list: Vec<Schedule> = serde_json::from_value(read_json(&case.dir.join(case.name))?)
        .map_err(|e| case.bad(format!("no schedules: {e}")))?;
    let (mut got, mut want, mut kept, mut want_kept) = (vec![], vec![], vec![], vec![]);
    for s in list {
        got.extend(schedule(&s.confidence, &s.sps_by_batch));
        want.extend(s.lengths);
        let logit = |p: &f64| (p / (1.0 - p)).ln() as f32;
        kept.extend(s.confidence.iter().map(|row| {
            let logits: Vec<f32> = row.iter().map(logit).collect();
            DraftLength::Confidence(0.7).choose(&logits)
        }));
        want_kept.extend(s.threshold);
    }
    case.exact("lengths by speed", &got, &want)?;
    case.exact("lengths by threshold", &kept, &want_kept)
}
