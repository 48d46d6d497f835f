#![doc = include_str!("../README.md")]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod attention;
mod cache;
mod compressor;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod draft;
mod index_keys;
mod indexer;
pub mod ops;
mod packed;
pub mod plan;
mod pool;
mod projections;
mod rows;
mod runtime;
mod slots;
mod stored;

pub use attention::{Attention, LayerCache, Prepared};
pub use cache::{CompressedCache, SlotRows, WindowCache};
pub use compressor::Compressor;
pub use config::{AttentionConfig, CandidateRole, IndexConfig, IndexRole, LayerRole};
pub use draft::{DSparkAttention, DraftChunk, DraftPlan, DraftRopes};
pub use index_keys::{IndexKeySource, last_published};
pub use indexer::{IndexQuery, Indexer};
pub use packed::{RowCodec, pack_rows, unpack_rows};
pub use plan::{AttnPlan, ChunkSpec, CompressPlan, KernelRows, WindowPlan};
pub use pool::{KvFormat, KvPool};
pub use rows::{RowQuant, finish_rows, finish_rows_unfused};
pub use runtime::{RopeTables, SharedAttentionRuntime};
pub use slots::{CacheGeometry, SlotMap};
pub use stored::{RowPlanes, StoredRows};
