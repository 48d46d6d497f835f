//! Attention on the CPU: one head at a time widened into panels, tiles of queries over the threads.

use deepseek_v41_core::cpu::should_parallelise;
use half::bf16;
use rayon::prelude::*;

use super::tile::{self, ROWS, Row, WIDTH};
use crate::{
    ops::exp::{exp, round_to_bf16},
    simd::Isa,
};

/// Keys (or values) of a panel; the panel's rows of values stay in the first-level cache.
const KEYS: usize = WIDTH;
/// Scores a tile of queries may take: about half of a core's second-level cache.
const TILE_SCORES: usize = 1 << 18;
/// Most groups of [`ROWS`] queries in a tile.
const MAX_GROUPS: usize = 8;

/// Keys and values of one head, widened and laid out in panels.
struct Head {
    /// `[ceil(n / KEYS), hd, KEYS]`: keys transposed, zeros past the last.
    keys: Vec<Row>,
    /// `[ceil(hd / WIDTH), n, WIDTH]`: zeros past the head's width.
    values: Vec<Row>,
    n: usize,
    hd: usize,
}

/// Where one head of a patch lies in `qkv: [n, 3, H, hd]`.
#[derive(Clone, Copy)]
struct HeadAt {
    heads: usize,
    head: usize,
    hd: usize,
}

impl HeadAt {
    /// `part`: 0 query, 1 key, 2 value.
    fn get<'a>(&self, qkv: &'a [bf16], patch: usize, part: usize) -> &'a [bf16] {
        let start = ((patch * 3 + part) * self.heads + self.head) * self.hd;
        &qkv[start..start + self.hd]
    }
}

/// What one thread keeps between tiles.
#[derive(Default)]
struct Scratch {
    /// `[m, hd]`: the tile's queries.
    q: Vec<f32>,
    /// `[m, n]` padded to whole panels: scores, then weights. Overwritten by every tile.
    p: Vec<f32>,
    totals: Vec<f32>,
    acc: Vec<[Row; ROWS]>,
}

impl Head {
    fn new(qkv: &[bf16], n: usize, at: HeadAt) -> Self {
        let hd = at.hd;
        let mut keys = vec![Row::ZERO; n.div_ceil(KEYS) * hd];
        keys.par_chunks_mut(hd)
            .enumerate()
            .for_each(|(panel, keys)| {
                for (c, j) in (panel * KEYS..n.min((panel + 1) * KEYS)).enumerate() {
                    for (row, v) in keys.iter_mut().zip(at.get(qkv, j, 1)) {
                        row.0[c] = wide(*v);
                    }
                }
            });
        let mut values = vec![Row::ZERO; hd.div_ceil(WIDTH) * n];
        values
            .par_chunks_mut(n)
            .enumerate()
            .for_each(|(panel, values)| {
                for (j, row) in values.iter_mut().enumerate() {
                    widen(&at.get(qkv, j, 2)[panel * WIDTH..], &mut row.0);
                }
            });
        Self {
            keys,
            values,
            n,
            hd,
        }
    }

    /// Attends for `out.len()` queries from `first` on; `out[i]: [hd]` is patch `first + i`'s.
    fn attend(
        &self,
        qkv: &[bf16],
        at: HeadAt,
        first: usize,
        out: &mut [&mut [bf16]],
        scratch: &mut Scratch,
        isa: Isa,
    ) {
        let (n, hd, m) = (self.n, self.hd, out.len());
        let padded = n.div_ceil(KEYS) * KEYS;
        let Scratch { q, p, totals, acc } = scratch;
        q.resize(m * hd, 0.0);
        for (i, q) in q.chunks_exact_mut(hd).enumerate() {
            widen(at.get(qkv, first + i, 0), q);
        }
        p.resize(m * padded, 0.0);
        for (panel, keys) in self.keys.chunks_exact(hd).enumerate() {
            for (q, p) in q.chunks(ROWS * hd).zip(p.chunks_mut(ROWS * padded)) {
                let rows = q.len() / hd;
                let mut sums = [Row::ZERO; ROWS];
                tile::accumulate(isa, q, hd, keys, &mut sums[..rows]);
                for (p, sums) in p.chunks_exact_mut(padded).zip(&sums) {
                    p[panel * KEYS..(panel + 1) * KEYS].copy_from_slice(&sums.0);
                }
            }
        }
        let scale = (hd as f64).sqrt().recip() as f32;
        totals.clear();
        totals.extend(p.chunks_exact_mut(padded).map(|p| {
            let mut total = 0.0;
            softmax(&mut p[..n], scale, &mut total);
            total
        }));
        acc.resize(m.div_ceil(ROWS), [Row::ZERO; ROWS]);
        for (panel, values) in self.values.chunks_exact(n).enumerate() {
            acc.fill([Row::ZERO; ROWS]);
            // Blocks of values outermost: a block serves every group while it is in the cache.
            for (block, values) in values.chunks(KEYS).enumerate() {
                for (p, acc) in p.chunks(ROWS * padded).zip(acc.iter_mut()) {
                    let rows = p.len() / padded;
                    tile::accumulate(isa, &p[block * KEYS..], padded, values, &mut acc[..rows]);
                }
            }
            let rows = acc.iter().flatten().zip(out.iter_mut()).zip(totals.iter());
            for ((acc, out), total) in rows {
                divide(&acc.0, *total, &mut out[panel * WIDTH..]);
            }
        }
    }
}

/// A bf16 is the upper half of an f32. Without `half`'s care for signalling NaNs, this is vector code.
fn wide(v: bf16) -> f32 {
    f32::from_bits(u32::from(v.to_bits()) << 16)
}

/// As many as the shorter of the two has.
fn widen(from: &[bf16], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(o, v)| *o = wide(*v));
}

/// `out = bf16(sums / total)`, as many as the shorter of the two has.
fn divide(sums: &[f32; WIDTH], total: f32, out: &mut [bf16]) {
    simd_dispatch!(divide_body(sums: &[f32; WIDTH], total: f32, out: &mut [bf16]))
}

#[inline(always)]
fn divide_body(sums: &[f32; WIDTH], total: f32, out: &mut [bf16]) {
    for (o, v) in out.iter_mut().zip(sums) {
        let bits = round_to_bf16(v / total).to_bits();
        *o = bf16::from_bits((bits >> 16) as u16);
    }
}

/// `p = bf16(exp(p * scale - max))` in place; the sum before rounding goes to `total`.
fn softmax(p: &mut [f32], scale: f32, total: &mut f32) {
    simd_dispatch!(softmax_body(p: &mut [f32], scale: f32, total: &mut f32))
}

#[inline(always)]
fn softmax_body(p: &mut [f32], scale: f32, total: &mut f32) {
    /// Independent maxima and sums, so that the loops are vector code: element `j` belongs to lane
    /// `j % LANES`, and the lanes are added pairwise.
    const LANES: usize = 16;
    // A NaN may slip by here: it comes back as its own weight and with that in the sum.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (whole, rest) = p.as_chunks_mut::<LANES>();
    let mut max = [f32::NEG_INFINITY; LANES];
    for p in whole.iter_mut() {
        for l in 0..LANES {
            p[l] *= scale;
            max[l] = larger(max[l], p[l]);
        }
    }
    for (p, max) in rest.iter_mut().zip(&mut max) {
        *p *= scale;
        *max = larger(*max, *p);
    }
    let max = max.into_iter().fold(f32::NEG_INFINITY, larger);
    let mut sums = [0f32; LANES];
    let weigh = |p: &mut f32, sum: &mut f32| {
        let weight = exp(*p - max);
        *sum += weight;
        *p = round_to_bf16(weight);
    };
    for p in whole.iter_mut() {
        for l in 0..LANES {
            weigh(&mut p[l], &mut sums[l]);
        }
    }
    rest.iter_mut()
        .zip(&mut sums)
        .for_each(|(p, sum)| weigh(p, sum));
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            sums[l] += sums[l + width];
        }
        width /= 2;
    }
    *total = sums[0];
}

/// [`full_attention`](super::full_attention) of one image. Heads one after the other, so that only one is held widened; tiles of queries over the threads.
pub(super) fn attend_all(
    qkv: &[bf16],
    n: usize,
    heads: usize,
    hd: usize,
    out: &mut [bf16],
    isa: Isa,
) {
    if n == 0 {
        return;
    }
    let groups = (TILE_SCORES / (n.next_multiple_of(KEYS) * ROWS)).clamp(1, MAX_GROUPS);
    let tile = groups * ROWS;
    for head in 0..heads {
        let at = HeadAt { heads, head, hd };
        let kv = Head::new(qkv, n, at);
        let run = |scratch: &mut Scratch, (t, out): (usize, &mut [bf16])| {
            let mut rows: Vec<&mut [bf16]> = out
                .chunks_exact_mut(heads * hd)
                .map(|row| &mut row[head * hd..(head + 1) * hd])
                .collect();
            kv.attend(qkv, at, t * tile, &mut rows, scratch, isa);
        };
        let band = tile * heads * hd;
        if should_parallelise(4 * n * n * hd) {
            out.par_chunks_mut(band)
                .enumerate()
                .for_each_init(Scratch::default, run);
        } else {
            let mut scratch = Scratch::default();
            out.chunks_mut(band)
                .enumerate()
                .for_each(|tile| run(&mut scratch, tile));
        }
    }
}

#[cfg(test)]
mod tests {
    use deepseek_v41_testing::{assert_bits_eq, random_bf16, with_threads};
    use proptest::prelude::*;

    use super::{super::full_attention_ref, *};

    fn check(n: usize, heads: usize, hd: usize) {
        let qkv = random_bf16(n * 3 * heads * hd, 1.0, (n * 100 + heads * 10 + hd) as u64);
        let mut first: Option<Vec<bf16>> = None;
        for isa in Isa::available() {
            for threads in [1, 3] {
                let mut out = vec![bf16::NAN; n * heads * hd];
                with_threads(threads, || attend_all(&qkv, n, heads, hd, &mut out, isa));
                match &first {
                    Some(first) => assert_bits_eq(&out, first),
                    None => first = Some(out),
                }
            }
        }
        let out = first.unwrap();
        for head in 0..heads {
            let at = HeadAt { heads, head, hd };
            let part = |part: usize| -> Vec<f32> {
                (0..n)
                    .flat_map(|i| at.get(&qkv, i, part))
                    .map(|v| v.to_f32())
                    .collect()
            };
            let mut expected = vec![0f32; n * hd];
            full_attention_ref(&part(0), &part(1), &part(2), hd, &mut expected);
            for (i, e) in expected.iter().enumerate() {
                let o = out[(i / hd) * heads * hd + head * hd + i % hd].to_f32();
                // One bf16 rounding of the result, and one of each weight beside values of order one.
                assert!((o - e).abs() <= e.abs() / 256.0 + 4e-3, "{o} vs {e}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn same_bits_everywhere_and_close_to_the_reference(
            n in 1usize..150, heads in 1usize..6, quarter in 1usize..25,
        ) {
            check(n, heads, quarter * 4);
        }
    }

    #[test]
    fn several_tiles() {
        check(TILE_SCORES / ROWS / 64 + 70, 1, 64);
    }

    /// A query's result does not depend on the queries beside it.
    #[test]
    fn one_patch_attends_to_itself() {
        let qkv = random_bf16(3 * 2 * 8, 1.0, 3);
        let mut out = vec![bf16::ZERO; 16];
        attend_all(&qkv, 1, 2, 8, &mut out, Isa::detect());
        assert_bits_eq(&out, &qkv[32..]);
    }

    #[test]
    fn huge_scores_stay_finite() {
        let mut qkv = random_bf16(5 * 3 * 8, 1.0, 4);
        for patch in qkv.chunks_exact_mut(24) {
            patch[..16]
                .iter_mut()
                .for_each(|v| *v = bf16::from_f32(v.to_f32() * 1e15));
        }
        let mut out = vec![bf16::NAN; 5 * 8];
        attend_all(&qkv, 5, 1, 8, &mut out, Isa::detect());
        assert!(out.iter().all(|v| v.to_f32().is_finite()));
    }

    #[test]
    fn a_nan_reaches_the_output() {
        let mut qkv = random_bf16(5 * 3 * 8, 1.0, 4);
        qkv[0] = bf16::NAN;
        let mut out = vec![bf16::ZERO; 5 * 8];
        attend_all(&qkv, 5, 1, 8, &mut out, Isa::detect());
        assert!(out[..8].iter().all(|v| v.is_nan()));
        assert!(out[8..].iter().all(|v| !v.is_nan()));
    }
}
