//! The pictures of a request.

use deepseek_recipe_core::multimodal::ImageSource;

use super::{ChatError, ChatPrompt};
use crate::{DeepSeekV41, Prompt};

impl ChatPrompt {
    /// What to generate from, with pictures read and encoded.
    ///
    /// Only pictures that are in the request itself are read: nothing is fetched and no file is opened.
    ///
    /// # Errors
    /// [`ChatError::ImageSource`] or `ChatError::Image` for a picture that cannot be read;
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the model, or this build, has no tower.
    pub fn to_prompt(&self, model: &DeepSeekV41) -> Result<Prompt, ChatError> {
        with_images(model, self.ids.clone(), &self.images)
    }
}

/// `ids` with `sources` in the places of its image tokens.
#[cfg(feature = "vision")]
pub(super) fn with_images(
    model: &DeepSeekV41,
    ids: Vec<u32>,
    sources: &[ImageSource],
) -> Result<Prompt, ChatError> {
    if sources.is_empty() {
        return Ok(Prompt::Ids(ids));
    }
    let vision = model.vision()?;
    let limits = vision.processor().limits();
    limits.check_count(sources.len())?;
    let files: Vec<_> = sources
        .iter()
        .map(|source| read(source, limits))
        .collect::<Result<_, _>>()?;
    Ok(vision.prompt(&ids, &files)?.into())
}

#[cfg(not(feature = "vision"))]
pub(super) fn with_images(
    _: &DeepSeekV41,
    ids: Vec<u32>,
    sources: &[ImageSource],
) -> Result<Prompt, ChatError> {
    match sources.is_empty() {
        true => Ok(Prompt::Ids(ids)),
        false => Err(crate::Error::Unsupported {
            what: "pictures in a build without the feature `vision`".into(),
        }
        .into()),
    }
}

/// The bytes of one file.
#[cfg(feature = "vision")]
fn read<'a>(
    source: &'a ImageSource,
    limits: &deepseek_v41_vision::Limits,
) -> Result<std::borrow::Cow<'a, [u8]>, ChatError> {
    let refused = |reason: String| ChatError::ImageSource {
        path: source.path().to_owned(),
        reason,
    };
    match source {
        ImageSource::Bytes { data, .. } => Ok(data.into()),
        ImageSource::Url { .. } => Err(refused(
            "addresses are not fetched: send the picture as a data URL".into(),
        )),
        ImageSource::DataUrl { data_url, .. } => {
            // Four letters of base64 are three bytes; percent-encoding only takes more.
            limits.check_bytes(data_url.len() / 4 * 3)?;
            let url = data_url::DataUrl::process(data_url).map_err(|e| refused(e.to_string()))?;
            let (bytes, _) = url.decode_to_vec().map_err(|e| refused(e.to_string()))?;
            Ok(bytes.into())
        }
    }
}
