//! Planning, resizing and decoding beyond the golden cases.
#![cfg(feature = "decode")]
#![allow(clippy::unwrap_used)]

use std::io::Cursor;

use deepseek_v41_core::Error;
use deepseek_v41_testing::random_bf16;
use deepseek_v41_vision::{
    GridConfig, ImageError, ImageProcessor, Limits, RgbImage, TokenType, expand_image_tokens,
    fit_to_grid, plan_image_grid, resize_bicubic, resize_bicubic_ref, span_len, span_types,
};
use image::{DynamicImage, ImageFormat};
use proptest::prelude::*;

fn released() -> GridConfig {
    GridConfig {
        patch_size: 14,
        downsample_ratio: 3,
        max_n_token: 1024,
        min_pixels: 295_936,
        max_wh_ratio: None,
    }
}

fn small() -> GridConfig {
    GridConfig {
        patch_size: 4,
        max_n_token: 40,
        min_pixels: 400,
        ..released()
    }
}

fn processor(cfg: GridConfig) -> ImageProcessor {
    ImageProcessor::new(cfg, Limits::default()).unwrap()
}

fn noise(width: u32, height: u32, seed: u64) -> RgbImage {
    let values = random_bf16((width * height * 3) as usize, 90.0, seed);
    let bytes = values
        .iter()
        .map(|v| (v.to_f32() + 128.0).clamp(0.0, 255.0) as u8)
        .collect();
    RgbImage::new(width, height, bytes).unwrap()
}

fn encode(image: DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut file = Cursor::new(Vec::new());
    image.write_to(&mut file, format).unwrap();
    file.into_inner()
}

fn png(image: &RgbImage) -> Vec<u8> {
    let rgb =
        image::RgbImage::from_raw(image.width(), image.height(), image.data().to_vec()).unwrap();
    encode(rgb.into(), ImageFormat::Png)
}

/// A PNG header that announces a size, and nothing behind it.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    fn crc(data: &[u8]) -> u32 {
        !data.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |c, _| {
                (c >> 1) ^ (0xEDB8_8320 & (c & 1).wrapping_neg())
            })
        })
    }
    let mut header = b"IHDR".to_vec();
    header.extend(width.to_be_bytes());
    header.extend(height.to_be_bytes());
    header.extend([8, 2, 0, 0, 0]);
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    file.extend(&header);
    file.extend(crc(&header).to_be_bytes());
    file.extend([0, 0, 0, 1]);
    file.extend(b"IDAT\0");
    file.extend(crc(b"IDAT\0").to_be_bytes());
    file
}

prop_compose! {
    fn grid_config()(
        patch_size in 1usize..20,
        downsample_ratio in 1usize..5,
        max_n_token in 4usize..1200,
        min_pixels in 0usize..400_000,
        max_wh_ratio in prop::option::of(1.0f64..50.0),
    ) -> GridConfig {
        GridConfig { patch_size, downsample_ratio, max_n_token, min_pixels, max_wh_ratio }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever the size and settings: an error, or a grid of whole patches within the budget.
    #[test]
    fn plans_fit_the_budget(
        cfg in grid_config(),
        width in prop_oneof![1u32..100, 1u32..70_000, Just(u32::MAX)],
        height in prop_oneof![1u32..100, 1u32..70_000, Just(u32::MAX)],
    ) {
        match plan_image_grid(width, height, &cfg) {
            Ok(grid) => {
                prop_assert!(grid.rows > 0 && grid.cols > 0);
                prop_assert!(span_len(grid.rows, grid.cols) <= cfg.max_n_token);
                prop_assert_eq!(grid.height % cfg.patch_size, 0);
                prop_assert_eq!(grid.width % cfg.patch_size, 0);
                let cells = |side: usize| (side / cfg.patch_size).div_ceil(cfg.downsample_ratio);
                prop_assert_eq!((cells(grid.height), cells(grid.width)), (grid.rows, grid.cols));
                prop_assert_eq!(span_types(grid.rows, grid.cols).len(), span_len(grid.rows, grid.cols));
            }
            Err(err) => prop_assert!(matches!(err, ImageError::NoGrid { .. }), "{}", err),
        }
    }

    /// The released settings plan every size.
    #[test]
    fn released_settings_plan_everything(width in 1u32..70_000, height in 1u32..70_000) {
        for max_wh_ratio in [None, Some(4.0)] {
            let cfg = GridConfig { max_wh_ratio, ..released() };
            prop_assert!(plan_image_grid(width, height, &cfg).is_ok());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn fast_resize_is_the_reference(
        width in 1u32..70, height in 1u32..70, to_width in 1usize..90, to_height in 1usize..90,
        seed: u64,
    ) {
        let image = noise(width, height, seed);
        let fast = resize_bicubic(&image, to_width, to_height).unwrap();
        prop_assert_eq!(fast, resize_bicubic_ref(&image, to_width, to_height).unwrap());
    }

    /// Random bytes behind every magic number, and damaged files: an error or an image, no panic.
    #[test]
    fn hostile_files_do_not_panic(
        magic in 0usize..5,
        junk in prop::collection::vec(any::<u8>(), 0..400),
        at in any::<prop::sample::Index>(),
        byte: u8,
        keep in any::<prop::sample::Index>(),
    ) {
        let processor = processor(small());
        let magics: [&[u8]; 5] = [
            b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\x10\0\0\0WEBP", b"GIF89a", b"",
        ];
        let file = [magics[magic], &junk].concat();
        let _ = processor.process(&file);
        let image = noise(9, 7, 1);
        let rgb = image::RgbImage::from_raw(9, 7, image.into_data()).unwrap();
        for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif] {
            let mut file = encode(rgb.clone().into(), format);
            let i = at.index(file.len());
            file[i] = byte;
            let _ = processor.process(&file);
            file.truncate(keep.index(file.len()));
            let _ = processor.process(&file);
        }
    }
}

#[test]
fn resize_blocks_and_threads() {
    let image = noise(333, 211, 2);
    let expected = resize_bicubic_ref(&image, 150, 97).unwrap();
    for threads in [1, 3] {
        let out = deepseek_v41_testing::with_threads(threads, || resize_bicubic(&image, 150, 97));
        assert_eq!(out.unwrap(), expected);
    }
    assert_eq!(resize_bicubic(&image, 333, 211).unwrap(), image);
    assert!(matches!(
        resize_bicubic(&image, 0, 5),
        Err(ImageError::Pixels { .. })
    ));
}

/// Overshoot at an edge is cut off, not wrapped.
#[test]
fn resize_clips() {
    let row: Vec<u8> = (0..40)
        .flat_map(|x| [if x < 20 { 0 } else { 255 }; 3])
        .collect();
    let image = RgbImage::new(40, 1, row).unwrap();
    let wide = resize_bicubic(&image, 100, 1).unwrap();
    assert!(wide.data().iter().take(90).all(|v| *v == 0));
    assert!(wide.data().iter().rev().take(90).all(|v| *v == 255));
}

/// Lossless formats give exactly the pixels that went in.
#[test]
fn formats() {
    let image = noise(31, 17, 3);
    let limits = Limits::default();
    assert_eq!(RgbImage::decode(&png(&image), &limits).unwrap(), image);
    let rgb = image::RgbImage::from_raw(31, 17, image.data().to_vec()).unwrap();
    let webp = encode(rgb.clone().into(), ImageFormat::WebP);
    assert_eq!(RgbImage::decode(&webp, &limits).unwrap(), image);
    let jpeg = encode(rgb.into(), ImageFormat::Jpeg);
    assert_eq!(RgbImage::decode(&jpeg, &limits).unwrap().width(), 31);
}

#[test]
fn grey_alpha_and_sixteen_bits() {
    let decode = |image: DynamicImage| {
        RgbImage::decode(&encode(image, ImageFormat::Png), &Limits::default())
            .unwrap()
            .into_data()
    };
    let raw = |width, height, bytes: Vec<u8>| -> DynamicImage {
        image::GrayImage::from_raw(width, height, bytes)
            .unwrap()
            .into()
    };
    assert_eq!(decode(raw(2, 1, vec![7, 200])), [7, 7, 7, 200, 200, 200]);
    // Alpha is dropped, not blended: the hidden colour shows.
    let rgba = image::RgbaImage::from_raw(2, 1, vec![1, 2, 3, 0, 4, 5, 6, 128]).unwrap();
    assert_eq!(decode(rgba.into()), [1, 2, 3, 4, 5, 6]);
    let la = image::GrayAlphaImage::from_raw(1, 1, vec![9, 0]).unwrap();
    assert_eq!(decode(la.into()), [9, 9, 9]);
    // High bytes: 0x12FF is 0x12, not rounded up.
    let rgb16 =
        image::ImageBuffer::<image::Rgb<u16>, _>::from_raw(1, 1, vec![0x12FF, 0x80, 0xFFFF]);
    assert_eq!(decode(rgb16.unwrap().into()), [0x12, 0, 0xFF]);
    let grey16 = image::ImageBuffer::<image::Luma<u16>, _>::from_raw(1, 1, vec![0x34F0]).unwrap();
    assert_eq!(decode(grey16.into()), [0x34; 3]);
}

#[test]
fn first_frame_of_a_gif() {
    use image::{Frame, RgbaImage, codecs::gif::GifEncoder};
    let mut file = Vec::new();
    let mut encoder = GifEncoder::new(&mut file);
    for colour in [[255, 0, 0, 255], [0, 0, 255, 255]] {
        let frame = RgbaImage::from_pixel(4, 3, image::Rgba(colour));
        encoder.encode_frame(Frame::new(frame)).unwrap();
    }
    drop(encoder);
    let image = RgbImage::decode(&file, &Limits::default()).unwrap();
    assert_eq!(image.data(), [255, 0, 0].repeat(12));
}

/// A rotated EXIF tag changes nothing: the official processor does not look at it.
#[test]
fn exif_orientation_is_ignored() {
    let rgb = image::RgbImage::from_fn(24, 8, |x, _| image::Rgb([(x * 10) as u8; 3]));
    let plain = encode(rgb.into(), ImageFormat::Jpeg);
    // Orientation 6: rotate by 90 degrees.
    let exif =
        b"\xff\xe1\0\x22Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    let tagged = [&plain[..2], exif, &plain[2..]].concat();
    let limits = Limits::default();
    let tagged = RgbImage::decode(&tagged, &limits).unwrap();
    assert_eq!(tagged, RgbImage::decode(&plain, &limits).unwrap());
    assert_eq!((tagged.width(), tagged.height()), (24, 8));
}

/// One pixel is enlarged to the smallest grid, all of one colour.
#[test]
fn one_pixel() {
    let image = RgbImage::new(1, 1, vec![255, 0, 127]).unwrap();
    let patches = processor(released()).process(&png(&image)).unwrap();
    assert_eq!(
        (patches.n_h(), patches.n_w(), patches.span_len()),
        (39, 39, 13 * 14 + 2)
    );
    let grid = plan_image_grid(1, 1, &released()).unwrap();
    let fitted = fit_to_grid(&image, &grid, &released()).unwrap();
    assert_eq!(fitted.data(), [255, 0, 127].repeat(546 * 546));
}

#[test]
fn ten_thousand_by_ten() {
    let thin = RgbImage::new(10_000, 10, vec![90; 300_000]).unwrap();
    let err = processor(released()).process(&png(&thin)).unwrap_err();
    assert!(
        matches!(
            err,
            ImageError::Aspect {
                width: 10_000,
                height: 10,
                max: 200
            }
        ),
        "{err}"
    );
    // Whoever raises the limit gets the official result.
    let limits = Limits {
        max_aspect: 1000,
        ..Limits::default()
    };
    let patches = ImageProcessor::new(released(), limits)
        .unwrap()
        .process(&png(&thin))
        .unwrap();
    assert_eq!((patches.rows(), patches.cols()), (1, 410));
}

/// The bomb is refused by its header: the file holds no pixels at all.
#[test]
fn header_bombs() {
    let processor = processor(released());
    for (width, height) in [
        (30_000, 30_000),
        (1 << 30, 1),
        (u32::MAX >> 1, u32::MAX >> 1),
    ] {
        let err = processor.process(&png_header(width, height)).unwrap_err();
        // The decoder's own bound comes first where one row alone is too long.
        let refused = matches!(
            err,
            ImageError::TooManyPixels { .. } | ImageError::Memory { .. }
        );
        assert!(refused, "{width} x {height}: {err}");
    }
    // A GIF of 65535 x 65535 with a global palette, one frame and two codes.
    let screen = [0xff, 0xff, 0xff, 0xff, 0x80, 0, 0, 0, 0, 0, 1, 1, 1];
    let frame = [
        0x2c, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 2, 2, 0x4c, 1, 0, 0x3b,
    ];
    let err = processor
        .process(&[b"GIF89a".as_slice(), &screen, &frame].concat())
        .unwrap_err();
    assert!(matches!(err, ImageError::TooManyPixels { .. }), "{err}");
    // A permitted size with nothing behind it is a damaged file.
    let err = processor.process(&png_header(100, 100)).unwrap_err();
    assert!(matches!(err, ImageError::Decode(_)), "{err}");
}

#[test]
fn damaged_files() {
    let processor = processor(released());
    let check = |file: &[u8], what: &str| {
        let err = processor.process(file).unwrap_err();
        assert!(!err.to_string().is_empty(), "{what}");
        err
    };
    assert!(matches!(check(b"", "empty"), ImageError::UnknownFormat));
    assert!(matches!(
        check(b"hello, picture", "text"),
        ImageError::UnknownFormat
    ));
    let bmp = [b"BM".as_slice(), &[0; 60]].concat();
    assert!(matches!(check(&bmp, "bmp"), ImageError::UnknownFormat));
    let image = noise(64, 48, 9);
    let rgb = image::RgbImage::from_raw(64, 48, image.data().to_vec()).unwrap();
    for format in [
        ImageFormat::Png,
        ImageFormat::Jpeg,
        ImageFormat::WebP,
        ImageFormat::Gif,
    ] {
        let file = encode(rgb.clone().into(), format);
        let err = check(&file[..file.len() / 2], "half a file");
        assert!(
            matches!(err, ImageError::Decode(_) | ImageError::Truncated),
            "{format:?}: {err}"
        );
    }
    let mut file = png(&image);
    let middle = file.len() / 2;
    file[middle] ^= 0x55;
    assert!(matches!(
        check(&file, "flipped bits"),
        ImageError::Decode(_)
    ));
}

#[test]
fn limits() {
    let image = png(&noise(40, 30, 4));
    let with = |limits: Limits| ImageProcessor::new(small(), limits).unwrap();
    let processor = with(Limits {
        max_bytes: image.len() - 1,
        ..Limits::default()
    });
    assert!(matches!(
        processor.process(&image),
        Err(ImageError::TooManyBytes { .. })
    ));
    let processor = with(Limits {
        max_pixels: 1199,
        ..Limits::default()
    });
    assert!(matches!(
        processor.process(&image),
        Err(ImageError::TooManyPixels { .. })
    ));
    let processor = with(Limits {
        max_aspect: 1,
        ..Limits::default()
    });
    assert!(matches!(
        processor.process(&image),
        Err(ImageError::Aspect { .. })
    ));
    let processor = with(Limits {
        max_images: 2,
        ..Limits::default()
    });
    let err = processor
        .process_all(&[&image, &image, &image])
        .unwrap_err();
    assert!(matches!(
        err,
        ImageError::TooManyImages { found: 3, max: 2 }
    ));
    assert!(matches!(
        Error::from(err),
        Error::Capacity {
            needed: 3,
            available: 2,
            ..
        }
    ));
    assert_eq!(
        with(Limits::default())
            .process_all(&[&image, &image])
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn pixels_of_another_length() {
    for (w, h, n) in [(0, 1, 0), (2, 2, 11), (1, 0, 3)] {
        assert!(matches!(
            RgbImage::new(w, h, vec![0; n]),
            Err(ImageError::Pixels { .. })
        ));
    }
}

#[test]
fn impossible_settings() {
    let check = |field: &str, cfg: GridConfig| match ImageProcessor::new(cfg, Limits::default()) {
        Err(ImageError::Core(Error::Config { field: found, .. })) => assert_eq!(found, field),
        other => panic!("{field}: {other:?}"),
    };
    check(
        "vision_patch_size",
        GridConfig {
            patch_size: 0,
            ..released()
        },
    );
    check(
        "vision_patch_size",
        GridConfig {
            patch_size: 1 << 40,
            ..released()
        },
    );
    check(
        "vision_downsample_ratio",
        GridConfig {
            downsample_ratio: 0,
            ..released()
        },
    );
    check(
        "vision_max_n_token",
        GridConfig {
            max_n_token: 3,
            ..released()
        },
    );
    check(
        "vision_max_n_token",
        GridConfig {
            max_n_token: usize::MAX,
            ..released()
        },
    );
    check(
        "vision_min_pixels",
        GridConfig {
            min_pixels: usize::MAX,
            ..released()
        },
    );
    for ratio in [0.5, -1.0, f64::NAN, f64::INFINITY] {
        check(
            "vision_max_wh_ratio",
            GridConfig {
                max_wh_ratio: Some(ratio),
                ..released()
            },
        );
    }
}

/// Past the aspect limit the picture is stretched over the whole grid: no grey bars.
#[test]
fn aspect_limit_stretches() {
    let cfg = GridConfig {
        max_wh_ratio: Some(4.0),
        ..small()
    };
    let image = RgbImage::new(100, 10, vec![200; 3000]).unwrap();
    let grid = plan_image_grid(100, 10, &cfg).unwrap();
    let fitted = fit_to_grid(&image, &grid, &cfg).unwrap();
    assert!(fitted.data().iter().all(|v| *v == 200));
}

#[test]
fn prompts_expand() {
    const IMAGE: u32 = 99;
    let processor = processor(small());
    let a = processor.process_rgb(&noise(20, 20, 1)).unwrap();
    let b = processor.process_rgb(&noise(60, 20, 2)).unwrap();
    let images = [a.clone(), b.clone()];
    let out = expand_image_tokens(&[IMAGE, 1, 2, IMAGE, 3], IMAGE, &images).unwrap();
    let (la, lb) = (a.span_len(), b.span_len());
    assert_eq!(out.ids.len(), la + lb + 3);
    assert_eq!(out.types.len(), out.ids.len());
    assert_eq!(out.starts, [0, la + 2]);
    assert_eq!(&out.types[..la], a.span_types());
    assert_eq!(out.types[la], TokenType::Text);
    assert_eq!(&out.types[la + 2..la + 2 + lb], b.span_types());
    let inside = out.types.iter().filter(|t| t.is_image()).count();
    assert_eq!(inside, out.ids.iter().filter(|id| **id == IMAGE).count());
    for ids in [&[1, 2][..], &[IMAGE; 3]] {
        let err = expand_image_tokens(ids, IMAGE, &images).unwrap_err();
        assert!(matches!(err, Error::Value { .. }), "{err}");
    }
    assert_eq!(
        expand_image_tokens(&[1, 2], IMAGE, &[]).unwrap().ids,
        [1, 2]
    );
    for code in -1..4 {
        assert_eq!(TokenType::from_code(code).unwrap().code(), code);
    }
    assert_eq!(TokenType::from_code(4), None);
}
