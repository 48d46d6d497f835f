//! What a generation gives.

use crate::sampling::Sampled;

/// What happens in a generation.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A token was chosen.
    Token(Sampled),
    /// Text is complete: whole characters, and no part of a stop string. Follows the token that
    /// completed it.
    Text(String),
    /// The end; nothing follows.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose the end-of-text token or one of `stop_ids`.
    StopToken(u32),
    /// One of the stop strings occurred.
    StopString(String),
    /// `max_tokens` were generated.
    MaxTokens,
    /// The sequence has no room for another token.
    ContextFull,
    /// The callback of [`Generation::on_prefill`](crate::Generation::on_prefill) asked for it. The text ends behind the pieces of the
    /// prompt that were run; a session can go on from there.
    Cancelled,
}

/// Tokens of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens run before the first one was chosen.
    pub prompt_tokens: usize,
    /// Tokens chosen, a stop token included.
    pub completion_tokens: usize,
}
