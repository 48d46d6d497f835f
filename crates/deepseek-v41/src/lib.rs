#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

#[cfg(feature = "chat")]
pub mod chat;
mod continuation;
pub mod engine;
mod event;
mod generate;
#[cfg(feature = "llguidance")]
pub mod grammar;
#[cfg(feature = "vision")]
mod images;
mod load;
mod options;
mod prompt;
pub mod sampling;
mod session;
pub mod speculative;
mod stop;
mod text_stream;
mod token_map;
pub mod tokenizer;

pub use deepseek_v41_attention as attention;
pub use deepseek_v41_core as core;
pub use deepseek_v41_core::{Error, LoadPolicy, Result, WeightError, Weights};
pub use deepseek_v41_engram as engram;
pub use deepseek_v41_hyperconn as hyperconn;
pub use deepseek_v41_model as model;
pub use deepseek_v41_moe as moe;
pub use deepseek_v41_quant as quant;
#[cfg(feature = "vision")]
pub use deepseek_v41_vision as vision;
pub use event::{Event, FinishReason, Usage};
pub use generate::Generation;
#[cfg(feature = "vision")]
pub use images::{ImagePrompt, Vision};
pub use load::{DeepSeekV41, LoadOptions, SpecialIds};
pub use options::{GenerateOptions, Speculation};
pub use prompt::Prompt;
pub use sampling::{LogitsHook, Sampled, Sampler, SamplingParams, TokenHistory, TokenLogprob};
pub use session::Session;
pub use stop::{StopStrings, Stopped};
pub use text_stream::TextStream;
pub use token_map::{compressed_token_map, token_map};
pub use tokenizer::{AddedTokens, SpecialTokens, Tokenizer};
