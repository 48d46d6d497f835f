//! What a pass says about the tokens that follow, as far as it is brought to the host.

use candle_core::Tensor;
use deepseek_v41_core::{Best, Result};
use deepseek_v41_model::ForwardOutput;

/// One entry a row, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rows {
    /// `[rows][vocab]`.
    Logits(Vec<Vec<f32>>),
    /// The most likely tokens.
    Best(Vec<u32>),
}

impl Rows {
    /// `n` rows from `first` on: tokens where the pass chose them and nothing stood in the way, else logits,
    /// from which the error is made as well.
    ///
    /// # Errors
    /// Rows that the pass does not have.
    pub(crate) fn of(out: &ForwardOutput, first: usize, n: usize, best: bool) -> Result<Self> {
        if let (true, Some(codes)) = (best, &out.best) {
            let codes = codes.narrow(0, first, n)?.to_vec1::<u32>()?;
            let tokens = codes.into_iter().map(|code| match Best::of(code) {
                Best::Token(token) => Some(token),
                Best::Unusable(_) | Best::Impossible => None,
            });
            if let Some(tokens) = tokens.collect() {
                return Ok(Self::Best(tokens));
            }
        }
        Self::logits(&out.logits, first, n)
    }

    fn logits(logits: &Tensor, first: usize, n: usize) -> Result<Self> {
        Ok(Self::Logits(logits.narrow(0, first, n)?.to_vec2()?))
    }
}
