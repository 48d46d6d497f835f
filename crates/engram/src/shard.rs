//! How several ranks share one table, and how they share the tokens.
//!
//! Two ways to split the rows are in use. By *heads*: a rank owns whole hash columns, looks up only
//! those, and the ranks' columns are gathered side by side. By *even rows*: a rank owns
//! `ceil(rows / world)` consecutive rows, answers zeros for the others, and the ranks' answers are
//! summed; this is the reference's split and that of its converted checkpoints. Column borders are
//! row borders, so a head shard is a run of rows as well and one split converts to the other.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use deepseek_v41_core::{Error, Result};
use half::bf16;

use crate::{
    layout::LayerLayout,
    ops::engram_lookup::lookup_into,
    table::{EngramTable, SCALE_BLOCK},
};

const OP: &str = "engram shard";
/// Scale byte of padding rows: 1.0.
const ONE: u8 = 127;

fn check_rank(rank: usize, world: usize) -> Result<()> {
    if rank < world {
        return Ok(());
    }
    Err(Error::value(
        format!("rank {rank}"),
        format!("the world has {world}"),
    ))
}

/// The part of `0..total` that `rank` owns when each owns `ceil(total / world)`, the last ones less.
fn even_part(total: usize, rank: usize, world: usize) -> (usize, Range<usize>) {
    let part = total.div_ceil(world);
    let start = rank.saturating_mul(part).min(total);
    (part, start..start.saturating_add(part).min(total))
}

/// The hash columns of one rank and the rows they fall into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShard {
    total_columns: usize,
    width: usize,
    columns: Range<usize>,
    rows: Range<u32>,
}

impl HeadShard {
    /// Columns `rank * ceil(columns / world) ..` of a layer.
    ///
    /// # Errors
    /// `rank >= world`.
    pub fn new(layer: &LayerLayout, rank: usize, world: usize) -> Result<Self> {
        check_rank(rank, world)?;
        let total_columns = layer.primes().len();
        let (width, columns) = even_part(total_columns, rank, world);
        let row_at = |c: usize| layer.offsets().get(c).copied().unwrap_or(layer.rows());
        let rows = row_at(columns.start)..row_at(columns.end);
        Ok(Self {
            total_columns,
            width,
            columns,
            rows,
        })
    }

    /// Columns that exist.
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Columns a rank answers for, padding included: the same on every rank.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows of the whole table that the shard holds.
    pub fn rows(&self) -> Range<u32> {
        self.rows.clone()
    }

    /// Looks up this rank's columns: `hashes: [T, columns]` row numbers of the whole table, `table` only
    /// this rank's rows → `[T, width * head_dim]`. Padding columns give zeros.
    ///
    /// # Errors
    /// A table of another size, hashes of another width, or a hash outside its rank's rows.
    pub fn lookup(&self, hashes: &[u32], table: &EngramTable) -> Result<Vec<bf16>> {
        let (dim, total) = (table.head_dim(), self.total_columns);
        if table.rows() != self.rows.len() || !hashes.len().is_multiple_of(total) {
            let (rows, found) = (self.rows.len(), table.rows());
            return Err(Error::shape(
                OP,
                format!("expected {rows} rows and {total} columns, found {found} rows"),
            ));
        }
        let tokens = hashes.len() / total;
        let mut local = Vec::with_capacity(tokens * self.columns.len());
        for token in hashes.chunks_exact(total) {
            for &row in &token[self.columns()] {
                if !self.rows.contains(&row) {
                    let reason = format!("the rank holds rows {:?}", self.rows);
                    return Err(Error::value(format!("engram row {row}"), reason));
                }
                local.push(row - self.rows.start);
            }
        }
        let mut out = vec![bf16::ZERO; tokens * self.width * dim];
        if self.columns.len() == self.width {
            lookup_into(&local, table, &mut out)?;
            return Ok(out);
        }
        let real = self.columns.len() * dim;
        let mut rows = vec![bf16::ZERO; tokens * real];
        lookup_into(&local, table, &mut rows)?;
        for t in 0..tokens {
            out[t * self.width * dim..][..real].copy_from_slice(&rows[t * real..][..real]);
        }
        Ok(out)
    }

    /// Puts the ranks' answers side by side and cuts the padding: `parts[rank]: [T, width * head_dim]` →
    /// `[T, columns * head_dim]`.
    ///
    /// # Errors
    /// Parts of other sizes.
    pub fn gather_cut(
        &self,
        parts: &[&[bf16]],
        tokens: usize,
        head_dim: usize,
    ) -> Result<Vec<bf16>> {
        let part = self.width * head_dim;
        let whole = self.total_columns * head_dim;
        if parts.iter().any(|p| p.len() != tokens * part) || parts.len() * part < whole {
            let reason = format!(
                "{} parts do not hold {tokens} tokens of {whole}",
                parts.len()
            );
            return Err(Error::shape(OP, reason));
        }
        let mut out = Vec::with_capacity(tokens * whole);
        for t in 0..tokens {
            let end = out.len() + whole;
            for p in parts {
                let take = part.min(end - out.len());
                out.extend_from_slice(&p[t * part..][..take]);
            }
        }
        Ok(out)
    }
}

/// Rows to copy from one head shard into an even row shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowCopy {
    /// Rank whose head shard holds the rows.
    pub from_rank: usize,
    /// Rows of that shard, counted from its first.
    pub from: Range<usize>,
    /// First row they become, counted from the even shard's first.
    pub to: usize,
}

/// The rows of one rank in the reference's split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvenRowShard {
    part: usize,
    rows: Range<usize>,
}

impl EvenRowShard {
    /// Rows `rank * ceil(total / world) ..` of a table of `total` rows.
    ///
    /// # Errors
    /// `rank >= world`.
    pub fn new(total: usize, rank: usize, world: usize) -> Result<Self> {
        check_rank(rank, world)?;
        let (part, rows) = even_part(total, rank, world);
        Ok(Self { part, rows })
    }

    /// Rows of the whole table that the shard holds.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Rows of the shard as stored: past [`EvenRowShard::rows`] come padding rows (codes 0, scales 1).
    pub fn stored_rows(&self) -> usize {
        self.part
    }

    /// Looks up the rows this rank holds, zeros for all others: summing the ranks' answers gives every
    /// row once. `rows` are of the whole table, `table` is the stored shard.
    ///
    /// # Errors
    /// A table of another size.
    pub fn lookup(&self, rows: &[u32], table: &EngramTable) -> Result<Vec<bf16>> {
        if table.rows() != self.part {
            return Err(Error::shape(
                OP,
                format!("expected {} rows, found {}", self.part, table.rows()),
            ));
        }
        let dim = table.head_dim();
        let mut out = vec![bf16::ZERO; rows.len() * dim];
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(dim)) {
            if self.rows.contains(&(row as usize)) {
                lookup_into(&[row - self.rows.start as u32], table, out)?;
            }
        }
        Ok(out)
    }

    /// Where this shard's rows are among the head shards of a group of `head_world` ranks.
    ///
    /// # Errors
    /// `head_world == 0`.
    pub fn copies_from_heads(
        &self,
        layer: &LayerLayout,
        head_world: usize,
    ) -> Result<Vec<RowCopy>> {
        check_rank(0, head_world)?;
        let mut copies = Vec::new();
        for from_rank in 0..head_world {
            let held = HeadShard::new(layer, from_rank, head_world)?.rows();
            let held = held.start as usize..held.end as usize;
            let start = held.start.max(self.rows.start);
            let end = held.end.min(self.rows.end);
            if start < end {
                let from = start - held.start..end - held.start;
                copies.push(RowCopy {
                    from_rank,
                    from,
                    to: start - self.rows.start,
                });
            }
        }
        Ok(copies)
    }

    /// Builds the shard, padding included, from all head shards of a group.
    ///
    /// # Errors
    /// Shards whose sizes are not those of the layer.
    pub fn convert(&self, layer: &LayerLayout, heads: &[EngramTable]) -> Result<EngramTable> {
        let copies = self.copies_from_heads(layer, heads.len())?;
        let dim = heads.first().map_or(SCALE_BLOCK, EngramTable::head_dim);
        for (rank, table) in heads.iter().enumerate() {
            let rows = HeadShard::new(layer, rank, heads.len())?.rows().len();
            if table.rows() != rows || table.head_dim() != dim {
                let (found, width) = (table.rows(), table.head_dim());
                let reason =
                    format!("rank {rank}: expected [{rows}, {dim}], found [{found}, {width}]");
                return Err(Error::shape(OP, reason));
            }
        }
        let blocks = dim / SCALE_BLOCK;
        let mut codes = BytesMut::zeroed(self.part * dim);
        let mut scales = BytesMut::zeroed(self.part * blocks);
        scales.fill(ONE);
        for copy in copies {
            for (i, row) in copy.from.enumerate() {
                let (row_codes, row_scales) = heads[copy.from_rank].row(row);
                let to = copy.to + i;
                codes[to * dim..][..dim].copy_from_slice(row_codes);
                scales[to * blocks..][..blocks].copy_from_slice(row_scales);
            }
        }
        EngramTable::from_bytes(self.part, dim, Bytes::from(codes), Bytes::from(scales))
    }
}

/// The tokens of one rank in a sequence-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenShare {
    /// Tokens that exist.
    pub tokens: Range<usize>,
    /// Rows every rank carries, `ceil(T / world)`. Rows past the tokens have no lookup and pass through
    /// the gate unchanged (see [`crate::Engram::forward`]).
    pub padded: usize,
}

impl TokenShare {
    /// Tokens `rank * ceil(tokens / world) ..` of a step.
    ///
    /// # Errors
    /// `rank >= world`.
    pub fn new(tokens: usize, rank: usize, world: usize) -> Result<Self> {
        check_rank(rank, world)?;
        let (padded, tokens) = even_part(tokens, rank, world);
        Ok(Self { tokens, padded })
    }
}
