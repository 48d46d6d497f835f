//! Antialiased bicubic resizing, equal to Pillow's to the bit.
//!
//! For output `i` of a side that goes from `n` to `m`, with `scale = n / m` and
//! `stretch = max(scale, 1)` (the filter widens when the image shrinks):
//!
//! ```text
//! centre = (i + 0.5) * scale
//! first  = max(0, trunc(centre - 2 * stretch + 0.5))
//! end    = min(n, trunc(centre + 2 * stretch + 0.5))
//! w[t]   = cubic((t + first - centre + 0.5) / stretch), normalised to sum 1
//! k[t]   = round(w[t] * 2^22), halves away from zero
//! out    = clamp((2^21 + sum_t k[t] * in[first + t]) >> 22, 0, 255)
//! ```
//!
//! Rows first, then columns, with bytes between the two passes; a side that keeps its length is not
//! filtered. Integer sums are exact, so blocking, threads and SIMD cannot change a pixel.
//!
//! The scheme is that of Pillow's `Resample.c` (8 bits per channel).

use deepseek_v41_core::cpu;
use rayon::prelude::*;

use super::RgbImage;
use crate::ImageError;

/// Fraction bits of a coefficient: 32, less 8 for the byte and 2 for overshoot and sign.
const FRACTION_BITS: u32 = 22;
const HALF: i32 = 1 << (FRACTION_BITS - 1);
/// The cubic reaches two pixels to either side.
const SUPPORT: f64 = 2.0;

/// Filter taps of every output position along one side.
struct Taps {
    /// First input and number of inputs, for each output.
    spans: Vec<(usize, usize)>,
    /// `[outputs, stride]`, zero behind each output's own taps.
    weights: Vec<i32>,
    stride: usize,
}

impl Taps {
    fn new(n: usize, m: usize) -> Self {
        let scale = n as f64 / m as f64;
        let stretch = scale.max(1.0);
        let support = SUPPORT * stretch;
        let stride = support.ceil() as usize * 2 + 1;
        let mut weights = vec![0; m * stride];
        let mut w = Vec::with_capacity(stride);
        let spans = weights.chunks_exact_mut(stride).enumerate().map(|(i, row)| {
            let centre = (i as f64 + 0.5) * scale;
            // `as` truncates and turns negative values into 0.
            let first = (centre - support + 0.5) as usize;
            let end = ((centre + support + 0.5) as usize).min(n);
            w.clear();
            let shrink = 1.0 / stretch;
            w.extend((first..end).map(|x| cubic((x as f64 - centre + 0.5) * shrink)));
            let sum: f64 = w.iter().sum();
            for (k, w) in row.iter_mut().zip(&w) {
                let w = if sum != 0.0 { w / sum } else { *w };
                let half = if w < 0.0 { -0.5 } else { 0.5 };
                *k = (half + w * f64::from(1 << FRACTION_BITS)) as i32;
            }
            (first, end - first)
        });
        let spans = spans.collect();
        Self { spans, weights, stride }
    }

    /// First input position and weights of output `i`.
    fn get(&self, i: usize) -> (usize, &[i32]) {
        let (first, n) = self.spans[i];
        (first, &self.weights[i * self.stride..i * self.stride + n])
    }
}

/// Keys' cubic with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

#[inline(always)]
fn clip(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

/// Resizes `image` to `width` by `height`.
///
/// # Errors
/// [`ImageError::Pixels`] for a side of zero.
pub fn resize_bicubic(
    image: &RgbImage,
    width: usize,
    height: usize,
) -> Result<RgbImage, ImageError> {
    resize_with(image, width, height, |src, out, taps| {
        let in_row = image.width() as usize * 3;
        each_row(out, width * 3, taps.stride * 8, |y, out| {
            filter_row(&src[y * in_row..(y + 1) * in_row], taps, out);
        });
    }, |src, out, taps| {
        each_row(out, width * 3, taps.stride * 8, |y, out| {
            let (first, weights) = taps.get(y);
            filter_columns(&src[first * width * 3..], width * 3, weights, out);
        });
    })
}

/// [`resize_bicubic`] as straight loops on one thread.
///
/// # Errors
/// [`ImageError::Pixels`] for a side of zero.
pub fn resize_bicubic_ref(
    image: &RgbImage,
    width: usize,
    height: usize,
) -> Result<RgbImage, ImageError> {
    let in_width = image.width() as usize;
    let pixel = |taps: &Taps, i: usize, at: &dyn Fn(usize) -> u8| {
        let (first, weights) = taps.get(i);
        let terms = weights.iter().enumerate().map(|(t, k)| k * i32::from(at(first + t)));
        clip(HALF + terms.sum::<i32>())
    };
    resize_with(image, width, height, |src, out, taps| {
        for (j, o) in out.iter_mut().enumerate() {
            let (y, x, c) = (j / 3 / width, j / 3 % width, j % 3);
            *o = pixel(taps, x, &|i| src[(y * in_width + i) * 3 + c]);
        }
    }, |src, out, taps| {
        for (j, o) in out.iter_mut().enumerate() {
            let (y, xc) = (j / (width * 3), j % (width * 3));
            *o = pixel(taps, y, &|i| src[i * width * 3 + xc]);
        }
    })
}

/// Runs the passes that are needed: `(source, output, taps)` each.
fn resize_with(
    image: &RgbImage,
    width: usize,
    height: usize,
    rows: impl Fn(&[u8], &mut [u8], &Taps),
    columns: impl Fn(&[u8], &mut [u8], &Taps),
) -> Result<RgbImage, ImageError> {
    let (in_width, in_height) = (image.width() as usize, image.height() as usize);
    let (w, h) = (width as u32, height as u32);
    if width == 0 || height == 0 {
        return Err(ImageError::Pixels { width: w, height: h, bytes: 0 });
    }
    let mut filtered = Vec::new();
    if width != in_width {
        filtered.resize(width * in_height * 3, 0);
        rows(image.data(), &mut filtered, &Taps::new(in_width, width));
    }
    if height == in_height {
        let data = if width == in_width { image.data().to_vec() } else { filtered };
        return RgbImage::new(w, h, data);
    }
    let src = if width == in_width { image.data() } else { &filtered };
    let mut out = vec![0; width * height * 3];
    columns(src, &mut out, &Taps::new(in_height, height));
    RgbImage::new(w, h, out)
}

/// Calls `f(y, row)` for every row of `out`, over threads when `work` operations a byte pay for them.
fn each_row(out: &mut [u8], row: usize, work: usize, f: impl Fn(usize, &mut [u8]) + Sync) {
    if cpu::should_parallelise(out.len().saturating_mul(work)) {
        out.par_chunks_mut(row).enumerate().for_each(|(y, out)| f(y, out));
    } else {
        out.chunks_mut(row).enumerate().for_each(|(y, out)| f(y, out));
    }
}

/// One row: `src: [n, 3]` → `out: [m, 3]`.
fn filter_row(src: &[u8], taps: &Taps, out: &mut [u8]) {
    simd_dispatch!(filter_row_body(src: &[u8], taps: &Taps, out: &mut [u8]))
}

#[inline(always)]
fn filter_row_body(src: &[u8], taps: &Taps, out: &mut [u8]) {
    for (x, out) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let (first, weights) = taps.get(x);
        // Four lanes a pixel, the fourth unused, so that a tap is one vector operation. The last pixel
        // of the row has no fourth byte behind it and goes through the tail below.
        let mut acc = [HALF; 4];
        let run = &src[first * 3..];
        let wide = weights.len().min(run.len().saturating_sub(1) / 3);
        for (px, k) in run.windows(4).step_by(3).zip(&weights[..wide]) {
            for c in 0..4 {
                acc[c] = acc[c].wrapping_add(k.wrapping_mul(i32::from(px[c])));
            }
        }
        for (px, k) in run[wide * 3..].as_chunks::<3>().0.iter().zip(&weights[wide..]) {
            for c in 0..3 {
                acc[c] = acc[c].wrapping_add(k.wrapping_mul(i32::from(px[c])));
            }
        }
        *out = [clip(acc[0]), clip(acc[1]), clip(acc[2])];
    }
}

/// One output row: `sum_t weights[t] * src[t]` over rows of `row` bytes.
fn filter_columns(src: &[u8], row: usize, weights: &[i32], out: &mut [u8]) {
    simd_dispatch!(filter_columns_body(src: &[u8], row: usize, weights: &[i32], out: &mut [u8]))
}

#[inline(always)]
fn filter_columns_body(src: &[u8], row: usize, weights: &[i32], out: &mut [u8]) {
    /// Bytes of a row whose sums stay in registers.
    const BLOCK: usize = 32;
    let (blocks, tail) = out.as_chunks_mut::<BLOCK>();
    for (b, out) in blocks.iter_mut().enumerate() {
        let mut acc = [HALF; BLOCK];
        for (t, k) in weights.iter().enumerate() {
            let at = t * row + b * BLOCK;
            for (acc, v) in acc.iter_mut().zip(&src[at..at + BLOCK]) {
                *acc = acc.wrapping_add(k.wrapping_mul(i32::from(*v)));
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = clip(acc);
        }
    }
    let done = blocks.len() * BLOCK;
    for (i, out) in tail.iter_mut().enumerate() {
        let terms = weights
            .iter()
            .enumerate()
            .map(|(t, k)| k.wrapping_mul(i32::from(src[t * row + done + i])));
        *out = clip(terms.fold(HALF, i32::wrapping_add));
    }
}
