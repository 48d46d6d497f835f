//! Joining neighbouring patches to one token.
//!
//! A grid `[n_h, n_w, c]` is padded with zeros at the bottom and right to multiples of `r`; each
//! `r x r` cell becomes a row of `c * r * r` values, channel first:
//!
//! ```text
//! out[cell][ch * r * r + dy * r + dx] = grid[cy * r + dy][cx * r + dx][ch]
//! ```
//!
//! with cells in row-major order.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use half::bf16;
use rayon::prelude::*;

use super::dense_bf16;

/// `xs: [n_h * n_w, c]` bf16 → `[ceil(n_h / r) * ceil(n_w / r), c * r * r]`.
///
/// # Errors
/// Another dtype or shape, or `r == 0`.
///
/// Reference: `Aligner.forward`.
pub fn merge_cells(xs: &Tensor, n_h: usize, n_w: usize, r: usize) -> Result<Tensor> {
    let xs = dense_bf16(xs, "merge_cells")?;
    if r == 0 || xs.rank() != 2 || Some(xs.dims()[0]) != n_h.checked_mul(n_w) {
        return Err(Error::shape(
            "merge_cells",
            format!(
                "expected [{n_h} * {n_w}, c] and r > 0, found {:?} and r = {r}",
                xs.shape()
            ),
        ));
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return crate::cuda::merge_cells(&xs, n_h, n_w, r);
    }
    Ok(xs.apply_op1_no_bwd(&MergeCells { n_h, n_w, r })?)
}

/// One row of cells: `rows` holds its up to `r` rows of patches `[.., n_w, c]`, `out: [cells, c*r*r]`
/// zeroed.
pub fn merge_cells_ref(rows: &[bf16], n_w: usize, c: usize, r: usize, out: &mut [bf16]) {
    for (dy, row) in rows.chunks(n_w * c).enumerate() {
        for (x, patch) in row.chunks(c).enumerate() {
            let cell = &mut out[(x / r) * c * r * r..];
            for (ch, v) in patch.iter().enumerate() {
                cell[ch * r * r + dy * r + x % r] = *v;
            }
        }
    }
}

struct MergeCells {
    n_h: usize,
    n_w: usize,
    r: usize,
}

impl CustomOp1 for MergeCells {
    fn name(&self) -> &'static str {
        "merge_cells"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, "merge_cells")?;
        let (_, c) = l.shape().dims2()?;
        let (rows, cols) = (self.n_h.div_ceil(self.r), self.n_w.div_ceil(self.r));
        let width = c * self.r * self.r;
        let mut out = vec![bf16::ZERO; rows * cols * width];
        let merge = |(src, out): (&[bf16], &mut [bf16])| {
            merge_cells_ref(src, self.n_w, c, self.r, out);
        };
        if !out.is_empty() {
            let band = self.r * self.n_w * c;
            if cpu::should_parallelise(out.len() * 4) {
                xs.par_chunks(band)
                    .zip(out.par_chunks_mut(cols * width))
                    .for_each(merge);
            } else {
                xs.chunks(band)
                    .zip(out.chunks_mut(cols * width))
                    .for_each(merge);
            }
        }
        Ok((CpuStorage::BF16(out), Shape::from((rows * cols, width))))
    }
}
