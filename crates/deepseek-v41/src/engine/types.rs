//! What goes into an engine and what comes out.

use deepseek_v41_core::Result;
use deepseek_v41_model::Limits;

use crate::Event;

/// How much an [`Engine`](super::Engine) does at a time.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineLimits {
    /// Slots, the longest text, the slack of the rings (no draft is longer than that).
    pub state: Limits,
    /// Tokens in the caches of all slots together; at least `state.max_len`. Memory of CPU caches is
    /// committed as it is written, so this bounds it.
    pub kv_tokens: usize,
    /// Tokens of a step. Texts being generated always take part; prompts fill what they leave.
    pub step_tokens: usize,
    /// Shortest beginning worth keeping for other requests.
    pub min_prefix: usize,
    /// Passes a second with 0, 1, 2, … tokens, if measured: the draft lengths of a step are then
    /// chosen together for the best rate, see [`schedule`](crate::speculative::schedule). Drawn texts
    /// then come from the same distribution as alone, but are other texts.
    pub sps_by_batch: Vec<f64>,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            state: Limits {
                max_seqs: 8,
                ..Limits::default()
            },
            kv_tokens: usize::MAX,
            step_tokens: 512,
            min_prefix: 16,
            sps_by_batch: Vec::new(),
        }
    }
}

/// A request of one [`Engine`](super::Engine).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

/// Something happened to a request.
#[derive(Debug)]
pub struct Update {
    /// To which one.
    pub id: RequestId,
    /// What; nothing follows [`Event::Done`] or an error.
    pub event: Result<Event>,
}

/// What an engine has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Passes of the backbone.
    pub steps: usize,
    /// Tokens run in them, drafts included.
    pub tokens: usize,
    /// Most sequences in one pass.
    pub widest: usize,
    /// Guessed tokens among them.
    pub drafted: usize,
    /// Guessed tokens that stood.
    pub accepted: usize,
    /// Requests that began in a kept prefix.
    pub prefix_hits: usize,
    /// Tokens they did not have to run.
    pub prefix_tokens: usize,
    /// Prefixes given up for room.
    pub evictions: usize,
    /// Times a request lost its place and was computed again.
    pub preemptions: usize,
}
