//! Conversations whose history stays in the caches.
#![allow(clippy::unwrap_used)]

mod common;

use common::{picture, tiny};
use deepseek_v41::{
    AddedTokens, Error, GenerateOptions, Prompt,
    chat::{
        Answer, ChatError, ChatSession, Conversation, Effort, InputMessage,
        recipe::stream::FinishReason, recipe_core::tools::ToolDefinition, system, user,
    },
    model::Limits,
};
use serde_json::json;

fn settings(thinking_mode: bool) -> Conversation {
    Conversation {
        thinking_mode,
        ..Conversation::default()
    }
}

fn session(settings: Conversation) -> ChatSession<'static> {
    let limits = Limits {
        max_len: 2048,
        max_rollback: 256,
        ..Limits::default()
    };
    ChatSession::new(tiny(), settings, limits).unwrap()
}

/// An answer, and how many tokens were read for it.
fn ask(chat: &mut ChatSession<'_>, question: &str) -> (Answer, usize) {
    let turn = chat
        .send([user(question)], &GenerateOptions::default())
        .unwrap();
    let usage = turn.prompt_usage();
    (
        turn.finish().unwrap(),
        usage.prompt_tokens - usage.prompt_cache_hit_tokens,
    )
}

/// Ids of the whole conversation, rendered and encoded afresh, without the header for another answer.
fn afresh(chat: &ChatSession<'_>) -> Vec<u32> {
    let prompt = chat.template().render(chat.conversation(), None).unwrap();
    prompt.ids[..prompt.ids.len() - 2].to_vec()
}

/// What the model says after a prompt, from empty caches.
fn from_nothing(prompt: &[u32]) -> Vec<u32> {
    let prompt = Prompt::Ids(prompt.to_vec());
    let mut generation = tiny()
        .generate(prompt, &GenerateOptions::default())
        .unwrap();
    for event in &mut generation {
        event.unwrap();
    }
    generation.generated().to_vec()
}

const QUESTIONS: [&str; 4] = [
    "What is a lantern?",
    "What is 3 + 4?",
    "Tell me a story.",
    "What is a kite?",
];

#[test]
fn only_what_is_new_is_read() {
    let mut chat = session(Conversation {
        messages: vec![system("You answer questions.")],
        ..settings(false)
    });
    for (i, question) in QUESTIONS.into_iter().enumerate() {
        let before = chat.token_ids().len();
        let (answer, read) = ask(&mut chat, question);
        assert!(!answer.content.is_empty(), "{question}");
        let asked = tiny()
            .tokenizer()
            .encode(question, AddedTokens::AsText)
            .unwrap()
            .len();
        // User, question, header; of the earlier answer only the end-of-text token.
        assert_eq!(
            read,
            asked + 3 + if i == 0 { before + read - asked - 3 } else { 1 }
        );
        assert_eq!(chat.turns(), i + 1);
    }
    // This tokenizer encodes its own text as the model wrote it.
    assert_eq!(chat.token_ids(), afresh(&chat));
}

#[test]
fn the_caches_change_nothing() {
    for thinking in [false, true] {
        let mut chat = session(settings(thinking));
        for question in QUESTIONS {
            let history = chat.token_ids().to_vec();
            ask(&mut chat, question);
            let whole = chat.template().render(chat.conversation(), None).unwrap();
            assert!(whole.ids.starts_with(&history));
            // The prompt of this turn, run from nothing.
            let mut conversation = chat.conversation().clone();
            let Some(InputMessage::Assistant {
                content,
                reasoning_content,
                ..
            }) = conversation.messages.pop()
            else {
                panic!("an answer was expected")
            };
            let prompt = chat.template().render(&conversation, None).unwrap();
            let generated = from_nothing(&prompt.ids);
            let text = tiny().tokenizer();
            let want = match reasoning_content {
                Some(reasoning) => format!("{reasoning}</think>{content}"),
                None => content,
            };
            let eos = tiny().special_ids().eos;
            let body = generated.strip_suffix(&[eos]).unwrap_or(&generated);
            assert_eq!(
                text.decode(body, deepseek_v41::SpecialTokens::Keep)
                    .unwrap(),
                want
            );
        }
    }
}

#[test]
fn reasoning_is_dropped_once_it_has_been_answered_to() {
    let mut chat = session(settings(true)).with_effort(Effort::new(75).unwrap());
    let mut known = 1;
    for question in QUESTIONS {
        let turn = chat
            .send([user(question)], &GenerateOptions::default())
            .unwrap();
        let usage = turn.prompt_usage();
        assert!(!turn.finish().unwrap().reasoning.is_empty(), "{question}");
        // Of the turn before, the last answer is read again and nothing of its prompt but `<think>`,
        // which has become `</think>`.
        assert_eq!(usage.prompt_cache_hit_tokens, known - 1);
        known = usage.prompt_tokens;
        assert_eq!(chat.token_ids(), afresh(&chat), "{question}");
    }
}

#[test]
fn with_tools_reasoning_stays() {
    let tool = ToolDefinition {
        name: "weather".into(),
        description: None,
        parameters: json!({"type": "object"}),
        strict: None,
        defer_loading: false,
    };
    let mut chat = session(Conversation {
        tools: vec![tool],
        ..settings(true)
    });
    for (i, question) in QUESTIONS[..2].iter().enumerate() {
        let (answer, read) = ask(&mut chat, question);
        assert!(i == 0 || read < 30, "{read}");
        assert_eq!(chat.token_ids(), afresh(&chat), "{answer:?}");
    }
}

#[test]
fn undo_goes_back_to_before() {
    let mut chat = session(settings(false));
    let first = ask(&mut chat, QUESTIONS[0]).0;
    let history = chat.token_ids().to_vec();
    let (second, read) = ask(&mut chat, QUESTIONS[1]);
    assert!(chat.undo().unwrap());
    assert_eq!((chat.turns(), chat.token_ids()), (1, &history[..]));
    // The same again, and no dearer: the caches were taken back, not emptied. The end of the first
    // answer has been read by now.
    let (again, read_again) = ask(&mut chat, QUESTIONS[1]);
    assert_eq!((&again, read_again), (&second, read - 1));
    assert!(chat.undo().unwrap() && chat.undo().unwrap());
    assert!(!chat.undo().unwrap());
    assert!(chat.token_ids().is_empty() && chat.conversation().messages.is_empty());
    assert_eq!(ask(&mut chat, QUESTIONS[0]).0, first);
}

#[test]
fn undo_further_than_the_slack() {
    let limits = Limits {
        max_len: 2048,
        max_rollback: 4,
        ..Limits::default()
    };
    let mut chat = ChatSession::new(tiny(), settings(false), limits).unwrap();
    ask(&mut chat, QUESTIONS[0]);
    let second = ask(&mut chat, QUESTIONS[1]).0;
    ask(&mut chat, QUESTIONS[2]);
    assert!(chat.undo().unwrap() && chat.undo().unwrap());
    assert_eq!(ask(&mut chat, QUESTIONS[1]).0, second);
}

#[test]
fn pictures_in_a_conversation() {
    let limits = Limits {
        max_len: 2048,
        max_rollback: 4,
        ..Limits::default()
    };
    let mut chat = ChatSession::new(tiny(), settings(false), limits).unwrap();
    let options = GenerateOptions::default();
    let look = |chat: &mut ChatSession<'_>| {
        let message = chat
            .template()
            .user_with_images([picture()], "What is in the picture?");
        chat.send([message], &options)
            .unwrap()
            .finish()
            .unwrap()
            .content
    };
    let want = "A red circle on a white background.";
    assert_eq!(look(&mut chat), want);
    ask(&mut chat, QUESTIONS[0]);
    assert!(!look(&mut chat).is_empty());
    // Further back than the slack: the pictures before are run again from what is kept of them.
    assert!(chat.undo().unwrap() && chat.undo().unwrap());
    let after = ask(&mut chat, QUESTIONS[0]).0;
    assert!(chat.undo().unwrap());
    assert_eq!(ask(&mut chat, QUESTIONS[0]).0, after);
    assert!(chat.undo().unwrap() && chat.undo().unwrap());
    assert_eq!(look(&mut chat), want);
    // A picture that is none: nothing was said.
    let message = chat.template().user_with_images([b"no".to_vec()], "?");
    let err = chat.send([message], &options).err().unwrap();
    assert!(matches!(err, ChatError::Image(_)), "{err}");
    assert_eq!((chat.turns(), chat.conversation().messages.len()), (1, 2));
}

#[test]
fn a_turn_that_is_dropped() {
    let mut chat = session(settings(false));
    let options = GenerateOptions::default();
    // Before its first token it never happened.
    drop(chat.send([user(QUESTIONS[0])], &options).unwrap());
    assert_eq!((chat.turns(), chat.token_ids().len()), (0, 0));
    // Later it ends where it is.
    let mut turn = chat.send([user(QUESTIONS[0])], &options).unwrap();
    while turn.answer().content.len() < 12 {
        turn.next().unwrap().unwrap();
    }
    drop(turn);
    let Some(InputMessage::Assistant { content, .. }) = chat.conversation().messages.last() else {
        panic!("an answer was expected")
    };
    assert!("A lantern is a lamp that you can carry.".starts_with(content) && content.len() >= 12);
    assert_eq!(chat.token_ids(), afresh(&chat));
    assert!(!ask(&mut chat, QUESTIONS[1]).0.content.is_empty());
}

#[test]
fn answers_that_are_cut_short() {
    let mut chat = session(settings(false));
    let short = GenerateOptions {
        max_tokens: 4,
        ..GenerateOptions::default()
    };
    let answer = chat
        .send([user(QUESTIONS[0])], &short)
        .unwrap()
        .finish()
        .unwrap();
    assert_eq!(answer.finish_reason, Some(FinishReason::Length));
    assert_eq!(chat.token_ids(), afresh(&chat));
    // What a stop sequence ended goes on without it.
    let stop = GenerateOptions {
        stop: vec!["lamp".into()],
        ..GenerateOptions::default()
    };
    assert!(chat.undo().unwrap());
    let answer = chat
        .send([user(QUESTIONS[0])], &stop)
        .unwrap()
        .finish()
        .unwrap();
    assert_eq!(answer.content, "A lantern is a ");
    assert_eq!(answer.stop_sequence.as_deref(), Some("lamp"));
    assert_eq!(chat.token_ids(), afresh(&chat));
    // Thinking that never ended.
    let mut chat = session(settings(true));
    let answer = chat
        .send([user(QUESTIONS[1])], &short)
        .unwrap()
        .finish()
        .unwrap();
    assert!(!answer.reasoning.is_empty() && answer.content.is_empty());
    assert_eq!(chat.token_ids(), afresh(&chat));
    assert!(!ask(&mut chat, QUESTIONS[0]).0.content.is_empty());
}

#[test]
fn what_cannot_be_said() {
    let mut chat = session(settings(false));
    let options = GenerateOptions::default();
    let answer = InputMessage::Assistant {
        content: "x".into(),
        reasoning_content: None,
        tool_calls: None,
        prefix: false,
    };
    for messages in [vec![], vec![answer.clone()], vec![user("a"), answer]] {
        let err = chat.send(messages, &options).err().unwrap();
        assert!(
            matches!(err, ChatError::Model(Error::Value { .. })),
            "{err}"
        );
    }
    let err = chat
        .send([user("a kite ".repeat(2000))], &options)
        .err()
        .unwrap();
    assert!(
        matches!(err, ChatError::Model(Error::Capacity { .. })),
        "{err}"
    );
    assert_eq!((chat.turns(), chat.conversation().messages.len()), (0, 0));
    assert!(!ask(&mut chat, QUESTIONS[0]).0.content.is_empty());
}
