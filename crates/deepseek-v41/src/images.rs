//! Pictures in prompts: image files → [`Prompt::WithImages`].
//!
//! ```no_run
//! use deepseek_v41::{AddedTokens, DeepSeekV41, GenerateOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = DeepSeekV41::load("a/checkpoint/directory")?;
//! let text = "<｜begin▁of▁sentence｜><｜User｜><｜deepseek_image｜>\n\nWhat is this?<｜Assistant｜></think>";
//! let ids = model.tokenizer().encode(text, AddedTokens::Recognise)?;
//! let prompt = model.vision()?.prompt(&ids, &[std::fs::read("picture.png")?])?;
//! for text in model.generate(prompt, &GenerateOptions::default())?.text() {
//!     print!("{}", text?);
//! }
//! # Ok(())
//! # }
//! ```

use candle_core::Device;
use deepseek_v41_core::{Error, Result, Weights};
use deepseek_v41_model::{Config, ImageSpan};
use deepseek_v41_vision::{
    GridConfig, ImageError, ImagePatches, ImageProcessor, Limits, TokenType, VisionConfig,
    VisionEncoder, expand_image_tokens,
};

use crate::{DeepSeekV41, Prompt};

/// The part of a model that reads pictures: preprocessing, tower and aligner.
#[derive(Debug, Clone)]
pub struct Vision {
    encoder: VisionEncoder,
    processor: ImageProcessor,
    image_token: u32,
}

/// A prompt whose image tokens have become spans.
#[derive(Debug, Clone)]
pub struct ImagePrompt {
    /// Token ids; every position of a span carries the image token's.
    pub ids: Vec<u32>,
    /// One an id.
    pub types: Vec<TokenType>,
    /// What stands at the spans, in order.
    pub images: Vec<ImageSpan>,
}

impl From<ImagePrompt> for Prompt {
    fn from(prompt: ImagePrompt) -> Self {
        Self::WithImages {
            ids: prompt.ids,
            images: prompt.images,
        }
    }
}

impl DeepSeekV41 {
    /// The part that reads pictures.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the checkpoint has none.
    pub fn vision(&self) -> Result<&Vision> {
        self.vision.as_ref().ok_or_else(|| Error::Unsupported {
            what: "pictures with a checkpoint that has no vision tower".into(),
        })
    }
}

impl Vision {
    /// Loads `vision.*`, `aligner.*` and `image_*`; `None` for a configuration or a checkpoint without
    /// a tower.
    pub(crate) fn load(cfg: &Config, weights: &Weights, device: &Device) -> Result<Option<Self>> {
        let vb = weights.var_builder(device);
        if !cfg.vision_enabled() || !VisionEncoder::is_present(&vb) {
            return Ok(None);
        }
        let vision = vision_config(cfg);
        let processor = ImageProcessor::new(vision.grid.clone(), Limits::default())?;
        let encoder = VisionEncoder::new(&vision, vb)?;
        Ok(Some(Self {
            encoder,
            processor,
            image_token: cfg.image_token_id as u32,
        }))
    }

    /// Preprocessing, within the default [`Limits`].
    pub fn processor(&self) -> &ImageProcessor {
        &self.processor
    }

    /// Tower and aligner.
    pub fn encoder(&self) -> &VisionEncoder {
        &self.encoder
    }

    /// The id that stands for a picture in a prompt.
    pub fn image_token(&self) -> u32 {
        self.image_token
    }

    /// Puts PNG, JPEG, WebP or GIF files, in order, where the prompt has image tokens: one token a
    /// picture.
    ///
    /// # Errors
    /// A file that breaks a limit or is no picture, and as [`Vision::expand`].
    pub fn prompt<B: AsRef<[u8]>>(
        &self,
        ids: &[u32],
        files: &[B],
    ) -> Result<ImagePrompt, ImageError> {
        // Before any decoding: the count says at once that they do not belong together.
        check_count(ids, self.image_token, files.len())?;
        Ok(self.expand(ids, &self.processor.process_all(files)?)?)
    }

    /// [`Vision::prompt`] for pictures that have been preprocessed, with limits of one's own perhaps.
    ///
    /// # Errors
    /// [`Error::Value`] unless there are as many image tokens as pictures; patches made for another
    /// tower.
    pub fn expand(&self, ids: &[u32], images: &[ImagePatches]) -> Result<ImagePrompt> {
        let expanded = expand_image_tokens(ids, self.image_token, images)?;
        #[cfg(feature = "cuda")]
        let _user = match self.encoder.vit().device() {
            Device::Cuda(dev) => Some(deepseek_v41_core::cuda::StreamUser::new(dev)),
            _ => None,
        };
        let rows = self.encoder.encode_all(images)?;
        let spans = expanded.starts.iter().zip(images).zip(&rows);
        let spans = spans.map(|((start, image), rows)| {
            let rows = self.encoder.span_rows(&image.span_types(), rows)?;
            Ok(ImageSpan {
                start: *start,
                // A prompt goes from thread to thread: what it holds must not be a device's, whose stream
                // another thread may be capturing when this one lets it go.
                rows: rows.to_device(&Device::Cpu)?,
            })
        });
        let images = spans.collect::<Result<_>>()?;
        Ok(ImagePrompt {
            ids: expanded.ids,
            types: expanded.types,
            images,
        })
    }
}

fn check_count(ids: &[u32], image_token: u32, images: usize) -> Result<()> {
    let wanted = ids.iter().filter(|id| **id == image_token).count();
    match wanted == images {
        true => Ok(()),
        false => Err(Error::value(
            "prompt",
            format!("{wanted} image tokens for {images} images"),
        )),
    }
}

/// The tower's own view of the configuration.
pub(crate) fn vision_config(cfg: &Config) -> VisionConfig {
    VisionConfig {
        dim: cfg.dim,
        vision_n_layers: cfg.vision_n_layers,
        vision_dim: cfg.vision_dim,
        vision_n_heads: cfg.vision_n_heads,
        vision_inter_dim: cfg.vision_inter_dim,
        vision_rope_theta: cfg.vision_rope_theta,
        grid: GridConfig {
            patch_size: cfg.vision_patch_size,
            downsample_ratio: cfg.vision_downsample_ratio,
            max_n_token: cfg.vision_max_n_token,
            min_pixels: cfg.vision_min_pixels,
            max_wh_ratio: cfg.vision_max_wh_ratio,
        },
    }
}
