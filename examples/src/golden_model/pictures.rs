//! The recorded pictures, and the rows that stand for them.

use std::path::Path;

use candle_core::{Device, Tensor};
use deepseek_v41::{Error, Result, Weights, model::ImageSpan};
use deepseek_v41_vision::{ImagePatches, VisionConfig, VisionEncoder};
use half::bf16;

use crate::expected::Expected;

/// Whose rows a picture is given to the text model as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PictureRows {
    /// Those of the run that was recorded, so that the text model is compared alone.
    Recorded,
    /// Those of the tower here, which are compared bit for bit with the wide run's.
    Own,
}

impl PictureRows {
    /// The run of `pictures.safetensors` they are compared with or taken from.
    fn run(self) -> &'static str {
        match self {
            Self::Recorded => "avx2",
            Self::Own => "wide",
        }
    }
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
    pub(super) fn load(dir: &Path, weights: &Weights) -> Result<Self> {
        let config = vision_config(&dir.join("config.json"))?;
        let model = dir.file_name().unwrap_or_default().to_string_lossy();
        Ok(Self {
            encoder: VisionEncoder::new(&config, weights.var_builder(&Device::Cpu))?,
            ratio: config.grid.downsample_ratio,
            rows: Expected::open(&dir.join("../pictures.safetensors"))?,
            model: model.into_owned(),
        })
    }

    /// The spans of a sequence. What the tower here makes differently from the wide run is added to
    /// `differing`.
    pub(super) fn spans(
        &self,
        expected: &Expected,
        row: usize,
        kind: PictureRows,
        differing: &mut (usize, usize),
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
            let official = |kind: PictureRows| {
                let name = format!("{}.image.{row}.{n}.{}.tokens", self.model, kind.run());
                self.rows.tensor(&name, &Device::Cpu)
            };
            let own = self.encoder.encode(&image)?;
            let bits = |rows: &Tensor| -> Result<Vec<u16>> {
                let values = rows.flatten_all()?.to_vec1::<bf16>()?;
                Ok(values.into_iter().map(bf16::to_bits).collect())
            };
            let (got, want) = (bits(&own)?, bits(&official(PictureRows::Own)?)?);
            if got.len() != want.len() {
                let reason = format!("{} values against {} recorded ones", got.len(), want.len());
                return Err(Error::shape("picture rows", reason));
            }
            differing.0 += got.iter().zip(&want).filter(|(a, b)| a != b).count();
            differing.1 += got.len();
            let rows = match kind {
                PictureRows::Recorded => official(kind)?,
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
