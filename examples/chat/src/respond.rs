//! A request in, a response out, in any of three protocols.

use std::{
    io::Write,
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

use deepseek_v41::{
    DeepSeekV41, Error,
    chat::{
        ChatError,
        recipe::{
            anthropic::MessagesRequest,
            openai::{ChatCompletionRequest, ResponsesRequest},
            request::ProtocolRequest,
            response::ProtocolResponse,
            stream::ChunkGenerator,
        },
    },
};
use serde::{Serialize, de::DeserializeOwned};

/// An API protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// OpenAI's Chat Completions.
    #[default]
    Chat,
    /// Anthropic's Messages.
    Messages,
    /// OpenAI's Responses.
    Responses,
}

impl FromStr for Protocol {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "chat" => Ok(Self::Chat),
            "messages" => Ok(Self::Messages),
            "responses" => Ok(Self::Responses),
            _ => Err(format!("{name}: expected chat, messages or responses")),
        }
    }
}

/// Answers a request: one JSON object, or server-sent events if the request asks for a stream.
///
/// `names` are what the request may call the model, besides the published name.
///
/// # Errors
/// A request that cannot be answered, a model that fails, or a closed output.
pub fn respond(
    model: &DeepSeekV41,
    protocol: Protocol,
    names: &[String],
    json: &str,
    out: &mut impl Write,
) -> Result<(), ChatError> {
    match protocol {
        Protocol::Chat => answer::<ChatCompletionRequest, _>(model, names, json, out),
        Protocol::Messages => answer::<MessagesRequest, _>(model, names, json, out),
        Protocol::Responses => answer::<ResponsesRequest, _>(model, names, json, out),
    }
}

/// A chunk of a protocol.
type Chunk<R> =
    <<<R as ProtocolRequest>::Response as ProtocolResponse>::ChunkGenerator as ChunkGenerator>::Chunk;

fn answer<R, W>(
    model: &DeepSeekV41,
    names: &[String],
    json: &str,
    out: &mut W,
) -> Result<(), ChatError>
where
    R: ProtocolRequest + DeserializeOwned,
    Chunk<R>: Serialize + Send,
    W: Write,
{
    let template = model.chat_template();
    let request = template.prepare_json::<R>(json, template.conversion_options(names))?;
    let created = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |t| t.as_secs());
    let (id, name) = (format!("resp-{created}"), "deepseek-v41");
    let chunks = request.generate(model, &id, name, |_| {})?;
    if !request.request.stream {
        let response = request.collect(chunks, &id, name, created)?;
        return line(out, &serde_json::to_string_pretty(&response)?);
    }
    for chunk in chunks {
        let chunk = chunk?;
        if let Some(event) = R::Response::sse_event_name(&chunk) {
            line(out, &format!("event: {event}"))?;
        }
        line(out, &format!("data: {}\n", serde_json::to_string(&chunk)?))?;
        flush(out)?;
    }
    match R::Response::sse_done_data() {
        Some(done) => line(out, &format!("data: {done}\n")),
        None => Ok(()),
    }
}

fn line(out: &mut impl Write, text: &str) -> Result<(), ChatError> {
    writeln!(out, "{text}").map_err(|e| Error::io("the output", e).into())
}

fn flush(out: &mut impl Write) -> Result<(), ChatError> {
    out.flush().map_err(|e| Error::io("the output", e).into())
}
