#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]
// Replaying captured steps on a GPU takes one promise, made in `replay`.
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod batch;
mod block;
mod checkpoint;
mod config;
mod dspark;
mod embed;
mod layer_plan;
mod lent;
mod probe;
#[cfg(feature = "cuda")]
mod replay;
mod state;
mod step;
mod transformer;
mod wave;

pub use batch::{Chunk, ForwardBatch, ForwardOutput, ImageSpan, LogitRows};
pub use checkpoint::refuse_unexpected;
pub use config::{Config, IndexKeys, LinearDtype};
pub use dspark::{ChooseToken, DSpark, Draft, DraftRequest, most_likely};
pub use layer_plan::{KvSource, LayerPlan, PlannedLayer};
pub use probe::{Probe, ProbePoint};
pub use state::{Limits, ModelState, Restored, SequenceId};
pub use transformer::Transformer;
