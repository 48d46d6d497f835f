//! From an image file to the patches the tower takes.

#[cfg(feature = "decode")]
mod decode;
mod fit;
mod patches;
mod resize;
mod rgb;

pub use fit::fit_to_grid;
pub use patches::{ImagePatches, normalise};
pub use resize::{resize_bicubic, resize_bicubic_ref};
pub use rgb::RgbImage;

use crate::{GridConfig, ImageError, ImageGrid, Limits, plan_image_grid};

/// Turns images into [`ImagePatches`] as the official processor does, within [`Limits`].
///
/// ```
/// use deepseek_v41_vision::{GridConfig, ImageProcessor, Limits, RgbImage};
///
/// let cfg = GridConfig {
///     patch_size: 14,
///     downsample_ratio: 3,
///     max_n_token: 1024,
///     min_pixels: 295_936,
///     max_wh_ratio: None,
/// };
/// let processor = ImageProcessor::new(cfg, Limits::default())?;
/// let grey = RgbImage::new(300, 200, vec![127; 300 * 200 * 3])?;
/// let patches = processor.process_rgb(&grey)?;
/// assert_eq!((patches.n_h(), patches.n_w()), (32, 48));
/// assert_eq!(patches.span_len(), 11 * (16 + 1) + 2);
/// # Ok::<(), deepseek_v41_vision::ImageError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ImageProcessor {
    cfg: GridConfig,
    limits: Limits,
}

impl ImageProcessor {
    /// A processor for towers with this grid.
    ///
    /// # Errors
    /// [`deepseek_v41_core::Error::Config`] naming the field that cannot be.
    pub fn new(cfg: GridConfig, limits: Limits) -> Result<Self, ImageError> {
        cfg.validate()?;
        Ok(Self { cfg, limits })
    }

    /// The grid settings.
    pub fn config(&self) -> &GridConfig {
        &self.cfg
    }

    /// The bounds it checks.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The grid an image of this size gets.
    ///
    /// # Errors
    /// The size is outside of the limits, or no grid fits.
    pub fn plan(&self, width: u32, height: u32) -> Result<ImageGrid, ImageError> {
        self.limits.check_size(width, height)?;
        plan_image_grid(width, height, &self.cfg)
    }

    /// Patches of one encoded PNG, JPEG, WebP or GIF file (its first frame).
    ///
    /// EXIF orientation and colour profiles are ignored and alpha is dropped, as in the official
    /// processor.
    ///
    /// # Errors
    /// The file breaks a limit, is of another format, truncated or corrupt, or no grid fits.
    #[cfg(feature = "decode")]
    pub fn process(&self, file: &[u8]) -> Result<ImagePatches, ImageError> {
        self.process_rgb(&RgbImage::decode(file, &self.limits)?)
    }

    /// [`process`](Self::process) for every image of a request.
    ///
    /// # Errors
    /// Too many images, or the first error of one of them.
    #[cfg(feature = "decode")]
    pub fn process_all<B: AsRef<[u8]>>(
        &self,
        files: &[B],
    ) -> Result<Vec<ImagePatches>, ImageError> {
        self.limits.check_count(files.len())?;
        files
            .iter()
            .map(|file| self.process(file.as_ref()))
            .collect()
    }

    /// Patches of pixels decoded elsewhere.
    ///
    /// # Errors
    /// The size breaks a limit, or no grid fits.
    pub fn process_rgb(&self, image: &RgbImage) -> Result<ImagePatches, ImageError> {
        let grid = self.plan(image.width(), image.height())?;
        let fitted = fit_to_grid(image, &grid, &self.cfg)?;
        ImagePatches::from_fitted(&fitted, &grid, &self.cfg)
    }
}
