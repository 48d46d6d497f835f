//! Decoded pixels.

use crate::ImageError;

/// An 8-bit RGB image, rows top to bottom, three bytes a pixel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: u32,
    height: u32,
    data: Vec<u8>,
}

impl RgbImage {
    /// Wraps `data: [height, width, 3]`.
    ///
    /// # Errors
    /// [`ImageError::Pixels`] for a side of zero or data of another length.
    pub fn new(width: u32, height: u32, data: Vec<u8>) -> Result<Self, ImageError> {
        let expected = u64::from(width) * u64::from(height) * 3;
        if expected == 0 || data.len() as u64 != expected {
            return Err(ImageError::Pixels {
                width,
                height,
                bytes: data.len(),
            });
        }
        Ok(Self {
            width,
            height,
            data,
        })
    }

    /// Pixels a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// `[height, width, 3]`.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The pixel data.
    pub fn into_data(self) -> Vec<u8> {
        self.data
    }
}
