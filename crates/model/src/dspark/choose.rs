//! From a block's logits to its tokens: each position's choice is the next one's bias.

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Best, Error, Result, argmax, upload};

use super::{ChooseToken, DSpark, Draft, DraftRequest, Hidden};

impl DSpark {
    /// The embeddings `[blocks, rank]` of the tokens `before`, and in `bias` what they add to the logits,
    /// `[blocks * vocab_size]`.
    fn bias(&self, before: &[u32], bias: &mut Vec<f32>) -> Result<Tensor> {
        let embed = self.markov_embed.forward(before)?;
        if embed.device().is_cpu() {
            let values = embed.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            bias.resize(before.len() * self.cfg.vocab_size, 0.0);
            self.markov_head
                .forward_values_f32(&values, before.len(), bias)?;
        } else {
            *bias = self.markov_head.forward(&embed)?.flatten_all()?.to_vec1()?;
        }
        Ok(embed)
    }

    /// Chooses the tokens of all blocks, position by position: each position's logits get a bias
    /// from the token before it.
    pub(super) fn tokens(
        &self,
        requests: &[DraftRequest],
        hidden: Option<Hidden>,
        choose: &mut ChooseToken<'_>,
    ) -> Result<Vec<Option<Draft>>> {
        let Some(Hidden { xs, logits }) = hidden else {
            return Ok(vec![None; requests.len()]);
        };
        let mut logits = logits.to_vec2::<f32>()?;
        let size = self.block_size();
        let mut before: Vec<u32> = requests.iter().filter_map(|r| r.next).collect();
        let blocks = before.len();
        let drafting: Vec<usize> = (0..requests.len())
            .filter(|i| requests[*i].next.is_some())
            .collect();
        let mut tokens = vec![Vec::with_capacity(size); blocks];
        let mut embeds = Vec::with_capacity(size);
        let mut bias = Vec::new();
        for i in 0..size {
            embeds.push(self.bias(&before, &mut bias)?);
            for (b, bias) in bias.chunks_exact(self.cfg.vocab_size).enumerate() {
                let row = &mut logits[b * size + i];
                row.iter_mut().zip(bias).for_each(|(l, b)| *l += b);
                before[b] = choose(drafting[b], i, row)?;
                tokens[b].push(before[b]);
            }
        }
        let confidence = self.confidences(&xs, &embeds)?;
        let mut drafts = vec![None; requests.len()];
        let mut logits = logits.into_iter();
        for (b, tokens) in tokens.into_iter().enumerate() {
            drafts[drafting[b]] = Some(Draft {
                tokens,
                logits: logits.by_ref().take(size).collect(),
                confidence: confidence[b * size..(b + 1) * size].to_vec(),
            });
        }
        Ok(drafts)
    }

    /// [`DSpark::tokens`] where the logits are: each position's choice is the next one's input there.
    pub(super) fn best_tokens(
        &self,
        requests: &[DraftRequest],
        hidden: Option<Hidden>,
    ) -> Result<Vec<Option<Draft>>> {
        let Some(Hidden { xs, logits }) = hidden else {
            return Ok(vec![None; requests.len()]);
        };
        let size = self.block_size();
        let first: Vec<u32> = requests.iter().filter_map(|r| r.next).collect();
        let blocks = first.len();
        let logits = logits.reshape((blocks, size, ()))?;
        let mut before = upload(first, blocks, &self.device)?;
        let (mut embeds, mut codes) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for i in 0..size {
            let embed = self.markov_embed.copies(&before, 1)?.squeeze(1)?;
            let bias = self.markov_head.forward(&embed)?;
            before = argmax(&(logits.narrow(1, i, 1)?.squeeze(1)? + bias)?)?;
            embeds.push(embed);
            codes.push(before.clone());
        }
        let confidence = self.confidences(&xs, &embeds)?;
        let codes = Tensor::stack(&codes, 1)?.to_vec2::<u32>()?;
        let mut chosen = codes.into_iter().zip(confidence.chunks_exact(size));
        let draft = |request: &DraftRequest| {
            let Some((codes, confidence)) = request.next.and_then(|_| chosen.next()) else {
                return Ok(None);
            };
            let tokens = codes.into_iter().map(|code| most_likely(Best::of(code)));
            Ok(Some(Draft {
                tokens: tokens.collect::<Result<_>>()?,
                logits: Vec::new(),
                confidence: confidence.to_vec(),
            }))
        };
        requests.iter().map(draft).collect()
    }

    /// Block by block, from the blocks `xs` and each position's embeddings `[blocks, rank]`.
    fn confidences(&self, xs: &Tensor, embeds: &[Tensor]) -> Result<Vec<f32>> {
        // `[size, blocks, rank]` → the rows' own order, block by block.
        let embeds = Tensor::stack(embeds, 1)?.flatten(0, 1)?;
        let hidden = Tensor::cat(&[xs, &embeds], 1)?;
        Ok(self.confidence.forward(&hidden)?.flatten_all()?.to_vec1()?)
    }
}

/// The token of a drafted position, chosen from logits without a hook or a mask.
///
/// # Errors
/// [`Error::Value`]: nothing can be chosen.
pub fn most_likely(best: Best) -> Result<u32> {
    match best {
        Best::Token(token) => Ok(token),
        Best::Unusable(token) => Err(Error::value(
            "draft logits",
            format!("NaN or +inf for token {token}"),
        )),
        Best::Impossible => Err(Error::value("draft logits", "no token is possible")),
    }
}
