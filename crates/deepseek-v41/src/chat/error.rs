//! What can be wrong with a conversation or an answer.

use deepseek_recipe::{request::ConversionError, stream::StreamError};
use deepseek_recipe_encoding::EncodingError;
use deepseek_v41_core::Error;

/// What can be wrong with a conversation or an answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The request asks for something that does not exist or contradicts itself.
    ///
    /// [`ConversionError::into_error_response`] makes it the answer that clients expect.
    #[error("request: {0}")]
    Request(#[from] ConversionError),
    /// The request is not JSON, or not of its protocol's shape.
    #[error("request: {0}")]
    Json(#[from] serde_json::Error),
    /// A reasoning effort that is neither a number from 1 to 100 nor a name.
    #[error("reasoning effort {found}: expected a whole number from 1 to 100 or one of {names}")]
    Effort {
        /// What was given.
        found: String,
        /// The names there are.
        names: String,
    },
    /// The prompt has a control token that the checkpoint's tokenizer lacks.
    #[error(transparent)]
    Encoding(#[from] EncodingError),
    /// Generated ids could not be decoded.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// One answer mixes the tool tags of V4 (`<｜DSML｜invoke`) with those of V4.1 (`<｜DSML｜ invoke`).
    #[error("the answer mixes tool tags with and without a space after ｜DSML｜")]
    MixedTags,
    /// A picture that is not in the request itself. Nothing is fetched.
    #[error("image {path}: {reason}")]
    ImageSource {
        /// Where in the request.
        path: String,
        /// Why it cannot be read.
        reason: String,
    },
    /// A picture that cannot be one.
    #[cfg(feature = "vision")]
    #[error(transparent)]
    Image(Box<deepseek_v41_vision::ImageError>),
    /// The model.
    #[error(transparent)]
    Model(#[from] Error),
}

/// Errors of the model keep their kind: only what is wrong with the picture itself is an image's.
#[cfg(feature = "vision")]
impl From<deepseek_v41_vision::ImageError> for ChatError {
    fn from(err: deepseek_v41_vision::ImageError) -> Self {
        match err {
            deepseek_v41_vision::ImageError::Core(err) => Self::Model(err),
            err => Self::Image(Box::new(err)),
        }
    }
}
