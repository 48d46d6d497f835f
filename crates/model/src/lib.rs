#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

mod batch;
mod block;
mod checkpoint;
mod config;
mod dspark;
mod embed;
mod layer_plan;
mod probe;
mod state;
mod transformer;

pub use batch::{Chunk, ForwardBatch, ForwardOutput, ImageSpan, LogitRows};
pub use checkpoint::refuse_unexpected;
pub use config::{Config, IndexKeys, LinearDtype};
pub use dspark::{ChooseToken, DSpark, Draft, DraftRequest};
pub use layer_plan::{KvSource, LayerPlan, PlannedLayer};
pub use probe::{Probe, ProbePoint};
pub use state::{Limits, ModelState, Restored, SequenceId};
pub use transformer::Transformer;
