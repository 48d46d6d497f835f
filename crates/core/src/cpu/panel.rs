//! Products with a panel: weight rows that were widened to f32 and lie end to end in a buffer.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{Isa, Lanes};

/// Rows of a panel.
pub(super) const ROWS: usize = 16;

/// `sums[i * sums_stride + r] += row r · input i` for the rows of `panel` (`len` values each) and up to
/// three inputs, input `i` at `xs[i * x_stride..]`.
pub(super) fn accumulate(
    isa: Isa,
    panel: &[f32],
    len: usize,
    xs: &[f32],
    x_stride: usize,
    inputs: usize,
    sums: &mut [Lanes],
    sums_stride: usize,
) {
    let rows = panel.len() / len;
    assert!(xs.len() >= (inputs - 1) * x_stride + len);
    assert!(sums.len() >= (inputs - 1) * sums_stride + rows);
    match isa {
        Isa::Portable => {
            for i in 0..inputs {
                let x = &xs[i * x_stride..][..len];
                for (row, sums) in panel.chunks_exact(len).zip(&mut sums[i * sums_stride..]) {
                    super::dot::accumulate(row, x, sums);
                }
            }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            let (w, xs, sums) = (panel.as_ptr(), xs.as_ptr(), sums.as_mut_ptr().cast());
            // SAFETY: the assertions: `rows` rows of `len` in the panel, `inputs` inputs of `len`, and
            // their sums. `Avx2` is only made where the processor has it.
            unsafe {
                match inputs {
                    1 => avx2::panel::<1>(w, len, rows, xs, x_stride, sums, sums_stride),
                    2 => avx2::panel::<2>(w, len, rows, xs, x_stride, sums, sums_stride),
                    _ => {
                        assert_eq!(inputs, 3);
                        avx2::panel::<3>(w, len, rows, xs, x_stride, sums, sums_stride);
                    }
                }
            }
        }
    }
}
