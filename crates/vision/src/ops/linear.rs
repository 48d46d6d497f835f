//! `x · Wᵀ + b` with bf16 weights as stored and one rounding.
//!
//! ```text
//! out[t][n] = bf16(dot(x[t], w[n]) + b[n])
//! ```
//!
//! with [`cpu::dot`]'s order of additions. The bias joins in f32: adding it to a product already rounded
//! to bf16 would round twice. On a GPU cuBLAS adds, in an order of its own.

mod packed;
mod tile;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result, StoredDtype, VarBuilder,
    cpu::{self, Bf16Rows, WeightRows},
};
use half::bf16;
use rayon::prelude::*;

use self::{
    packed::PackedRows,
    tile::{COLS, ColStep, LANES, ROWS},
};
use super::dense_bf16;
use crate::simd::Isa;

/// What the layers of a module share on a device.
#[derive(Debug, Clone)]
pub(crate) struct Products {
    #[cfg(feature = "cuda")]
    blas: Option<std::sync::Arc<deepseek_v41_core::cuda::Blas>>,
}

impl Products {
    /// For layers on `device`.
    ///
    /// # Errors
    /// The device refuses.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            #[cfg(feature = "cuda")]
            blas: match device {
                Device::Cuda(dev) => Some(deepseek_v41_core::cuda::Blas::new(dev)?.into()),
                _ => None,
            },
        })
    }
}

/// A layer's weights on a GPU.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
struct OnDevice {
    blas: std::sync::Arc<deepseek_v41_core::cuda::Blas>,
    /// `[out_dim, in_dim]` bf16.
    weight: Tensor,
    /// `[out_dim]` bf16.
    bias: Option<Tensor>,
}

/// A linear layer of the tower or the aligner.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Bf16Rows,
    bias: Option<Vec<f32>>,
    #[cfg(feature = "cuda")]
    on_device: Option<OnDevice>,
}

impl Linear {
    /// Reads `weight: [out_dim, in_dim]` and, if asked for, `bias: [out_dim]`, both stored bf16. The
    /// weight is used where it lies, and nothing is copied, except to a GPU.
    ///
    /// # Errors
    /// A tensor is missing or of another shape or dtype; the device refuses it.
    pub fn new(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Self> {
        let products = Products::new(vb.device())?;
        Self::with(in_dim, out_dim, bias, vb, &products)
    }

    /// [`Linear::new`] with what other layers use too.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn with(
        in_dim: usize,
        out_dim: usize,
        bias: bool,
        vb: VarBuilder,
        products: &Products,
    ) -> Result<Self> {
        let raw = vb.raw("weight", &[StoredDtype::BF16], &[out_dim, in_dim])?;
        let bias = match bias {
            true => Some(vb.tensor_f32("bias", &[out_dim])?),
            false => None,
        };
        #[cfg(feature = "cuda")]
        let on_device = match &products.blas {
            Some(blas) => Some(OnDevice {
                blas: blas.clone(),
                weight: raw.to_tensor(vb.device())?,
                bias: bias
                    .as_ref()
                    .map(|b| deepseek_v41_core::cuda::bf16_weight(b, &vb.full_name("bias")))
                    .transpose()?,
            }),
            None => None,
        };
        let len = raw.bytes.len();
        let weight = Bf16Rows::new(raw.bytes, out_dim, in_dim).ok_or_else(|| {
            Error::shape(
                "linear",
                format!("[{out_dim}, {in_dim}] bf16 in {len} bytes"),
            )
        })?;
        Ok(Self {
            weight,
            bias: bias.map(|b| b.to_vec1::<f32>()).transpose()?,
            #[cfg(feature = "cuda")]
            on_device,
        })
    }

    /// A layer over weights already in memory, on the CPU: `weight: [out_dim, in_dim]`, `bias: [out_dim]`.
    ///
    /// # Errors
    /// A bias of another length.
    pub fn from_rows(weight: Bf16Rows, bias: Option<Vec<f32>>) -> Result<Self> {
        if bias.as_ref().is_some_and(|b| b.len() != weight.rows()) {
            return Err(Error::shape("linear", "bias and weight differ in length"));
        }
        Ok(Self {
            weight,
            bias,
            #[cfg(feature = "cuda")]
            on_device: None,
        })
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
    /// Another dtype or shape, or another device than the layer's.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = dense_bf16(xs, "linear")?;
        if xs.rank() != 2 || xs.dims()[1] != self.in_dim() {
            return Err(Error::shape(
                "linear",
                format!("expected [n, {}], found {:?}", self.in_dim(), xs.shape()),
            ));
        }
        #[cfg(feature = "cuda")]
        match (&self.on_device, xs.device().is_cuda()) {
            (Some(own), true) => {
                return own.blas.linear(&xs, &own.weight, own.bias.as_ref());
            }
            (None, false) => {}
            _ => {
                return Err(Error::shape(
                    "linear",
                    "weights and values on different devices",
                ));
            }
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

/// Straight loops over [`cpu::dot`]: `xs: [m, k]`, `weight: [n, k]`, `bias: [n]` → `out: [m, n]`.
pub fn linear_ref(xs: &[f32], weight: &[f32], bias: Option<&[f32]>, k: usize, out: &mut [bf16]) {
    let n = weight.len() / k;
    for (x, out) in xs.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (j, o) in out.iter_mut().enumerate() {
            let sum = cpu::dot(x, &weight[j * k..(j + 1) * k]);
            *o = cpu::round_bf16(sum + bias.map_or(0.0, |b| b[j]));
        }
    }
}

/// Rows of an output block: enough that widening a weight is small beside using it.
const BLOCK_ROWS: usize = 24 * ROWS;
/// Columns of an output block, each of which reads all packed rows again. The block's partial sums stay in
/// a core's second-level cache.
const BLOCK_COLS: usize = 16 * COLS;
/// Steps of [`LANES`] along K at a time: a panel of weights and a tile of rows stay in the first-level
/// cache.
const STEPS: usize = 64;

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
        assert!(matches!(
            linear.forward(&xs.unwrap()),
            Err(Error::Shape { op: "linear", .. })
        ));
    }
}
