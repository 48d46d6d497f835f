//! Requests of an API protocol.

use std::marker::PhantomData;

use deepseek_recipe::{
    request::{
        ConversationRequest, ConversionError, ConversionOptions, ModelVersion, ProtocolRequest,
    },
    response::{Accumulate, ProtocolResponse},
    stream::PromptUsage,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    AnswerParser, ChatError, ChatGeneration, ChatPrompt, ChatTemplate, Effort, EffortNames,
};
use crate::{DeepSeekV41, GenerateOptions, Prompt, SamplingParams};

/// A request that has been read and rendered.
#[derive(Debug)]
pub struct ChatRequest<R> {
    /// Conversation, parameters and how to parse the answer.
    pub request: ConversationRequest,
    /// The conversation as a prompt.
    pub prompt: ChatPrompt,
    /// What the prompt library has no place for.
    pub controls: Controls,
    protocol: PhantomData<fn() -> R>,
}

/// Fields of a request that the prompt library does not pass on.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Controls {
    /// Subtracted from the logits of tokens generated before.
    pub presence_penalty: Option<f32>,
    /// Subtracted once for every time they were.
    pub frequency_penalty: Option<f32>,
    /// Divides the logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
    /// Keeps the most probable tokens.
    pub top_k: Option<usize>,
    /// Keeps tokens at least this fraction as probable as the best.
    pub min_p: Option<f32>,
    /// A reasoning effort given as a number.
    #[serde(skip)]
    pub effort: Option<Effort>,
}

/// The chunks of a protocol.
type Generator<R> = <<R as ProtocolRequest>::Response as ProtocolResponse>::ChunkGenerator;

impl ChatTemplate {
    /// Reads and renders a request.
    ///
    /// # Errors
    /// [`ChatError::Request`] for what the protocol does not allow, and as [`ChatTemplate::render`].
    pub fn prepare<R: ProtocolRequest>(
        &self,
        request: R,
        options: ConversionOptions,
        controls: Controls,
    ) -> Result<ChatRequest<R>, ChatError> {
        let request = request.convert(options)?;
        if request.model_version != ModelVersion::DeepseekV41Flash {
            let detail = "this server has no model of that version";
            return Err(ConversionError::bad_request(detail).into());
        }
        let prompt = self.render(&request.conversation, controls.effort)?;
        Ok(ChatRequest {
            request,
            prompt,
            controls,
            protocol: PhantomData,
        })
    }

    /// [`ChatTemplate::prepare`] from JSON, with the [`Controls`] it holds.
    ///
    /// # Errors
    /// Also [`ChatError::Json`], and [`ChatError::Effort`] for a number that is no effort.
    pub fn prepare_json<R: ProtocolRequest + DeserializeOwned>(
        &self,
        json: &str,
        options: ConversionOptions,
    ) -> Result<ChatRequest<R>, ChatError> {
        let mut value: Value = serde_json::from_str(json)?;
        let effort = take_numeric_effort(&mut value)?;
        let controls = Controls {
            effort,
            ..Controls::deserialize(&value)?
        };
        self.prepare(serde_json::from_value::<R>(value)?, options, controls)
    }
}

/// Takes an effort that is not a name out of the places where the protocols have it.
fn take_numeric_effort(request: &mut Value) -> Result<Option<Effort>, ChatError> {
    for place in [
        "/reasoning_effort",
        "/reasoning/effort",
        "/output_config/effort",
    ] {
        match request.pointer_mut(place) {
            // Names are the prompt library's to read; it knows more of them.
            None | Some(Value::String(_) | Value::Null) => {}
            Some(found) => {
                let effort = EffortNames::Publisher.from_json(found)?;
                // Any name: thinking is on then, and the number is what is stated.
                *found = Value::from("high");
                return Ok(Some(effort));
            }
        }
    }
    Ok(None)
}

impl<R: ProtocolRequest> ChatRequest<R>
where
    <Generator<R> as deepseek_recipe::stream::ChunkGenerator>::Chunk: Send,
{
    /// The generation the request asks for, after a prompt of `prompt_tokens` in a context of `context`.
    ///
    /// By the rules of the publisher's service: while thinking the temperature is always 1 and top-p at
    /// least 0.95. Stop sequences are the parser's business and not among them.
    ///
    /// # Errors
    /// [`ChatError::Request`] when prompt and answer do not fit the context.
    pub fn options(
        &self,
        prompt_tokens: usize,
        context: usize,
    ) -> Result<GenerateOptions, ChatError> {
        let tokens = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let max_tokens = self
            .request
            .resolve_max_tokens(tokens(prompt_tokens), tokens(context))?;
        let (asked, controls) = (&self.request.inference_options, self.controls);
        let sampling = SamplingParams {
            temperature: asked.temperature.unwrap_or(1.0),
            top_p: asked.top_p.unwrap_or(1.0),
            top_k: controls.top_k.unwrap_or(0),
            min_p: controls.min_p.unwrap_or(0.0),
            repetition_penalty: controls.repetition_penalty.unwrap_or(1.0),
            presence_penalty: controls.presence_penalty.unwrap_or(0.0),
            frequency_penalty: controls.frequency_penalty.unwrap_or(0.0),
            seed: asked.seed,
            logprobs: asked.logprobs,
            top_logprobs: asked.top_logprobs.map_or(0, usize::from),
            ..SamplingParams::default()
        };
        Ok(GenerateOptions {
            sampling,
            max_tokens: max_tokens as usize,
            ..Default::default()
        })
    }

    /// Answers in the protocol's chunks. `id` names the response and `name` is what it calls the model;
    /// `adjust` may change the options, for a smaller context or drafts.
    ///
    /// # Errors
    /// As [`ChatPrompt::to_prompt`] and [`ChatRequest::options`]. What goes wrong later arrives as an
    /// item of the iterator.
    pub fn generate<'m>(
        &self,
        model: &'m DeepSeekV41,
        id: impl Into<String>,
        name: impl Into<String>,
        adjust: impl FnOnce(&mut GenerateOptions),
    ) -> Result<ChatGeneration<'m, 'm, Generator<R>>, ChatError> {
        let prompt = self.prompt.to_prompt(model)?;
        let prompt_tokens = match &prompt {
            Prompt::Ids(ids) | Prompt::WithImages { ids, .. } => ids.len(),
            _ => self.prompt.ids.len(),
        };
        let mut options = self.options(prompt_tokens, model.config().max_position_embeddings)?;
        adjust(&mut options);
        let generator = R::chunk_generator(&self.request, id.into(), name.into());
        let parsing = self.request.parsing_options.clone();
        let parser = AnswerParser::new(model.tokenizer(), generator, parsing);
        let usage = PromptUsage {
            prompt_tokens,
            prompt_cache_hit_tokens: 0,
        };
        let generation = model.generate(prompt, &options)?;
        ChatGeneration::new(generation, &options, model.special_ids().eos, parser, usage)
    }

    /// Chunks of an answer put together: the response of a request that does not stream. `created` is in
    /// seconds since 1970.
    ///
    /// # Errors
    /// The first error among the chunks.
    pub fn collect(
        &self,
        chunks: ChatGeneration<'_, '_, Generator<R>>,
        id: impl Into<String>,
        name: impl Into<String>,
        created: u64,
    ) -> Result<R::Response, ChatError> {
        let prompt_tokens = chunks.usage.prompt_tokens;
        let mut response = R::Response::new(id.into(), name.into(), created, prompt_tokens, 0);
        for chunk in chunks {
            response.accumulate(chunk?);
        }
        Ok(response)
    }
}
