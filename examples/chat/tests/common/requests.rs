//! Requests and their answers.

use deepseek_v41::chat::{ChatError, ChatRequest, recipe::openai::ChatCompletionRequest};
use deepseek_v41_examples_chat::respond::{Protocol, respond};
use serde_json::{Value, json};

use super::tiny;

pub(crate) const QUESTION: &str = "What is a lantern?";

pub(crate) const ANSWER: &str = "A lantern is a lamp that you can carry.";

pub(crate) fn run(protocol: Protocol, request: &Value) -> Result<String, ChatError> {
    let mut out = Vec::new();
    respond(
        tiny(),
        protocol,
        &["tiny".to_owned()],
        &request.to_string(),
        &mut out,
    )?;
    Ok(String::from_utf8(out).unwrap())
}

pub(crate) fn answer(protocol: Protocol, request: &Value) -> Value {
    serde_json::from_str(&run(protocol, request).unwrap()).unwrap()
}

pub(crate) fn chat(extra: Value) -> Value {
    let mut request = json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "thinking": {"type": "disabled"},
        "temperature": 0,
        "max_tokens": 64,
    });
    request
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    request
}

pub(crate) fn prepare(request: &Value) -> Result<ChatRequest<ChatCompletionRequest>, ChatError> {
    let template = tiny().chat_template();
    let options = template.conversion_options(["tiny"]);
    template.prepare_json(&request.to_string(), options)
}
