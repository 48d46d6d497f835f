//! From logits to a token.
//!
//! Logits are changed in this order:
//!
//! 1. `logit_bias` is added;
//! 2. repetition penalty (prompt and generated tokens), then frequency and presence penalty (generated
//!    tokens);
//! 3. [`LogitsHook`]s, in the order in which they were added: they have the last word on the logits;
//! 4. temperature 0 takes the largest logit, the lowest index among equals, and is done;
//! 5. division by the temperature;
//! 6. `top_k` keeps the k largest, lower indices first among equals;
//! 7. `top_p` keeps the fewest of the largest whose probabilities, renormalised over what `top_k` left,
//!    reach p;
//! 8. `min_p` keeps those at least `min_p` times as probable as the most probable one;
//! 9. what is left is renormalised and one token drawn: `argmax(p / Exp(1))`, with a fresh exponential
//!    draw for every token left, which is the Gumbel trick in the form the reference uses.
//!
//! The most probable token always survives 6 to 8. A NaN or +inf among the logits, before or after the
//! edits, or nothing but -inf, is an error and never a token.

mod filter;
mod params;
mod rows;
mod sampler;

pub use filter::probs;
pub use params::SamplingParams;
pub(crate) use rows::Rows;
pub use sampler::{LogitsHook, Sampled, Sampler, TokenLogprob};

/// The tokens penalties look at.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenHistory<'a> {
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// Tokens generated since.
    pub generated: &'a [u32],
}
