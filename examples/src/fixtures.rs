//! The golden fixtures of the prompt format, in the prompt library's terms.

use deepseek_v41::chat::{
    Answer, AnswerParser, ChatError, ChatTemplate, Conversation, Effort, EffortNames, Events,
    InputMessage, Irregularity, OutputChunk, ParsingOptions,
    recipe::stream::{InferenceFinishReason, ThinkingInitialStage},
    recipe_core::{
        conversation::ResponseFormat, messages::ToolCall, multimodal::ImageSource, prompt::Prompt,
        special_tokens::SpecialToken, tools::ToolDefinition,
    },
};
use deepseek_v41::{AddedTokens, Result, Tokenizer};
use serde_json::Value;

/// Why a fixture cannot be said in the library's terms.
pub type Inexpressible = &'static str;

/// A string, or nothing.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Text and pictures of a message's content.
fn content(template: &ChatTemplate, value: &Value) -> (Prompt, Vec<ImageSource>) {
    if !value.is_array() {
        return (Prompt::plain(text(value)), Vec::new());
    }
    let mut images = Vec::new();
    let mut parts = Vec::new();
    for block in list(value) {
        if block["type"] == "text" {
            parts.push(Prompt::plain(text(&block["text"])));
            continue;
        }
        let url = block["image_url"]["url"].as_str();
        images.push(ImageSource::Bytes {
            data: url.or(block["data"].as_str()).unwrap_or_default().into(),
            detail: Default::default(),
            path: String::new(),
        });
        parts.push(Prompt::special(template.spelling(SpecialToken::Image)));
    }
    (Prompt::join(&parts, "\n\n"), images)
}

/// A fixture's conversation.
///
/// # Errors
/// What the library has no terms for.
pub fn conversation(
    template: &ChatTemplate,
    fixture: &Value,
) -> Result<Conversation, Inexpressible> {
    if !fixture["context"].is_null() {
        return Err("a history of which only the end is rendered");
    }
    if fixture["drop"] == false {
        return Err("earlier reasoning kept on request");
    }
    let mut out = Conversation {
        thinking_mode: fixture["mode"] == "thinking",
        ..Conversation::default()
    };
    for message in list(&fixture["messages"]) {
        if !message["task"].is_null() {
            return Err("a task's token in place of the header");
        }
        out.tools
            .extend(list(&message["tools"]).iter().map(|tool| ToolDefinition {
                name: text(&tool["function"]["name"]),
                description: tool["function"]["description"].as_str().map(str::to_owned),
                parameters: tool["function"]["parameters"].clone(),
                strict: None,
                defer_loading: false,
            }));
        if !message["response_format"].is_null() {
            out.response_format = ResponseFormat::JsonSchema(message["response_format"].clone());
        }
        out.messages.push(self::message(template, message)?);
    }
    Ok(out)
}

fn message(template: &ChatTemplate, message: &Value) -> Result<InputMessage, Inexpressible> {
    let (content, image_sources) = content(template, &message["content"]);
    Ok(match message["role"].as_str() {
        Some("system") => InputMessage::System {
            content,
            image_sources,
            tools: None,
        },
        Some("user") => InputMessage::User {
            content,
            image_sources,
        },
        Some("latest_reminder") => InputMessage::LatestReminder {
            content: content.to_string(),
        },
        Some("tool") => InputMessage::Tool {
            content,
            image_sources,
            tool_call_id: message["tool_call_id"].as_str().map(str::to_owned),
        },
        Some("assistant") => InputMessage::Assistant {
            content: content.to_string(),
            reasoning_content: message["reasoning_content"].as_str().map(str::to_owned),
            tool_calls: message["tool_calls"].as_array().map(|calls| {
                let call = |call: &Value| ToolCall {
                    id: text(&call["id"]),
                    name: text(&call["function"]["name"]),
                    arguments: text(&call["function"]["arguments"]),
                };
                calls.iter().map(call).collect()
            }),
            prefix: message["wo_eos"] == true,
        },
        _ => return Err("a role of another format"),
    })
}

/// A fixture's effort, if it states one.
pub fn effort(fixture: &Value) -> Option<Result<Effort, ChatError>> {
    let names = match fixture["table"] == "newer" {
        true => EffortNames::Newer,
        false => EffortNames::Publisher,
    };
    (!fixture["effort"].is_null()).then(|| names.from_json(&fixture["effort"]))
}

/// What the library appends to a fixture's prompt: a history that ends with an answer asks for another
/// one, and gets its header.
pub fn appended(fixture: &Value) -> &'static str {
    let last = list(&fixture["messages"]).last();
    match last {
        Some(last) if last["role"] == "assistant" && last["wo_eos"] != true => {
            "<｜Assistant｜></think>"
        }
        _ => "",
    }
}

/// How answers of a conversation with tools are read.
pub fn parsing(template: &ChatTemplate, thinking: bool) -> ParsingOptions {
    ParsingOptions {
        thinking_initial_stage: thinking.then_some(ThinkingInitialStage::ReasoningStart),
        special_tokens: std::sync::Arc::new(template.special_tokens().clone()),
        ..ParsingOptions::default()
    }
}

/// Reads an answer handed in in portions.
///
/// # Errors
/// What the parser refuses.
pub fn parse<'a>(
    tokenizer: &Tokenizer,
    options: &ParsingOptions,
    portions: impl IntoIterator<Item = &'a [u32]>,
    reason: Option<InferenceFinishReason>,
) -> Result<(Answer, Vec<Irregularity>), ChatError> {
    let mut parser = AnswerParser::new(tokenizer, Events, options.clone());
    let mut chunks: Vec<OutputChunk> = Vec::new();
    for ids in portions {
        chunks.extend(parser.push(ids)?);
    }
    chunks.extend(parser.finish(reason)?);
    let mut answer = Answer::default();
    answer.extend(&chunks);
    Ok((answer, parser.irregularities().to_vec()))
}

/// A fixture's answer, read to its end.
///
/// # Errors
/// A text that cannot be encoded, or what the parser refuses.
pub fn answer(
    template: &ChatTemplate,
    eos: u32,
    fixture: &Value,
) -> Result<(Answer, Vec<Irregularity>), ChatError> {
    let tokenizer = template.tokenizer();
    let ids = tokenizer.encode(&text(&fixture["text"]), AddedTokens::Recognise)?;
    let (ids, reason) = match ids.strip_suffix(&[eos]) {
        Some(ids) => (ids, Some(InferenceFinishReason::Stop)),
        None => (&ids[..], None),
    };
    let options = parsing(template, fixture["mode"] == "thinking");
    parse(tokenizer, &options, [ids], reason)
}
