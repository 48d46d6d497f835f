//! From features of patches to rows the text model can read.

use candle_core::Tensor;
use deepseek_v41_core::{Result, VarBuilder};

use crate::{
    VisionConfig,
    ops::{Linear, Products, gelu, merge_cells},
};

/// Joins cells of patches and projects them to the text model's width: `w2(gelu(w1(cell)))`.
#[derive(Debug, Clone)]
pub struct Aligner {
    w1: Linear,
    w2: Linear,
    ratio: usize,
}

impl Aligner {
    /// Loads `w1` and `w2`, both with bias, under `vb`.
    ///
    /// # Errors
    /// A weight is missing or does not fit the configuration.
    pub fn new(cfg: &VisionConfig, vb: VarBuilder) -> Result<Self> {
        let products = Products::new(vb.device())?;
        Self::with(cfg, vb, &products)
    }

    pub(crate) fn with(cfg: &VisionConfig, vb: VarBuilder, products: &Products) -> Result<Self> {
        Ok(Self {
            w1: Linear::with(cfg.cell_dim(), cfg.dim, true, vb.pp("w1"), products)?,
            w2: Linear::with(cfg.dim, cfg.dim, true, vb.pp("w2"), products)?,
            ratio: cfg.grid.downsample_ratio,
        })
    }

    /// `features: [n_h * n_w, vision_dim]` bf16 → `[rows * cols, dim]` bf16, one row a cell.
    ///
    /// # Errors
    /// Another shape or dtype.
    ///
    /// Reference: `Aligner.forward`.
    pub fn forward(&self, features: &Tensor, n_h: usize, n_w: usize) -> Result<Tensor> {
        self.project(&self.cells(features, n_h, n_w)?)
    }

    /// `[n_h * n_w, vision_dim]` → `[rows * cols, cell_dim]`.
    pub(crate) fn cells(&self, features: &Tensor, n_h: usize, n_w: usize) -> Result<Tensor> {
        merge_cells(features, n_h, n_w, self.ratio)
    }

    /// `[n, cell_dim]` → `[n, dim]`.
    pub(crate) fn project(&self, cells: &Tensor) -> Result<Tensor> {
        self.w2.forward(&gelu(&self.w1.forward(cells)?)?)
    }
}
