//! The product on the CPU: blocks of the output over the threads, weights widened once for all rows of a block.

use deepseek_v41_core::cpu;
use half::bf16;
use rayon::prelude::*;

use super::{
    Linear,
    packed::PackedRows,
    tile::{self, COLS, ColStep, LANES, ROWS},
};
use crate::simd::Isa;

/// Rows of an output block: enough that widening a weight is small beside using it.
const BLOCK_ROWS: usize = 24 * ROWS;
/// Columns of an output block, each of which reads all packed rows again. The block's partial sums stay in
/// a core's second-level cache.
const BLOCK_COLS: usize = 16 * COLS;
/// Steps of [`LANES`] along K at a time: a panel of weights and a tile of rows stay in the first-level
/// cache.
pub(super) const STEPS: usize = 64;

/// What one thread keeps between blocks.
#[derive(Default)]
struct Scratch {
    /// Partial sums `[panels, tiles]`; the first step along K overwrites what an earlier block left.
    acc: Vec<tile::Acc>,
    panel: Vec<ColStep>,
}

/// A part of the output that one thread fills.
struct Block<'a> {
    row: usize,
    column: usize,
    rows: Vec<&'a mut [bf16]>,
}

/// Cuts `out: [m, n]` into blocks, row blocks outermost.
fn split_blocks(out: &mut [bf16], m: usize, n: usize) -> Vec<Block<'_>> {
    let across = n.div_ceil(BLOCK_COLS);
    let mut blocks: Vec<Block<'_>> = (0..m.div_ceil(BLOCK_ROWS) * across)
        .map(|i| Block {
            row: i / across * BLOCK_ROWS,
            column: i % across * BLOCK_COLS,
            rows: Vec::with_capacity(BLOCK_ROWS.min(m)),
        })
        .collect();
    for (i, row) in out.chunks_exact_mut(n).enumerate() {
        for (j, part) in row.chunks_mut(BLOCK_COLS).enumerate() {
            blocks[i / BLOCK_ROWS * across + j].rows.push(part);
        }
    }
    blocks
}

impl Linear {
    /// [`forward`](Self::forward) over slices: `xs: [m, in_dim]` → `out: [m, out_dim]`.
    pub(super) fn forward_slice(&self, xs: &[bf16], out: &mut [bf16], isa: Isa) {
        let (n, k) = (self.out_dim(), self.in_dim());
        if n == 0 || k == 0 || xs.is_empty() {
            // Without inputs the sum is empty and only the bias is left.
            for row in out.chunks_mut(n.max(1)) {
                for (j, o) in row.iter_mut().enumerate() {
                    *o = cpu::round_bf16(self.bias.as_ref().map_or(0.0, |b| b[j]));
                }
            }
            return;
        }
        // Blocks enough for every thread, and no more: what is packed shall stay in the caches.
        let wanted = 2 * rayon::current_num_threads();
        let rows = BLOCK_ROWS * wanted.div_ceil(n.div_ceil(BLOCK_COLS));
        let mut packed = PackedRows::default();
        for (xs, out) in xs.chunks(rows * k).zip(out.chunks_mut(rows * n)) {
            packed.pack(xs, k);
            self.forward_band(&packed, out, isa);
        }
    }

    /// The rows that are packed.
    fn forward_band(&self, packed: &PackedRows, out: &mut [bf16], isa: Isa) {
        let (n, k) = (self.out_dim(), self.in_dim());
        let m = out.len() / n;
        let mut blocks = split_blocks(out, m, n);
        let run = |scratch: &mut Scratch, block: &mut Block<'_>| {
            self.forward_block(packed, block, scratch, isa);
        };
        if cpu::should_parallelise(2 * m * n * k) {
            blocks.par_iter_mut().for_each_init(Scratch::default, run);
        } else {
            let mut scratch = Scratch::default();
            blocks.iter_mut().for_each(|block| run(&mut scratch, block));
        }
    }

    /// One block of the output. Weights are widened once for all of its rows; partial sums wait in
    /// `acc` between steps along K, in the lanes of [`cpu::dot`].
    fn forward_block(
        &self,
        packed: &PackedRows,
        block: &mut Block<'_>,
        scratch: &mut Scratch,
        isa: Isa,
    ) {
        let tiles = block.rows.len().div_ceil(ROWS);
        let columns = block.rows.first().map_or(0, |row| row.len());
        let panels = columns.div_ceil(COLS);
        let Scratch { acc, panel } = scratch;
        acc.resize(tiles * panels, tile::ZERO_ACC);
        for s0 in (0..packed.steps).step_by(STEPS) {
            let steps = STEPS.min(packed.steps - s0);
            panel.resize(steps, tile::ZERO_COLS);
            let rows = packed.tiles(block.row / ROWS, tiles, s0, steps);
            for (p, acc) in acc.chunks_exact_mut(tiles).enumerate() {
                let column = block.column + p * COLS;
                self.widen(column, s0, panel, isa);
                // The weights widened next come from memory: they are asked for while these are used.
                let next = match p + 1 < panels {
                    true => (column + COLS, s0),
                    false => (block.column, s0 + steps),
                };
                for (t, (x, acc)) in rows.chunks_exact(steps).zip(acc).enumerate() {
                    self.prefetch(next, t, tiles);
                    tile::accumulate(isa, x, panel, acc, s0 == 0);
                }
            }
        }
        let mut bias = [0f32; BLOCK_COLS];
        if let Some(all) = &self.bias {
            bias.iter_mut()
                .zip(&all[block.column..])
                .for_each(|(o, b)| *o = *b);
        }
        // A row's columns are gathered before they go out: rows lie pages apart.
        let mut values = [[bf16::ZERO; BLOCK_COLS]; ROWS];
        let mut finished = [[bf16::ZERO; COLS]; ROWS];
        for (t, rows) in block.rows.chunks_mut(ROWS).enumerate() {
            for (p, bias) in bias.as_chunks::<COLS>().0.iter().take(panels).enumerate() {
                tile::finish(isa, &acc[p * tiles + t], bias, &mut finished);
                for (values, row) in values.iter_mut().zip(&finished) {
                    values[p * COLS..(p + 1) * COLS].copy_from_slice(row);
                }
            }
            for (row, values) in rows.iter_mut().zip(&values) {
                row.copy_from_slice(&values[..row.len()]);
            }
        }
    }

    /// Part `part` of `parts` of the weights that [`widen`](Self::widen) reads for a column and a step.
    fn prefetch(&self, (column, s0): (usize, usize), part: usize, parts: usize) {
        const LINE: usize = 64;
        let (k, bytes) = (self.in_dim(), self.weight.bytes());
        let lines = (STEPS * LANES * 2).div_ceil(LINE);
        let share = (COLS * lines).div_ceil(parts);
        for i in part * share..((part + 1) * share).min(COLS * lines) {
            let at = ((column + i / lines) * k + s0 * LANES) * 2 + i % lines * LINE;
            // Past the row's end it is another row's, past the last row nothing.
            if let Some(byte) = bytes.get(at) {
                tile::prefetch(byte);
            }
        }
    }

    /// Weights of columns `column ..` and steps `s0 ..` in the order [`tile::accumulate`] reads them.
    /// Columns past the last and elements past K become zeros.
    fn widen(&self, column: usize, s0: usize, panel: &mut [ColStep], isa: Isa) {
        let (n, k) = (self.out_dim(), self.in_dim());
        let k0 = s0 * LANES;
        let k1 = (k0 + panel.len() * LANES).min(k);
        for c in 0..COLS {
            if column + c < n {
                let row = (column + c) * k;
                let row = &self.weight.bytes()[(row + k0) * 2..(row + k1) * 2];
                tile::widen(isa, row, c, panel);
            } else {
                panel.iter_mut().for_each(|step| step.0[c] = [0.0; LANES]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use deepseek_v41_core::cpu::Bf16Rows;
    use deepseek_v41_testing::{assert_bits_eq, random_bf16, random_f32, with_threads};
    use proptest::prelude::*;

    use super::{super::linear_ref, *};

    fn layer(n: usize, k: usize, bias: bool, seed: u64) -> (Linear, Vec<f32>) {
        let weight = random_bf16(n * k, 0.05, seed);
        let bytes: Vec<u8> = weight.iter().flat_map(|v| v.to_le_bytes()).collect();
        let rows = Bf16Rows::new(Bytes::from(bytes), n, k).unwrap();
        let bias = bias.then(|| random_f32(n, 1.0, seed + 1));
        (
            Linear::from_rows(rows, bias).unwrap(),
            weight.iter().map(|v| v.to_f32()).collect(),
        )
    }

    fn check(m: usize, n: usize, k: usize, bias: bool) {
        let (linear, weight) = layer(n, k, bias, (m * 31 + n * 7 + k) as u64);
        let xs = random_bf16(m * k, 1.0, 5);
        let wide: Vec<f32> = xs.iter().map(|v| v.to_f32()).collect();
        let mut expected = vec![bf16::ZERO; m * n];
        linear_ref(&wide, &weight, linear.bias.as_deref(), k, &mut expected);
        for isa in Isa::available() {
            for threads in [1, 3] {
                let mut out = vec![bf16::NAN; m * n];
                with_threads(threads, || linear.forward_slice(&xs, &mut out, isa));
                assert_bits_eq(&out, &expected);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn same_bits_as_the_reference(
            m in 1usize..20, n in 1usize..80, k in 1usize..90, bias: bool,
        ) {
            check(m, n, k, bias);
        }
    }

    #[test]
    fn same_bits_over_several_blocks_and_bands() {
        check(
            2 * BLOCK_ROWS + 5,
            3 * BLOCK_COLS - 3,
            STEPS * LANES + 9,
            true,
        );
        check(3 * BLOCK_ROWS + 1, COLS + 1, 3, false);
    }

    /// What a band left in the packed rows does not reach the next one, past whose last element there
    /// would be infinities.
    #[test]
    fn bands_leave_nothing_behind() {
        const K: usize = LANES + 1;
        let (linear, weight) = layer(8, K, false, 7);
        for rest in [1, ROWS, ROWS + 1] {
            let m = 2 * BLOCK_ROWS + rest;
            let mut xs = random_bf16(m * K, 1.0, 8);
            xs[..2 * BLOCK_ROWS * K].fill(bf16::INFINITY);
            let wide: Vec<f32> = xs.iter().map(|v| v.to_f32()).collect();
            let mut expected = vec![bf16::ZERO; m * 8];
            linear_ref(&wide, &weight, None, K, &mut expected);
            let mut out = vec![bf16::ZERO; m * 8];
            with_threads(1, || linear.forward_slice(&xs, &mut out, Isa::detect()));
            let behind = 2 * BLOCK_ROWS * 8..;
            assert_bits_eq(&out[behind.clone()], &expected[behind]);
        }
    }
}
