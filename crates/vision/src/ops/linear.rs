//! `x · Wᵀ + b` with bf16 weights as stored and one rounding.
//!
//! ```text
//! out[t][n] = bf16(dot(x[t], w[n]) + b[n])
//! ```
//!
//! with [`cpu::dot`]'s order of additions. The bias joins in f32: adding it to a product already rounded
//! to bf16 would round twice.

mod tile;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result, StoredDtype, VarBuilder,
    cpu::{self, Bf16Rows, WeightRows},
};
use half::bf16;
use rayon::prelude::*;

use self::tile::{COLS, LANES, ROWS};
use super::cpu_bf16;
use crate::simd::Isa;

/// A linear layer of the tower or the aligner.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Bf16Rows,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Reads `weight: [out_dim, in_dim]` and, if asked for, `bias: [out_dim]`, both stored bf16. The
    /// weight is used where it lies; nothing is copied.
    ///
    /// # Errors
    /// A tensor is missing or of another shape or dtype.
    pub fn new(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Self> {
        let raw = vb.raw("weight", &[StoredDtype::BF16], &[out_dim, in_dim])?;
        let bias = match bias {
            true => Some(vb.tensor_f32("bias", &[out_dim])?.to_vec1::<f32>()?),
            false => None,
        };
        let len = raw.bytes.len();
        let weight = Bf16Rows::new(raw.bytes, out_dim, in_dim).ok_or_else(|| {
            Error::shape("linear", format!("[{out_dim}, {in_dim}] bf16 in {len} bytes"))
        })?;
        Ok(Self { weight, bias })
    }

    /// A layer over weights already in memory: `weight: [out_dim, in_dim]`, `bias: [out_dim]`.
    ///
    /// # Errors
    /// A bias of another length.
    pub fn from_rows(weight: Bf16Rows, bias: Option<Vec<f32>>) -> Result<Self> {
        if bias.as_ref().is_some_and(|b| b.len() != weight.rows()) {
            return Err(Error::shape("linear", "bias and weight differ in length"));
        }
        Ok(Self { weight, bias })
    }

    /// Input features.
    pub fn in_dim(&self) -> usize {
        self.weight.cols()
    }

    /// Output features.
    pub fn out_dim(&self) -> usize {
        self.weight.rows()
    }

    /// `xs: [n, in_dim]` bf16 → `[n, out_dim]` bf16.
    ///
    /// # Errors
    /// Another dtype or shape.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = cpu_bf16(xs, "linear")?;
        if xs.rank() != 2 || xs.dims()[1] != self.in_dim() {
            return Err(Error::shape(
                "linear",
                format!("expected [n, {}], found {:?}", self.in_dim(), xs.shape()),
            ));
        }
        Ok(xs.apply_op1_no_bwd(&LinearOp(self))?)
    }

    /// [`forward`](Self::forward) over slices: `xs: [m, in_dim]` → `out: [m, out_dim]`.
    fn forward_slice(&self, xs: &[bf16], out: &mut [bf16], isa: Isa) {
        let (n, k) = (self.out_dim(), self.in_dim());
        if n == 0 || k == 0 || xs.is_empty() {
            // Without inputs the sum is empty and only the bias is left.
            for row in out.chunks_mut(n.max(1)) {
                for (j, o) in row.iter_mut().enumerate() {
                    *o = bf16::from_f32(self.bias.as_ref().map_or(0.0, |b| b[j]));
                }
            }
            return;
        }
        for (xs, out) in xs.chunks(BAND_ROWS * k).zip(out.chunks_mut(BAND_ROWS * n)) {
            self.forward_band(xs, out, isa);
        }
    }

    /// Up to [`BAND_ROWS`] rows.
    fn forward_band(&self, xs: &[bf16], out: &mut [bf16], isa: Isa) {
        let (n, k) = (self.out_dim(), self.in_dim());
        let m = xs.len() / k;
        let packed = PackedRows::new(xs, k);
        let mut blocks = split_blocks(out, m, n);
        let run = |block: &mut Block<'_>| self.forward_block(&packed, block, isa);
        if cpu::should_parallelise(2 * m * n * k) {
            blocks.par_iter_mut().for_each(run);
        } else {
            blocks.iter_mut().for_each(run);
        }
    }

    /// One block of the output. Weights are widened once for all of its rows; partial sums wait in
    /// `acc` between steps along K, in the lanes of [`cpu::dot`].
    fn forward_block(&self, packed: &PackedRows, block: &mut Block<'_>, isa: Isa) {
        let tiles = block.rows.len().div_ceil(ROWS);
        let columns = block.rows.first().map_or(0, |row| row.len());
        let panels = columns.div_ceil(COLS);
        let mut acc = vec![tile::ZERO; tiles * panels];
        let mut panel = vec![[[0f32; LANES]; COLS]; STEPS];
        for s0 in (0..packed.steps).step_by(STEPS) {
            let steps = STEPS.min(packed.steps - s0);
            for (p, acc) in acc.chunks_exact_mut(tiles).enumerate() {
                self.widen(block.column + p * COLS, s0, &mut panel[..steps]);
                for (t, acc) in acc.iter_mut().enumerate() {
                    let x = packed.tile(block.row / ROWS + t, s0, steps);
                    tile::accumulate(isa, x, &panel[..steps], acc);
                }
            }
        }
        for (p, acc) in acc.chunks_exact(tiles).enumerate() {
            let bias = self.bias.as_ref().map(|b| &b[block.column + p * COLS..]);
            for (rows, acc) in block.rows.chunks_mut(ROWS).zip(acc) {
                for (row, acc) in rows.iter_mut().zip(acc) {
                    let out = row[p * COLS..].iter_mut().take(COLS).enumerate();
                    for (j, o) in out {
                        *o = bf16::from_f32(sum_lanes(&acc[j]) + bias.map_or(0.0, |b| b[j]));
                    }
                }
            }
        }
    }

    /// Weights of columns `column ..` and steps `s0 ..` in the order [`tile::accumulate`] reads them.
    /// Columns past the last and elements past K become zeros.
    fn widen(&self, column: usize, s0: usize, panel: &mut [[[f32; LANES]; COLS]]) {
        let (n, k) = (self.out_dim(), self.in_dim());
        let k0 = s0 * LANES;
        let k1 = (k0 + panel.len() * LANES).min(k);
        for c in 0..COLS {
            if column + c < n {
                let row = (column + c) * k;
                widen_row(&self.weight.bytes()[(row + k0) * 2..(row + k1) * 2], c, panel);
            } else {
                panel.iter_mut().for_each(|step| step[c] = [0.0; LANES]);
            }
        }
    }
}

/// Straight loops over [`cpu::dot`]: `xs: [m, k]`, `weight: [n, k]`, `bias: [n]` → `out: [m, n]`.
pub fn linear_ref(xs: &[f32], weight: &[f32], bias: Option<&[f32]>, k: usize, out: &mut [bf16]) {
    let n = weight.len() / k;
    for (x, out) in xs.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (j, o) in out.iter_mut().enumerate() {
            let sum = cpu::dot(x, &weight[j * k..(j + 1) * k]);
            *o = bf16::from_f32(sum + bias.map_or(0.0, |b| b[j]));
        }
    }
}

/// Rows widened at a time: bounds the f32 copy of the activations.
const BAND_ROWS: usize = 8 * BLOCK_ROWS;
/// Rows of an output block: enough that widening a weight is small beside using it.
const BLOCK_ROWS: usize = 32 * ROWS;
/// Columns of an output block: the block's partial sums stay in a core's second-level cache.
const BLOCK_COLS: usize = 8 * COLS;
/// Steps of [`LANES`] along K at a time: a panel of weights and a tile of rows stay in the first-level
/// cache.
const STEPS: usize = 64;

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

/// Activations widened to f32 in the order [`tile::accumulate`] reads them: `[tiles, steps, ROWS,
/// LANES]`, zeros behind the last row and the last element.
struct PackedRows {
    data: Vec<[[f32; LANES]; ROWS]>,
    steps: usize,
}

impl PackedRows {
    fn new(xs: &[bf16], k: usize) -> Self {
        let (m, steps) = (xs.len() / k, k.div_ceil(LANES));
        let mut data = vec![[[0f32; LANES]; ROWS]; m.div_ceil(ROWS) * steps];
        let pack = |(rows, tile): (&[bf16], &mut [[[f32; LANES]; ROWS]])| {
            for (r, row) in rows.chunks_exact(k).enumerate() {
                for (step, x) in tile.iter_mut().zip(row.chunks(LANES)) {
                    for (o, x) in step[r].iter_mut().zip(x) {
                        *o = x.to_f32();
                    }
                }
            }
        };
        if cpu::should_parallelise(xs.len() * 4) {
            xs.par_chunks(ROWS * k).zip(data.par_chunks_mut(steps)).for_each(pack);
        } else {
            xs.chunks(ROWS * k).zip(data.chunks_mut(steps)).for_each(pack);
        }
        Self { data, steps }
    }

    fn tile(&self, tile: usize, s0: usize, steps: usize) -> &[[[f32; LANES]; ROWS]] {
        let start = tile * self.steps + s0;
        &self.data[start..start + steps]
    }
}

/// Widens one weight row (little-endian bf16) into column `c` of a panel.
fn widen_row(bytes: &[u8], c: usize, panel: &mut [[[f32; LANES]; COLS]]) {
    simd_dispatch!(widen_row_body(bytes: &[u8], c: usize, panel: &mut [[[f32; LANES]; COLS]]))
}

#[inline(always)]
fn widen_row_body(bytes: &[u8], c: usize, panel: &mut [[[f32; LANES]; COLS]]) {
    let (whole, rest) = bytes.as_chunks::<{ 2 * LANES }>();
    for (step, b) in panel.iter_mut().zip(whole) {
        for l in 0..LANES {
            step[c][l] = widen(b[2 * l], b[2 * l + 1]);
        }
    }
    if let Some(step) = panel.get_mut(whole.len()) {
        step[c] = [0.0; LANES];
        for (o, b) in step[c].iter_mut().zip(rest.as_chunks::<2>().0) {
            *o = widen(b[0], b[1]);
        }
    }
}

#[inline(always)]
fn widen(low: u8, high: u8) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16)
}

/// The tree at the end of [`cpu::dot`].
#[inline(always)]
fn sum_lanes(l: &[f32; LANES]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

struct LinearOp<'a>(&'a Linear);

impl CustomOp1 for LinearOp<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, "linear")?;
        let (m, _) = l.shape().dims2()?;
        let mut out = vec![bf16::ZERO; m * self.0.out_dim()];
        self.0.forward_slice(xs, &mut out, Isa::detect());
        Ok((CpuStorage::BF16(out), Shape::from((m, self.0.out_dim()))))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use deepseek_v41_testing::{assert_bits_eq, random_bf16, random_f32, with_threads};
    use proptest::prelude::*;

    use super::*;

    fn layer(n: usize, k: usize, bias: bool, seed: u64) -> (Linear, Vec<f32>) {
        let weight = random_bf16(n * k, 0.05, seed);
        let bytes: Vec<u8> = weight.iter().flat_map(|v| v.to_le_bytes()).collect();
        let rows = Bf16Rows::new(Bytes::from(bytes), n, k).unwrap();
        let bias = bias.then(|| random_f32(n, 1.0, seed + 1));
        (Linear::from_rows(rows, bias).unwrap(), weight.iter().map(|v| v.to_f32()).collect())
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
        check(2 * BLOCK_ROWS + 5, 3 * BLOCK_COLS - 3, STEPS * LANES + 9, true);
        check(BAND_ROWS + 1, COLS + 1, 3, false);
    }

    #[test]
    fn no_rows_give_no_rows() {
        let (linear, _) = layer(3, 4, true, 1);
        let xs = Tensor::zeros((0, 4), candle_core::DType::BF16, &candle_core::Device::Cpu);
        assert_eq!(linear.forward(&xs.unwrap()).unwrap().dims(), [0, 3]);
    }

    #[test]
    fn other_width_is_refused() {
        let (linear, _) = layer(3, 4, true, 1);
        let xs = Tensor::zeros((2, 5), candle_core::DType::BF16, &candle_core::Device::Cpu);
        assert!(matches!(linear.forward(&xs.unwrap()), Err(Error::Shape { op: "linear", .. })));
    }
}
