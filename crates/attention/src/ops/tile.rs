//! Tiles of cache rows widened once and served to all heads, and the dot product both attention and
//! the indexer are defined by.

use deepseek_v41_core::cpu;
use half::bf16;

use super::pool_rows::PoolRow;
use super::simd::Lanes;

/// Rows of a tile: the step in which attention walks a query's rows (it is part of the definition,
/// because probabilities are rounded relative to the maximum so far).
pub(crate) const TILE: usize = 64;

/// Columns of one block of a tile.
pub(crate) const COLS: usize = 16;

// The extra columns keep the blocks of one row out of each other's cache sets.
const BLOCK: usize = TILE * COLS + COLS;

/// `sum(a[k] * b[k])` as one chain of fused multiply-adds in ascending `k`.
///
/// The kernels run one such chain per (row, head) pair and put pairs side by side in vector lanes, so
/// no chain is ever split and the result does not depend on the vector width.
pub(crate) fn dot(a: &[bf16], b: &[bf16]) -> f32 {
    a.iter()
        .zip(b)
        .fold(0.0, |acc, (a, b)| a.to_f32().mul_add(b.to_f32(), acc))
}

/// Up to [`TILE`] rows of `dim` values in f32, stored as `[ceil(dim / 16)][TILE][16]`, zero-padded.
#[derive(Debug)]
pub(crate) struct Tile<'a> {
    data: &'a mut [f32],
    dim: usize,
}

impl<'a> Tile<'a> {
    /// Values of scratch memory a tile takes.
    pub(crate) fn len(dim: usize) -> usize {
        dim.div_ceil(COLS) * BLOCK
    }

    /// A tile in `data`, whose content does not matter.
    pub(crate) fn new(data: &'a mut [f32], dim: usize) -> Self {
        debug_assert_eq!(data.len(), Self::len(dim));
        Self { data, dim }
    }

    /// Number of column blocks.
    #[inline(always)]
    pub(crate) fn blocks(&self) -> usize {
        self.dim.div_ceil(COLS)
    }

    /// All rows of one column block: `[TILE][16]`.
    #[inline(always)]
    pub(crate) fn block(&self, b: usize) -> &[f32] {
        &self.data[b * BLOCK..][..TILE * COLS]
    }

    /// Widens one row of `dim` values, or unpacks it.
    #[inline(always)]
    pub(crate) fn set_row(&mut self, r: usize, row: PoolRow<'_>) {
        let row = match row {
            PoolRow::Bf16(row) => row,
            PoolRow::Packed(row, codec) => {
                for b in 0..self.dim / COLS {
                    let values = codec.decode_cols(row, b * COLS);
                    self.data[b * BLOCK + r * COLS..][..COLS].copy_from_slice(&values);
                }
                return;
            }
        };
        let (chunks, rest) = row[..self.dim].as_chunks::<COLS>();
        let mut at = r * COLS;
        for chunk in chunks {
            self.data[at..at + COLS].copy_from_slice(&chunk.map(cpu::widen));
            at += BLOCK;
        }
        if !rest.is_empty() {
            let mut last = [0f32; COLS];
            for (last, v) in last.iter_mut().zip(rest) {
                *last = cpu::widen(*v);
            }
            self.data[at..at + COLS].copy_from_slice(&last);
        }
    }

    /// [`dot`] of rows `r0..r0 + R` with the `W` heads of `panel: [blocks * 16][W]`.
    ///
    /// Rows that were never set give nonsense, which callers ignore.
    #[inline(always)]
    pub(crate) fn dots<V: Lanes<W>, const R: usize, const W: usize>(
        &self,
        r0: usize,
        panel: &[f32],
    ) -> [V; R] {
        let mut acc = [V::splat(0.0); R];
        let (panel, _) = panel.as_chunks::<W>();
        for b in 0..self.blocks() {
            let rows = &self.data[b * BLOCK + r0 * COLS..][..R * COLS];
            let panel = &panel[b * COLS..][..COLS];
            for k in 0..COLS {
                let heads = V::load(&panel[k]);
                for i in 0..R {
                    acc[i] = acc[i].add_product(V::splat(rows[i * COLS + k]), heads);
                }
            }
        }
        acc
    }
}

/// Values [`pack_heads`] writes.
pub(crate) fn packed_len<const W: usize>(heads: usize, dim: usize) -> usize {
    heads.next_multiple_of(W) * dim.next_multiple_of(COLS)
}

/// Transposes `heads: [n, dim]` to panels `[ceil(n / W)][dim rounded up to 16][W]`, zero-padded.
#[inline(always)]
pub(crate) fn pack_heads<const W: usize>(heads: &[bf16], dim: usize, out: &mut [f32]) {
    let rows = dim.next_multiple_of(COLS);
    if !dim.is_multiple_of(COLS) || !(heads.len() / dim).is_multiple_of(W) {
        out.fill(0.0);
    }
    for (panel, heads) in out.chunks_exact_mut(rows * W).zip(heads.chunks(W * dim)) {
        for (h, head) in heads.chunks_exact(dim).enumerate() {
            for (k, v) in head.iter().enumerate() {
                panel[k * W + h] = cpu::widen(*v);
            }
        }
    }
}
