//! The projection behind the mixes, in f64.
//!
//! Coefficients scale whole rows of the stream before those are rounded to bf16, so their last bits
//! show in everything after: sums of 20480 products in f32 would be another formula's. In f64 the
//! products of two f32 are exact.
//!
//! A sum has eight lanes, element `k` in lane `k % 8` in ascending order, and a fixed tree over them:
//! the same bits for any number of rows, tokens or threads that are worked on at a time.

use deepseek_v41_core::cpu::{F32Rows, Isa, WeightRows};

use super::rows::for_isa;

/// Weight rows worked on together: their lanes and one token's elements fit the vector registers.
pub(super) const ROWS: usize = 4;

/// Columns of the weight rows read at a time, a multiple of [`LANES`]: 8 KB of the first-level cache.
const STRETCH: usize = 512;

const LANES: usize = 8;
type Lanes = [f64; LANES];

/// `1 / sqrt(mean(x²) + eps)`.
pub(super) fn rstd(isa: Isa, x: &[f32], eps: f32) -> f64 {
    let mut lanes = [0.0; LANES];
    add_squares(isa, x, &mut lanes);
    1.0 / (sum(&lanes) / x.len() as f64 + f64::from(eps)).sqrt()
}

/// Products of weight rows `first .. first + ROWS` (or as many as there are) with `xs: [m, cols]`;
/// `sums: [m]`.
pub(super) fn project(isa: Isa, w: &F32Rows, first: usize, xs: &[f32], sums: &mut [[f64; ROWS]]) {
    let cols = w.cols();
    let count = ROWS.min(w.rows() - first);
    let mut lanes = vec![[[0.0; LANES]; ROWS]; sums.len()];
    // Rows past the last stay zero, and what they give is not read.
    let mut weights = [[0f32; STRETCH]; ROWS];
    for k in (0..cols).step_by(STRETCH) {
        let n = STRETCH.min(cols - k);
        for (r, row) in weights[..count].iter_mut().enumerate() {
            w.decode(first + r, k, &mut row[..n]);
        }
        for (x, lanes) in xs.chunks_exact(cols).zip(&mut lanes) {
            add_products(isa, &x[k..k + n], &weights, lanes);
        }
    }
    for (sums, lanes) in sums.iter_mut().zip(&lanes) {
        *sums = std::array::from_fn(|r| sum(&lanes[r]));
    }
}

fn sum(l: &Lanes) -> f64 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

#[inline(always)]
fn add_squares_body(x: &[f32], lanes: &mut Lanes) {
    let mut acc = *lanes;
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for l in 0..LANES {
            acc[l] += f64::from(x[l]) * f64::from(x[l]);
        }
    }
    for (lane, x) in acc.iter_mut().zip(rest) {
        *lane += f64::from(*x) * f64::from(*x);
    }
    *lanes = acc;
}

#[inline(always)]
fn add_products_body(x: &[f32], w: &[[f32; STRETCH]; ROWS], lanes: &mut [Lanes; ROWS]) {
    let mut acc = *lanes;
    let (whole, rest) = x.as_chunks::<LANES>();
    let w = w.each_ref().map(|row| row[..x.len()].as_chunks::<LANES>());
    for (i, x) in whole.iter().enumerate() {
        for r in 0..ROWS {
            let w = &w[r].0[i];
            for l in 0..LANES {
                acc[r][l] += f64::from(x[l]) * f64::from(w[l]);
            }
        }
    }
    for r in 0..ROWS {
        for (lane, (x, w)) in acc[r].iter_mut().zip(rest.iter().zip(w[r].1)) {
            *lane += f64::from(*x) * f64::from(*w);
        }
    }
    *lanes = acc;
}

for_isa!(fn add_squares(x: &[f32], lanes: &mut Lanes) = add_squares_body);
for_isa!(
    fn add_products(
        x: &[f32],
        w: &[[f32; STRETCH]; ROWS],
        lanes: &mut [Lanes; ROWS],
    ) = add_products_body
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Lane by lane, element by element: what every instruction set must give.
    fn plain(x: &[f32], w: &[f32]) -> f64 {
        let mut lanes = [0.0; LANES];
        for (k, (x, w)) in x.iter().zip(w).enumerate() {
            lanes[k % LANES] += f64::from(*x) * f64::from(*w);
        }
        sum(&lanes)
    }

    #[test]
    fn every_isa_keeps_the_order() {
        for (rows, cols) in [(1, 1), (3, 7), (8, 512), (15, 515), (24, 1100)] {
            let value = |i: usize| ((i * 7919) % 1013) as f32 / 97.0 - 5.0;
            let w: Vec<f32> = (0..rows * cols).map(|i| value(i + 5) / 3.0).collect();
            let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
            let weight = F32Rows::new(bytes.into(), rows, cols).expect("lengths fit");
            let xs: Vec<f32> = (0..3 * cols).map(value).collect();
            for isa in Isa::available() {
                for first in (0..rows).step_by(ROWS) {
                    let mut sums = [[0.0; ROWS]; 3];
                    project(isa, &weight, first, &xs, &mut sums);
                    for (x, sums) in xs.chunks_exact(cols).zip(sums) {
                        for r in first..rows.min(first + ROWS) {
                            let expected = plain(x, &w[r * cols..(r + 1) * cols]);
                            assert_eq!(sums[r - first].to_bits(), expected.to_bits());
                        }
                    }
                }
                let x = &xs[..cols];
                let mean = plain(x, x) / cols as f64;
                assert_eq!(rstd(isa, x, 0.5), 1.0 / (mean + 0.5).sqrt());
            }
        }
    }
}
