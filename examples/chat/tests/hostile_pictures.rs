//! Pictures and tower settings that nobody should send or write.
#![allow(clippy::unwrap_used)]

mod common;

use std::{fs, io::Cursor, path::Path};

use candle_core::{DType, Device, Tensor};
use common::{picture, tiny};
use deepseek_v41::{
    AddedTokens, DeepSeekV41, GenerateOptions, ImagePrompt,
    vision::{ImageError, ImagePatches},
};
use deepseek_v41_testing::assert_outcome;
use image::{DynamicImage, ImageFormat, RgbImage};
use serde_json::{Value, json};

const PROMPT: &str =
    "<｜begin▁of▁sentence｜><｜User｜><｜deepseek_image｜>\n\nWhat?<｜Assistant｜></think>";

fn png(width: u32, height: u32) -> Vec<u8> {
    let pixels = RgbImage::from_fn(width, height, |x, y| image::Rgb([x as u8, y as u8, 7]));
    let mut file = Cursor::new(Vec::new());
    DynamicImage::from(pixels)
        .write_to(&mut file, ImageFormat::Png)
        .unwrap();
    file.into_inner()
}

/// A prompt with the picture, and the first words about it.
fn describe(model: &DeepSeekV41, file: &[u8]) -> Result<usize, ImageError> {
    let ids = model.tokenizer().encode(PROMPT, AddedTokens::Recognise)?;
    Ok(few_words(model, model.vision()?.prompt(&ids, &[file])?)?)
}

/// The prompt's length.
fn few_words(model: &DeepSeekV41, prompt: ImagePrompt) -> deepseek_v41::Result<usize> {
    let len = prompt.ids.len();
    let few = GenerateOptions {
        max_tokens: 2,
        ..GenerateOptions::default()
    };
    model
        .generate(prompt, &few)?
        .try_for_each(|event| event.map(drop))?;
    Ok(len)
}

#[test]
fn sizes() {
    let thin = "factor of 200";
    for (width, height, want) in [
        (1, 1, ""),
        (1, 2, ""),
        (2, 1, ""),
        (1, 200, ""),
        (200, 1, ""),
        (1, 201, thin),
        (201, 1, thin),
        (1, 4096, thin),
        (13, 14, ""),
        (41, 43, ""),
        (127, 125, ""),
        (1000, 7, ""),
        (7, 1000, ""),
        (1500, 1500, ""),
    ] {
        let case = format!("{width} x {height}");
        assert_outcome(&case, describe(tiny(), &png(width, height)), want);
    }
}

#[test]
fn patches() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let good = zeros(&[9, 3, 14, 14], DType::BF16);
    let ones = good.ones_like().unwrap();
    let strided = zeros(&[14, 14, 3, 9], DType::BF16);
    let strided = strided.permute((3, 2, 0, 1)).unwrap();
    let (patches, encoder) = ("image_patches", "vision_encoder");
    for (case, values, n_h, n_w, ratio, want) in [
        ("good", good.clone(), 3, 3, 3, ""),
        ("strided", strided, 3, 3, 3, ""),
        ("f32", zeros(&[9, 3, 14, 14], DType::F32), 3, 3, 3, patches),
        (
            "none",
            zeros(&[0, 3, 14, 14], DType::BF16),
            0,
            9,
            3,
            patches,
        ),
        (
            "too few",
            zeros(&[8, 3, 14, 14], DType::BF16),
            3,
            3,
            3,
            patches,
        ),
        ("flat", zeros(&[9, 588], DType::BF16), 3, 3, 3, patches),
        ("overflow", good.clone(), usize::MAX, 2, 3, patches),
        ("no cells", good.clone(), 3, 3, 0, patches),
        ("other cells", good.clone(), 3, 3, 2, encoder),
        (
            "other patches",
            zeros(&[9, 3, 13, 13], DType::BF16),
            3,
            3,
            3,
            "vit",
        ),
        ("NaN", (&good * f64::NAN).unwrap(), 3, 3, 3, "NaN"),
        ("huge", (ones * 1e38).unwrap(), 3, 3, 3, "NaN"),
    ] {
        let run = || -> deepseek_v41::Result<usize> {
            let image = ImagePatches::new(values.clone(), n_h, n_w, ratio)?;
            let prompt = tiny().vision()?.expand(&[0, 4094, 5], &[image])?;
            few_words(tiny(), prompt)
        };
        assert_outcome(case, run(), want);
    }
}

/// Every setting of the tower with values of every kind: the checkpoint is refused, or reads pictures.
#[test]
fn settings() {
    use deepseek_v41_tiny_a as a;
    use deepseek_v41_tiny_b as b;
    let temp = tempfile::tempdir().unwrap();
    let dir: &Path = temp.path();
    for (name, bytes) in [
        ("generation_config.json", a::GENERATION_CONFIG.as_bytes()),
        ("tokenizer.json", a::TOKENIZER.as_bytes()),
        (a::SHARD_NAME, a::SHARD),
        (b::SHARD_NAME, b::SHARD),
    ] {
        fs::write(dir.join(name), bytes).unwrap();
    }
    let whole: Value = serde_json::from_str(a::CONFIG).unwrap();
    let load = |key: &str, value: Value| {
        let mut config = whole.clone();
        config[key] = value;
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        DeepSeekV41::load(dir)
    };
    let of_pictures = |key: &&String| key.starts_with("vision") || key.starts_with("image");
    for key in whole.as_object().unwrap().keys().filter(of_pictures) {
        for value in [
            json!(0),
            json!(1),
            json!(-1),
            json!(5),
            json!(1 << 16),
            json!(u64::MAX),
            json!(0.5),
            json!(1e300),
            json!("x"),
        ] {
            if let Ok(model) = load(key, value.clone()) {
                match describe(&model, &picture()) {
                    Ok(len) => assert!(len <= 64, "{key} = {value}: {len}"),
                    // Another id stands for pictures.
                    Err(err) => assert!(key == "image_token_id", "{key} = {value}: {err}"),
                }
            }
        }
    }
    // A tower with fewer blocks than the checkpoint's is another tower.
    assert_outcome(
        "blocks",
        load("vision_n_layers", json!(1)),
        "vision.blocks.1",
    );
    assert_outcome(
        "ratio",
        load("vision_downsample_ratio", json!(2)),
        "aligner.w1",
    );
}
