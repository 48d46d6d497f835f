//! The operations of this crate: a definition over slices (`*_ref`), a checked function over tensors,
//! and a CPU kernel where the operation costs time.

mod candidate_blocks;
mod compress;
mod index_topk;
mod pool_rows;
mod simd;
mod sparse_attn;
mod tile;
mod topk_rows;
mod write_rows;

pub use candidate_blocks::{CandidateBlocks, candidate_blocks, select_candidate_blocks_ref};
pub use compress::{compress, compress_ref};
pub use index_topk::{
    IndexSpan, TopkIdxs, candidate_blocks_ref, index_score_ref, index_topk, index_topk_ref,
    index_topk_with_candidates,
};
pub(crate) use index_topk::{Visible, Wanted, select_rows};
pub use pool_rows::PoolRows;
#[cfg(feature = "cuda")]
pub(crate) use sparse_attn::check_attn;
pub use sparse_attn::{KvRows, KvScope, sparse_attn, sparse_attn_ref};
pub use topk_rows::topk_rows_ref;
pub use write_rows::{write_rows, write_rows_ref};
