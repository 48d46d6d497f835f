//! Bringing an image to the size of its grid.

use super::{RgbImage, resize_bicubic};
use crate::{GridConfig, ImageError, ImageGrid};

/// The grey of the bars beside an image whose aspect is not its grid's.
const PAD: u8 = 127;

/// Scales `image` to the grid's pixel size, keeping its aspect and centring it on grey.
///
/// Only an image past the aspect limit (`max_wh_ratio`) is stretched instead.
///
/// # Errors
/// [`ImageError::NoGrid`] when the shorter side would round to nothing.
///
/// Reference: image processor, `process_image`; Pillow's `ImageOps.pad`.
pub fn fit_to_grid(
    image: &RgbImage,
    grid: &ImageGrid,
    cfg: &GridConfig,
) -> Result<RgbImage, ImageError> {
    let (w, h) = (f64::from(image.width()), f64::from(image.height()));
    if cfg.max_wh_ratio.is_some_and(|limit| w >= limit * h) {
        return resize_bicubic(image, grid.width, grid.height);
    }
    let (width, height) = contained_size(w, h, grid);
    if width == 0 || height == 0 {
        return Err(ImageError::NoGrid {
            width: image.width(),
            height: image.height(),
            max_n_token: cfg.max_n_token,
        });
    }
    let scaled = resize_bicubic(image, width, height)?;
    if (width, height) == (grid.width, grid.height) {
        return Ok(scaled);
    }
    // At most one of the two is non-zero.
    let left = round_half_even((grid.width - width) as f64 * 0.5);
    let top = round_half_even((grid.height - height) as f64 * 0.5);
    let mut data = vec![PAD; grid.width * grid.height * 3];
    let rows = data.chunks_exact_mut(grid.width * 3).skip(top);
    for (row, src) in rows.zip(scaled.data().chunks_exact(width * 3)) {
        row[left * 3..(left + width) * 3].copy_from_slice(src);
    }
    RgbImage::new(grid.width as u32, grid.height as u32, data)
}

/// The largest size of aspect `w / h` inside the grid, one side equal to the grid's.
fn contained_size(w: f64, h: f64, grid: &ImageGrid) -> (usize, usize) {
    let (grid_w, grid_h) = (grid.width as f64, grid.height as f64);
    let (image_ratio, grid_ratio) = (w / h, grid_w / grid_h);
    // A ratio within rounding of the grid's could round past it; the grid is the limit.
    if image_ratio > grid_ratio {
        (grid.width, round_half_even(h / w * grid_w).min(grid.height))
    } else if image_ratio < grid_ratio {
        (round_half_even(w / h * grid_h).min(grid.width), grid.height)
    } else {
        (grid.width, grid.height)
    }
}

/// Python's `round`.
fn round_half_even(v: f64) -> usize {
    v.round_ties_even() as usize
}
