//! The official values: tower, aligner, rotary table, preprocessing and span layouts.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::Weights;
use deepseek_v41_testing::{Golden, assert_bits_eq, assert_close, golden_dir, rel_rms};
use deepseek_v41_vision::{
    GridConfig, ImageGrid, ImagePatches, ImageProcessor, Limits, RgbImage, VisionConfig,
    VisionEncoder, fit_to_grid, normalise, ops::Rope2d, plan_image_grid, span_types,
};
use half::bf16;
use serde_json::Value;

fn json(name: &str) -> Value {
    let path = golden_dir().join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("golden json")
}

/// The settings of the image cases, by what differs between them (manifest, `ops.vision.cases`).
fn small_grid(patch_size: usize, max_n_token: usize) -> GridConfig {
    GridConfig {
        patch_size,
        downsample_ratio: 3,
        max_n_token,
        min_pixels: 400,
        max_wh_ratio: None,
    }
}

fn grid_config(args: &Value) -> GridConfig {
    serde_json::from_value(args.clone()).expect("grid settings")
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// bf16 through two blocks: the bits of an official run with sums and exponentials in float64. From the
/// recorded run it is as far as that one is, which is as far as two machines' runs are from each other.
#[test]
fn tower_and_aligner() {
    let golden = Golden::open("ops_vision");
    let runs = Golden::open("pictures");
    let cfg = VisionConfig {
        dim: 96,
        vision_n_layers: 2,
        vision_dim: 64,
        vision_n_heads: 2,
        vision_inter_dim: 96,
        vision_rope_theta: 1e4,
        grid: small_grid(4, 64),
    };
    let mut weights = golden.subtree("vit");
    weights.retain(|name, _| name.starts_with("vision.") || name.starts_with("aligner."));
    for name in ["image_start", "image_end", "image_newline"] {
        let row = Tensor::zeros(cfg.dim, DType::BF16, &Device::Cpu).unwrap();
        weights.insert(name.to_owned(), row);
    }
    let weights = Weights::from_tensors(weights).unwrap();
    let encoder = VisionEncoder::new(&cfg, weights.var_builder(&Device::Cpu)).unwrap();
    assert!(weights.unused().is_empty(), "{:?}", weights.unused());
    for i in 0..3 {
        let key = |part: &str| format!("vit.{i}.{part}");
        let grid = golden.i64(&key("grid"));
        let patches = golden.tensor(&key("patches"));
        let (n_h, n_w) = (grid[0] as usize, grid[1] as usize);
        let image = ImagePatches::new(patches, n_h, n_w, cfg.grid.downsample_ratio).unwrap();
        let features = encoder.vit().forward(&image).unwrap();
        let tokens = encoder.encode(&image).unwrap();
        assert_eq!(features.dims(), golden.shape(&key("features")));
        assert_eq!(tokens.dims(), golden.shape(&key("tokens")));
        for (ours, part) in [(features, "features"), (tokens, "tokens")] {
            let run = |run: &str| key(&format!("{run}.{part}"));
            let bits: Vec<bf16> = ours.flatten_all().unwrap().to_vec1().unwrap();
            assert_bits_eq(&bits, &runs.bf16(&run("wide")));
            // One of the runs is the recorded one.
            assert_bits_eq(&runs.bf16(&run("avx2")), &golden.bf16(&key(part)));
            let [wide, avx2, avx512] = ["wide", "avx2", "avx512"].map(|r| runs.f32(&run(r)));
            let noise = rel_rms(&avx512, &avx2).max(rel_rms(&avx512, &wide));
            let err = rel_rms(&flat(&ours), &golden.f32(&key(part)));
            println!("{}: {err:.5} of rms, the runs {noise:.5}", key(part));
            assert!(err <= 2.0 * noise, "{}: {err}, {noise}", key(part));
        }
    }
}

#[test]
fn rope_table() {
    let golden = Golden::open("ops_vision");
    // The golden table has 8 angles a patch: half of a head.
    let table = Rope2d::new(16, 1e4).unwrap().table(3, 5);
    assert_eq!(golden.shape("vit_rope.cos"), [15, 8]);
    assert_close(&table.cos, &golden.f32("vit_rope.cos"), 1e-6, 0.0);
    assert_close(&table.sin, &golden.f32("vit_rope.sin"), 1e-6, 0.0);
}

#[test]
fn image_plans() {
    let plans = json("image_plans.json");
    let mut count = 0;
    for (name, set) in plans.as_object().unwrap() {
        let cfg = grid_config(&set["args"]);
        cfg.validate().unwrap();
        for row in set["width_height_then_rows_cols_hpx_wpx"]
            .as_array()
            .unwrap()
        {
            let n: Vec<usize> = row
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_u64().unwrap() as usize)
                .collect();
            let expected = ImageGrid {
                rows: n[2],
                cols: n[3],
                height: n[4],
                width: n[5],
            };
            let plan = plan_image_grid(n[0] as u32, n[1] as u32, &cfg).unwrap();
            assert_eq!(plan, expected, "{name}: {} x {}", n[0], n[1]);
            count += 1;
        }
    }
    assert_eq!(count, 75);
}

/// Resized pixels are equal, not only within the level the manifest allows.
#[test]
fn images() {
    let golden = Golden::open("ops_vision");
    // Case, settings, patches (rows, columns), tokens (rows, columns).
    let cases = [
        (0, small_grid(4, 40), (5, 8), (2, 3)),
        (1, small_grid(4, 40), (13, 13), (5, 5)),
        (2, small_grid(4, 40), (23, 2), (8, 1)),
        (3, small_grid(7, 64), (7, 9), (3, 3)),
    ];
    for (i, cfg, n_vit, n_llm) in cases {
        let key = |part: &str| format!("image_{i}.{part}");
        let shape = golden.shape(&key("rgb"));
        let rgb = RgbImage::new(
            shape[1] as u32,
            shape[0] as u32,
            golden.bytes(&key("rgb")).to_vec(),
        )
        .unwrap();
        let grid = plan_image_grid(rgb.width(), rgb.height(), &cfg).unwrap();
        let fitted = fit_to_grid(&rgb, &grid, &cfg).unwrap();
        assert_eq!(golden.shape(&key("resized")), [grid.height, grid.width, 3]);
        assert_eq!(
            fitted.data(),
            golden.bytes(&key("resized")),
            "{}",
            key("resized")
        );

        let expected = golden.bf16(&key("patches"));
        let given = RgbImage::new(
            grid.width as u32,
            grid.height as u32,
            golden.bytes(&key("resized")).to_vec(),
        );
        assert_bits_eq(&normalise(&given.unwrap(), cfg.patch_size), &expected);

        let whole = ImageProcessor::new(cfg, Limits::default())
            .unwrap()
            .process_rgb(&rgb)
            .unwrap();
        assert_eq!(whole.patches().dims(), golden.shape(&key("patches")));
        let values: Vec<bf16> = whole.patches().flatten_all().unwrap().to_vec1().unwrap();
        assert_bits_eq(&values, &expected);
        assert_eq!((whole.n_h(), whole.n_w()), n_vit);
        assert_eq!((whole.rows(), whole.cols()), n_llm);
        let types: Vec<i64> = whole.span_types().iter().map(|t| t.code()).collect();
        assert_eq!(types, golden.i64(&key("types")));
        assert_eq!(whole.span_types(), span_types(n_llm.0, n_llm.1));
    }
}

/// The tiny model's picture, from the file to the token types of its prompt.
#[cfg(feature = "decode")]
#[test]
fn tiny_picture() {
    let file = std::fs::read(golden_dir().join("../tiny/picture.png")).unwrap();
    let cfg = GridConfig {
        max_n_token: 16,
        min_pixels: 15_876,
        ..small_grid(14, 16)
    };
    let image = ImageProcessor::new(cfg, Limits::default())
        .unwrap()
        .process(&file)
        .unwrap();
    let expected = json("../tiny/expected_picture.json");
    let types = expected["token_types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_i64().unwrap());
    let span: Vec<i64> = types.filter(|t| *t >= 0).collect();
    assert_eq!(
        image
            .span_types()
            .iter()
            .map(|t| t.code())
            .collect::<Vec<_>>(),
        span
    );
}
