//! The tower as a whole on made-up weights: shapes, spans, errors, and bits that depend on nothing but
//! the picture.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, WeightError, Weights};
use deepseek_v41_testing::{assert_bits_eq, random_bf16, seed_of, with_threads};
use deepseek_v41_vision::{
    GridConfig, ImagePatches, TokenType, VisionConfig, VisionEncoder,
    ops::{
        PatchRuns, add, add_ref, full_attention, gelu, gelu_ref, merge_cells, swiglu, swiglu_ref,
    },
};
use half::bf16;
use proptest::prelude::*;

fn config() -> VisionConfig {
    VisionConfig {
        dim: 24,
        vision_n_layers: 2,
        vision_dim: 20,
        vision_n_heads: 5,
        vision_inter_dim: 13,
        vision_rope_theta: 1e4,
        grid: GridConfig {
            patch_size: 3,
            downsample_ratio: 2,
            max_n_token: 64,
            min_pixels: 100,
            max_wh_ratio: None,
        },
    }
}

fn tensors(cfg: &VisionConfig) -> HashMap<String, Tensor> {
    let (d, inter) = (cfg.vision_dim, cfg.vision_inter_dim);
    let mut shapes = vec![
        (
            "vision.patch_embed.proj.weight".to_owned(),
            vec![d, cfg.patch_dim()],
        ),
        ("vision.patch_embed.proj.bias".to_owned(), vec![d]),
        ("vision.norm.weight".to_owned(), vec![d]),
        (
            "aligner.w1.weight".to_owned(),
            vec![cfg.dim, cfg.cell_dim()],
        ),
        ("aligner.w1.bias".to_owned(), vec![cfg.dim]),
        ("aligner.w2.weight".to_owned(), vec![cfg.dim, cfg.dim]),
        ("aligner.w2.bias".to_owned(), vec![cfg.dim]),
        ("image_start".to_owned(), vec![cfg.dim]),
        ("image_newline".to_owned(), vec![cfg.dim]),
        ("image_end".to_owned(), vec![cfg.dim]),
    ];
    for i in 0..cfg.vision_n_layers {
        let block = [
            ("norm1.weight", vec![d]),
            ("norm2.weight", vec![d]),
            ("attn.wqkv.weight", vec![3 * d, d]),
            ("attn.wqkv.bias", vec![3 * d]),
            ("attn.wo.weight", vec![d, d]),
            ("attn.wo.bias", vec![d]),
            ("mlp.w1.weight", vec![2 * inter, d]),
            ("mlp.w2.weight", vec![d, inter]),
        ];
        shapes.extend(block.map(|(name, shape)| (format!("vision.blocks.{i}.{name}"), shape)));
    }
    let tensor = |name: &str, shape: Vec<usize>| {
        let values = random_bf16(shape.iter().product(), 0.3, seed_of(name));
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    shapes
        .into_iter()
        .map(|(name, shape)| (name.clone(), tensor(&name, shape)))
        .collect()
}

fn encoder(tensors: HashMap<String, Tensor>) -> deepseek_v41_core::Result<VisionEncoder> {
    let weights = Weights::from_tensors(tensors)?;
    VisionEncoder::new(&config(), weights.var_builder(&Device::Cpu))
}

fn image(n_h: usize, n_w: usize, patch: usize) -> ImagePatches {
    let values = random_bf16(n_h * n_w * 3 * patch * patch, 0.5, (n_h * 100 + n_w) as u64);
    let patches = Tensor::from_vec(values, (n_h * n_w, 3, patch, patch), &Device::Cpu).unwrap();
    ImagePatches::new(patches, n_h, n_w, 2).unwrap()
}

fn values(xs: &Tensor) -> Vec<bf16> {
    xs.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn spans() {
    let encoder = encoder(tensors(&config())).unwrap();
    let image = image(5, 3, 3);
    let tokens = encoder.encode(&image).unwrap();
    assert_eq!(tokens.dims(), [3 * 2, 24]);
    let span = encoder.encode_span(&image).unwrap();
    assert_eq!(span.dims(), [image.span_len(), 24]);
    let mut next = 0;
    for (i, t) in image.span_types().into_iter().enumerate() {
        let row = values(&span.get(i).unwrap());
        let expected = match t {
            TokenType::ImageStart => encoder.image_start().unwrap(),
            TokenType::ImageNewLine => encoder.image_newline().unwrap(),
            TokenType::ImageEnd => encoder.image_end().unwrap(),
            TokenType::Image => {
                next += 1;
                tokens.get(next - 1).unwrap()
            }
            TokenType::Text => unreachable!("spans hold no text"),
        };
        assert_bits_eq(&row, &values(&expected));
    }
    assert_eq!(next, 6);
}

/// A span may arrive in pieces: each takes the rows of tokens that belong to it.
#[test]
fn parts_of_a_span() {
    let encoder = encoder(tensors(&config())).unwrap();
    let image = image(5, 3, 3);
    let (types, tokens) = (image.span_types(), encoder.encode(&image).unwrap());
    let whole = encoder.span_rows(&types, &tokens).unwrap();
    for cut in 0..=types.len() {
        let (a, b) = types.split_at(cut);
        let n = a.iter().filter(|t| **t == TokenType::Image).count();
        let first = encoder
            .span_rows(a, &tokens.narrow(0, 0, n).unwrap())
            .unwrap();
        let second = encoder
            .span_rows(b, &tokens.narrow(0, n, 6 - n).unwrap())
            .unwrap();
        let joined = Tensor::cat(&[first, second], 0).unwrap();
        assert_bits_eq(&values(&joined), &values(&whole));
    }
    let err = encoder.span_rows(&types[1..3], &tokens).unwrap_err();
    assert!(matches!(err, Error::Value { .. }), "{err}");
    let err = encoder
        .span_rows(&[TokenType::Text], &tokens.narrow(0, 0, 0).unwrap())
        .unwrap_err();
    assert!(matches!(err, Error::Value { .. }), "{err}");
    let narrow = Tensor::zeros((6, 23), DType::BF16, &Device::Cpu).unwrap();
    assert!(matches!(
        encoder.span_rows(&types, &narrow),
        Err(Error::Shape { .. })
    ));
}

#[test]
fn same_bits_for_any_number_of_threads() {
    let encoder = encoder(tensors(&config())).unwrap();
    let image = image(37, 29, 3);
    let expected = values(&encoder.encode(&image).unwrap());
    for threads in [1, 2, 5] {
        assert_bits_eq(
            &with_threads(threads, || values(&encoder.encode(&image).unwrap())),
            &expected,
        );
    }
}

/// Several pictures in one call: the bits of each alone, in order; none give none, and one of another
/// tower refuses all.
#[test]
fn several_pictures() {
    let encoder = encoder(tensors(&config())).unwrap();
    let images = [image(1, 1, 3), image(7, 5, 3), image(2, 9, 3)];
    let together = encoder.encode_all(&images).unwrap();
    assert_eq!(together.len(), images.len());
    for (image, rows) in images.iter().zip(&together) {
        assert_bits_eq(&values(rows), &values(&encoder.encode(image).unwrap()));
        let features = encoder.vit().forward(image).unwrap();
        let among = encoder.vit().forward_all(&images[..]).unwrap();
        let at = images.iter().position(|i| i.n_h() == image.n_h()).unwrap();
        assert_bits_eq(&values(&among[at]), &values(&features));
    }
    assert!(encoder.encode_all(&[]).unwrap().is_empty());
    let [first, ..] = images;
    let other = image(2, 2, 4);
    assert!(encoder.encode_all(&[first, other]).is_err());
}

/// Runs of patches in one tensor attend within themselves.
#[test]
fn runs_of_patches() {
    let device = &Device::Cpu;
    let lens = [3, 0, 17, 1];
    let qkv = Tensor::from_vec(random_bf16(21 * 3 * 2 * 8, 1.0, 9), (21, 3, 2, 8), device);
    let qkv = qkv.unwrap();
    let runs = PatchRuns::new(&lens, device).unwrap();
    let out = values(&full_attention(&qkv, &runs).unwrap());
    let mut at = 0;
    for len in lens {
        let own = qkv.narrow(0, at, len).unwrap();
        let alone = full_attention(&own, &PatchRuns::one(len, device).unwrap()).unwrap();
        assert_bits_eq(&out[at * 16..(at + len) * 16], &values(&alone));
        at += len;
    }
    for lens in [vec![], vec![20], vec![21, 1]] {
        let runs = PatchRuns::new(&lens, device).unwrap();
        assert!(matches!(
            full_attention(&qkv, &runs),
            Err(Error::Shape {
                op: "full_attention",
                ..
            })
        ));
    }
    assert!(matches!(
        PatchRuns::new(&[usize::MAX, 2], device),
        Err(Error::Capacity { .. })
    ));
}

#[test]
fn missing_and_misshaped_weights() {
    let cfg = config();
    for name in tensors(&cfg).into_keys() {
        let mut missing = tensors(&cfg);
        missing.remove(&name);
        match encoder(missing) {
            Err(Error::Weight {
                name: found,
                reason: WeightError::Missing,
                ..
            }) => {
                assert_eq!(found, name);
            }
            other => panic!("{name}: {other:?}"),
        }
        let mut shape = tensors(&cfg);
        shape.insert(
            name.clone(),
            Tensor::zeros(7, DType::BF16, &Device::Cpu).unwrap(),
        );
        match encoder(shape) {
            Err(Error::Weight {
                name: found,
                reason: WeightError::Shape { .. },
                ..
            }) => {
                assert_eq!(found, name);
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    let vb = Weights::from_tensors(tensors(&cfg))
        .unwrap()
        .var_builder(&Device::Cpu);
    assert!(VisionEncoder::is_present(&vb));
    let vb = Weights::from_tensors(HashMap::new())
        .unwrap()
        .var_builder(&Device::Cpu);
    assert!(!VisionEncoder::is_present(&vb));
}

#[test]
fn patches_of_another_tower() {
    let encoder = encoder(tensors(&config())).unwrap();
    assert!(matches!(
        encoder.encode(&image(4, 4, 5)),
        Err(Error::Shape { op: "vit", .. })
    ));
    let other = ImagePatches::new(image(5, 5, 3).patches().clone(), 5, 5, 3).unwrap();
    assert!(matches!(encoder.encode(&other), Err(Error::Shape { .. })));
    let patches = image(4, 4, 3).patches().clone();
    let shape = |patches: Tensor, n_h, n_w, r| {
        assert!(matches!(
            ImagePatches::new(patches, n_h, n_w, r),
            Err(Error::Shape { .. })
        ));
    };
    shape(patches.clone(), 4, 5, 2);
    shape(patches.clone(), usize::MAX, 4, 2);
    shape(patches.clone(), 4, 4, 0);
    shape(patches.flatten_all().unwrap(), 4, 4, 2);
    shape(patches.to_dtype(DType::F32).unwrap(), 4, 4, 2);
}

#[test]
fn impossible_towers() {
    let check = |field: &str, cfg: VisionConfig| match cfg.validate() {
        Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
        other => panic!("{field}: {other:?}"),
    };
    check("dim", VisionConfig { dim: 0, ..config() });
    check(
        "vision_n_layers",
        VisionConfig {
            vision_n_layers: 0,
            ..config()
        },
    );
    check(
        "vision_dim",
        VisionConfig {
            vision_dim: usize::MAX,
            ..config()
        },
    );
    check(
        "vision_n_heads",
        VisionConfig {
            vision_n_heads: 0,
            ..config()
        },
    );
    check(
        "vision_n_heads",
        VisionConfig {
            vision_n_heads: 3,
            ..config()
        },
    );
    check(
        "vision_n_heads",
        VisionConfig {
            vision_n_heads: 10,
            ..config()
        },
    );
    check(
        "vision_inter_dim",
        VisionConfig {
            vision_inter_dim: 0,
            ..config()
        },
    );
    check(
        "vision_rope_theta",
        VisionConfig {
            vision_rope_theta: f64::NAN,
            ..config()
        },
    );
}

#[test]
fn config_reads_the_official_keys() {
    let text = r#"{"vocab_size": 4096, "dim": 256, "vision_n_layers": 2, "vision_dim": 64,
        "vision_n_heads": 4, "vision_inter_dim": 128, "vision_patch_size": 14,
        "vision_downsample_ratio": 3, "vision_max_n_token": 16, "vision_min_pixels": 15876,
        "vision_max_wh_ratio": null, "vision_rope_theta": 10000, "image_token_id": 4094}"#;
    let cfg: VisionConfig = serde_json::from_str(text).unwrap();
    cfg.validate().unwrap();
    assert_eq!(
        (cfg.head_dim(), cfg.patch_dim(), cfg.cell_dim()),
        (16, 588, 576)
    );
    assert_eq!(cfg.grid.max_wh_ratio, None);
}

/// Channel first inside a cell, zeros below and to the right.
#[test]
fn cells() {
    let grid: Vec<bf16> = (0..3 * 3 * 2)
        .map(|v| bf16::from_f32(1.0 + v as f32))
        .collect();
    let xs = Tensor::from_vec(grid, (9, 2), &Device::Cpu).unwrap();
    let cells = merge_cells(&xs, 3, 3, 2).unwrap();
    let expected = [
        [1., 3., 7., 9., 2., 4., 8., 10.],
        [5., 0., 11., 0., 6., 0., 12., 0.],
        [13., 15., 0., 0., 14., 16., 0., 0.],
        [17., 0., 0., 0., 18., 0., 0., 0.],
    ];
    assert_bits_eq(
        &values(&cells),
        &expected
            .concat()
            .iter()
            .map(|v| bf16::from_f32(*v))
            .collect::<Vec<_>>(),
    );
    assert!(matches!(
        merge_cells(&xs, 3, 4, 2),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        merge_cells(&xs, 3, 3, 0),
        Err(Error::Shape { .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn elementwise(rows in 1usize..40, width in 1usize..70, seed: u64) {
        let shape = (rows, width);
        let (a, b) = (random_bf16(rows * width, 4.0, seed), random_bf16(rows * width, 4.0, !seed));
        let tensor = |v: &[bf16]| Tensor::from_slice(v, shape, &Device::Cpu).unwrap();
        let mut expected = vec![bf16::ZERO; a.len()];
        add_ref(&a, &b, &mut expected);
        assert_bits_eq(&values(&add(&tensor(&a), &tensor(&b)).unwrap()), &expected);
        gelu_ref(&a, &mut expected);
        assert_bits_eq(&values(&gelu(&tensor(&a)).unwrap()), &expected);
        for (o, x) in expected.iter().zip(&a) {
            let x = f64::from(x.to_f32());
            let exact = x * 0.5 * (1.0 + candle_core::cpu::erf::erf_f64(x / 2f64.sqrt()));
            // One bf16 rounding, and f32's cancellation in 1 + erf far to the left.
            prop_assert!((f64::from(o.to_f32()) - exact).abs() <= exact.abs() / 250.0 + 1e-6);
        }
        for (i, out) in expected.chunks_mut(width).enumerate() {
            swiglu_ref(&a[i * width..(i + 1) * width], &b[i * width..(i + 1) * width], out);
        }
        let both = Tensor::cat(&[tensor(&a), tensor(&b)], 1).unwrap();
        assert_bits_eq(&values(&swiglu(&both).unwrap()), &expected);
    }
}

#[test]
fn activations_at_the_ends() {
    let ends = [-3e38f32, -100.0, -89.0, 0.0, 89.0, 3e38, f32::NAN];
    let xs: Vec<bf16> = ends.iter().map(|v| bf16::from_f32(*v)).collect();
    let ones = vec![bf16::ONE; xs.len()];
    let mut out = vec![bf16::ZERO; xs.len()];
    swiglu_ref(&xs, &ones, &mut out);
    assert_eq!(
        out[..4],
        [bf16::NEG_ZERO, bf16::NEG_ZERO, bf16::NEG_ZERO, bf16::ZERO]
    );
    assert_eq!(out[4..6], xs[4..6]);
    assert!(out[6].is_nan());
    gelu_ref(&xs, &mut out);
    assert!(out[..4].iter().all(|v| *v == bf16::ZERO));
    assert_eq!(out[4..6], xs[4..6]);
    assert!(out[6].is_nan());
}

#[test]
fn other_dtypes_are_refused() {
    let xs = Tensor::zeros((2, 4), DType::F32, &Device::Cpu).unwrap();
    assert!(matches!(gelu(&xs), Err(Error::Shape { op: "gelu", .. })));
    assert!(matches!(
        swiglu(&xs),
        Err(Error::Shape { op: "swiglu", .. })
    ));
    assert!(matches!(add(&xs, &xs), Err(Error::Shape { op: "add", .. })));
    assert!(matches!(
        merge_cells(&xs, 1, 2, 1),
        Err(Error::Shape {
            op: "merge_cells",
            ..
        })
    ));
    let odd = Tensor::zeros((2, 3), DType::BF16, &Device::Cpu).unwrap();
    assert!(matches!(
        swiglu(&odd),
        Err(Error::Shape { op: "swiglu", .. })
    ));
}
