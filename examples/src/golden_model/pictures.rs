//! The recorded pictures, and the rows that stand for them.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{Error, Result, Weights, model::ImageSpan};
use deepseek_v41_vision::{ImagePatches, VisionConfig, VisionEncoder};

use super::rel_rms;
use crate::expected::Expected;

/// Whose rows a picture is given to the text model as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PictureRows {
    /// Those of the run that was recorded, so that the text model is compared alone.
    Recorded,
    /// Those of the tower here, which are compared with the wide run's.
    Own,
}

/// Runs of the official tower in `pictures.safetensors`: sums in f64, and two widths of vector code.
const WIDE: &str = "wide";
const VECTORED: [&str; 2] = ["avx2", "avx512"];
/// The one whose rows the recorded models were given.
const RECORDED: &str = VECTORED[0];

/// How far picture rows, as the tower here makes them, are from those of the plain run of the official code.
#[derive(Debug, Clone, Default)]
pub struct PictureDistance {
    /// Values that differ in a bit, and their number.
    pub values: (usize, usize),
    /// The relative rms of each picture's rows, and the largest such distance between two runs of the
    /// official code.
    pub pictures: Vec<(f64, f64)>,
}

/// A model's tower, and the rows that runs of the official code made.
pub(super) struct Pictures {
    encoder: VisionEncoder,
    ratio: usize,
    /// `pictures.safetensors` of the golden data.
    rows: Expected,
    /// The model's name in it.
    model: String,
}

impl Pictures {
    /// The tower of the checkpoint in `dir`, which lies in the golden data's directory.
    pub(super) fn load(dir: &Path, weights: &Weights, device: &Device) -> Result<Self> {
        let config = vision_config(&dir.join("config.json"))?;
        let model = dir.file_name().unwrap_or_default().to_string_lossy();
        Ok(Self {
            encoder: VisionEncoder::new(&config, weights.var_builder(device))?,
            ratio: config.grid.downsample_ratio,
            rows: Expected::open(&dir.join("../pictures.safetensors"))?,
            model: model.into_owned(),
        })
    }

    /// The spans of a sequence. What the tower here makes differently from the wide run is added to
    /// `distance`.
    pub(super) fn spans(
        &self,
        expected: &Expected,
        row: usize,
        kind: PictureRows,
        distance: &mut PictureDistance,
    ) -> Result<Vec<ImageSpan>> {
        let mut spans = Vec::new();
        for n in 0.. {
            let key = |part: &str| format!("image.{row}.{n}.{part}");
            if !expected.contains(&key("info")) {
                break;
            }
            let info = expected.integers(&key("info"))?;
            let patches = expected.tensor(&key("patches"), &Device::Cpu)?;
            let image = ImagePatches::new(patches, info[1] as usize, info[2] as usize, self.ratio)?;
            let types: Vec<i64> = image.span_types().iter().map(|t| t.code()).collect();
            if types != expected.integers(&key("types"))? {
                return Err(Error::value(
                    key("types"),
                    format!("laid out here as {types:?}"),
                ));
            }
            let official = |run: &str| {
                let name = format!("{}.image.{row}.{n}.{run}.tokens", self.model);
                self.rows.tensor(&name, &Device::Cpu)
            };
            let own = self.encoder.encode(&image)?.to_device(&Device::Cpu)?;
            let floats = |rows: &Tensor| -> Result<Vec<f32>> {
                Ok(rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
            };
            let wide = floats(&official(WIDE)?)?;
            let got = floats(&own)?;
            let differing = got.iter().zip(&wide);
            let differing = differing.filter(|(a, b)| a.to_bits() != b.to_bits());
            distance.values.0 += differing.count();
            distance.values.1 += got.len();
            let vectored = VECTORED
                .map(official)
                .into_iter()
                .collect::<Result<Vec<_>>>()?;
            let noise = [
                rel_rms(&vectored[0], &wide)?,
                rel_rms(&vectored[1], &wide)?,
                rel_rms(&vectored[1], &floats(&vectored[0])?)?,
            ];
            let noise = noise.into_iter().fold(0.0, f64::max);
            distance.pictures.push((rel_rms(&own, &wide)?, noise));
            let rows = match kind {
                PictureRows::Recorded => official(RECORDED)?,
                PictureRows::Own => own,
            };
            spans.push(ImageSpan {
                start: info[0] as usize,
                rows: self.encoder.span_rows(&image.span_types(), &rows)?,
            });
        }
        Ok(spans)
    }
}

/// The tower's part of the inference config.
fn vision_config(path: &Path) -> Result<VisionConfig> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::checkpoint(path, e.to_string()))
}
