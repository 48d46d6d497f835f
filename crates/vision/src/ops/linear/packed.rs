//! Activations in the order the inner loop reads them.

use deepseek_v41_core::cpu;
use half::bf16;
use rayon::prelude::*;

use super::{
    blocks::STEPS,
    tile::{self, LANES, ROWS, RowStep},
};

/// Activations widened to f32 in the order [`tile::accumulate`] reads them: for every [`STEPS`] steps
/// along K, `[tiles, steps, ROWS, LANES]`; zeros behind the last row and the last element.
#[derive(Default)]
pub(super) struct PackedRows {
    data: Vec<RowStep>,
    tiles: usize,
    /// Steps of [`LANES`] along K.
    pub(super) steps: usize,
}

impl PackedRows {
    /// `xs: [m, k]` in the place of what was packed before.
    pub(super) fn pack(&mut self, xs: &[bf16], k: usize) {
        let (m, steps) = (xs.len() / k, k.div_ceil(LANES));
        let tiles = m.div_ceil(ROWS);
        // Rows and elements that exist are overwritten, those behind them must be zeros, as they are where
        // the last band left the same places free.
        if tiles * ROWS != m || tiles != self.tiles {
            self.data.clear();
        }
        (self.tiles, self.steps) = (tiles, steps);
        let data = &mut self.data;
        data.resize(tiles * steps, tile::ZERO_ROWS);
        let pack = |(i, data): (usize, &mut [RowStep])| {
            let k0 = i * STEPS * LANES;
            let k1 = (k0 + STEPS * LANES).min(k);
            for (rows, tile) in xs.chunks(ROWS * k).zip(data.chunks_mut(data.len() / tiles)) {
                for (r, row) in rows.chunks_exact(k).enumerate() {
                    pack_row(&row[k0..k1], r, tile);
                }
            }
        };
        if cpu::should_parallelise(xs.len() * 4) {
            data.par_chunks_mut(tiles * STEPS)
                .enumerate()
                .for_each(pack);
        } else {
            data.chunks_mut(tiles * STEPS).enumerate().for_each(pack);
        }
    }

    /// `[n, steps]` of `n` tiles from `tile` on.
    pub(super) fn tiles(&self, tile: usize, n: usize, s0: usize, steps: usize) -> &[RowStep] {
        debug_assert!(s0.is_multiple_of(STEPS) && s0 + steps <= self.steps);
        let start = s0 * self.tiles + tile * steps;
        &self.data[start..start + n * steps]
    }
}

/// Widens a part of one row of activations into row `r` of a tile.
fn pack_row(xs: &[bf16], r: usize, tile: &mut [RowStep]) {
    simd_dispatch!(pack_row_body(xs: &[bf16], r: usize, tile: &mut [RowStep]))
}

#[inline(always)]
fn pack_row_body(xs: &[bf16], r: usize, tile: &mut [RowStep]) {
    let (whole, rest) = xs.as_chunks::<LANES>();
    for (step, x) in tile.iter_mut().zip(whole) {
        for l in 0..LANES {
            step.0[r][l] = x[l].to_f32();
        }
    }
    if let Some(step) = tile.get_mut(whole.len()) {
        step.0[r]
            .iter_mut()
            .zip(rest)
            .for_each(|(o, x)| *o = x.to_f32());
    }
}
