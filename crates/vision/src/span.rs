//! Where image tokens stand in a prompt.

use deepseek_v41_core::{Error, Result};

use crate::{ImagePatches, span_len};

/// What a position of the prompt holds; the numbers are those of the official token types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i8)]
pub enum TokenType {
    /// Ordinary text.
    Text = -1,
    /// First position of a span, overwritten by `image_start`.
    ImageStart = 0,
    /// One aligned cell of the picture.
    Image = 1,
    /// End of a row of cells, overwritten by `image_newline`.
    ImageNewLine = 2,
    /// Last position of a span, overwritten by `image_end`.
    ImageEnd = 3,
}

impl TokenType {
    /// The official number, -1 for text.
    pub fn code(self) -> i64 {
        self as i64
    }

    /// The type of an official number.
    pub fn from_code(code: i64) -> Option<Self> {
        [
            Self::Text,
            Self::ImageStart,
            Self::Image,
            Self::ImageNewLine,
            Self::ImageEnd,
        ]
        .into_iter()
        .find(|t| t.code() == code)
    }

    /// Whether the position lies inside an image span, delimiters included: the mask that the gate's
    /// vision bias and the n-gram hash ask for.
    pub fn is_image(self) -> bool {
        self != Self::Text
    }
}

/// The types of one span of `rows` by `cols` image tokens.
pub fn span_types(rows: usize, cols: usize) -> Vec<TokenType> {
    let mut types = Vec::with_capacity(span_len(rows, cols));
    types.push(TokenType::ImageStart);
    for _ in 0..rows {
        types.extend(std::iter::repeat_n(TokenType::Image, cols));
        types.push(TokenType::ImageNewLine);
    }
    types.push(TokenType::ImageEnd);
    types
}

/// A prompt whose image tokens have been replaced by whole spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpandedPrompt {
    /// Token ids; every position of a span carries the image token id.
    pub ids: Vec<u32>,
    /// One type per id.
    pub types: Vec<TokenType>,
    /// First position of each image's span, in order.
    pub starts: Vec<usize>,
}

/// Replaces each image token of a tokenised prompt by the span of the next image.
///
/// # Errors
/// [`Error::Value`] unless there are exactly as many image tokens as images.
///
/// Reference: image processor, `prepare_vl_inputs`.
pub fn expand_image_tokens(
    ids: &[u32],
    image_token_id: u32,
    images: &[ImagePatches],
) -> Result<ExpandedPrompt> {
    let wanted = ids.iter().filter(|id| **id == image_token_id).count();
    if wanted != images.len() {
        return Err(Error::value(
            "prompt",
            format!("{wanted} image tokens for {} images", images.len()),
        ));
    }
    let mut out = ExpandedPrompt {
        ids: Vec::new(),
        types: Vec::new(),
        starts: Vec::new(),
    };
    let mut queue = images.iter();
    for &id in ids {
        // Counted above: there is an image for every image token.
        let image = if id == image_token_id {
            queue.next()
        } else {
            None
        };
        match image {
            Some(image) => {
                out.starts.push(out.ids.len());
                let types = image.span_types();
                out.ids.extend(std::iter::repeat_n(id, types.len()));
                out.types.extend(types);
            }
            None => {
                out.ids.push(id);
                out.types.push(TokenType::Text);
            }
        }
    }
    Ok(out)
}
