//! Patches: what the tower takes.

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use half::bf16;
use rayon::prelude::*;

use super::RgbImage;
use crate::{GridConfig, ImageError, ImageGrid, TokenType, span_len, span_types};

/// One image cut into patches, row by row over the grid.
#[derive(Debug, Clone)]
pub struct ImagePatches {
    patches: Tensor,
    n_h: usize,
    n_w: usize,
    rows: usize,
    cols: usize,
}

impl ImagePatches {
    /// Wraps `patches: [n_h * n_w, 3, p, p]` bf16, row-major over the grid, values in -1..=1.
    ///
    /// `downsample_ratio` patches a side become one token.
    ///
    /// # Errors
    /// Another shape or dtype, or an empty grid.
    pub fn new(patches: Tensor, n_h: usize, n_w: usize, downsample_ratio: usize) -> Result<Self> {
        let shape_fits = match *patches.dims() {
            [n, 3, a, b] => n > 0 && Some(n) == n_h.checked_mul(n_w) && a == b && a > 0,
            _ => false,
        };
        if !shape_fits || patches.dtype() != DType::BF16 || downsample_ratio == 0 {
            return Err(Error::shape(
                "image_patches",
                format!(
                    "expected [{n_h} * {n_w}, 3, p, p] bf16, found {:?} {:?}",
                    patches.shape(),
                    patches.dtype()
                ),
            ));
        }
        let (rows, cols) = (
            n_h.div_ceil(downsample_ratio),
            n_w.div_ceil(downsample_ratio),
        );
        Ok(Self {
            patches: patches.contiguous()?,
            n_h,
            n_w,
            rows,
            cols,
        })
    }

    /// Cuts an image that already has its grid's size; see [`fit_to_grid`](crate::fit_to_grid).
    ///
    /// # Errors
    /// The image is not of the grid's size.
    pub fn from_fitted(
        image: &RgbImage,
        grid: &ImageGrid,
        cfg: &GridConfig,
    ) -> Result<Self, ImageError> {
        let p = cfg.patch_size;
        let (width, height) = (image.width() as usize, image.height() as usize);
        if (width, height) != (grid.width, grid.height)
            || !width.is_multiple_of(p)
            || !height.is_multiple_of(p)
        {
            return Err(Error::shape(
                "image_patches",
                format!(
                    "expected {}x{} pixels, found {width}x{height}",
                    grid.width, grid.height
                ),
            )
            .into());
        }
        let (n_h, n_w) = (height / p, width / p);
        let data = normalise(image, p);
        let patches = Tensor::from_vec(data, (n_h * n_w, 3, p, p), &Device::Cpu)?;
        Ok(Self::new(patches, n_h, n_w, cfg.downsample_ratio)?)
    }

    /// `[n_h * n_w, 3, p, p]` bf16, contiguous.
    pub fn patches(&self) -> &Tensor {
        &self.patches
    }

    /// Rows of patches.
    pub fn n_h(&self) -> usize {
        self.n_h
    }

    /// Patches a row.
    pub fn n_w(&self) -> usize {
        self.n_w
    }

    /// Rows of image tokens.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Image tokens a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Tokens of the whole span, delimiters included.
    pub fn span_len(&self) -> usize {
        span_len(self.rows, self.cols)
    }

    /// Token types of the span.
    pub fn span_types(&self) -> Vec<TokenType> {
        span_types(self.rows, self.cols)
    }
}

/// `[height, width, 3]` bytes → `[n_h * n_w, 3, patch, patch]`, each value
/// `bf16((v / 255 - 0.5) / 0.5)`.
///
/// Pixels right of and below the last whole patch are left out.
pub fn normalise(image: &RgbImage, patch: usize) -> Vec<bf16> {
    // A byte has 256 values: the table is the formula, evaluated once each.
    let table: [bf16; 256] =
        std::array::from_fn(|v| bf16::from_f32((v as f32 / 255.0 - 0.5) / 0.5));
    let (width, height) = (image.width() as usize, image.height() as usize);
    let (n_h, n_w) = (height / patch, width / patch);
    let area = patch * patch;
    let mut out = vec![bf16::ZERO; n_h * n_w * 3 * area];
    if out.is_empty() {
        return out;
    }
    let work = out.len() * 4;
    // `band`: one row of patches; `src`: the pixel rows it is cut from.
    let cut = |(band, src): (&mut [bf16], &[u8])| {
        for (i, row) in src.chunks_exact(width * 3).enumerate() {
            for (x, run) in row.chunks_exact(patch * 3).enumerate() {
                let out = &mut band[x * 3 * area..(x + 1) * 3 * area];
                for c in 0..3 {
                    let line = &mut out[c * area + i * patch..c * area + (i + 1) * patch];
                    for (o, px) in line.iter_mut().zip(run.as_chunks::<3>().0) {
                        *o = table[usize::from(px[c])];
                    }
                }
            }
        }
    };
    let (band, src) = (n_w * 3 * area, patch * width * 3);
    if cpu::should_parallelise(work) {
        out.par_chunks_mut(band)
            .zip(image.data().par_chunks(src))
            .for_each(cut);
    } else {
        out.chunks_mut(band)
            .zip(image.data().chunks(src))
            .for_each(cut);
    }
    out
}
