//! What a pass says about the tokens that follow, as far as it is brought to the host.

use candle_core::Tensor;
use deepseek_v41_core::{Best, Result};
use deepseek_v41_model::ForwardOutput;

use super::{Sampler, sampler::Needs};

/// One entry a row, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rows {
    /// `[rows][vocab]`.
    Logits(Vec<Vec<f32>>),
    /// The tokens `sampler` would choose, already drawn.
    Chosen(Vec<u32>),
}

impl Rows {
    /// `n` rows from `first` on, for `sampler`: tokens where the device can choose them, else logits, from
    /// which the error is made as well.
    ///
    /// # Errors
    /// Rows that the pass does not have.
    pub(crate) fn of(
        out: &ForwardOutput,
        first: usize,
        n: usize,
        sampler: &mut Sampler,
    ) -> Result<Self> {
        let logits = out.logits.narrow(0, first, n)?;
        if let Some(codes) = &out.best {
            let codes = codes.narrow(0, first, n)?;
            let chosen = match sampler.needs() {
                Needs::Best => best(&codes)?,
                // Drafts of a distribution are judged by the whole of it.
                Needs::Draw if n == 1 => drawn(&logits, &codes, sampler)?,
                Needs::Draw | Needs::Logits => None,
            };
            if let Some(tokens) = chosen {
                return Ok(Self::Chosen(tokens));
            }
        }
        Ok(Self::Logits(logits.to_vec2()?))
    }
}

/// `None` if one of them is no token.
fn best(codes: &Tensor) -> Result<Option<Vec<u32>>> {
    let codes = codes.to_vec1::<u32>()?;
    let tokens = codes.into_iter().map(|code| match Best::of(code) {
        Best::Token(token) => Some(token),
        Best::Unusable(_) | Best::Impossible => None,
    });
    Ok(tokens.collect())
}

/// Draws a row where it is.
#[cfg(feature = "cuda")]
fn drawn(logits: &Tensor, codes: &Tensor, sampler: &mut Sampler) -> Result<Option<Vec<u32>>> {
    if !logits.device().is_cuda() {
        return Ok(None);
    }
    let rows = [sampler.draw_row()];
    let drawn = deepseek_v41_core::cuda::sample::sample(logits, codes, &rows)?;
    let tokens = drawn.into_iter().map(|row| {
        sampler.pass_over(row.numbers);
        row.token
    });
    Ok(tokens.collect())
}

#[cfg(not(feature = "cuda"))]
fn drawn(_: &Tensor, _: &Tensor, _: &mut Sampler) -> Result<Option<Vec<u32>>> {
    Ok(None)
}
