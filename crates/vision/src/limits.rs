//! Bounds on what a caller may hand in.

use crate::ImageError;

/// Bounds checked before any pixel is decoded.
///
/// The published processor has none; anything that faces a network needs them. The defaults are 32 MiB
/// a file, 64 million pixels, sides within a factor of 200 and 16 images a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest encoded file in bytes.
    pub max_bytes: usize,
    /// Largest width times height.
    pub max_pixels: u64,
    /// Largest ratio of the longer to the shorter side.
    pub max_aspect: u32,
    /// Most images in one request.
    pub max_images: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_bytes: 32 << 20,
            max_pixels: 64_000_000,
            max_aspect: 200,
            max_images: 16,
        }
    }
}

impl Limits {
    /// Checks how many images one request brings.
    ///
    /// # Errors
    /// [`ImageError::TooManyImages`].
    pub fn check_count(&self, found: usize) -> Result<(), ImageError> {
        if found > self.max_images {
            return Err(ImageError::TooManyImages {
                found,
                max: self.max_images,
            });
        }
        Ok(())
    }

    /// Checks the length of an encoded file.
    ///
    /// # Errors
    /// [`ImageError::TooManyBytes`].
    pub fn check_bytes(&self, found: usize) -> Result<(), ImageError> {
        if found > self.max_bytes {
            return Err(ImageError::TooManyBytes {
                found,
                max: self.max_bytes,
            });
        }
        Ok(())
    }

    /// Checks the size a header announces.
    ///
    /// # Errors
    /// [`ImageError::Pixels`] for a side of zero, [`ImageError::TooManyPixels`], [`ImageError::Aspect`].
    pub fn check_size(&self, width: u32, height: u32) -> Result<(), ImageError> {
        let (w, h) = (u64::from(width), u64::from(height));
        if w == 0 || h == 0 {
            return Err(ImageError::Pixels {
                width,
                height,
                bytes: 0,
            });
        }
        if w * h > self.max_pixels {
            return Err(ImageError::TooManyPixels {
                width,
                height,
                max: self.max_pixels,
            });
        }
        if w.max(h) > w.min(h) * u64::from(self.max_aspect) {
            return Err(ImageError::Aspect {
                width,
                height,
                max: self.max_aspect,
            });
        }
        Ok(())
    }
}
