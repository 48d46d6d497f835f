//! The vision tower and its rotary table, preprocessing, span layouts.

use candle_core::Device;
use deepseek_v41::Result;
use deepseek_v41_examples::expected::Expected;
use deepseek_v41_vision::{
    Aligner, GridConfig, ImagePatches, ImageProcessor, Limits, RgbImage, VisionConfig, Vit,
    fit_to_grid, normalise, ops::Rope2d, plan_image_grid,
};

use crate::{
    case::{Case, f32s, relative_rms},
    suite::{object, read_json},
    tolerance::{MODEL_FLOOR, MODEL_NOISE, ROPE},
};

/// Runs of the official tower in `pictures.safetensors`; the first has its sums in float64.
const RUNS: [&str; 3] = ["wide", "avx2", "avx512"];

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    match case.name {
        "vit" => tower(case)?,
        "vit_rope" => rope_table(case)?,
        name if name.starts_with("image_") => image(case)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn tower(case: &mut Case<'_>) -> Result<()> {
    let cfg: VisionConfig = serde_json::from_value(case.spec["args"].clone())
        .map_err(|e| case.bad(format!("its args: {e}")))?;
    let name = |key: &str| key.strip_prefix("vit.").map(str::to_owned);
    let weights = case.data.select(name).var_builder(case.device);
    let vit = Vit::new(&cfg, weights.pp("vision"))?;
    let aligner = Aligner::new(&cfg, weights.pp("aligner"))?;
    let official = Expected::open(&case.dir.join("pictures.safetensors"))?;
    for i in 0.. {
        let part = |part: &str| format!("{i}.{part}");
        if !case.has(&part("grid")) {
            break;
        }
        let grid = case.ids(&part("grid"))?;
        let (n_h, n_w) = (grid[0] as usize, grid[1] as usize);
        let patches = case
            .data
            .tensor(&case.key(&part("patches")), &Device::Cpu)?;
        let image = ImagePatches::new(patches, n_h, n_w, cfg.grid.downsample_ratio)?;
        let features = vit.forward(&image)?;
        let tokens = aligner.forward(&features, n_h, n_w)?;
        for (what, got) in [("features", features), ("tokens", tokens)] {
            let run = |run: &str| official.floats(&case.key(&part(&format!("{run}.{what}"))));
            let [wide, avx2, avx512] = [run(RUNS[0])?, run(RUNS[1])?, run(RUNS[2])?];
            let noise = [(&avx2, &wide), (&avx512, &wide), (&avx512, &avx2)]
                .map(|(a, b)| relative_rms(a, b))
                .into_iter()
                .fold(0.0, f64::max);
            let got = f32s(&got)?;
            let run = format!("{what} of {n_h} x {n_w}, wide run");
            let mut limit = MODEL_NOISE * noise;
            match case.device.is_cpu() {
                true => case.exact_f32(&run, &got, &wide)?,
                // A GPU adds in another order, as one more valid run of the official code would.
                false => {
                    limit = limit.max(MODEL_FLOOR);
                    case.rms(&run, &got, &wide, limit)?;
                }
            }
            let want = case.f32s(&part(what))?;
            case.rms(
                &format!("{what} of {n_h} x {n_w}, recorded run"),
                &got,
                &want,
                limit,
            )?;
        }
    }
    Ok(())
}

fn rope_table(case: &mut Case<'_>) -> Result<()> {
    let shape = case.shape("cos")?;
    // The case: "3x5 grid, dim 8": angles for half of a head.
    let table = Rope2d::new(2 * shape[1], 1e4)?.table(3, 5);
    let (cos, sin) = (case.f32s("cos")?, case.f32s("sin")?);
    case.close("cos", &table.cos, &cos, ROPE)?;
    case.close("sin", &table.sin, &sin, ROPE)
}

fn image(case: &mut Case<'_>) -> Result<()> {
    let cfg: GridConfig = serde_json::from_value(case.spec["args"].clone())
        .map_err(|e| case.bad(format!("its args: {e}")))?;
    let pixels = |part: &str| -> Result<RgbImage> {
        let shape = case.shape(part)?;
        Ok(RgbImage::new(
            shape[1] as u32,
            shape[0] as u32,
            case.bytes(part)?,
        )?)
    };
    let (rgb, resized) = (pixels("rgb")?, pixels("resized")?);
    let grid = plan_image_grid(rgb.width(), rgb.height(), &cfg)?;
    let fitted = fit_to_grid(&rgb, &grid, &cfg)?;
    let processor = ImageProcessor::new(cfg, Limits::default())?;
    let whole = processor.process_rgb(&rgb)?;
    let sizes = |key: &str| -> Result<Vec<usize>> { case.arg(key) };
    let (n_vit, n_llm) = (sizes("n_vit")?, sizes("n_llm")?);
    let types: Vec<i64> = whole.span_types().iter().map(|t| t.code()).collect();
    let want = case.ints("types")?;
    case.exact("patches a side", &[whole.n_h(), whole.n_w()], &n_vit)?;
    case.exact("tokens a side", &[whole.rows(), whole.cols()], &n_llm)?;
    case.exact("types", &types, &want)?;
    let patches = case.bf16s("patches")?;
    case.exact(
        "patches of the saved pixels",
        &normalise(&resized, processor.config().patch_size),
        &patches,
    )?;
    case.exact("resized", fitted.data(), resized.data())?;
    case.exact_tensor(whole.patches(), "patches")
}

/// Plans for sizes of pictures, in a file of their own.
pub(super) fn plans(case: &mut Case<'_>) -> Result<()> {
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for (_, set) in object(&read_json(&case.dir.join(case.name))?) {
        let fail = |e| case.bad(format!("a set of plans: {e}"));
        let cfg: GridConfig = serde_json::from_value(set["args"].clone()).map_err(fail)?;
        let rows: Vec<[usize; 6]> =
            serde_json::from_value(set["width_height_then_rows_cols_hpx_wpx"].clone())
                .map_err(fail)?;
        for [width, height, plan @ ..] in rows {
            let grid = plan_image_grid(width as u32, height as u32, &cfg)?;
            got.push([grid.rows, grid.cols, grid.height, grid.width]);
            want.push(plan);
        }
    }
    case.exact("rows, columns, pixels", &got, &want)
}
