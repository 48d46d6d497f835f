//! From an image file to the rows a text model would read.
//!
//! ```sh
//! cargo run --release -p deepseek-v41-vision --example image_embeddings -- CHECKPOINT picture.png
//! ```
//!
//! CHECKPOINT is a directory with `config.json` (the official inference config) and safetensors files.
//! Prints the grid, the span and the first values of some rows:
//!
//! ```text
//! picture.png: 126 x 126 pixels, 9 x 9 patches, 3 x 3 tokens, span of 14
//! encoded in 3 ms: [9, 256]
//! token 0: [0.0123, -0.4512, …]
//! ```
#![allow(clippy::print_stdout)]

use std::{error::Error, path::PathBuf, time::Instant};

use candle_core::{DType, Device};
use deepseek_v41_core::{LoadPolicy, Weights};
use deepseek_v41_vision::{ImageProcessor, Limits, VisionConfig, VisionEncoder};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [checkpoint, pictures @ ..] = args.as_slice() else {
        return Err("usage: image_embeddings CHECKPOINT IMAGE...".into());
    };
    let config = std::fs::read_to_string(checkpoint.join("config.json"))?;
    let cfg: VisionConfig = serde_json::from_str(&config)?;
    let weights = Weights::open(checkpoint, LoadPolicy::Mmap)?;
    let vb = weights.var_builder(&Device::Cpu);
    if !VisionEncoder::is_present(&vb) {
        return Err("this checkpoint has no vision tower".into());
    }
    let encoder = VisionEncoder::new(&cfg, vb)?;
    let processor = ImageProcessor::new(cfg.grid.clone(), Limits::default())?;
    for picture in pictures {
        let image = processor.process(&std::fs::read(picture)?)?;
        let p = cfg.grid.patch_size;
        println!(
            "{}: {} x {} pixels, {} x {} patches, {} x {} tokens, span of {}",
            picture.display(),
            image.n_w() * p,
            image.n_h() * p,
            image.n_h(),
            image.n_w(),
            image.rows(),
            image.cols(),
            image.span_len()
        );
        let start = Instant::now();
        let tokens = encoder.encode(&image)?;
        println!(
            "encoded in {} ms: {:?}",
            start.elapsed().as_millis(),
            tokens.dims()
        );
        let rows: Vec<Vec<f32>> = tokens.to_dtype(DType::F32)?.to_vec2()?;
        for (i, row) in rows.iter().enumerate().take(3) {
            println!("token {i}: {:.4?} …", &row[..row.len().min(6)]);
        }
    }
    Ok(())
}
