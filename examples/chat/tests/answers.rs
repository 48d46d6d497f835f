//! Answers in pieces: whatever the cut, the same answer, and never a part of a tag in the text.
#![allow(clippy::unwrap_used)]

mod common;

use common::{bytewise, parse, parsing, tiny};
use deepseek_v41::chat::{
    Answer, AnswerParser, CalledTool, ChatError, Events, Irregularity, OutputChunk, ParsingOptions,
    recipe::stream::{FinishReason, InferenceFinishReason},
};
use proptest::prelude::*;

const STOP: Option<InferenceFinishReason> = Some(InferenceFinishReason::Stop);

/// Reasoning, text and two calls, with everything that could be taken for a tag.
const ANSWER: &str = "  Ein Größenproblem 🦀, <b>?</think>So </ <｜ say é\u{300}:\n\n<｜DSML｜ calls>\n\
    <｜DSML｜ invoke name=\"weather\">\n\
    <｜DSML｜ parameter name=\"city\" string=\"true\">Aix \"<b>\" \\ </｜DSML｜ parameter>\n\
    <｜DSML｜ parameter name=\"days\" string=\"false\">[1, {\"a\": null}]</｜DSML｜ parameter>\n\
    </｜DSML｜ invoke>\n\
    <｜DSML｜ invoke name=\"ping\">\n</｜DSML｜ invoke>\n\
    </｜DSML｜ calls>";

fn wanted() -> Answer {
    Answer {
        reasoning: "  Ein Größenproblem 🦀, <b>?".into(),
        content: "So </ <｜ say é\u{300}:".into(),
        tool_calls: vec![
            CalledTool {
                name: "weather".into(),
                arguments: r#"{"city": "Aix \"<b>\" \\ ", "days": [1, {"a": null}]}"#.into(),
            },
            CalledTool {
                name: "ping".into(),
                arguments: "{}".into(),
            },
        ],
        finish_reason: Some(FinishReason::ToolCalls),
        ..Answer::default()
    }
}

/// Only what was said; tokens are counted by text that has been completed.
fn said(answer: Answer) -> Answer {
    Answer {
        usage: Default::default(),
        ..answer
    }
}

#[test]
fn a_call_cut_at_every_byte() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let options = parsing(&template, true);
    let old = ANSWER
        .replace("｜DSML｜ calls", "｜DSML｜tool_calls")
        .replace("｜DSML｜ ", "｜DSML｜");
    for text in [ANSWER, &old] {
        let ids = bytewise(tokenizer, text);
        assert!(ids.len() > 200);
        let whole = parse(tokenizer, &options, [&ids[..]], STOP);
        assert_eq!((said(whole.0), whole.1), (wanted(), vec![]));
        let single = parse(tokenizer, &options, ids.chunks(1), STOP);
        assert_eq!(said(single.0), wanted());
        for at in 0..=ids.len() {
            let (a, b) = ids.split_at(at);
            assert_eq!(
                said(parse(tokenizer, &options, [a, b], STOP).0),
                wanted(),
                "cut at {at}"
            );
        }
    }
}

#[test]
fn what_has_been_given_out_is_never_taken_back() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let ids = bytewise(tokenizer, ANSWER);
    let mut parser = AnswerParser::new(tokenizer, Events, parsing(&template, true));
    let mut so_far = Answer::default();
    for id in &ids {
        so_far.extend(&parser.push(&[*id]).unwrap());
        assert!(wanted().reasoning.starts_with(&so_far.reasoning));
        assert!(
            wanted().content.starts_with(&so_far.content),
            "{:?}",
            so_far.content
        );
    }
}

/// An answer that ends inside a call: what is there stays a call, and nothing becomes text.
#[test]
fn a_call_that_ends_early_leaks_no_tags() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let ids = bytewise(tokenizer, ANSWER);
    for len in 0..ids.len() {
        let length = Some(InferenceFinishReason::Length);
        let (answer, _) = parse(tokenizer, &parsing(&template, true), [&ids[..len]], length);
        assert!(
            !answer.content.contains("DSML") && !answer.reasoning.contains("DSML"),
            "{len}"
        );
        assert!(
            wanted()
                .content
                .starts_with(answer.content.trim_end_matches(['\n', '<', '\u{fffd}']))
        );
        assert_eq!(answer.finish_reason, Some(FinishReason::Length));
    }
}

#[test]
fn an_orphan_closing_tag_is_left_out() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let ids = bytewise(tokenizer, "</think>Hello</think> you");
    for portion in [1, ids.len()] {
        let options = parsing(&template, false);
        let (answer, found) = parse(tokenizer, &options, ids.chunks(portion), STOP);
        assert_eq!(answer.content, "Hello you");
        assert_eq!(found, [Irregularity::OrphanThinkingEnd; 2]);
    }
    // Spelled with ordinary tokens it is text, and so are tags.
    let table = common::byte_tokens(tokenizer);
    let text = "a</think>b\n\n<｜DSML｜ calls>\n";
    let ids: Vec<u32> = text.bytes().map(|b| table[usize::from(b)]).collect();
    let (answer, found) = parse(tokenizer, &parsing(&template, false), [&ids[..]], STOP);
    assert_eq!((&*answer.content, found), (text, vec![]));
}

#[test]
fn empty_and_unclosed_answers() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let run = |text: &str, thinking| {
        let ids = bytewise(tokenizer, text);
        let (answer, found) = parse(
            tokenizer,
            &parsing(&template, thinking),
            ids.chunks(1),
            STOP,
        );
        (
            answer.reasoning,
            answer.content,
            answer.tool_calls.len(),
            found,
        )
    };
    let none = String::new;
    assert_eq!(run("", false), (none(), none(), 0, vec![]));
    assert_eq!(
        run("", true),
        (none(), none(), 0, vec![Irregularity::UnclosedThinking])
    );
    assert_eq!(run("</think>", true), (none(), none(), 0, vec![]));
    // A block without a call is no call, and no text either.
    assert_eq!(
        run("a\n\n<｜DSML｜ calls>\n</｜DSML｜ calls>", false),
        (none(), "a".into(), 0, vec![])
    );
    // A call out of the reasoning.
    let call = "r\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>";
    assert_eq!(
        run(call, true),
        ("r".into(), none(), 1, vec![Irregularity::UnclosedThinking])
    );
}

#[test]
fn mixed_forms_of_tags_are_refused() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let old = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let new = old
        .replace("tool_calls", " calls")
        .replace("｜invoke", "｜ invoke");
    let tags: Vec<usize> = new.match_indices("｜ ").map(|(at, _)| at).collect();
    assert_eq!(tags.len(), 4);
    for text in [old, &new] {
        let (answer, _) = parse(
            tokenizer,
            &parsing(&template, false),
            bytewise(tokenizer, text).chunks(1),
            STOP,
        );
        assert_eq!(answer.tool_calls.len(), 1);
    }
    for at in tags {
        // One tag of the other form.
        let mixed = format!("{}｜{}", &new[..at], &new[at + "｜ ".len()..]);
        let mut parser = AnswerParser::new(tokenizer, Events, parsing(&template, false));
        let ids = bytewise(tokenizer, &mixed);
        let result: Result<Vec<Vec<OutputChunk>>, ChatError> =
            ids.iter().map(|id| parser.push(&[*id])).collect();
        assert!(matches!(result, Err(ChatError::MixedTags)), "{mixed}");
        assert!(parser.is_ended());
    }
}

#[test]
fn stop_sequences_count_in_the_content_alone() {
    let template = tiny().chat_template();
    let tokenizer = template.tokenizer();
    let options = ParsingOptions {
        stop_sequences: vec!["END".into(), "é".into()],
        ..parsing(&template, true)
    };
    let ids = bytewise(tokenizer, "END é</think>a EN END b");
    for at in 0..=ids.len() {
        let (a, b) = ids.split_at(at);
        let (answer, _) = parse(tokenizer, &options, [a, b], STOP);
        assert_eq!(
            (&*answer.reasoning, &*answer.content),
            ("END é", "a EN "),
            "{at}"
        );
        assert_eq!(answer.stop_sequence.as_deref(), Some("END"));
        assert_eq!(answer.finish_reason, Some(FinishReason::StopSequence));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any text with any cuts is the text.
    #[test]
    fn any_text_in_any_portions(text in "\\PC{0,40}", cuts in prop::collection::vec(0usize..200, 0..6)) {
        let template = tiny().chat_template();
        let tokenizer = template.tokenizer();
        let table = common::byte_tokens(tokenizer);
        let ids: Vec<u32> = text.bytes().map(|b| table[usize::from(b)]).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(ids.len())).collect();
        cuts.extend([0, ids.len()]);
        cuts.sort_unstable();
        let portions = cuts.windows(2).map(|w| &ids[w[0]..w[1]]);
        let (answer, found) = parse(tokenizer, &parsing(&template, false), portions, STOP);
        // The library holds U+FFFD back as the sign of an unfinished character.
        prop_assume!(!text.contains('\u{fffd}'));
        prop_assert_eq!(answer.content, text);
        prop_assert!(found.is_empty());
    }
}
