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
use crate::{ImageError, simd::Isa};

/// Fraction bits of a coefficient: 32, less 8 for the byte and 2 for overshoot and sign.
const FRACTION_BITS: u32 = 22;
const HALF: i32 = 1 << (FRACTION_BITS - 1);
/// The cubic reaches two pixels to either side.
const SUPPORT: f64 = 2.0;

/// Filter taps of every output position along one side.
struct Taps {
    /// First input and number of inputs, for each output.
    spans: Vec<(usize, usize)>,
    /// `[outputs, stride]`, zero behind each output's own taps; `stride` is even.
    weights: Vec<i32>,
    stride: usize,
}

impl Taps {
    fn new(n: usize, m: usize) -> Self {
        let scale = n as f64 / m as f64;
        let stretch = scale.max(1.0);
        let support = SUPPORT * stretch;
        let stride = support.ceil() as usize * 2 + 2;
        let mut weights = vec![0; m * stride];
        let mut w = Vec::with_capacity(stride);
        let spans = weights
            .chunks_exact_mut(stride)
            .enumerate()
            .map(|(i, row)| {
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
        Self {
            spans,
            weights,
            stride,
        }
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
    resize_with(
        image,
        width,
        height,
        |src, out, taps| {
            let in_row = image.width() as usize * 3;
            each_row(out, width * 3, taps.stride * 8, |y, wide, out| {
                filter_row(&src[y * in_row..(y + 1) * in_row], taps, wide, out);
            });
        },
        |src, out, taps| {
            each_row(out, width * 3, taps.stride * 8, |y, _, out| {
                let (first, weights) = taps.get(y);
                filter_columns(&src[first * width * 3..], width * 3, weights, out);
            });
        },
    )
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
        let terms = weights
            .iter()
            .enumerate()
            .map(|(t, k)| k * i32::from(at(first + t)));
        clip(HALF + terms.sum::<i32>())
    };
    resize_with(
        image,
        width,
        height,
        |src, out, taps| {
            for (j, o) in out.iter_mut().enumerate() {
                let (y, x, c) = (j / 3 / width, j / 3 % width, j % 3);
                *o = pixel(taps, x, &|i| src[(y * in_width + i) * 3 + c]);
            }
        },
        |src, out, taps| {
            for (j, o) in out.iter_mut().enumerate() {
                let (y, xc) = (j / (width * 3), j % (width * 3));
                *o = pixel(taps, y, &|i| src[i * width * 3 + xc]);
            }
        },
    )
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
        return Err(ImageError::Pixels {
            width: w,
            height: h,
            bytes: 0,
        });
    }
    let mut filtered = Vec::new();
    if width != in_width {
        filtered.resize(width * in_height * 3, 0);
        rows(image.data(), &mut filtered, &Taps::new(in_width, width));
    }
    if height == in_height {
        let data = if width == in_width {
            image.data().to_vec()
        } else {
            filtered
        };
        return RgbImage::new(w, h, data);
    }
    let src = if width == in_width {
        image.data()
    } else {
        &filtered
    };
    let mut out = vec![0; width * height * 3];
    columns(src, &mut out, &Taps::new(in_height, height));
    RgbImage::new(w, h, out)
}

/// Calls `f(y, scratch, row)` for every row of `out`, over threads when `work` operations a byte pay for
/// them.
fn each_row(
    out: &mut [u8],
    row: usize,
    work: usize,
    f: impl Fn(usize, &mut WideRow, &mut [u8]) + Sync,
) {
    if cpu::should_parallelise(out.len().saturating_mul(work)) {
        let rows = out.par_chunks_mut(row).enumerate();
        rows.for_each_init(Vec::new, |scratch, (y, out)| f(y, scratch, out));
    } else {
        let mut scratch = Vec::new();
        out.chunks_mut(row)
            .enumerate()
            .for_each(|(y, out)| f(y, &mut scratch, out));
    }
}

/// Pixels widened to four lanes, the last one idle, with one more of zeros at the end.
type WideRow = Vec<[i32; 4]>;

/// One row: `src: [n, 3]` → `out: [m, 3]`. `wide` is scratch space.
fn filter_row(src: &[u8], taps: &Taps, wide: &mut WideRow, out: &mut [u8]) {
    wide.clear();
    let pixels = src.as_chunks::<3>().0.iter();
    wide.extend(pixels.map(|p| [i32::from(p[0]), i32::from(p[1]), i32::from(p[2]), 0]));
    wide.push([0; 4]);
    #[cfg(target_arch = "x86_64")]
    if Isa::detect() != Isa::Portable {
        // SAFETY: `detect` has found AVX2.
        return unsafe { filter_row_avx2(wide, taps, out) };
    }
    for (x, out) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let (first, weights) = taps.get(x);
        let mut acc = [HALF; 3];
        for (px, k) in wide[first..].iter().zip(weights) {
            for c in 0..3 {
                acc[c] = acc[c].wrapping_add(k.wrapping_mul(px[c]));
            }
        }
        *out = acc.map(clip);
    }
}

/// Two taps at a time, one in each half of a register. (Left to itself the compiler runs over the taps of
/// one channel and spends its time on shuffles.)
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn filter_row_avx2(wide: &[[i32; 4]], taps: &Taps, out: &mut [u8]) {
    use std::arch::x86_64::{
        _mm_add_epi32, _mm_cvtsi128_si32, _mm_loadl_epi64, _mm_packs_epi32, _mm_packus_epi16,
        _mm_set1_epi32, _mm_srai_epi32, _mm256_add_epi32, _mm256_castsi128_si256,
        _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_mullo_epi32,
        _mm256_permutevar8x32_epi32, _mm256_set_epi32, _mm256_setzero_si256,
    };
    let spread = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
    for (x, out) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let (first, n) = taps.spans[x];
        // An odd count takes one more pixel, which `wide` has, with the zero behind the weights.
        let pairs = n.div_ceil(2);
        let weights = taps.weights[x * taps.stride..][..2 * pairs]
            .as_chunks::<2>()
            .0;
        let pixels = wide[first..first + 2 * pairs].as_chunks::<2>().0;
        let mut acc = _mm256_setzero_si256();
        for (px, k) in pixels.iter().zip(weights) {
            // SAFETY: 32 bytes of two pixels.
            let px = unsafe { _mm256_loadu_si256(px.as_ptr().cast()) };
            // SAFETY: 8 bytes of two weights.
            let k = unsafe { _mm_loadl_epi64(k.as_ptr().cast()) };
            let k = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(k), spread);
            acc = _mm256_add_epi32(acc, _mm256_mullo_epi32(px, k));
        }
        let both = _mm_add_epi32(
            _mm256_castsi256_si128(acc),
            _mm256_extracti128_si256::<1>(acc),
        );
        let sum =
            _mm_srai_epi32::<{ FRACTION_BITS as i32 }>(_mm_add_epi32(both, _mm_set1_epi32(HALF)));
        // Saturating to i16 and then to u8 is `clip`: sums are within ten bits here.
        let bytes = _mm_packus_epi16(_mm_packs_epi32(sum, sum), sum);
        let [r, g, b, _] = _mm_cvtsi128_si32(bytes).to_le_bytes();
        *out = [r, g, b];
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
