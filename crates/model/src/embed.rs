//! Token embeddings and the output head.

use candle_core::{DType, Device, Tensor};
#[cfg(feature = "cuda")]
use deepseek_v41_core::upload;
use deepseek_v41_core::{Error, RawTensor, Result, StoredDtype, VarBuilder};
use half::bf16;

use crate::{Chunk, Config};

/// The embedding table, read row by row from where it is stored.
#[derive(Debug, Clone)]
pub(crate) struct Embedding {
    rows: RawTensor,
    dim: usize,
    device: Device,
    /// `[vocab_size, dim]` bf16 on a GPU.
    #[cfg(feature = "cuda")]
    table: Option<Tensor>,
}

impl Embedding {
    /// Reads `weight: [vocab_size, dim]` bf16 under `vb`.
    pub(crate) fn new(vocab_size: usize, dim: usize, vb: VarBuilder) -> Result<Self> {
        let rows = vb.raw("weight", &[StoredDtype::BF16], &[vocab_size, dim])?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            table: vb
                .device()
                .is_cuda()
                .then(|| rows.to_tensor(vb.device()))
                .transpose()?,
            rows,
            dim,
            device: vb.device().clone(),
        })
    }

    /// `ids: [T]` → `[T, dim]` bf16.
    pub(crate) fn forward(&self, ids: &[u32]) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(table) = &self.table {
            return self.on_device(table, ids);
        }
        let mut out = Vec::with_capacity(ids.len() * self.dim);
        for &id in ids {
            self.push_row(id, &mut out)?;
        }
        Ok(Tensor::from_vec(out, (ids.len(), self.dim), &self.device)?)
    }

    /// Whether the table is on a GPU.
    pub(crate) fn is_on_device(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.table.is_some();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// `ids: [T]` u32 on a GPU, checked → `[T, copies, dim]` bf16, each row `copies` times.
    pub(crate) fn copies(&self, ids: &Tensor, copies: usize) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(table) = &self.table {
            return deepseek_v41_core::cuda::ops::embedding(ids, table, copies);
        }
        Err(Error::shape(
            "embedding",
            format!(
                "{copies} copies of {:?} without a table on a GPU",
                ids.shape()
            ),
        ))
    }

    /// The rows of all chunks end to end, those of image spans taken from the picture.
    pub(crate) fn forward_chunks(&self, chunks: &[Chunk]) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(table) = &self.table {
            return self.chunks_on_device(table, chunks);
        }
        let tokens: usize = chunks.iter().map(|c| c.token_ids.len()).sum();
        let mut out = Vec::with_capacity(tokens * self.dim);
        for chunk in chunks {
            let mut spans = chunk.images.iter().peekable();
            let mut at = 0;
            while at < chunk.token_ids.len() {
                match spans.next_if(|span| span.start == at && span.rows.dims()[0] > 0) {
                    Some(span) => {
                        let rows = span.rows.flatten_all()?.to_vec1::<bf16>()?;
                        at += rows.len() / self.dim;
                        out.extend(rows);
                    }
                    None => {
                        self.push_row(chunk.token_ids[at], &mut out)?;
                        at += 1;
                    }
                }
            }
        }
        Ok(Tensor::from_vec(out, (tokens, self.dim), &self.device)?)
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self, table: &Tensor, ids: &[u32]) -> Result<Tensor> {
        let vocab = self.rows.shape[0];
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(outside(*id, vocab));
        }
        if ids.is_empty() {
            return upload(Vec::<bf16>::new(), (0, self.dim), &self.device);
        }
        let ids = upload(ids.to_vec(), ids.len(), &self.device)?;
        Ok(deepseek_v41_core::cuda::ops::embedding(&ids, table, 1)?.squeeze(1)?)
    }

    /// Runs of tokens and pictures one after the other, nothing read back.
    #[cfg(feature = "cuda")]
    fn chunks_on_device(&self, table: &Tensor, chunks: &[Chunk]) -> Result<Tensor> {
        let (mut parts, mut run) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let mut at = 0;
            for span in chunk.images.iter().filter(|span| span.rows.dims()[0] > 0) {
                run.extend_from_slice(&chunk.token_ids[at..span.start]);
                if !run.is_empty() {
                    parts.push(self.on_device(table, &std::mem::take(&mut run))?);
                }
                parts.push(span.rows.to_device(&self.device)?);
                at = span.start + span.rows.dims()[0];
            }
            run.extend_from_slice(&chunk.token_ids[at..]);
        }
        if parts.is_empty() {
            return self.on_device(table, &run);
        }
        if !run.is_empty() {
            parts.push(self.on_device(table, &run)?);
        }
        Ok(Tensor::cat(&parts, 0)?)
    }

    fn push_row(&self, id: u32, out: &mut Vec<bf16>) -> Result<()> {
        let width = self.dim * 2;
        let start = (id as usize).saturating_mul(width);
        let row = self
            .rows
            .bytes
            .get(start..start.saturating_add(width))
            .ok_or_else(|| outside(id, self.rows.shape[0]))?;
        out.extend(
            row.chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]])),
        );
        Ok(())
    }
}

fn outside(id: u32, vocab: usize) -> Error {
    Error::value(
        "token id",
        format!("{id} is outside of the vocabulary of {vocab}"),
    )
}

/// Checks ids and image spans before anything is computed or written.
pub(crate) fn check_chunk(cfg: &Config, chunk: &Chunk) -> Result<()> {
    let len = chunk.token_ids.len();
    let mut free_from = 0;
    for span in &chunk.images {
        let dims = span.rows.dims();
        let ok = dims.len() == 2 && dims[1] == cfg.dim && span.start >= free_from;
        if span.rows.dtype() != DType::BF16 {
            return Err(Error::shape(
                "image span",
                format!("expected rows of BF16, found {:?}", span.rows.dtype()),
            ));
        }
        let end = dims
            .first()
            .and_then(|n| span.start.checked_add(*n))
            .filter(|end| *end <= len);
        match end {
            Some(end) if ok => free_from = end,
            _ => {
                return Err(Error::shape(
                    "image span",
                    format!(
                        "rows {dims:?} at {} do not fit a chunk of {len} tokens of width {} after {free_from}",
                        span.start, cfg.dim
                    ),
                ));
            }
        }
    }
    chunk.token_ids.iter().try_for_each(|id| check_id(cfg, *id))
}

/// Checks one id.
pub(crate) fn check_id(cfg: &Config, id: u32) -> Result<()> {
    match (id as usize) < cfg.vocab_size {
        true => Ok(()),
        false => Err(outside(id, cfg.vocab_size)),
    }
}

/// 1 for the chunk's positions inside image spans; `None` when it has none.
pub(crate) fn image_mask(chunk: &Chunk) -> Option<Vec<u8>> {
    if chunk.images.is_empty() {
        return None;
    }
    let mut mask = vec![0; chunk.token_ids.len()];
    for span in &chunk.images {
        mask[span.start..span.start + span.rows.dims()[0]].fill(1);
    }
    Some(mask)
}
