//! What goes into a forward pass and what comes out.

use candle_core::Tensor;

use crate::SequenceId;

/// The next tokens of one sequence. They continue where the sequence stands: prefill is a chunk on
/// an empty sequence, decode a chunk of one.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// The sequence they belong to.
    pub seq: SequenceId,
    /// Token ids, possibly none.
    pub token_ids: Vec<u32>,
    /// Image spans inside the chunk, in ascending order without overlap.
    pub images: Vec<ImageSpan>,
}

impl Chunk {
    /// A chunk of text.
    pub fn text(seq: SequenceId, token_ids: impl Into<Vec<u32>>) -> Self {
        Self {
            seq,
            token_ids: token_ids.into(),
            images: Vec::new(),
        }
    }
}

/// Positions of a chunk whose embeddings come from a picture. They use the routing bias for images
/// and take no part in n-grams.
#[derive(Debug, Clone)]
pub struct ImageSpan {
    /// Offset of the first position in the chunk.
    pub start: usize,
    /// `[n, dim]` bf16: the rows that take the place of the embeddings.
    pub rows: Tensor,
}

/// Which tokens' logits a forward pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogitRows {
    /// The last token of every chunk that has tokens, in chunk order.
    #[default]
    Last,
    /// Every token.
    All,
    /// None: the pass only fills the caches.
    None,
    /// The last `n` tokens of every chunk, all of a shorter one.
    Newest(usize),
}

/// A step: chunks of different sequences, at whatever position each stands.
#[derive(Debug, Clone, Default)]
pub struct ForwardBatch {
    /// At most one chunk a sequence.
    pub chunks: Vec<Chunk>,
    /// Which rows to turn into logits.
    pub logits: LogitRows,
    /// Whether to return what the draft head needs.
    pub target_hidden: bool,
    /// Whether to return the most likely token of each row.
    pub best: bool,
}

impl ForwardBatch {
    /// One chunk of text; logits of its last token.
    pub fn one(seq: SequenceId, token_ids: impl Into<Vec<u32>>) -> Self {
        Self {
            chunks: vec![Chunk::text(seq, token_ids)],
            ..Self::default()
        }
    }

    /// Tokens of all chunks, `T`.
    pub fn tokens(&self) -> usize {
        self.chunks.iter().map(|c| c.token_ids.len()).sum()
    }
}

/// The result of a forward pass.
#[derive(Debug, Clone)]
pub struct ForwardOutput {
    /// `[rows, vocab_size]` f32, rows as [`LogitRows`] asks.
    pub logits: Tensor,
    /// `[T, targets * dim]` bf16 when asked for: for each draft target layer in order, the mean over
    /// the copies of its input stream.
    pub target_hidden: Option<Tensor>,
    /// `[rows]` u32 when asked for: codes of the most likely tokens, as [`argmax`](deepseek_v41_core::argmax)
    /// gives them.
    pub best: Option<Tensor>,
}
