//! The error type shared by every crate of the workspace.

use std::path::{Path, PathBuf};

use safetensors::Dtype;

use crate::DeviceError;

/// Result with [`Error`] as its default error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between a checkpoint on disk and a tensor of logits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of candle itself. What a GPU refused candle is a [`Device`](Self::Device) error.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// A weight is missing, unexpected, or not what the configuration says it is.
    #[error("weight `{name}`{}: {reason}", in_file(.file))]
    Weight {
        /// Full checkpoint name, such as `layers.3.attn.wq_a.scale`.
        name: String,
        /// The file it was read from, when there is one.
        file: Option<PathBuf>,
        /// What is wrong with it.
        reason: WeightError,
    },
    /// A file of a checkpoint cannot be used at all: truncated, a lying header, not safetensors.
    #[error("checkpoint file {}: {reason}", .file.display())]
    Checkpoint {
        /// The offending file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A saved sequence cannot be brought back.
    #[error("saved state {}: {reason}", .file.display())]
    SavedState {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: SavedStateError,
    },
    /// A configuration field is missing or has a value the model cannot have.
    #[error("config field `{field}`: {reason}")]
    Config {
        /// Field name as the official config spells it.
        field: String,
        /// What was expected and what was found.
        reason: String,
    },
    /// An operation was called with tensors that do not fit each other.
    #[error("{op}: {reason}")]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// What was expected and what was found.
        reason: String,
    },
    /// A value outside of what its meaning allows (a token id past the vocabulary, NaN logits).
    #[error("{what}: {reason}")]
    Value {
        /// What the value is.
        what: String,
        /// Why it cannot be used.
        reason: String,
    },
    /// A layer read something that no earlier layer of this forward pass has published.
    #[error("{what} was read before any layer published it")]
    MissingSource {
        /// What was read.
        what: &'static str,
    },
    /// A fixed-size resource is too small for the request.
    #[error("{what}: {needed} needed, {available} available")]
    Capacity {
        /// The resource and its unit.
        what: &'static str,
        /// How much the request needs.
        needed: usize,
        /// How much there is.
        available: usize,
    },
    /// The request is valid, but this build, checkpoint or device cannot serve it.
    #[error("unsupported: {what}")]
    Unsupported {
        /// What was asked for, and what to do instead.
        what: String,
    },
    /// A GPU cannot be used, or an operation on it failed.
    #[error("{what}: {reason}")]
    Device {
        /// The device, kernel or resource.
        what: String,
        /// What the driver says, and what to do.
        reason: DeviceError,
    },
    /// Reading or writing a file failed.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

fn in_file(file: &Option<PathBuf>) -> String {
    file.as_ref()
        .map(|f| format!(" in {}", f.display()))
        .unwrap_or_default()
}

/// What is wrong with one weight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The checkpoint has no tensor of this name.
    #[error("missing from the checkpoint")]
    Missing,
    /// The checkpoint has a tensor that no layer of the configuration asks for.
    #[error("not part of this configuration")]
    Unexpected,
    /// The shape differs from what the configuration implies.
    #[error("expected shape {expected:?}, found {found:?}")]
    Shape {
        /// From the configuration.
        expected: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// The stored type is not one this weight may have.
    #[error("expected dtype {expected:?}, found {found:?}")]
    Dtype {
        /// The types that would do.
        expected: Vec<Dtype>,
        /// In the file.
        found: Dtype,
    },
    /// Shape and dtype fit, but the content cannot be right.
    #[error("{0}")]
    Content(String),
}

/// Why a saved sequence cannot be brought back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SavedStateError {
    /// The file is something else.
    #[error("not a saved sequence")]
    NotAState,
    /// Written in another version of the format.
    #[error("format version {found}, this build reads version {expected}")]
    Version {
        /// In the file.
        found: String,
        /// What this build reads.
        expected: u32,
    },
    /// Saved with another model: its configuration, weights or token map differ.
    #[error("saved with another model: fingerprint {found:016x}, this one has {expected:016x}")]
    Fingerprint {
        /// In the file.
        found: u64,
        /// Of the model that it was to continue with.
        expected: u64,
    },
    /// The file was cut off or changed since it was written.
    #[error("damaged: {0}")]
    Damaged(String),
    /// A set of rows has another type or shape than the sequence implies.
    #[error("rows `{name}`: expected {expected}, found {found}")]
    Rows {
        /// Name of the rows in the file.
        name: String,
        /// Dtype and shape that the sequence implies.
        expected: String,
        /// What the file has.
        found: String,
    },
}

impl Error {
    /// [`Error::Shape`] from anything printable.
    pub fn shape(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Shape {
            op,
            reason: reason.into(),
        }
    }

    /// [`Error::Config`] from anything printable.
    pub fn config(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Config {
            field: field.into(),
            reason: reason.into(),
        }
    }

    /// [`Error::Value`] from anything printable.
    pub fn value(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Value {
            what: what.into(),
            reason: reason.into(),
        }
    }

    /// [`Error::Device`] about `what`.
    pub fn device(what: impl Into<String>, reason: DeviceError) -> Self {
        Self::Device {
            what: what.into(),
            reason,
        }
    }

    /// [`Error::Weight`] without a file.
    pub fn weight(name: impl Into<String>, reason: WeightError) -> Self {
        Self::Weight {
            name: name.into(),
            file: None,
            reason,
        }
    }

    /// [`Error::Checkpoint`] for `file`.
    pub fn checkpoint(file: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::Checkpoint {
            file: file.as_ref().to_path_buf(),
            reason: reason.into(),
        }
    }

    /// [`Error::SavedState`] about `file`.
    pub fn saved_state(file: impl AsRef<Path>, reason: SavedStateError) -> Self {
        Self::SavedState {
            file: file.as_ref().to_path_buf(),
            reason,
        }
    }

    /// [`Error::Io`] for `path`.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.as_ref().to_path_buf(),
            source,
        }
    }
}

/// candle allocates and launches on a GPU as well: what fails there is an error of the device, like ours.
impl From<candle_core::Error> for Error {
    fn from(err: candle_core::Error) -> Self {
        match DeviceError::behind(&err) {
            Some((what, reason)) => Self::Device { what, reason },
            None => Self::Candle(err),
        }
    }
}

/// Ops run inside candle's `CustomOp` traits, whose result type is candle's: our errors travel
/// through it wrapped, so that nothing of the message is lost. Those of a device come back as they were.
impl From<Error> for candle_core::Error {
    fn from(err: Error) -> Self {
        match err {
            Error::Candle(err) => err,
            err @ Error::Device { .. } => Self::Cuda(Box::new(err)).bt(),
            err => Self::wrap(err),
        }
    }
}
