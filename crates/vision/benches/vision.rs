//! Preprocessing and the tower at released sizes.
//!
//! `cargo bench -p deepseek-v41-vision` prints times and GFLOP/s; the first lines are this machine's
//! fused multiply-add peak, to hold the products against. `benches/peers/pillow_preprocess.py` times
//! Pillow on the picture this bench writes.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::{collections::HashMap, hint::black_box, io::Cursor, path::PathBuf, time::Instant};

use candle_core::{DType, Device, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41_core::Weights;
use deepseek_v41_testing::random_bf16;
use deepseek_v41_vision::{
    Aligner, GridConfig, ImageProcessor, Limits, RgbImage, VisionBlock, VisionConfig, fit_to_grid,
    normalise,
    ops::{PatchRuns, Rope2d, full_attention},
    plan_image_grid,
};
use image::{ExtendedColorType, ImageEncoder, codecs::jpeg::JpegEncoder};
use rayon::prelude::*;

fn released() -> VisionConfig {
    VisionConfig {
        dim: 5120,
        vision_n_layers: 32,
        vision_dim: 1024,
        vision_n_heads: 16,
        vision_inter_dim: 2816,
        vision_rope_theta: 1e4,
        grid: GridConfig {
            patch_size: 14,
            downsample_ratio: 3,
            max_n_token: 1024,
            min_pixels: 295_936,
            max_wh_ratio: None,
        },
    }
}

/// Multiply-adds on registers, all threads.
fn peak() -> f64 {
    const ROUNDS: usize = 20_000_000;
    const SUMS: usize = 12;
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512() -> f64 {
        use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
        let mut sums = [_mm512_set1_ps(0.5); SUMS];
        let (a, b) = (
            _mm512_set1_ps(black_box(0.999)),
            _mm512_set1_ps(black_box(1e-3)),
        );
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|s| *s = _mm512_fmadd_ps(*s, a, b));
        }
        black_box(sums.map(|s| _mm512_reduce_add_ps(s)));
        (ROUNDS * SUMS * 16 * 2) as f64
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2() -> f64 {
        use std::arch::x86_64::{_mm256_cvtss_f32, _mm256_fmadd_ps, _mm256_set1_ps};
        let mut sums = [_mm256_set1_ps(0.5); SUMS];
        let (a, b) = (
            _mm256_set1_ps(black_box(0.999)),
            _mm256_set1_ps(black_box(1e-3)),
        );
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|s| *s = _mm256_fmadd_ps(*s, a, b));
        }
        black_box(sums.map(|s| _mm256_cvtss_f32(s)));
        (ROUNDS * SUMS * 8 * 2) as f64
    }
    let run = |_| {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just detected.
            return unsafe { avx512() };
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: just detected.
            return unsafe { avx2() };
        }
        0.0
    };
    let start = Instant::now();
    let flops: f64 = (0..rayon::current_num_threads())
        .into_par_iter()
        .map(run)
        .sum();
    flops / start.elapsed().as_secs_f64() / 1e9
}

/// A picture with smooth areas, edges and noise, so that a decoder has the usual amount of work.
fn picture(width: u32, height: u32) -> RgbImage {
    let noise = random_bf16(4096, 8.0, 7);
    let mut data = Vec::with_capacity((width * height * 3) as usize);
    for y in 0..height {
        for x in 0..width {
            let n = noise[((x * 31 + y * 57) % 4096) as usize].to_f32();
            let edge = if (x / 97 + y / 131) % 2 == 0 {
                40.0
            } else {
                0.0
            };
            for c in 0..3 {
                let wave = ((x as f32) * 0.004 * (c + 1) as f32 + (y as f32) * 0.003).sin() * 80.0;
                data.push((128.0 + wave + edge + n).clamp(0.0, 255.0) as u8);
            }
        }
    }
    RgbImage::new(width, height, data).unwrap()
}

fn jpeg(image: &RgbImage) -> Vec<u8> {
    let mut file = Cursor::new(Vec::new());
    JpegEncoder::new_with_quality(&mut file, 90)
        .write_image(
            image.data(),
            image.width(),
            image.height(),
            ExtendedColorType::Rgb8,
        )
        .unwrap();
    file.into_inner()
}

fn preprocessing(c: &mut Criterion) {
    let cfg = released().grid;
    let photo = picture(4000, 3000);
    let file = jpeg(&photo);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("vision_12mp.jpg");
    std::fs::write(&path, &file).unwrap();
    println!("picture for the peer: {}", path.display());
    let grid = plan_image_grid(photo.width(), photo.height(), &cfg).unwrap();
    let fitted = fit_to_grid(&photo, &grid, &cfg).unwrap();
    let processor = ImageProcessor::new(cfg.clone(), Limits::default()).unwrap();

    let mut group = c.benchmark_group("cpu/preprocess/12MP");
    group.sample_size(20);
    group.throughput(Throughput::Elements(12_000_000));
    group.bench_function("decode", |b| {
        b.iter(|| RgbImage::decode(black_box(&file), &Limits::default()).unwrap());
    });
    group.bench_function("resize", |b| {
        b.iter(|| fit_to_grid(black_box(&photo), &grid, &cfg).unwrap());
    });
    group.bench_function("normalise", |b| {
        b.iter(|| normalise(black_box(&fitted), cfg.patch_size));
    });
    group.bench_function("whole", |b| {
        b.iter(|| processor.process(black_box(&file)).unwrap())
    });
    group.finish();
}

fn tower(c: &mut Criterion) {
    println!("peak: {:.0} GFLOP/s", peak());
    let cfg = released();
    let (dim, inter) = (cfg.vision_dim, cfg.vision_inter_dim);
    let mut weights = HashMap::new();
    let mut put = |name: &str, shape: &[usize], std: f32| {
        let values = random_bf16(shape.iter().product(), std, 11);
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        weights.insert(name.to_owned(), tensor);
    };
    put("norm1.weight", &[dim], 1.0);
    put("norm2.weight", &[dim], 1.0);
    put("attn.wqkv.weight", &[3 * dim, dim], 0.03);
    put("attn.wqkv.bias", &[3 * dim], 0.1);
    put("attn.wo.weight", &[dim, dim], 0.03);
    put("attn.wo.bias", &[dim], 0.1);
    put("mlp.w1.weight", &[2 * inter, dim], 0.03);
    put("mlp.w2.weight", &[dim, inter], 0.03);
    put("w1.weight", &[cfg.dim, cfg.cell_dim()], 0.01);
    put("w1.bias", &[cfg.dim], 0.1);
    put("w2.weight", &[cfg.dim, cfg.dim], 0.01);
    put("w2.bias", &[cfg.dim], 0.1);
    let vb = Weights::from_tensors(weights)
        .unwrap()
        .var_builder(&Device::Cpu);
    let block = VisionBlock::new(&cfg, vb.clone()).unwrap();
    let rope = Rope2d::new(cfg.head_dim(), cfg.vision_rope_theta).unwrap();

    let mut group = c.benchmark_group("cpu/tower");
    group.sample_size(10);
    for side in [32, 45] {
        let n = side * side;
        let xs = random_bf16(n * dim, 1.0, 3);
        let xs = Tensor::from_vec(xs, (n, dim), &Device::Cpu).unwrap();
        let table = rope.table(side, side);
        let runs = PatchRuns::one(n, &Device::Cpu).unwrap();
        let linear = 2 * n * dim * (4 * dim + 3 * inter);
        let attention = 4 * n * n * dim;
        group.throughput(Throughput::Elements((linear + attention) as u64));
        group.bench_function(format!("block/n={n}"), |b| {
            b.iter(|| block.forward(black_box(&xs), &table, &runs).unwrap());
        });
        let qkv = Tensor::from_vec(
            random_bf16(n * 3 * dim, 1.0, 4),
            (n, 3, cfg.vision_n_heads, cfg.head_dim()),
            &Device::Cpu,
        );
        let qkv = qkv.unwrap();
        group.throughput(Throughput::Elements(attention as u64));
        group.bench_function(format!("attention/n={n}"), |b| {
            b.iter(|| full_attention(black_box(&qkv), &runs).unwrap());
        });
    }
    let aligner = Aligner::new(&cfg, vb).unwrap();
    let features = Tensor::ones((93 * 93, dim), DType::BF16, &Device::Cpu).unwrap();
    let cells = 31 * 31;
    group.throughput(Throughput::Elements(
        (2 * cells * cfg.dim * (cfg.cell_dim() + cfg.dim)) as u64,
    ));
    group.bench_function("aligner/tokens=961", |b| {
        b.iter(|| aligner.forward(black_box(&features), 93, 93).unwrap());
    });
    group.finish();
}

criterion_group!(benches, preprocessing, tower);
criterion_main!(benches);
