//! What is asked of a generation.

use crate::{
    sampling::SamplingParams,
    speculative::{DraftLength, PromptLookup},
};

/// How a text is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the text, besides the end-of-text token.
    pub stop_ids: Vec<u32>,
    /// Go on after the end-of-text token, for measurements.
    pub ignore_eos: bool,
    /// Longest piece of a prompt that is run at a time, in tokens. It bounds memory and how often
    /// progress is reported, and never changes a result.
    pub prefill_chunk: usize,
    /// Whether and how tokens are guessed ahead. Changes the speed and not the distribution; with
    /// temperature 0 not a single token.
    pub speculation: Speculation,
}

/// Where guesses come from.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Speculation {
    /// One token a pass.
    #[default]
    Off,
    /// The checkpoint's draft head.
    DraftHead(DraftLength),
    /// Earlier parts of the text itself.
    PromptLookup(PromptLookup),
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            sampling: SamplingParams::greedy(),
            max_tokens: 256,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            prefill_chunk: 512,
            speculation: Speculation::Off,
        }
    }
}
