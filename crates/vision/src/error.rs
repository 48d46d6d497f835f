//! What can be wrong with an image somebody hands in.

use deepseek_v41_core::Error;

/// An image that cannot become patches, and why.
///
/// Kept apart from [`Error`] so that a server can answer "your image is too large" without looking
/// into messages. It converts into [`Error`] where only that travels.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// More images than [`Limits::max_images`](crate::Limits::max_images).
    #[error("{found} images, at most {max} are allowed")]
    TooManyImages {
        /// Images in the request.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// The file is larger than [`Limits::max_bytes`](crate::Limits::max_bytes).
    #[error("image file of {found} bytes, at most {max} are allowed")]
    TooManyBytes {
        /// Bytes of the file.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// The header announces more pixels than [`Limits::max_pixels`](crate::Limits::max_pixels).
    /// Nothing has been allocated for them.
    #[error("image of {width}x{height} pixels, at most {max} pixels are allowed")]
    TooManyPixels {
        /// Width in the header.
        width: u32,
        /// Height in the header.
        height: u32,
        /// The limit.
        max: u64,
    },
    /// One side is more than [`Limits::max_aspect`](crate::Limits::max_aspect) times the other.
    #[error("image of {width}x{height} pixels: sides differ by more than a factor of {max}")]
    Aspect {
        /// Width in the header.
        width: u32,
        /// Height in the header.
        height: u32,
        /// The limit.
        max: u32,
    },
    /// A side of zero pixels, or pixel data of another length than the sides say.
    #[error("image of {width}x{height} pixels with {bytes} bytes of RGB data")]
    Pixels {
        /// Stated width.
        width: u32,
        /// Stated height.
        height: u32,
        /// Length of the data.
        bytes: usize,
    },
    /// No grid of patches fits: one side would round to nothing, or the token budget is too small.
    #[error("image of {width}x{height} pixels has no patch grid within {max_n_token} tokens")]
    NoGrid {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// The token budget of the configuration.
        max_n_token: usize,
    },
    /// Not PNG, JPEG, WebP or GIF.
    #[error("not a PNG, JPEG, WebP or GIF file")]
    UnknownFormat,
    /// The file ends before its picture does.
    #[error("image file is truncated")]
    Truncated,
    /// Decoding would take more working memory than an image within the limits needs.
    #[error("decoding the image would take more than {max} bytes")]
    Memory {
        /// The bound, which follows from [`Limits::max_pixels`](crate::Limits::max_pixels).
        max: u64,
    },
    /// The decoder refused the file.
    #[cfg(feature = "decode")]
    #[error("image file cannot be decoded: {0}")]
    Decode(image::ImageError),
    /// An error outside of the image itself.
    #[error(transparent)]
    Core(#[from] Error),
}

impl From<candle_core::Error> for ImageError {
    fn from(err: candle_core::Error) -> Self {
        Self::Core(err.into())
    }
}

impl From<ImageError> for Error {
    fn from(err: ImageError) -> Self {
        match err {
            ImageError::Core(err) => err,
            ImageError::TooManyImages { found, max } => Error::Capacity {
                what: "images in one request",
                needed: found,
                available: max,
            },
            ImageError::TooManyBytes { found, max } => Error::Capacity {
                what: "bytes of an image file",
                needed: found,
                available: max,
            },
            err => Error::value("image", err.to_string()),
        }
    }
}
