//! Settings of the tower and of the preprocessing in front of it.

use deepseek_v41_core::{Error, Result};
use serde::Deserialize;

/// How an image becomes a grid of patches. Field names in JSON are those of the official config.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct GridConfig {
    /// Side of a square patch in pixels (released: 14).
    #[serde(rename = "vision_patch_size")]
    pub patch_size: usize,
    /// Patches per side of the cell that becomes one token (released: 3).
    #[serde(rename = "vision_downsample_ratio")]
    pub downsample_ratio: usize,
    /// Most tokens one image may take, delimiters included (released: 1024).
    #[serde(rename = "vision_max_n_token")]
    pub max_n_token: usize,
    /// Images with fewer pixels are enlarged to about this many (released: 295 936).
    #[serde(rename = "vision_min_pixels")]
    pub min_pixels: usize,
    /// Images wider than this many times their height are squeezed (released: no limit).
    #[serde(rename = "vision_max_wh_ratio", default)]
    pub max_wh_ratio: Option<f64>,
}

/// The vision tower and its aligner. Deserialises from the official inference config; unknown keys
/// are ignored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct VisionConfig {
    /// Width of the text model, which is what the aligner produces (released: 5120).
    pub dim: usize,
    /// Transformer blocks (released: 32).
    pub vision_n_layers: usize,
    /// Width of the tower (released: 1024).
    pub vision_dim: usize,
    /// Attention heads (released: 16).
    pub vision_n_heads: usize,
    /// Hidden width of the gated MLP (released: 2816).
    pub vision_inter_dim: usize,
    /// Base of the rotary frequencies (released, and where the config has none: 10 000).
    #[serde(default = "released_rope_theta")]
    pub vision_rope_theta: f64,
    /// Patches, cells and the token budget.
    #[serde(flatten)]
    pub grid: GridConfig,
}

fn released_rope_theta() -> f64 {
    10_000.0
}

/// Sizes past these are typing errors or attacks: the product of any two still fits comfortably.
const MAX_PATCH: usize = 256;
const MAX_RATIO: usize = 16;
const MAX_TOKENS: usize = 1 << 16;
const MAX_WIDTH: usize = 1 << 16;
const MAX_LAYERS: usize = 1 << 10;

fn check(field: &str, value: usize, max: usize) -> Result<()> {
    if value == 0 || value > max {
        return Err(Error::config(
            field,
            format!("expected 1..={max}, found {value}"),
        ));
    }
    Ok(())
}

impl GridConfig {
    /// Checks that grids can be planned with these settings.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field.
    pub fn validate(&self) -> Result<()> {
        check("vision_patch_size", self.patch_size, MAX_PATCH)?;
        check("vision_downsample_ratio", self.downsample_ratio, MAX_RATIO)?;
        check("vision_max_n_token", self.max_n_token, MAX_TOKENS)?;
        if self.max_n_token < 4 {
            // The smallest span is start, one image token, newline, end.
            return Err(Error::config(
                "vision_max_n_token",
                "a span takes at least 4 tokens",
            ));
        }
        if self.min_pixels > u32::MAX as usize {
            return Err(Error::config(
                "vision_min_pixels",
                format!("{} is absurd", self.min_pixels),
            ));
        }
        match self.max_wh_ratio {
            Some(r) if !(r.is_finite() && r >= 1.0) => Err(Error::config(
                "vision_max_wh_ratio",
                format!("expected nothing or a number from 1 on, found {r}"),
            )),
            _ => Ok(()),
        }
    }
}

impl VisionConfig {
    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.vision_dim / self.vision_n_heads
    }

    /// Values of one flattened patch: three channels of `patch_size` squared.
    pub fn patch_dim(&self) -> usize {
        3 * self.grid.patch_size * self.grid.patch_size
    }

    /// Values of one cell as the aligner takes it.
    pub fn cell_dim(&self) -> usize {
        self.vision_dim * self.grid.downsample_ratio * self.grid.downsample_ratio
    }

    /// Checks that a tower can have these sizes.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field.
    pub fn validate(&self) -> Result<()> {
        self.grid.validate()?;
        check("dim", self.dim, MAX_WIDTH)?;
        check("vision_n_layers", self.vision_n_layers, MAX_LAYERS)?;
        check("vision_dim", self.vision_dim, MAX_WIDTH)?;
        check("vision_n_heads", self.vision_n_heads, MAX_WIDTH)?;
        check("vision_inter_dim", self.vision_inter_dim, MAX_WIDTH)?;
        if !self.vision_dim.is_multiple_of(4 * self.vision_n_heads) {
            // Half a head is rotated by rows and half of that by columns, in pairs.
            return Err(Error::config(
                "vision_n_heads",
                format!(
                    "vision_dim {} does not split into {} heads of a multiple of 4",
                    self.vision_dim, self.vision_n_heads
                ),
            ));
        }
        if !(self.vision_rope_theta.is_finite() && self.vision_rope_theta > 0.0) {
            return Err(Error::config(
                "vision_rope_theta",
                "expected a positive number",
            ));
        }
        Ok(())
    }
}
