//! The vision tower, op by op and whole.

use super::*;
use deepseek_v41_vision::{
    Aligner, GridConfig, ImagePatches, VisionConfig, VisionEncoder, Vit,
    ops::{
        Linear as TowerLinear, PatchRuns, Rope2d, add, apply_rope_2d, full_attention, gelu,
        merge_cells, swiglu,
    },
};

/// Weights of the softmax round against a running maximum on one side and the last one on the other.
const WEIGHTS: f64 = 4e-3;
/// Blocks of products, a softmax and roundings, each of which may fall the other way.
const TOWER: f64 = 1.5e-2;

pub(super) fn vision(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    attention(gpu, rng, r)?;
    parts(gpu, rng, r)?;
    linears(gpu, rng, r)?;
    tower(gpu, rng, r)
}

fn attention(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (lens, h, hd) in [
        (vec![1], 5, 12),
        (vec![257], 5, 20),
        (vec![257, 1, 63], 3, 36),
        (vec![64, 65, 128, 129], 2, 4),
        (vec![70, 0, 130], 4, 16),
        (vec![33, 191], 1, 72),
        (vec![150], 2, 128),
        (vec![90, 31], 3, 100),
        (vec![300, 2, 520], 16, 64),
        (vec![2025], 16, 64),
    ] {
        let n: usize = lens.iter().sum();
        let qkv = rng.bf16(&[n, 3, h, hd], 1.0)?;
        r.both(
            "full_attention",
            &format!("{lens:?} patches, {h}x{hd}"),
            gpu,
            WEIGHTS,
            &[&qkv],
            |o, d| full_attention(&o[0], &PatchRuns::new(&lens, d)?),
        )?;
    }
    // Scores past what a factor and a difference in one step would take.
    let qkv = (rng.bf16(&[70, 2, 2, 16], 1.0)? * 1e15)?;
    let qkv = Tensor::cat(&[&qkv, &rng.bf16(&[70, 1, 2, 16], 1.0)?], 1)?;
    r.both(
        "full_attention",
        "huge scores",
        gpu,
        WEIGHTS,
        &[&qkv],
        |o, d| full_attention(&o[0], &PatchRuns::one(70, d)?),
    )?;
    // A NaN among 100 keys reaches every query of its head and image and no other.
    let mut values = rng.f32s(130 * 3 * 2 * 8, 1.0);
    values[40 * 48 + 16] = f32::NAN;
    let qkv = Tensor::from_vec(values, (130, 3, 2, 8), &Device::Cpu)?.to_dtype(DType::BF16)?;
    r.both(
        "full_attention",
        "a NaN in one of two images",
        gpu,
        WEIGHTS,
        &[&qkv],
        |o, d| full_attention(&o[0], &PatchRuns::new(&[100, 30], d)?),
    )?;
    let heads = Tensor::zeros((3, 3, 1, 132), DType::BF16, gpu)?;
    let refused = full_attention(&heads, &PatchRuns::one(3, gpu)?);
    let refused = matches!(refused, Err(deepseek_v41::Error::Unsupported { .. }));
    r.error(
        "full_attention",
        "heads of 132 are refused",
        f64::from(u8::from(!refused)),
        0.0,
    );
    let short = full_attention(&heads, &PatchRuns::one(4, gpu)?);
    let short = matches!(short, Err(deepseek_v41::Error::Shape { .. }));
    r.error(
        "full_attention",
        "another number of patches is refused",
        f64::from(u8::from(!short)),
        0.0,
    );
    Ok(())
}

fn parts(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (grids, h, hd, rotated) in [
        (vec![(1, 1)], 5, 12, 3),
        (vec![(3, 5), (1, 7)], 6, 20, 4),
        (vec![(45, 45)], 48, 64, 32),
        (vec![(2, 300)], 3, 32, 3),
    ] {
        let n: usize = grids.iter().map(|(h, w)| h * w).sum();
        let xs = rng.bf16(&[n, h, hd], 1.0)?;
        let table = Rope2d::new(hd, 1e4)?.tables(&grids);
        let shape = format!("{grids:?}, {h}x{hd}, {rotated} turned");
        r.both("rope_2d", &shape, gpu, 0.0, &[&xs], |o, d| {
            apply_rope_2d(&o[0], &table.clone().on(d)?, rotated)
        })?;
    }
    for (n, inter) in [(1, 1), (7, 33), (257, 96), (2025, 2816)] {
        let xs = rng.uneven(n, 2 * inter)?;
        let shape = format!("{n}x{inter}");
        r.both("swiglu (vision)", &shape, gpu, 0.0, &[&xs], |o, _| {
            swiglu(&o[0])
        })?;
        r.both("gelu", &shape, gpu, ROUNDING, &[&xs], |o, _| gelu(&o[0]))?;
        let ys = rng.uneven(n, 2 * inter)?;
        r.both("add", &shape, gpu, 0.0, &[&xs, &ys], |o, _| {
            add(&o[0], &o[1])
        })?;
        // A view that begins in the middle of 16 bytes.
        r.both(
            "gelu",
            &format!("{shape}, a view"),
            gpu,
            ROUNDING,
            &[&xs],
            |o, _| gelu(&o[0].flatten_all()?.narrow(0, 1, 2 * n * inter - 1)?),
        )?;
    }
    for (n_h, n_w, c, ratio) in [
        (1, 1, 4, 3),
        (5, 7, 12, 3),
        (4, 6, 33, 2),
        (9, 2, 8, 1),
        (45, 44, 1024, 3),
    ] {
        let xs = rng.bf16(&[n_h * n_w, c], 1.0)?;
        let shape = format!("{n_h}x{n_w}x{c}, cells of {ratio}");
        r.both("merge_cells", &shape, gpu, 0.0, &[&xs], |o, _| {
            merge_cells(&o[0], n_h, n_w, ratio)
        })?;
    }
    Ok(())
}

fn linears(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (m, k, n, bias) in [
        (1, 27, 5, true),
        (257, 60, 36, true),
        (3, 588, 1024, true),
        (65, 96, 192, false),
        (300, 1024, 3072, true),
        (300, 2816, 1024, false),
        (33, 9216, 5120, true),
    ] {
        let mut weights = rng.weight("", n, k, WeightFormat::Bf16);
        weights.push(rng.named("bias", &[n], 1.0, DType::BF16)?);
        let xs = rng.bf16(&[m, k], 1.0)?;
        let shape = format!("M{m} {k}->{n}, bias {bias}");
        r.both("linear (vision)", &shape, gpu, ROUNDING, &[&xs], |o, d| {
            TowerLinear::new(k, n, bias, checkpoint(weights.clone(), d))?.forward(&o[0])
        })?;
    }
    Ok(())
}

/// A tower, its aligner and the delimiters; weights small enough for activations of order one.
fn encoder_weights(cfg: &VisionConfig, rng: &Random) -> Result<Vec<deepseek_v41::core::RawTensor>> {
    let (dim, inter) = (cfg.vision_dim, cfg.vision_inter_dim);
    let mut all = Vec::new();
    let mut linear = |name: String, n: usize, k: usize, bias: bool| -> Result<()> {
        all.extend(rng.weight(&format!("{name}."), n, k, WeightFormat::Bf16));
        if bias {
            all.push(rng.named(&format!("{name}.bias"), &[n], 0.1, DType::BF16)?);
        }
        Ok(())
    };
    linear("vision.patch_embed.proj".into(), dim, cfg.patch_dim(), true)?;
    for i in 0..cfg.vision_n_layers {
        let at = |part: &str| format!("vision.blocks.{i}.{part}");
        linear(at("attn.wqkv"), 3 * dim, dim, true)?;
        linear(at("attn.wo"), dim, dim, true)?;
        linear(at("mlp.w1"), 2 * inter, dim, false)?;
        linear(at("mlp.w2"), dim, inter, false)?;
    }
    linear("aligner.w1".into(), cfg.dim, cfg.cell_dim(), true)?;
    linear("aligner.w2".into(), cfg.dim, cfg.dim, true)?;
    let norms = (0..cfg.vision_n_layers)
        .flat_map(|i| [1, 2].map(|n| format!("vision.blocks.{i}.norm{n}.weight")))
        .chain(["vision.norm.weight".into()]);
    for name in norms {
        all.push(rng.named(&name, &[dim], 1.0, DType::BF16)?);
    }
    for name in ["image_start", "image_newline", "image_end"] {
        all.push(rng.named(name, &[cfg.dim], 1.0, DType::BF16)?);
    }
    Ok(all)
}

fn tower(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    let grid = |patch_size| GridConfig {
        patch_size,
        downsample_ratio: 3,
        max_n_token: 1024,
        min_pixels: 1,
        max_wh_ratio: None,
    };
    let config = |layers, vision_dim, heads, inter, dim, patch| VisionConfig {
        dim,
        vision_n_layers: layers,
        vision_dim,
        vision_n_heads: heads,
        vision_inter_dim: inter,
        vision_rope_theta: 1e4,
        grid: grid(patch),
    };
    // Heads of 12, five heads of 32, and the released widths with fewer layers.
    for (cfg, sizes) in [
        (config(2, 96, 8, 100, 72, 4), vec![(1, 1), (17, 16), (2, 9)]),
        (config(3, 160, 5, 96, 128, 3), vec![(257, 1)]),
        (config(2, 1024, 16, 2816, 5120, 14), vec![(13, 17), (1, 2)]),
    ] {
        let weights = encoder_weights(&cfg, rng)?;
        let images = |d: &Device, o: &[Tensor]| -> Result<Vec<ImagePatches>> {
            let pairs = sizes.iter().zip(o);
            pairs
                .map(|((h, w), patches)| {
                    ImagePatches::new(patches.to_device(d)?, *h, *w, cfg.grid.downsample_ratio)
                })
                .collect()
        };
        let p = cfg.grid.patch_size;
        let patches = sizes.iter().map(|(h, w)| rng.bf16(&[h * w, 3, p, p], 1.0));
        let patches = patches.collect::<Result<Vec<_>>>()?;
        let operands: Vec<&Tensor> = patches.iter().collect();
        let shape = format!(
            "{sizes:?}, {}x{}, {} layers",
            cfg.vision_n_heads,
            cfg.head_dim(),
            cfg.vision_n_layers
        );
        r.both("vit", &shape, gpu, TOWER, &operands, |o, d| {
            let vit = Vit::new(&cfg, checkpoint(weights.clone(), d).pp("vision"))?;
            Ok(Tensor::cat(&vit.forward_all(&images(d, o)?)?, 0)?)
        })?;
        r.both("picture rows", &shape, gpu, TOWER, &operands, |o, d| {
            let encoder = VisionEncoder::new(&cfg, checkpoint(weights.clone(), d))?;
            let images = images(d, o)?;
            let rows = encoder.encode_all(&images)?;
            let spans = images.iter().zip(&rows);
            let spans = spans.map(|(image, rows)| encoder.span_rows(&image.span_types(), rows));
            Ok(Tensor::cat(&spans.collect::<Result<Vec<_>>>()?, 0)?)
        })?;
        let encoder = VisionEncoder::new(&cfg, checkpoint(weights.clone(), gpu))?;
        r.error(
            "picture rows",
            "no pictures",
            encoder.encode_all(&[])?.len() as f64,
            0.0,
        );
        // Alone or among others, a picture's rows are within the order of sums.
        let all = images(gpu, &patches)?;
        let among = encoder.encode_all(&all)?;
        for (image, among) in all.iter().zip(&among) {
            r.close(
                "picture rows",
                &format!(
                    "{}x{} alone and among {}",
                    image.n_h(),
                    image.n_w(),
                    all.len()
                ),
                &encoder.encode(image)?,
                among,
                TOWER,
            )?;
        }
        let aligner = Aligner::new(&cfg, checkpoint(weights.clone(), gpu).pp("aligner"))?;
        let features = rng.bf16(&[10, cfg.vision_dim], 1.0)?.to_device(gpu)?;
        let refused = matches!(
            aligner.forward(&features, 3, 3),
            Err(deepseek_v41::Error::Shape { .. })
        );
        r.error(
            "aligner",
            "9 patches of 10 are refused",
            f64::from(u8::from(!refused)),
            0.0,
        );
    }
    Ok(())
}
