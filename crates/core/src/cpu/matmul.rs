//! `xs · Wᵀ` for weights that are widened to f32 on the fly.

use bytes::Bytes;
use half::bf16;
use rayon::prelude::*;

use super::{dot, should_parallelise};

/// Rows of a weight matrix `[rows, cols]` in some stored format.
pub trait WeightRows: Sync {
    /// Output features.
    fn rows(&self) -> usize;
    /// Input features.
    fn cols(&self) -> usize;
    /// Writes the values of `row` from column `k0` on, scale included, to `out`.
    ///
    /// The values must be exact in f32: what is widened here is what the product is defined on.
    fn decode(&self, row: usize, k0: usize, out: &mut [f32]);
}

/// `out[m, n] = dot(xs[m, :], w[n, :])`, bit for bit [`dot`] of the decoded row, for any `m`.
///
/// `xs: [m, cols]`, `out: [m, rows]`.
pub fn matmul<W: WeightRows>(w: &W, xs: &[f32], m: usize, out: &mut [f32]) {
    matmul_with(w, xs, m, out, |v| v);
}

/// [`matmul`] with each element rounded once to bf16.
pub fn matmul_bf16<W: WeightRows>(w: &W, xs: &[f32], m: usize, out: &mut [bf16]) {
    matmul_with(w, xs, m, out, bf16::from_f32);
}

fn matmul_with<W: WeightRows, O: Copy + Send + Sync + Default>(
    w: &W,
    xs: &[f32],
    m: usize,
    out: &mut [O],
    store: impl Fn(f32) -> O + Sync,
) {
    let (n, k) = (w.rows(), w.cols());
    debug_assert_eq!(xs.len(), m * k);
    debug_assert_eq!(out.len(), m * n);
    if m == 0 || n == 0 {
        return;
    }
    let column = |row: usize, buf: &mut Vec<f32>| -> Vec<O> {
        buf.resize(k, 0.0);
        w.decode(row, 0, buf);
        (0..m).map(|i| store(dot(&xs[i * k..(i + 1) * k], buf))).collect()
    };
    let columns: Vec<Vec<O>> = if should_parallelise(2 * m * n * k) {
        (0..n).into_par_iter().map_init(Vec::new, |buf, row| column(row, buf)).collect()
    } else {
        let mut buf = Vec::new();
        (0..n).map(|row| column(row, &mut buf)).collect()
    };
    for (row, column) in columns.into_iter().enumerate() {
        for (i, v) in column.into_iter().enumerate() {
            out[i * n + row] = v;
        }
    }
}

/// bf16 weights as stored: little-endian, row-major `[rows, cols]`.
#[derive(Debug, Clone)]
pub struct Bf16Rows {
    bytes: Bytes,
    rows: usize,
    cols: usize,
}

/// f32 weights as stored: little-endian, row-major `[rows, cols]`.
#[derive(Debug, Clone)]
pub struct F32Rows {
    bytes: Bytes,
    rows: usize,
    cols: usize,
}

impl Bf16Rows {
    /// `None` when the byte length is not `rows * cols * 2`.
    pub fn new(bytes: Bytes, rows: usize, cols: usize) -> Option<Self> {
        (rows.checked_mul(cols)?.checked_mul(2)? == bytes.len()).then_some(Self {
            bytes,
            rows,
            cols,
        })
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl F32Rows {
    /// `None` when the byte length is not `rows * cols * 4`.
    pub fn new(bytes: Bytes, rows: usize, cols: usize) -> Option<Self> {
        (rows.checked_mul(cols)?.checked_mul(4)? == bytes.len()).then_some(Self {
            bytes,
            rows,
            cols,
        })
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl WeightRows for Bf16Rows {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn decode(&self, row: usize, k0: usize, out: &mut [f32]) {
        let start = (row * self.cols + k0) * 2;
        let bytes = &self.bytes[start..start + out.len() * 2];
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
        }
    }
}

impl WeightRows for F32Rows {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn decode(&self, row: usize, k0: usize, out: &mut [f32]) {
        let start = (row * self.cols + k0) * 4;
        let bytes = &self.bytes[start..start + out.len() * 4];
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
    }
}
