//! Products with a panel: weight rows that were widened to f32 into a buffer that stays in cache.

use super::{Isa, Lanes, Stretch, WeightRows, with_scratch};
#[cfg(target_arch = "x86_64")]
use super::{LANES, avx2, avx512};

/// Rows of a panel.
pub(super) const ROWS: usize = 16;

/// The values of up to [`ROWS`] rows over a stretch of columns.
struct Panel<'a> {
    values: &'a [f32],
    rows: usize,
    len: usize,
    kernel: Kernel,
}

/// What multiplies the panel, and with it the order of its values.
#[derive(Clone, Copy)]
enum Kernel {
    /// Rows end to end.
    Portable,
    /// Rows end to end.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Pairs of rows, interleaved by eight columns.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    fn choose(isa: Isa, rows: usize, len: usize) -> Self {
        match isa {
            Isa::Portable => Self::Portable,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if rows.is_multiple_of(avx512::ROWS) && len.is_multiple_of(LANES) => {
                Self::Avx512
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => Self::Avx2,
        }
    }

    /// Of `left` inputs, how many to take next: as many as the registers hold sums for, and no
    /// single one left behind where that can be helped.
    fn inputs(self, left: usize) -> usize {
        match self {
            Self::Portable => left,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                if left == 4 {
                    2
                } else {
                    left.min(3)
                }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                if left == 7 || left == 8 {
                    4
                } else {
                    left.min(6)
                }
            }
        }
    }
}

/// Decodes a stretch of a weight panel by panel and adds its products to the sums.
pub(super) fn accumulate<W: WeightRows + ?Sized>(
    w: &W,
    isa: Isa,
    stretch: &Stretch<'_>,
    sums: &mut [Lanes],
) {
    let (rows, len, m) = (stretch.rows.len(), stretch.cols.len(), stretch.inputs());
    with_scratch((ROWS + 2) * len, |buffer| {
        let (values, pair) = buffer.split_at_mut(ROWS * len);
        for r0 in (0..rows).step_by(ROWS) {
            let count = ROWS.min(rows - r0);
            let kernel = Kernel::choose(isa, count, len);
            let values = &mut values[..count * len];
            fill(w, kernel, stretch, r0, pair, values);
            let panel = Panel {
                values,
                rows: count,
                len,
                kernel,
            };
            let mut i = 0;
            while i < m {
                let c = kernel.inputs(m - i);
                let xs = &stretch.xs[i * stretch.k + stretch.cols.start..];
                panel.multiply(xs, stretch.k, c, &mut sums[i * rows + r0..], rows);
                i += c;
            }
        }
    });
}

/// Decodes rows `r0 ..` of the stretch into `values`, in the kernel's order; `pair` holds two rows.
fn fill<W: WeightRows + ?Sized>(
    w: &W,
    kernel: Kernel,
    stretch: &Stretch<'_>,
    r0: usize,
    pair: &mut [f32],
    values: &mut [f32],
) {
    let (len, k0) = (stretch.cols.len(), stretch.cols.start);
    let first = stretch.rows.start + r0;
    match kernel {
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512 => {
            let (even, odd) = pair.split_at_mut(len);
            for (p, values) in values.chunks_exact_mut(2 * len).enumerate() {
                w.decode(first + 2 * p, k0, even);
                w.decode(first + 2 * p + 1, k0, odd);
                let eights = even
                    .as_chunks::<LANES>()
                    .0
                    .iter()
                    .zip(odd.as_chunks::<LANES>().0);
                let both = values.as_chunks_mut::<LANES>().0.as_chunks_mut::<2>().0;
                for (out, (even, odd)) in both.iter_mut().zip(eights) {
                    *out = [*even, *odd];
                }
            }
        }
        _ => {
            for (r, out) in values.chunks_exact_mut(len).enumerate() {
                w.decode(first + r, k0, out);
            }
        }
    }
}

impl Panel<'_> {
    /// `sums[i * sums_stride + r] += row r · input i` for `inputs` inputs, input `i` at
    /// `xs[i * x_stride..]`.
    fn multiply(
        &self,
        xs: &[f32],
        x_stride: usize,
        inputs: usize,
        sums: &mut [Lanes],
        sums_stride: usize,
    ) {
        let (len, rows) = (self.len, self.rows);
        assert_eq!(self.values.len(), rows * len);
        assert!(inputs > 0 && xs.len() >= (inputs - 1) * x_stride + len);
        assert!(sums.len() >= (inputs - 1) * sums_stride + rows);
        #[cfg(target_arch = "x86_64")]
        let (w, x, out) = (self.values.as_ptr(), xs.as_ptr(), sums.as_mut_ptr().cast());
        // One arm a number of inputs: their sums live in that many registers.
        #[cfg(target_arch = "x86_64")]
        macro_rules! by_inputs {
            ($set:ident: $($c:literal)*) => {
                match inputs {
                    // SAFETY: the assertions above: `rows` rows of `len` in the panel, `inputs`
                    // inputs of `len`, and their sums. The kernel was chosen by an `Isa` that only
                    // processors with its features have, for rows and columns that it takes.
                    $($c => unsafe { $set::panel::<$c>(w, len, rows, x, x_stride, out, sums_stride) },)*
                    _ => assert!(inputs == 0, "more inputs than a step takes"),
                }
            };
        }
        match self.kernel {
            Kernel::Portable => {
                for i in 0..inputs {
                    let x = &xs[i * x_stride..][..len];
                    let rows = self.values.chunks_exact(len);
                    for (row, sums) in rows.zip(&mut sums[i * sums_stride..]) {
                        super::dot::accumulate(row, x, sums);
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => by_inputs!(avx2: 1 2 3),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => by_inputs!(avx512: 1 2 3 4 5 6),
        }
    }
}
