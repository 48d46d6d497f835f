//! How many patches and tokens an image of some size becomes.

use crate::{GridConfig, ImageError};

/// The plan for one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGrid {
    /// Rows of image tokens.
    pub rows: usize,
    /// Image tokens a row.
    pub cols: usize,
    /// Height in pixels the image is brought to, a multiple of the patch size.
    pub height: usize,
    /// Width in pixels the image is brought to, a multiple of the patch size.
    pub width: usize,
}

/// Tokens of a span of `rows` by `cols` image tokens: start, each row followed by a newline, end.
pub fn span_len(rows: usize, cols: usize) -> usize {
    rows * (cols + 1) + 2
}

/// The grid of an image of `width` by `height` pixels.
///
/// Small images are enlarged to about `min_pixels`, large ones shrunk until their span fits
/// `max_n_token`; sides are rounded to whole patches. All of it in f64, as the official processor
/// does it, so that the two agree on every size.
///
/// # Errors
/// [`ImageError::Pixels`] for a side of zero, [`ImageError::NoGrid`] when no grid fits the budget.
///
/// Reference: image processor, `plan_image_grid`.
pub fn plan_image_grid(width: u32, height: u32, cfg: &GridConfig) -> Result<ImageGrid, ImageError> {
    if width == 0 || height == 0 {
        return Err(ImageError::Pixels {
            width,
            height,
            bytes: 0,
        });
    }
    let (patch, ratio) = (cfg.patch_size as f64, cfg.downsample_ratio);
    let (mut w, mut h) = (f64::from(width), f64::from(height));
    if let Some(limit) = cfg.max_wh_ratio
        && w > h * limit
    {
        w = h * limit;
    }
    if w * h < cfg.min_pixels as f64 {
        let grow = (cfg.min_pixels as f64 / (w * h)).sqrt();
        (w, h) = ((w * grow).trunc(), (h * grow).trunc());
    }
    let no_grid = ImageError::NoGrid {
        width,
        height,
        max_n_token: cfg.max_n_token,
    };
    // Patches a side, and from them tokens a side.
    let grid = |n_h: f64, n_w: f64| {
        let (n_h, n_w) = (n_h as usize, n_w as usize);
        ImageGrid {
            rows: n_h.div_ceil(ratio),
            cols: n_w.div_ceil(ratio),
            height: n_h * cfg.patch_size,
            width: n_w * cfg.patch_size,
        }
    };
    let fits = |g: &ImageGrid| {
        g.rows > 0
            && g.cols > 0
            && g.rows <= cfg.max_n_token
            && g.cols <= cfg.max_n_token
            && span_len(g.rows, g.cols) <= cfg.max_n_token
    };
    let full = grid((h / patch).ceil(), (w / patch).ceil());
    if fits(&full) {
        return Ok(full);
    }
    let (n_h, n_w) = shrink_to_budget(w, h, cfg);
    let shrunk = grid(n_h, n_w);
    if fits(&shrunk) {
        Ok(shrunk)
    } else {
        Err(no_grid)
    }
}

/// Patches (rows, columns) of the largest grid of about this aspect whose span fits the budget.
fn shrink_to_budget(w: f64, h: f64, cfg: &GridConfig) -> (f64, f64) {
    let (patch, ratio, budget) = (
        cfg.patch_size as f64,
        cfg.downsample_ratio as f64,
        cfg.max_n_token as f64,
    );
    let (cell, aspect) = (patch * ratio, h / w);
    // cols * (cols + 1) * aspect = budget - 2, solved for cols.
    let cols = ((budget - 2.0) / aspect + 0.25).sqrt() - 0.5;
    let rows = cols * aspect;
    if cols < 1.0 {
        return (((budget - 2.0) / 2.0).floor() * ratio, ratio);
    }
    if rows < 1.0 {
        return (ratio, (budget - 3.0) * ratio);
    }
    let scale = (cols.floor() * cell / w).min(rows.floor() * cell / h);
    ((h * scale / patch).floor(), (w * scale / patch).floor())
}
