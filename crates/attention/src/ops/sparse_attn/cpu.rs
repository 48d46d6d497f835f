//! CPU kernel: a tile of rows is widened once and serves all heads of the query.
//!
//! Scores put heads side by side in vector lanes, values put columns: both are small matrix products
//! whose every element is one chain of multiply-adds, the one of `sparse_attn_ref`.

use deepseek_v41_core::cpu;
use half::bf16;

use super::{KvRows, NO_MAX, valid_rows};
use crate::ops::pool_rows::PoolRow;
use crate::ops::simd::{Lanes, Simd, Vectors, dispatch, exp, round_bf16};
use crate::ops::tile::{COLS, TILE, Tile, pack_heads, packed_len};

/// Heads a thread takes at least when a query is split: enough to repay widening the rows again.
const MIN_HEADS: usize = 16;

/// Up to so many heads, vectors of this many lanes waste less than the usual 16.
const FEW: usize = 8;

/// As `sparse_attn_ref`, bit for bit.
pub(super) fn sparse_attn(
    q: &[bf16],
    scopes: &[KvRows<'_>],
    sink: &[f32],
    dim: usize,
    scale: f32,
    out: &mut [bf16],
) {
    sparse_attn_with(Simd::detect(), q, scopes, sink, dim, scale, out);
}

fn sparse_attn_with<'a>(
    simd: Simd,
    q: &[bf16],
    scopes: &[KvRows<'a>],
    sink: &[f32],
    dim: usize,
    scale: f32,
    out: &mut [bf16],
) {
    let heads = sink.len();
    let row = heads * dim;
    let attend = |rows: &mut Vec<PoolRow<'a>>, t: usize, h0: usize, out: &mut [bf16]| {
        valid_rows(scopes, t, dim, rows);
        let n = out.len() / dim;
        let query = Query {
            q: &q[t * row + h0 * dim..][..n * dim],
            sink: &sink[h0..][..n],
            rows,
            dim,
            scale,
        };
        // Outside of the kernel: a closure inside would not be compiled for its instruction set.
        cpu::with_scratch(scratch_lens(n, dim).iter().sum(), |scratch| match n > FEW {
            true => attend(simd, &query, scratch, out),
            false => attend_few(simd, &query, scratch, out),
        });
    };
    let width: usize = scopes.iter().map(|s| s.width).sum();
    let work = 4 * q.len() * width;
    if !cpu::should_parallelise(work) {
        let mut rows = Vec::with_capacity(width);
        for (t, out) in out.chunks_exact_mut(row).enumerate() {
            attend(&mut rows, t, 0, out);
        }
        return;
    }
    // Queries are the natural unit; a step with fewer of them than threads splits their heads.
    let (queries, threads) = (q.len() / row, rayon::current_num_threads());
    let split = match queries < 2 * threads {
        true => heads.div_ceil(threads).next_multiple_of(MIN_HEADS),
        false => heads,
    };
    if split >= heads {
        return cpu::for_each_piece(work, out, row, |t, out| {
            attend(&mut Vec::with_capacity(width), t, 0, out);
        });
    }
    for (t, out) in out.chunks_exact_mut(row).enumerate() {
        cpu::for_each_piece(work / queries, out, split * dim, |i, out| {
            attend(&mut Vec::with_capacity(width), t, i * split, out);
        });
    }
}

/// Some heads of one query and the rows they see.
struct Query<'a> {
    /// `[n, dim]`.
    q: &'a [bf16],
    sink: &'a [f32],
    rows: &'a [PoolRow<'a>],
    dim: usize,
    scale: f32,
}

dispatch! {
    /// The heads' result, `out: [n, dim]`.
    fn attend<16>(query: &Query<'_>, scratch: &mut [f32], out: &mut [bf16]) = attend_body
}

dispatch! {
    /// [`attend`] for at most [`FEW`] heads.
    fn attend_few<8>(query: &Query<'_>, scratch: &mut [f32], out: &mut [bf16]) = attend_body
}

#[inline(always)]
fn attend_body<V: Vectors<W> + Vectors<COLS>, const R: usize, const W: usize>(
    query: &Query<'_>,
    scratch: &mut [f32],
    out: &mut [bf16],
) {
    let Query {
        q,
        sink,
        rows,
        dim,
        scale,
    } = *query;
    if rows.is_empty() {
        out.fill(bf16::ZERO);
        return;
    }
    let heads = sink.len();
    let padded = heads.next_multiple_of(W);
    let blocks = dim.div_ceil(COLS);
    let [tile, panels, p, o, m, l, c] = carve(scratch, scratch_lens(heads, dim));
    let mut tile = Tile::new(tile, dim);
    pack_heads::<W>(q, dim, panels);
    o.fill(0.0);
    m.fill(NO_MAX);
    l.fill(0.0);

    for rows in rows.chunks(TILE) {
        for (r, row) in rows.iter().enumerate() {
            tile.set_row(r, *row);
        }
        for (i, panel) in panels.chunks_exact(blocks * COLS * W).enumerate() {
            let scale = <V as Vectors<W>>::Of::splat(scale);
            // Whole groups of R rows: the last group's surplus is nonsense and never read.
            for r0 in (0..rows.len()).step_by(R) {
                let dots = tile.dots::<<V as Vectors<W>>::Of, R, W>(r0, panel);
                for (r, dots) in dots.into_iter().enumerate() {
                    let (p, _) = p[(r0 + r) * padded..][..padded].as_chunks_mut::<W>();
                    dots.mul(scale).store(&mut p[i]);
                }
            }
        }
        softmax::<W>(&mut p[..rows.len() * padded], m, l, c);
        for b in 0..blocks {
            let values = &tile.block(b)[..rows.len() * COLS];
            let o = &mut o[b * padded * COLS..][..padded * COLS];
            for h in (0..heads).step_by(R) {
                let o = &mut o[h * COLS..][..R * COLS];
                accumulate::<<V as Vectors<COLS>>::Of, R>(values, &p[h..], &c[h..], padded, o);
            }
        }
    }

    for (h, out) in out.chunks_exact_mut(dim).enumerate() {
        let l = l[h] + exp(sink[h] - m[h]);
        for (b, out) in out.chunks_mut(COLS).enumerate() {
            let o = &o[(b * padded + h) * COLS..][..COLS];
            for (out, o) in out.iter_mut().zip(o) {
                *out = cpu::round_bf16(o / l);
            }
        }
    }
}

/// Values of scratch for so many heads: tile, panels, p, o, and m, l, c.
fn scratch_lens(heads: usize, dim: usize) -> [usize; 7] {
    let (lanes, panels) = match heads > FEW {
        true => (16, packed_len::<16>(heads, dim)),
        false => (FEW, packed_len::<FEW>(heads, dim)),
    };
    let padded = heads.next_multiple_of(lanes);
    let o = dim.next_multiple_of(COLS) * padded;
    [
        Tile::len(dim),
        panels,
        TILE * padded,
        o,
        padded,
        padded,
        padded,
    ]
}

/// Consecutive parts of `scratch`.
fn carve<const N: usize>(mut scratch: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    lens.map(|len| {
        let (part, rest) = std::mem::take(&mut scratch).split_at_mut(len);
        scratch = rest;
        part
    })
}

/// One step of the recurrence for all heads: scores `p: [rows][heads]` become rounded probabilities,
/// `m` and `l` move on, `c` receives the correction of `o`. `W` heads at a time, which divides them.
#[inline(always)]
fn softmax<const W: usize>(p: &mut [f32], m: &mut [f32], l: &mut [f32], c: &mut [f32]) {
    let blocks = m.len() / W;
    let (p, m, l, c) = (
        p.as_chunks_mut::<W>().0,
        m.as_chunks_mut::<W>().0,
        l.as_chunks_mut::<W>().0,
        c.as_chunks_mut::<W>().0,
    );
    for (block, (m, c)) in m.iter_mut().zip(&mut *c).enumerate() {
        let mut top = *m;
        for s in p[block..].iter().step_by(blocks) {
            for w in 0..W {
                top[w] = if s[w] > top[w] { s[w] } else { top[w] };
            }
        }
        for p in p[block..].iter_mut().step_by(blocks) {
            for w in 0..W {
                p[w] -= top[w];
            }
        }
        for w in 0..W {
            c[w] = m[w] - top[w];
        }
        *m = top;
    }
    // Flat, so that they fill vectors of any width.
    exponentials(p.as_flattened_mut());
    exponentials(c.as_flattened_mut());
    for (block, (l, c)) in l.iter_mut().zip(c).enumerate() {
        let mut sum = [0f32; W];
        for p in p[block..].iter().step_by(blocks) {
            for w in 0..W {
                sum[w] += p[w];
            }
        }
        for w in 0..W {
            l[w] = l[w].mul_add(c[w], sum[w]);
        }
    }
    for p in p.as_flattened_mut() {
        *p = round_bf16(*p);
    }
}

#[inline(always)]
fn exponentials(xs: &mut [f32]) {
    for x in xs {
        *x = exp(*x);
    }
}

/// `o[h] = o[h] * c[h] + sum over rows of p[row][h] * values[row]` for `R` heads and one column block.
#[inline(always)]
fn accumulate<V: Lanes<COLS>, const R: usize>(
    values: &[f32],
    p: &[f32],
    c: &[f32],
    stride: usize,
    o: &mut [f32],
) {
    let (o, _) = o.as_chunks_mut::<COLS>();
    let (values, _) = values.as_chunks::<COLS>();
    let mut acc = [V::splat(0.0); R];
    for h in 0..R {
        acc[h] = V::load(&o[h]).mul(V::splat(c[h]));
    }
    for (r, v) in values.iter().enumerate() {
        let v = V::load(v);
        let p = &p[r * stride..][..R];
        for h in 0..R {
            acc[h] = acc[h].add_product(V::splat(p[h]), v);
        }
    }
    for h in 0..R {
        acc[h].store(&mut o[h]);
    }
}

#[cfg(test)]
mod tests {
    use deepseek_v41_testing::{assert_bits_eq, random_bf16, random_f32};

    use super::*;
    use crate::ops::pool_rows::PoolRows;
    use crate::ops::sparse_attn::sparse_attn_ref;

    #[test]
    fn every_instruction_set_gives_the_reference_bits() {
        for (heads, dim, n) in [
            (1, 16, 3),
            (5, 40, 70),
            (16, 64, 64),
            (20, 24, 200),
            (64, 48, 129),
        ] {
            let q = random_bf16(2 * heads * dim, 1.0, 1);
            let kv = random_bf16(50 * dim, 1.0, 2);
            let sink = random_f32(heads, 1.0, 3);
            let idxs: Vec<i32> = (0..2 * n).map(|i| (i as i32 * 7) % 51 - 1).collect();
            let scopes = [KvRows {
                kv: PoolRows::Bf16(&kv),
                idxs: &idxs,
                width: n,
            }];
            let mut want = vec![bf16::ZERO; q.len()];
            sparse_attn_ref(&q, &scopes, &sink, dim, 0.3, &mut want);
            for simd in Simd::available() {
                let mut out = vec![bf16::ONE; q.len()];
                sparse_attn_with(simd, &q, &scopes, &sink, dim, 0.3, &mut out);
                assert_bits_eq(&out, &want);
            }
        }
    }

    #[test]
    fn scratch_left_over_from_others_does_not_show() {
        let (heads, dim) = (5, 40);
        let q = random_bf16(heads * dim, 1.0, 1);
        let kv = random_bf16(7 * dim, 1.0, 2);
        let scopes = [KvRows {
            kv: PoolRows::Bf16(&kv),
            idxs: &[0, 6, 3],
            width: 3,
        }];
        let mut want = vec![bf16::ZERO; q.len()];
        sparse_attn_ref(&q, &scopes, &[0.0; 5], dim, 0.3, &mut want);
        cpu::with_scratch(1 << 16, |scratch| scratch.fill(f32::NAN));
        let mut out = vec![bf16::ONE; q.len()];
        sparse_attn(&q, &scopes, &[0.0; 5], dim, 0.3, &mut out);
        assert_bits_eq(&out, &want);
    }
}
