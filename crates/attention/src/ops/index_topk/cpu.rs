//! CPU kernel: keys are widened a tile at a time and meet all heads of the query at once.

use half::bf16;
use rayon::prelude::*;

use super::{BlockRows, Scoring, Wanted};
use crate::ops::simd::{Lanes, Simd, Vectors, dispatch, round_bf16};
use crate::ops::tile::{COLS, TILE, Tile, pack_heads};
use crate::ops::topk_rows::TopRows;

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
    let threads = rayon::current_num_threads();
    let parallel =
        deepseek_v41_core::cpu::should_parallelise(2 * positions * scoring.heads * scoring.dim);
    let new = || Scan::new(simd, scoring, wanted);

    // A step with few queries spreads each one's positions; the kept set of a merge does not depend
    // on where the cuts were.
    if parallel && queries.len() < 2 * threads {
        let parts: Vec<(usize, std::ops::Range<usize>)> = queries
            .iter()
            .enumerate()
            .flat_map(|(t, q)| q.parts(2 * threads, min_part).map(move |part| (t, part)))
            .collect();
        let kept: Vec<(TopRows, TopRows)> = parts
            .par_iter()
            .map_init(new, |scan, (t, part)| {
                scan.query(&queries[*t], part.clone());
                scan.take()
            })
            .collect();
        for (t, query) in queries.iter().enumerate() {
            let (mut rows, mut ids) = (TopRows::new(k), TopRows::new(topk_blocks));
            for (_, (part_rows, part_ids)) in parts.iter().zip(&kept).filter(|(p, _)| p.0 == t) {
                rows.merge(part_rows);
                ids.merge(part_ids);
            }
            query.write(
                &mut rows,
                &mut ids,
                at(topk, t, k),
                at(blocks, t, topk_blocks),
            );
        }
        return;
    }

    let one = |scan: &mut Scan<'_>, query: &Query<'_>, topk: &mut [i32], blocks: &mut [i32]| {
        scan.query(query, 0..query.units());
        query.write(&mut scan.rows, &mut scan.ids, topk, blocks);
    };
    let topk = rows_mut(topk, k, queries.len());
    let blocks = rows_mut(blocks, topk_blocks, queries.len());
    if parallel {
        (queries.par_iter(), topk, blocks)
            .into_par_iter()
            .for_each_init(new, |scan, (query, topk, blocks)| {
                one(scan, query, topk, blocks)
            });
    } else {
        let mut scan = new();
        for ((query, topk), blocks) in queries.iter().zip(topk).zip(blocks) {
            one(&mut scan, query, topk, blocks);
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

fn at(out: &mut [i32], t: usize, width: usize) -> &mut [i32] {
    &mut out[t * width..][..width]
}

/// The positions one query has to look at, in units: blocks of consecutive positions that are never
/// cut apart.
#[derive(Debug, Clone, Copy)]
struct Query<'a> {
    t: usize,
    base: u32,
    visible: usize,
    unit: usize,
    /// Units to visit, all of them if `None`.
    ids: Option<&'a [i32]>,
}

impl<'a> Query<'a> {
    fn new(
        t: usize,
        scoring: &Scoring<'_>,
        wanted: Wanted,
        candidates: Option<BlockRows<'a>>,
    ) -> Self {
        let span = scoring.spans[t];
        let visible = span.visible as usize;
        let (unit, ids) = match candidates {
            None => (
                wanted.block.saturating_mul(TILE.div_ceil(wanted.block)),
                None,
            ),
            Some(c) => {
                let ids = &c.ids[t * c.width..][..c.width];
                // Ascending ids: what lies past the visible positions, and the -1 tail, is a suffix.
                let used = ids
                    .iter()
                    .take_while(|&&id| id >= 0 && (id as usize).saturating_mul(c.block) < visible);
                (c.block, Some(&ids[..used.count()]))
            }
        };
        Self {
            t,
            base: span.base,
            visible,
            unit,
            ids,
        }
    }

    fn units(&self) -> usize {
        self.ids
            .map_or(self.visible.div_ceil(self.unit), <[i32]>::len)
    }

    /// Upper bound of the number of positions.
    fn positions(&self) -> usize {
        self.units().saturating_mul(self.unit).min(self.visible)
    }

    /// Positions of unit `i`.
    fn unit(&self, i: usize) -> std::ops::Range<usize> {
        let id = self.ids.map_or(i, |ids| ids[i] as usize);
        let start = id * self.unit;
        start..start.saturating_add(self.unit).min(self.visible)
    }

    /// At most `count` runs of units of about equal length, each of `min_part` positions or more.
    fn parts(
        &self,
        count: usize,
        min_part: usize,
    ) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let units = self.units();
        let least = min_part.div_ceil(self.unit);
        let step = units.div_ceil(count).max(least);
        (0..units)
            .step_by(step)
            .map(move |start| start..(start + step).min(units))
    }

    /// The newest visible position's block is in, whatever it scored.
    fn newest_block(&self, block: usize) -> Option<u32> {
        (self.visible > 0).then(|| ((self.visible - 1) / block) as u32)
    }

    fn write(&self, rows: &mut TopRows, ids: &mut TopRows, topk: &mut [i32], blocks: &mut [i32]) {
        for (out, position) in topk.iter_mut().zip(rows.drain_ascending()) {
            *out = (self.base + position) as i32;
        }
        for (out, id) in blocks.iter_mut().zip(ids.drain_ascending()) {
            *out = id as i32;
        }
    }
}

/// One thread's pass over positions and what it keeps of them.
struct Scan<'a> {
    simd: Simd,
    scoring: &'a Scoring<'a>,
    wanted: Wanted,
    /// Token whose heads are packed.
    packed: Option<usize>,
    panels: Vec<f32>,
    weights: Vec<f32>,
    tile: Tile,
    terms: Vec<f32>,
    /// Positions of the current tile and their scores.
    positions: Vec<u32>,
    scores: Vec<f32>,
    rows: TopRows,
    ids: TopRows,
}

impl<'a> Scan<'a> {
    fn new(simd: Simd, scoring: &'a Scoring<'a>, wanted: Wanted) -> Self {
        Self {
            simd,
            scoring,
            wanted,
            packed: None,
            panels: Vec::new(),
            weights: Vec::new(),
            tile: Tile::new(scoring.dim),
            terms: Vec::new(),
            positions: Vec::with_capacity(TILE),
            scores: vec![0.0; TILE],
            rows: TopRows::new(wanted.k),
            ids: TopRows::new(wanted.topk_blocks),
        }
    }

    /// What was kept, leaving the scan empty.
    fn take(&mut self) -> (TopRows, TopRows) {
        let rows = std::mem::replace(&mut self.rows, TopRows::new(self.wanted.k));
        (
            rows,
            std::mem::replace(&mut self.ids, TopRows::new(self.wanted.topk_blocks)),
        )
    }

    /// Scores the positions of `units` of a query.
    fn query(&mut self, query: &Query<'_>, units: std::ops::Range<usize>) {
        self.pack(query.t);
        // The block being scored and its best score so far.
        let mut open: Option<(u32, f32)> = None;
        for unit in units {
            for position in query.unit(unit) {
                self.positions.push(position as u32);
                if self.positions.len() == TILE {
                    self.flush(query, &mut open);
                }
            }
        }
        self.flush(query, &mut open);
        self.close(query, open);
    }

    fn pack(&mut self, t: usize) {
        if self.packed == Some(t) {
            return;
        }
        let Scoring {
            q,
            weights,
            heads,
            dim,
            ..
        } = *self.scoring;
        let q = &q[t * heads * dim..][..heads * dim];
        match heads > 8 {
            true => pack_heads::<16>(q, dim, &mut self.panels),
            false => pack_heads::<8>(q, dim, &mut self.panels),
        }
        self.weights.clear();
        self.weights
            .extend(weights[t * heads..][..heads].iter().map(|w| w.to_f32()));
        self.weights.resize(heads.next_multiple_of(16), 0.0);
        self.packed = Some(t);
    }

    /// Scores the tile gathered so far and hands its positions on.
    fn flush(&mut self, query: &Query<'_>, open: &mut Option<(u32, f32)>) {
        let Scoring {
            keys, heads, dim, ..
        } = *self.scoring;
        let job = Job {
            keys: &keys[query.base as usize * dim..],
            positions: &self.positions,
            panels: &self.panels,
            weights: &self.weights,
            heads,
        };
        if heads > 8 {
            score(
                self.simd,
                &job,
                &mut self.tile,
                &mut self.terms,
                &mut self.scores,
            );
        } else {
            score_few(
                self.simd,
                &job,
                &mut self.tile,
                &mut self.terms,
                &mut self.scores,
            );
        }
        for i in 0..self.positions.len() {
            let (position, score) = (self.positions[i], self.scores[i]);
            self.rows.push(score, position);
            if self.wanted.topk_blocks > 0 {
                let id = position / self.wanted.block as u32;
                match open {
                    Some((current, best)) if *current == id => *best = best.max(score),
                    _ => {
                        // `max` drops NaN, which counts as minus infinity.
                        let next = Some((id, score.max(f32::NEG_INFINITY)));
                        let done = std::mem::replace(open, next);
                        self.close(query, done);
                    }
                }
            }
        }
        self.positions.clear();
    }

    /// A block whose last position has been scored.
    fn close(&mut self, query: &Query<'_>, block: Option<(u32, f32)>) {
        if let Some((id, best)) = block {
            let pinned = query.newest_block(self.wanted.block) == Some(id);
            if pinned {
                self.ids.push(f32::INFINITY, id);
            } else if best > f32::NEG_INFINITY {
                self.ids.push(best, id);
            }
        }
    }
}

/// A tile's worth of scoring.
struct Job<'a> {
    /// From the query's position 0 on.
    keys: &'a [bf16],
    positions: &'a [u32],
    panels: &'a [f32],
    weights: &'a [f32],
    heads: usize,
}

dispatch! {
    /// `scores[i]` for each of `job.positions`, as `index_score_ref`, bit for bit.
    fn score<16>(
        job: &Job<'_>, tile: &mut Tile, terms: &mut Vec<f32>, scores: &mut [f32],
    ) = score_body
}

dispatch! {
    /// [`score`] for at most 8 heads.
    fn score_few<8>(
        job: &Job<'_>, tile: &mut Tile, terms: &mut Vec<f32>, scores: &mut [f32],
    ) = score_body
}

#[inline(always)]
fn score_body<V: Vectors<W>, const R: usize, const W: usize>(
    job: &Job<'_>,
    tile: &mut Tile,
    terms: &mut Vec<f32>,
    scores: &mut [f32],
) {
    let Job {
        keys,
        positions,
        panels,
        weights,
        heads,
    } = *job;
    let dim = tile.dim();
    for (r, &position) in positions.iter().enumerate() {
        tile.set_row(r, &keys[position as usize * dim..][..dim]);
    }
    let padded = heads.next_multiple_of(W);
    terms.resize(R * padded, 0.0);
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
        for r in 0..R.min(positions.len() - r0) {
            scores[r0 + r] = round_bf16(sums[r]);
        }
    }
}
