//! The prompt format: conversations as text and ids, answers as messages, and what is refused.

use std::path::Path;

use crate::report::Report;

/// The fixtures of `file`, read with the embedded model's tokenizer.
#[cfg(not(feature = "chat"))]
pub(crate) fn run(_: &Path, file: &str, report: &mut Report) {
    report.skipped(
        file.into(),
        "conversations need DeepSeek's prompt library: build with `--features chat`",
    );
}

/// The fixtures of `file`, read with the embedded model's tokenizer.
#[cfg(feature = "chat")]
pub(crate) fn run(dir: &Path, file: &str, report: &mut Report) {
    use fixtures::{answers, prompts, refusals};

    let model = match deepseek_v41::DeepSeekV41::tiny() {
        Ok(model) => model,
        Err(error) => return report.failed(file.into(), error),
    };
    let all = match crate::suite::read_json(&dir.join(file)) {
        Ok(all) => all,
        Err(error) => return report.failed(file.into(), error),
    };
    let template = model.chat_template();
    let list = |part: &str| all[part].as_array().cloned().unwrap_or_default();
    prompts(&template, &list("encode"), report);
    answers(&template, model.special_ids().eos, &list("parse"), report);
    refusals(&list("reject"), report);
}

#[cfg(feature = "chat")]
mod fixtures {
    use deepseek_v41::{
        AddedTokens,
        chat::{CalledTool, ChatError, ChatTemplate},
    };
    use deepseek_v41_examples::fixtures::{answer, appended, conversation, effort, text};
    use serde_json::Value;

    use crate::{
        report::{Check, Report},
        tolerance::EXACT,
    };

    fn check(what: &str, values: usize, differing: usize) -> Check {
        Check {
            what: what.into(),
            values,
            error: differing as f64,
            allowed: EXACT,
            unit: "differing".into(),
        }
    }

    /// Positions at which the two differ, one of them ending included.
    fn differing<T: PartialEq>(a: &[T], b: &[T]) -> usize {
        let pairs = a.iter().zip(b).filter(|(a, b)| a != b).count();
        pairs + a.len().abs_diff(b.len())
    }

    pub(super) fn prompts(template: &ChatTemplate, list: &[Value], report: &mut Report) {
        for fixture in list {
            let name = format!("encoding/{}", text(&fixture["name"]));
            match conversation(template, fixture) {
                Err(why) => {
                    report.skipped(name, format!("the prompt library has no term for {why}"));
                }
                Ok(conversation) => {
                    let compare = || -> Result<Vec<Check>, ChatError> {
                        let prompt =
                            template.render(&conversation, effort(fixture).transpose()?)?;
                        let mut want = text(&fixture["prompt"]);
                        want.push_str(appended(fixture));
                        let ids = template.tokenizer().encode(&want, AddedTokens::Recognise)?;
                        let images = fixture["images"].as_array().map_or(0, Vec::len);
                        Ok(vec![
                            check(
                                "bytes of the prompt",
                                want.len(),
                                differing(prompt.text.as_bytes(), want.as_bytes()),
                            ),
                            check("ids", ids.len(), differing(&prompt.ids, &ids)),
                            check("pictures", images, prompt.images.len().abs_diff(images)),
                        ])
                    };
                    match compare() {
                        Ok(checks) => report.compared(name, checks),
                        Err(error) => report.failed(name, error),
                    }
                }
            }
        }
    }

    pub(super) fn answers(template: &ChatTemplate, eos: u32, list: &[Value], report: &mut Report) {
        for (i, fixture) in list.iter().enumerate() {
            let name = format!("encoding/answer_{i}");
            if let Some(error) = fixture["error"].as_str() {
                let why = "refused by the official parser, read leniently here (docs/encoding.md)";
                report.skipped(name, format!("{error}: {why}"));
                continue;
            }
            match answer(template, eos, fixture) {
                Err(error) => report.failed(name, error),
                Ok((answer, passed_over)) => {
                    let want = &fixture["message"];
                    let calls = want["tool_calls"].as_array().into_iter().flatten();
                    let calls: Vec<CalledTool> = calls
                        .map(|call| CalledTool {
                            name: text(&call["function"]["name"]),
                            arguments: text(&call["function"]["arguments"]),
                        })
                        .collect();
                    let bytes = |what: &str, got: &str| {
                        let want = text(&want[what]);
                        check(what, want.len(), differing(got.as_bytes(), want.as_bytes()))
                    };
                    let checks = vec![
                        bytes("content", &answer.content),
                        bytes("reasoning_content", &answer.reasoning),
                        check(
                            "tool_calls",
                            calls.len(),
                            differing(&answer.tool_calls, &calls),
                        ),
                        check("passed over", 0, passed_over.len()),
                    ];
                    report.compared(name, checks);
                }
            }
        }
    }

    pub(super) fn refusals(list: &[Value], report: &mut Report) {
        for (i, fixture) in list.iter().enumerate() {
            let name = format!("encoding/refusal_{i}");
            match effort(fixture) {
                Some(effort) => {
                    let accepted = !matches!(effort, Err(ChatError::Effort { .. }));
                    let what = format!("effort {}", fixture["effort"]);
                    report.compared(name, vec![check(&what, 1, usize::from(accepted))]);
                }
                None => {
                    let error = text(&fixture["error"]);
                    let why = "what users write is text here (docs/encoding.md)";
                    report.skipped(name, format!("{error}: {why}"));
                }
            }
        }
    }
}
