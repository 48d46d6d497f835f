//! From a block's logits to its tokens: each position's choice is the next one's bias.

use candle_core::{DType, Tensor};
use deepseek_v41_core::{ArgmaxWork, Best, Error, Result, argmax_sum};

use super::{Blocks, ChooseToken, DSpark, Draft, DraftRequest};

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

    /// The drafts of what a pass came to.
    pub(super) fn drafts(
        &self,
        requests: &[DraftRequest],
        blocks: Option<Blocks>,
        choose: &mut ChooseToken<'_>,
    ) -> Result<Vec<Option<Draft>>> {
        match blocks {
            None => Ok(vec![None; requests.len()]),
            Some(Blocks::Hidden { xs, logits }) => self.tokens(requests, &xs, &logits, choose),
            Some(Blocks::Chosen { codes, confidence }) => {
                self.best_tokens(requests, &codes, &confidence)
            }
        }
    }

    /// Chooses the tokens of all blocks, position by position: each position's logits get a bias
    /// from the token before it.
    fn tokens(
        &self,
        requests: &[DraftRequest],
        xs: &Tensor,
        logits: &Tensor,
        choose: &mut ChooseToken<'_>,
    ) -> Result<Vec<Option<Draft>>> {
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
        let confidence = self.confidences(xs, &embeds)?.to_vec1::<f32>()?;
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

    /// Where the logits are, each position's most likely token: it is the next one's input there. `next` are
    /// the tokens before the first, `[blocks]` u32.
    pub(super) fn chosen(&self, next: &Tensor, xs: &Tensor, logits: &Tensor) -> Result<Blocks> {
        let size = self.block_size();
        let blocks = next.elem_count();
        let logits = logits.reshape((blocks, size, ()))?;
        let work = ArgmaxWork::new(blocks, &self.device)?;
        let mut before = next.clone();
        let (mut embeds, mut codes) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for i in 0..size {
            let embed = self.markov_embed.copies(&before, 1)?.squeeze(1)?;
            let bias = self.markov_head.forward(&embed)?;
            before = argmax_sum(&logits.narrow(1, i, 1)?.squeeze(1)?, &bias, &work)?;
            embeds.push(embed);
            codes.push(before.clone());
        }
        Ok(Blocks::Chosen {
            codes: Tensor::stack(&codes, 1)?,
            confidence: self.confidences(xs, &embeds)?,
        })
    }

    /// The drafts that were [`chosen`](Self::chosen).
    fn best_tokens(
        &self,
        requests: &[DraftRequest],
        codes: &Tensor,
        confidence: &Tensor,
    ) -> Result<Vec<Option<Draft>>> {
        let codes = codes.to_vec2::<u32>()?;
        let confidence = confidence.to_vec1::<f32>()?;
        let mut chosen = codes
            .into_iter()
            .zip(confidence.chunks_exact(self.block_size()));
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

    /// Block by block, `[blocks * block_size]` f32, from the blocks `xs` and each position's embeddings
    /// `[blocks, rank]`.
    fn confidences(&self, xs: &Tensor, embeds: &[Tensor]) -> Result<Tensor> {
        // `[size, blocks, rank]` → the rows' own order, block by block.
        let embeds = Tensor::stack(embeds, 1)?.flatten(0, 1)?;
        let hidden = Tensor::cat(&[xs, &embeds], 1)?;
        Ok(self.confidence.forward(&hidden)?.flatten_all()?)
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
