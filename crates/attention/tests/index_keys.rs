//! The official code's stale index keys: which source's are scored when, and that asking for them works.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use candle_core::Tensor;
use common::{CPU, chunk, geometry, input, odd_config};
use deepseek_v41_attention::{
    AttnPlan, CandidateRole, CompressedCache, IndexKeySource, Indexer, KvFormat,
    SharedAttentionRuntime, last_published,
};
use deepseek_v41_core::{Error, Rope, RopeConfig, Weights};

/// The reference's own bookkeeping: one slot, written whenever a source has a latent.
fn simulate(ratios: &[usize], prefill: u32, len: u32) -> Vec<Vec<Option<usize>>> {
    let mut published = None;
    let mut scored = vec![Vec::new(); len as usize];
    for (start, end) in std::iter::once((0, prefill)).chain((prefill..len).map(|p| (p, p + 1))) {
        for (source, &r) in ratios.iter().enumerate() {
            let r = r as u32;
            let latent = if start == 0 {
                end >= r
            } else {
                end.is_multiple_of(r)
            };
            if latent {
                published = Some(source);
            }
            for pos in start..end {
                scored[pos as usize].push(published);
            }
        }
    }
    scored
}

#[test]
fn last_published_is_what_the_reference_holds() {
    for ratios in [
        &[2, 2, 2, 1][..],
        &[2, 2, 1],
        &[1, 2],
        &[2, 1],
        &[4, 2],
        &[3],
        &[2, 4, 3],
    ] {
        for prefill in 1..9 {
            let scored = simulate(ratios, prefill, 30);
            for (pos, scored) in scored.iter().enumerate() {
                for (source, &want) in scored.iter().enumerate() {
                    let got = last_published(ratios, source + 1, prefill, pos as u32);
                    assert_eq!(
                        got, want,
                        "{ratios:?} prefill {prefill} pos {pos} source {source}"
                    );
                }
            }
        }
    }
}

/// In the release every second decode step scores the keys of the last source.
#[test]
fn stale_keys_alternate() {
    let scored: Vec<_> = (10..14)
        .map(|pos| last_published(&[2, 2, 2, 1], 1, 10, pos))
        .collect();
    assert_eq!(scored, [Some(3), Some(0), Some(3), Some(0)]);
}

struct Scoring {
    indexer: Indexer,
    own: CompressedCache,
    other: CompressedCache,
    xs: Tensor,
    qr: Tensor,
    rope: Rope,
    plan: AttnPlan,
}

impl Scoring {
    /// Two sequences in the caches of a source at ratio 2 and another at ratio 1, with random keys.
    fn new(candidates: CandidateRole) -> Self {
        let mut cfg = odd_config(2);
        cfg.owns_index_k = false;
        let weights = common::random_weights(&cfg, 7)
            .into_iter()
            .filter_map(|(k, v)| Some((k.strip_prefix("indexer.")?.to_string(), v)))
            .collect();
        let vb = Weights::from_tensors(weights).unwrap().var_builder(&CPU);
        let g = geometry(7, 2, 40, 2);
        let cache = |ratio, seed| {
            let format = KvFormat::default();
            let mut cache = CompressedCache::new(g, ratio, 32, Some(32), format, &CPU).unwrap();
            let plan =
                AttnPlan::new(&[chunk(0, 0, 40), chunk(1, 0, 40)], &g, &[ratio], &CPU).unwrap();
            let plan = &plan.compress[0];
            cache
                .write_index_k(&input(plan.groups(), 32, seed), plan)
                .unwrap();
            cache
        };
        let rope = RopeConfig {
            dim: 8,
            theta: 10000.0,
            original_seq_len: 0,
            factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        Self {
            indexer: Indexer::new(&cfg, candidates, vb).unwrap(),
            own: cache(2, 1),
            other: cache(1, 2),
            xs: input(9, cfg.dim, 3),
            qr: input(9, cfg.q_lora_rank, 4),
            rope: Rope::new(&rope).unwrap(),
            plan: AttnPlan::new(&[chunk(1, 30, 5), chunk(0, 21, 4)], &g, &[2], &CPU).unwrap(),
        }
    }

    fn select(&self, keys: IndexKeySource<'_>) -> Result<SharedAttentionRuntime, Error> {
        let mut shared = SharedAttentionRuntime::new();
        let table = self.rope.table(&self.plan.positions, &CPU)?;
        let plan = &self.plan.compress[0];
        let query = self.indexer.query(&self.xs, &self.qr, &table)?;
        self.indexer
            .select(query, plan, &self.own, keys, &mut shared)?;
        Ok(shared)
    }
}

fn rows(shared: &SharedAttentionRuntime) -> Vec<Vec<i32>> {
    shared.topk().unwrap().0.to_vec2().unwrap()
}

#[test]
fn each_token_scores_the_keys_it_was_given() {
    for role in [CandidateRole::None, CandidateRole::Publish] {
        let s = Scoring::new(role);
        let owner = s.select(IndexKeySource::Owner).unwrap();
        let none = s.select(IndexKeySource::PerToken(&[None; 9])).unwrap();
        assert_eq!(rows(&owner), rows(&none));
        let all = s
            .select(IndexKeySource::PerToken(&[Some(&s.other); 9]))
            .unwrap();
        assert_ne!(rows(&owner), rows(&all));
        let mixed: Vec<_> = (0..9).map(|t| (t % 3 == 1).then_some(&s.other)).collect();
        let got = s.select(IndexKeySource::PerToken(&mixed)).unwrap();
        for t in 0..9 {
            let want = if t % 3 == 1 { &all } else { &owner };
            assert_eq!(rows(&got)[t], rows(want)[t], "token {t}");
            if role == CandidateRole::Publish {
                let ids = |s: &SharedAttentionRuntime| {
                    s.candidates().unwrap().ids.to_vec2::<i32>().unwrap()[t].clone()
                };
                assert_eq!(ids(&got), ids(want), "token {t}");
            }
        }
        // Every row named lies among the visible rows of the token's own sequence.
        for (row, span) in rows(&got).iter().zip(&s.plan.compress[0].spans) {
            let visible = span.base as i32..(span.base + span.visible) as i32;
            assert!(row.iter().all(|i| *i == -1 || visible.contains(i)));
        }
    }
}

#[test]
fn key_sources_must_fit() {
    let s = Scoring::new(CandidateRole::None);
    assert!(s.select(IndexKeySource::PerToken(&[None; 8])).is_err());
    let g = geometry(7, 2, 40, 2);
    let without = CompressedCache::new(g, 1, 32, None, KvFormat::default(), &CPU).unwrap();
    let missing = s.select(IndexKeySource::PerToken(&[Some(&without); 9]));
    assert!(matches!(missing, Err(Error::MissingSource { .. })));
    // A source whose rows are fewer than the query may see.
    let coarse = CompressedCache::new(g, 4, 32, Some(32), KvFormat::default(), &CPU).unwrap();
    let short = s.select(IndexKeySource::PerToken(&[Some(&coarse); 9]));
    assert!(matches!(short, Err(Error::Capacity { .. })));
}
