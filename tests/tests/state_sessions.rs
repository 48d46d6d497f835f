//! Sessions: saved and restored, dropped and failed at any point.

use std::sync::OnceLock;

use deepseek_v41::{
    DeepSeekV41, Error, Event, GenerateOptions, Session, Speculation,
    core::SavedStateError,
    model::Limits,
    speculative::{DraftLength, PromptLookup},
};

fn tiny() -> &'static DeepSeekV41 {
    static MODEL: OnceLock<DeepSeekV41> = OnceLock::new();
    MODEL.get_or_init(|| DeepSeekV41::tiny().expect("the embedded model"))
}

fn options(speculation: Speculation) -> GenerateOptions {
    GenerateOptions {
        max_tokens: 24,
        ignore_eos: true,
        speculation,
        ..Default::default()
    }
}

fn ways() -> [GenerateOptions; 3] {
    [
        options(Speculation::Off),
        options(Speculation::DraftHead(DraftLength::Full)),
        options(Speculation::PromptLookup(PromptLookup {
            min_ngram: 1,
            ..Default::default()
        })),
    ]
}

fn session() -> Session<'static> {
    tiny()
        .session(Limits {
            max_len: 256,
            ..Limits::default()
        })
        .expect("a session")
}

/// Generates on and returns the tokens.
fn go_on(session: &mut Session<'_>, prompt: &str, options: &GenerateOptions) -> Vec<u32> {
    let events = session.generate(prompt, options).expect("a generation");
    let tokens = events.filter_map(|e| match e.expect("an event") {
        Event::Token(token) => Some(token.token),
        _ => None,
    });
    tokens.collect()
}

/// What a session with exactly this text says next.
fn fresh(ids: &[u32], options: &GenerateOptions) -> Vec<u32> {
    let events = tiny()
        .generate(ids.to_vec(), options)
        .expect("a generation");
    let tokens = events.filter_map(|e| match e.expect("an event") {
        Event::Token(token) => Some(token.token),
        _ => None,
    });
    tokens.collect()
}

#[test]
fn a_restored_session_goes_on_as_the_saved_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("session.safetensors");
    for options in ways() {
        let mut there = session();
        go_on(&mut there, "Once upon a time there was a fox", &options);
        there.save(&path).expect("saved");
        let limits = Limits {
            max_len: 256,
            ..Limits::default()
        };
        let mut back = Session::restore(tiny(), limits, &path).expect("restored");
        assert_eq!(
            back.token_ids().expect("ids"),
            there.token_ids().expect("ids")
        );
        let text = there.token_ids().expect("ids");
        let expected = go_on(&mut there, "", &options);
        assert_eq!(go_on(&mut back, "", &options), expected);
        assert_eq!(fresh(&text, &options), expected);
        // And further, into a rewind past what was saved: those tokens are run again.
        back.truncate(9).expect("rewound");
        assert_eq!(go_on(&mut back, "", &options), fresh(&text[..9], &options));
    }
    let err = Session::restore(
        tiny(),
        Limits {
            max_len: 8,
            ..Limits::default()
        },
        &path,
    );
    assert!(matches!(err.expect_err("too long"), Error::Capacity { .. }));
    std::fs::write(&path, "something else").expect("written");
    let err = Session::restore(tiny(), Limits::default(), &path).expect_err("no session");
    assert!(
        matches!(
            err,
            Error::SavedState {
                reason: SavedStateError::NotAState,
                ..
            }
        ),
        "{err}"
    );
}

#[test]
fn a_dropped_generation_ends_its_text_with_the_last_token_seen() {
    for options in ways() {
        for seen in 0..12 {
            let mut session = session();
            let mut tokens = Vec::new();
            let mut generation = session
                .generate("The hen said", &options)
                .expect("a generation");
            while tokens.len() < seen {
                match generation.next().expect("more").expect("an event") {
                    Event::Token(token) => tokens.push(token.token),
                    Event::Text(_) => {}
                    Event::Done { .. } => panic!("too early"),
                }
            }
            drop(generation);
            let text = session.token_ids().expect("ids");
            assert!(text.ends_with(&tokens), "{seen}");
            if seen > 0 {
                assert_eq!(
                    go_on(&mut session, "", &options),
                    fresh(&text, &options),
                    "{seen}"
                );
            }
        }
    }
}

#[test]
fn a_failed_choice_leaves_the_session_usable() {
    for options in ways() {
        for limit in 0..9 {
            let mut session = session();
            let mut generation = session
                .generate("A fox met", &options)
                .expect("a generation");
            generation
                .sampler()
                .add_hook(
                    move |generated: &[u32], _: &mut [f32]| match generated.len() < limit {
                        true => Ok(()),
                        false => Err(Error::value("hook", "enough")),
                    },
                );
            let (mut tokens, mut failed) = (0, false);
            for event in generation.by_ref() {
                assert!(!failed, "nothing follows an error");
                match event {
                    Ok(Event::Token(_)) => tokens += 1,
                    Ok(_) => {}
                    Err(err) => failed = err.to_string() == "hook: enough",
                }
            }
            assert!(failed && tokens == limit, "{tokens} of {limit}");
            drop(generation);
            let text = session.token_ids().expect("ids");
            // Without a token after the prompt there is nothing to go on from but new text.
            let prompt = if limit == 0 { " and" } else { "" };
            let said = go_on(&mut session, prompt, &options);
            let ids = session.token_ids().expect("ids");
            let start = &ids[..ids.len() - said.len()];
            assert!(start.starts_with(&text));
            assert_eq!(said, fresh(start, &options), "{limit}");
        }
    }
}
