//! Tower, aligner and the rows a span puts into the text model's embeddings.

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Error, Result, VarBuilder, upload};

use crate::{Aligner, ImagePatches, TokenType, VisionConfig, Vit, ops::Products};

/// Everything of a checkpoint that has to do with pictures.
#[derive(Debug, Clone)]
pub struct VisionEncoder {
    vit: Vit,
    aligner: Aligner,
    /// `[3, dim]`: start, newline, end.
    delimiters: Tensor,
    ratio: usize,
}

impl VisionEncoder {
    /// Loads `vision.*`, `aligner.*`, `image_start`, `image_newline` and `image_end` under `vb`, which
    /// stands at the checkpoint's root.
    ///
    /// # Errors
    /// The configuration is impossible, or a weight is missing or does not fit it.
    pub fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let products = Products::new(vb.device())?;
        let row = |name: &str| vb.tensor(name, DType::BF16, &[cfg.dim]);
        Ok(Self {
            vit: Vit::with(cfg, vb.pp("vision"), &products)?,
            aligner: Aligner::with(cfg, vb.pp("aligner"), &products)?,
            delimiters: Tensor::stack(
                &[
                    row("image_start")?,
                    row("image_newline")?,
                    row("image_end")?,
                ],
                0,
            )?,
            ratio: cfg.grid.downsample_ratio,
        })
    }

    /// Whether the checkpoint under `vb` has a tower at all.
    pub fn is_present(vb: &VarBuilder) -> bool {
        vb.pp("vision").contains("patch_embed.proj.weight")
    }

    /// Width of the rows it produces.
    pub fn dim(&self) -> usize {
        self.delimiters.dims()[1]
    }

    /// The tower.
    pub fn vit(&self) -> &Vit {
        &self.vit
    }

    /// The aligner.
    pub fn aligner(&self) -> &Aligner {
        &self.aligner
    }

    /// `[dim]` bf16: what stands at [`TokenType::ImageStart`].
    ///
    /// # Errors
    /// None in practice: the row exists.
    pub fn image_start(&self) -> Result<Tensor> {
        Ok(self.delimiters.get(0)?)
    }

    /// `[dim]` bf16: what stands at [`TokenType::ImageNewLine`].
    ///
    /// # Errors
    /// None in practice: the row exists.
    pub fn image_newline(&self) -> Result<Tensor> {
        Ok(self.delimiters.get(1)?)
    }

    /// `[dim]` bf16: what stands at [`TokenType::ImageEnd`].
    ///
    /// # Errors
    /// None in practice: the row exists.
    pub fn image_end(&self) -> Result<Tensor> {
        Ok(self.delimiters.get(2)?)
    }

    /// One row an image token: `[rows * cols, dim]` bf16, in reading order.
    ///
    /// # Errors
    /// Patches made for another patch size or downsample ratio.
    pub fn encode(&self, image: &ImagePatches) -> Result<Tensor> {
        self.check(image)?;
        self.aligner
            .forward(&self.vit.forward(image)?, image.n_h(), image.n_w())
    }

    /// [`encode`](Self::encode) of several images, in order. On a GPU they share passes; no images give
    /// none.
    ///
    /// # Errors
    /// As for one; nothing is computed then.
    pub fn encode_all(&self, images: &[ImagePatches]) -> Result<Vec<Tensor>> {
        images.iter().try_for_each(|image| self.check(image))?;
        let cells = self.vit.forward_all(images)?;
        let cells = cells.iter().zip(images);
        let cells = cells
            .map(|(features, image)| self.aligner.cells(features, image.n_h(), image.n_w()))
            .collect::<Result<Vec<_>>>()?;
        if cells.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.aligner.project(&Tensor::cat(&cells, 0)?)?;
        let mut at = 0;
        let own = cells.iter().map(|cells| {
            let first = at;
            at += cells.dims()[0];
            Ok(rows.narrow(0, first, cells.dims()[0])?)
        });
        own.collect()
    }

    fn check(&self, image: &ImagePatches) -> Result<()> {
        let cells = (
            image.n_h().div_ceil(self.ratio),
            image.n_w().div_ceil(self.ratio),
        );
        match (image.rows(), image.cols()) == cells {
            true => Ok(()),
            false => Err(Error::shape(
                "vision_encoder",
                format!("expected {} patches a side of a cell", self.ratio),
            )),
        }
    }

    /// The rows that overwrite the embeddings of a span: `types` as [`crate::span_types`] lists them,
    /// `tokens: [n, dim]` from [`encode`](Self::encode) → `[types.len(), dim]` bf16.
    ///
    /// A part of a span works as well, with the rows of `tokens` that belong to it.
    ///
    /// # Errors
    /// [`Error::Value`] for a text position inside the span or a number of image positions other than
    /// `n`; [`Error::Shape`] for rows of another width.
    pub fn span_rows(&self, types: &[TokenType], tokens: &Tensor) -> Result<Tensor> {
        let (n, dim) = tokens.dims2()?;
        if dim != self.dim() || tokens.dtype() != DType::BF16 {
            return Err(Error::shape(
                "span_rows",
                format!(
                    "expected [n, {}] bf16, found {:?}",
                    self.dim(),
                    tokens.shape()
                ),
            ));
        }
        let wanted = types.iter().filter(|t| **t == TokenType::Image).count();
        if wanted != n {
            return Err(Error::value(
                "image span",
                format!("{wanted} image positions for {n} rows"),
            ));
        }
        let mut next = self.delimiters.dims()[0] as u32..;
        let rows: Vec<u32> = types
            .iter()
            .map(|t| match t {
                TokenType::ImageStart => Some(0),
                TokenType::ImageNewLine => Some(1),
                TokenType::ImageEnd => Some(2),
                TokenType::Image => next.next(),
                TokenType::Text => None,
            })
            .collect::<Option<_>>()
            .ok_or_else(|| Error::value("image span", "a text position inside"))?;
        if rows.is_empty() {
            return Ok(self.delimiters.narrow(0, 0, 0)?);
        }
        let delimiters = self.delimiters.to_device(tokens.device())?;
        let source = Tensor::cat(&[&delimiters, tokens], 0)?;
        let rows = upload(rows, types.len(), tokens.device())?;
        Ok(source.index_select(&rows, 0)?)
    }

    /// [`encode`](Self::encode) and [`span_rows`](Self::span_rows): `[span_len, dim]` bf16.
    ///
    /// # Errors
    /// As for the two.
    pub fn encode_span(&self, image: &ImagePatches) -> Result<Tensor> {
        self.span_rows(&image.span_types(), &self.encode(image)?)
    }
}
