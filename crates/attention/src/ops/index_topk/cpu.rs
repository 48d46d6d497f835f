//! CPU kernel: keys are widened a tile at a time and meet all heads of the query at once.

use std::ops::Range;

use deepseek_v41_core::cpu;
use rayon::prelude::*;

use super::positions::Query;
use super::{BlockRows, Scoring, Wanted};
use crate::ops::pool_rows::PoolRows;
use crate::ops::simd::{Lanes, Simd, Vectors, dispatch, round_bf16};
use crate::ops::tile::{COLS, TILE, Tile, pack_heads, packed_len};
use crate::ops::topk_rows::TopRows;

/// Positions scored at a time: with the heads of the released shapes, what fits the first-level cache.
const ROWS: usize = 32;

/// Rows in flight in any instruction set's kernel.
const MAX_ROWS: usize = 8;

const _: () = assert!(ROWS <= TILE && ROWS.is_multiple_of(MAX_ROWS));

/// Positions a thread takes at least when one query is spread over threads: each part may keep up to
/// `k` entries that have to be merged.
const MIN_PART: usize = 2048;

/// Writes each query's best rows to `topk: [T, k]` and its candidate blocks to `blocks: [T, topk_blocks]`,
/// both pre-filled with -1.
pub(super) fn select(
    scoring: &Scoring<'_>,
    wanted: Wanted,
    candidates: Option<BlockRows<'_>>,
    topk: &mut [i32],
    blocks: &mut [i32],
) {
    select_with(
        Simd::detect(),
        MIN_PART,
        scoring,
        wanted,
        candidates,
        topk,
        blocks,
    );
}

fn select_with(
    simd: Simd,
    min_part: usize,
    scoring: &Scoring<'_>,
    wanted: Wanted,
    candidates: Option<BlockRows<'_>>,
    topk: &mut [i32],
    blocks: &mut [i32],
) {
    let Wanted { k, topk_blocks, .. } = wanted;
    let queries: Vec<Query<'_>> = (0..scoring.spans.len())
        .map(|t| Query::new(t, scoring, wanted, candidates))
        .collect();
    let positions: usize = queries.iter().map(Query::positions).sum();
    let work = 2 * positions * scoring.heads * scoring.dim;
    let parallel = cpu::should_parallelise(work);
    let threads = rayon::current_num_threads();
    let scan = |query: &Query<'_>, units| Scan::new(simd, scoring, wanted, query).run(units);
    let outputs = queries
        .iter()
        .zip(rows_mut(topk, k, queries.len()))
        .zip(rows_mut(blocks, topk_blocks, queries.len()));

    if !parallel {
        for ((query, topk), blocks) in outputs {
            scan(query, 0..query.units()).write(query, topk, blocks);
        }
    } else if queries.len() >= 2 * threads {
        let outputs: Vec<_> = outputs.collect();
        outputs.into_par_iter().for_each(|((query, topk), blocks)| {
            scan(query, 0..query.units()).write(query, topk, blocks);
        });
    } else {
        // Few queries: the positions of each are spread. What a merge keeps does not depend on where
        // the cuts were.
        let parts: Vec<(usize, Range<usize>)> = queries
            .iter()
            .enumerate()
            .flat_map(|(t, q)| q.parts(2 * threads, min_part).map(move |part| (t, part)))
            .collect();
        let mut kept: Vec<Option<Kept>> = parts.iter().map(|_| None).collect();
        cpu::for_each_piece(work, &mut kept, 1, |i, kept| {
            let (t, part) = &parts[i];
            kept[0] = Some(scan(&queries[*t], part.clone()));
        });
        for (t, ((query, topk), blocks)) in outputs.enumerate() {
            let mut all = Kept::new(wanted);
            let of_query = parts.iter().zip(&mut kept).filter(|((of, _), _)| *of == t);
            let mut own = of_query.filter_map(|(_, part)| part.take()).peekable();
            if let Some(first) = own.next() {
                all = first;
            }
            for part in own {
                all.rows.merge(&part.rows);
                all.blocks.merge(&part.blocks);
            }
            all.write(query, topk, blocks);
        }
    }
}

/// `chunks_exact_mut` for a width that may be 0.
fn rows_mut(mut out: &mut [i32], width: usize, rows: usize) -> Vec<&mut [i32]> {
    let mut split = Vec::with_capacity(rows);
    for _ in 0..rows {
        let (row, rest) = std::mem::take(&mut out).split_at_mut(width);
        split.push(row);
        out = rest;
    }
    split
}

/// The best of what was scored so far.
struct Kept {
    rows: TopRows,
    blocks: TopRows,
}

impl Kept {
    fn new(wanted: Wanted) -> Self {
        Self {
            rows: TopRows::new(wanted.k),
            blocks: TopRows::new(wanted.topk_blocks),
        }
    }

    fn write(mut self, query: &Query<'_>, topk: &mut [i32], blocks: &mut [i32]) {
        for (out, position) in topk.iter_mut().zip(self.rows.drain_ascending()) {
            *out = (query.base + position) as i32;
        }
        for (out, id) in blocks.iter_mut().zip(self.blocks.drain_ascending()) {
            *out = id as i32;
        }
    }
}

/// One pass over positions of one query.
struct Scan<'a> {
    simd: Simd,
    scoring: &'a Scoring<'a>,
    query: &'a Query<'a>,
    block: u32,
    want_blocks: bool,
    kept: Kept,
    /// The block being scored and its best score so far.
    open: Option<(u32, f32)>,
}

impl<'a> Scan<'a> {
    fn new(simd: Simd, scoring: &'a Scoring<'a>, wanted: Wanted, query: &'a Query<'a>) -> Self {
        let (block, want_blocks) = (wanted.block as u32, wanted.topk_blocks > 0);
        let kept = Kept::new(wanted);
        Self {
            simd,
            scoring,
            query,
            block,
            want_blocks,
            kept,
            open: None,
        }
    }

    /// Scores the positions of `units`, a tile at a time.
    fn run(mut self, units: Range<usize>) -> Kept {
        let Scoring {
            q,
            weights,
            keys,
            heads,
            dim,
            ..
        } = *self.scoring;
        let t = self.query.t;
        let (q, weights) = (
            &q[t * heads * dim..][..heads * dim],
            &weights[t * heads..][..heads],
        );
        let packed = if heads > 8 {
            packed_len::<16>
        } else {
            packed_len::<8>
        }(heads, dim);
        let padded = heads.next_multiple_of(16);
        cpu::with_scratch(
            Tile::len(dim) + packed + MAX_ROWS * padded + padded,
            |scratch| {
                let (tile, scratch) = scratch.split_at_mut(Tile::len(dim));
                let (panels, scratch) = scratch.split_at_mut(packed);
                let (wide, terms) = scratch.split_at_mut(padded);
                match heads > 8 {
                    true => pack_heads::<16>(q, dim, panels),
                    false => pack_heads::<8>(q, dim, panels),
                }
                wide.fill(0.0);
                cpu::widen_slice(weights, wide);
                let mut job = Job {
                    keys,
                    base: self.query.base as usize,
                    tile: Tile::new(tile, dim),
                    panels,
                    weights: wide,
                    terms,
                    heads,
                    dim,
                };
                let mut positions = [0u32; ROWS];
                let mut n = 0;
                for position in units.flat_map(|unit| self.query.unit(unit)) {
                    positions[n] = position as u32;
                    n += 1;
                    if n == ROWS {
                        self.score(&mut job, &positions);
                        n = 0;
                    }
                }
                self.score(&mut job, &positions[..n]);
            },
        );
        self.close();
        self.kept
    }

    fn score(&mut self, job: &mut Job<'_>, positions: &[u32]) {
        let mut scores = [0f32; ROWS];
        match job.heads > 8 {
            true => score(self.simd, job, positions, &mut scores),
            false => score_few(self.simd, job, positions, &mut scores),
        }
        for (&position, &score) in positions.iter().zip(&scores) {
            self.kept.rows.push(score, position);
            if self.want_blocks {
                let id = position / self.block;
                match &mut self.open {
                    Some((open, best)) if *open == id => *best = best.max(score),
                    _ => {
                        self.close();
                        // `max` drops NaN, which counts as minus infinity.
                        self.open = Some((id, score.max(f32::NEG_INFINITY)));
                    }
                }
            }
        }
    }

    /// Keeps or drops the block whose last position has been scored.
    fn close(&mut self) {
        if let Some((id, best)) = self.open.take() {
            let newest = (self.query.visible as u32 - 1) / self.block;
            if id == newest {
                self.kept.blocks.push(f32::INFINITY, id);
            } else if best > f32::NEG_INFINITY {
                self.kept.blocks.push(best, id);
            }
        }
    }
}

/// What scoring a tile of positions needs.
struct Job<'a> {
    keys: PoolRows<'a>,
    /// Row of the query's position 0.
    base: usize,
    tile: Tile<'a>,
    /// The query's heads, transposed.
    panels: &'a [f32],
    /// `[heads padded]`.
    weights: &'a [f32],
    /// Scratch, `[MAX_ROWS][heads padded]`.
    terms: &'a mut [f32],
    heads: usize,
    dim: usize,
}

dispatch! {
    /// `scores[i]` for each position, as `index_score_ref`, bit for bit.
    fn score<16>(job: &mut Job<'_>, positions: &[u32], scores: &mut [f32]) = score_body
}

dispatch! {
    /// [`score`] for at most 8 heads.
    fn score_few<8>(job: &mut Job<'_>, positions: &[u32], scores: &mut [f32]) = score_body
}

#[inline(always)]
fn score_body<V: Vectors<W>, const R: usize, const W: usize>(
    job: &mut Job<'_>,
    positions: &[u32],
    scores: &mut [f32],
) {
    let &mut Job {
        keys,
        base,
        ref mut tile,
        panels,
        weights,
        ref mut terms,
        heads,
        dim,
    } = job;
    for (r, &position) in positions.iter().enumerate() {
        tile.set_row(r, keys.row(base + position as usize, dim));
    }
    let padded = heads.next_multiple_of(W);
    let terms = &mut terms[..R * padded];
    for r0 in (0..positions.len()).step_by(R) {
        for (i, panel) in panels.chunks_exact(tile.blocks() * COLS * W).enumerate() {
            let dots = tile.dots::<V::Of, R, W>(r0, panel);
            for (r, dots) in dots.into_iter().enumerate() {
                let (terms, _) = terms[r * padded..][..padded].as_chunks_mut::<W>();
                dots.store(&mut terms[i]);
            }
        }
        for terms in terms.chunks_exact_mut(padded) {
            for (term, weight) in terms.iter_mut().zip(weights) {
                let s = round_bf16(*term);
                let s = if s < 0.0 { 0.0 } else { s };
                *term = round_bf16(s * weight);
            }
        }
        // Heads in ascending order; the rows' chains are independent and overlap.
        let mut sums = [0f32; R];
        for h in 0..heads {
            for r in 0..R {
                sums[r] += terms[r * padded + h];
            }
        }
        for (score, sum) in scores[r0..].iter_mut().zip(sums) {
            *score = round_bf16(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use deepseek_v41_testing::random_bf16;

    use super::*;
    use crate::ops::index_topk::{IndexSpan, index_score_ref};

    #[test]
    fn every_instruction_set_gives_the_reference_bits() {
        for (heads, dim, n) in [(1, 8, 3), (5, 40, 70), (16, 64, 64), (33, 24, 100)] {
            let q = random_bf16(heads * dim, 1.0, 1);
            let weights = random_bf16(heads, 1.0, 2);
            let keys = random_bf16(n * dim, 1.0, 3);
            let spans = [IndexSpan {
                base: 0,
                visible: n as u32,
            }];
            let scoring = Scoring {
                q: &q,
                weights: &weights,
                keys: PoolRows::Bf16(&keys),
                spans: &spans,
                heads,
                dim,
            };
            let wanted = Wanted {
                k: n,
                topk_blocks: 0,
                block: 1,
            };
            let query = Query::new(0, &scoring, wanted, None);
            let want: Vec<f32> = keys
                .chunks(dim)
                .map(|key| index_score_ref(&q, &weights, key))
                .collect();
            for simd in Simd::available() {
                // Scratch left over from others must not show.
                cpu::with_scratch(1 << 16, |scratch| scratch.fill(f32::NAN));
                let kept = Scan::new(simd, &scoring, wanted, &query).run(0..query.units());
                let mut all = TopRows::new(n);
                want.iter()
                    .enumerate()
                    .for_each(|(j, &score)| all.push(score, j as u32));
                assert_eq!(kept.rows.sorted_keys(), all.sorted_keys(), "{simd:?}");
            }
        }
    }

    #[test]
    fn parts_do_not_matter() {
        let (heads, dim, n) = (4, 64, 1500);
        let q = random_bf16(heads * dim, 1.0, 1);
        let weights = random_bf16(heads, 1.0, 2);
        let keys = random_bf16(n * dim, 1.0, 3);
        let spans = [IndexSpan {
            base: 0,
            visible: n as u32,
        }];
        let scoring = Scoring {
            q: &q,
            weights: &weights,
            keys: PoolRows::Bf16(&keys),
            spans: &spans,
            heads,
            dim,
        };
        let wanted = Wanted {
            k: 48,
            topk_blocks: 9,
            block: 7,
        };
        let run = |threads, min_part| {
            let (mut topk, mut blocks) = (vec![-1; 48], vec![-1; 9]);
            deepseek_v41_testing::with_threads(threads, || {
                let simd = Simd::detect();
                select_with(
                    simd,
                    min_part,
                    &scoring,
                    wanted,
                    None,
                    &mut topk,
                    &mut blocks,
                );
            });
            (topk, blocks)
        };
        let whole = run(1, 2048);
        for (threads, min_part) in [(2, 1), (3, 100), (8, 1)] {
            assert_eq!(run(threads, min_part), whole);
        }
    }
}
