//! Reading image files.

use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};

use super::RgbImage;
use crate::{ImageError, Limits};

/// Working memory a decoder may use beside the pixels themselves.
const DECODER_SLACK: u64 = 64 << 20;
/// Bytes of the widest pixel a decoder produces (16-bit RGBA).
const WIDEST_PIXEL: u64 = 8;

impl RgbImage {
    /// Decodes a PNG, JPEG, WebP or GIF file to RGB.
    ///
    /// The first frame of an animation; grey is replicated, palettes are expanded, alpha is dropped
    /// without compositing, 16-bit channels keep their high byte, CMYK goes through the decoder's own
    /// conversion. EXIF orientation and colour profiles are ignored. Sizes are checked against
    /// `limits` as soon as the header is read, before anything is allocated for the pixels.
    ///
    /// # Errors
    /// The file breaks a limit, is of another format, truncated or corrupt.
    pub fn decode(file: &[u8], limits: &Limits) -> Result<Self, ImageError> {
        limits.check_bytes(file.len())?;
        let format = image::guess_format(file).map_err(|_| ImageError::UnknownFormat)?;
        // Named one by one: other crates of a build may switch on more formats of `image`.
        match format {
            ImageFormat::Png | ImageFormat::WebP | ImageFormat::Gif => {}
            ImageFormat::Jpeg if ends_inside_scan(file) => return Err(ImageError::Truncated),
            ImageFormat::Jpeg => {}
            _ => return Err(ImageError::UnknownFormat),
        }
        let mut reader = ImageReader::with_format(Cursor::new(file), format);
        let mut bounds = image::Limits::no_limits();
        let max = limits
            .max_pixels
            .saturating_mul(WIDEST_PIXEL)
            .saturating_add(DECODER_SLACK);
        bounds.max_alloc = Some(max);
        reader.limits(bounds);
        let refused = |err| match err {
            image::ImageError::Limits(_) => ImageError::Memory { max },
            err => ImageError::Decode(err),
        };
        let decoder = reader.into_decoder().map_err(refused)?;
        let (width, height) = decoder.dimensions();
        limits.check_size(width, height)?;
        Self::new(
            width,
            height,
            to_rgb(DynamicImage::from_decoder(decoder).map_err(refused)?),
        )
    }
}

/// Whether a JPEG has no end marker behind its last scan. The decoder would fill the missing rows with
/// grey and call it a picture.
fn ends_inside_scan(file: &[u8]) -> bool {
    // Inside a scan 0xFF is escaped, so a marker pair found from the end is a marker, or junk behind
    // the picture.
    let last = |marker: u8| file.windows(2).rposition(|w| w == [0xFF, marker]);
    const START_OF_SCAN: u8 = 0xDA;
    const END_OF_IMAGE: u8 = 0xD9;
    last(END_OF_IMAGE) < last(START_OF_SCAN)
}

fn to_rgb(image: DynamicImage) -> Vec<u8> {
    match image {
        DynamicImage::ImageRgb8(p) => p.into_raw(),
        DynamicImage::ImageRgba8(p) => pick::<4, _>(&p, |v| v),
        DynamicImage::ImageLuma8(p) => replicate::<1, _>(&p, |v| v),
        DynamicImage::ImageLumaA8(p) => replicate::<2, _>(&p, |v| v),
        DynamicImage::ImageRgb16(p) => pick::<3, _>(&p, high_byte),
        DynamicImage::ImageRgba16(p) => pick::<4, _>(&p, high_byte),
        DynamicImage::ImageLuma16(p) => replicate::<1, _>(&p, high_byte),
        DynamicImage::ImageLumaA16(p) => replicate::<2, _>(&p, high_byte),
        // Float images, which none of the four formats holds.
        other => other.into_rgb8().into_raw(),
    }
}

fn high_byte(v: u16) -> u8 {
    (v >> 8) as u8
}

/// The first three of `N` channels.
fn pick<const N: usize, T: Copy>(pixels: &[T], narrow: impl Fn(T) -> u8) -> Vec<u8> {
    pixels
        .as_chunks::<N>()
        .0
        .iter()
        .flat_map(|p| [p[0], p[1], p[2]])
        .map(narrow)
        .collect()
}

/// The first of `N` channels, three times.
fn replicate<const N: usize, T: Copy>(pixels: &[T], narrow: impl Fn(T) -> u8) -> Vec<u8> {
    pixels
        .as_chunks::<N>()
        .0
        .iter()
        .flat_map(|p| [narrow(p[0]); 3])
        .collect()
}
