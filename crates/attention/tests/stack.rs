//! Layers that share: one source, one with an indexer of its own inside the candidates, one that
//! reuses the selection.
#![allow(clippy::unwrap_used, reason = "tests: a panic is the report")]

mod common;

use std::sync::Arc;

use candle_core::Tensor;
use common::{CPU, bits, chunk, geometry, input, odd_config, random_weights};
use deepseek_v41_attention::ops::TopkIdxs;
use deepseek_v41_attention::{
    Attention, AttentionConfig, AttnPlan, CacheGeometry, CandidateRole, ChunkSpec, CompressedCache,
    IndexKeySource, IndexRole, KvFormat, LayerCache, LayerRole, RopeTables, SharedAttentionRuntime,
    WindowCache,
};
use deepseek_v41_core::{LocalComm, Rope, RopeConfig, Weights};
use deepseek_v41_testing::assert_bits_eq;
use half::bf16;
use proptest::prelude::*;

struct Stack {
    geometry: CacheGeometry,
    ratio: usize,
    layers: Vec<(Attention, WindowCache)>,
    sources: Vec<CompressedCache>,
    rope: Rope,
    shared: SharedAttentionRuntime,
}

impl Stack {
    fn new(ratio: usize, geometry: CacheGeometry, format: KvFormat) -> Self {
        let role = |owns_kv, index| LayerRole::Compressed {
            ratio,
            owns_kv,
            index,
        };
        let roles = [
            role(true, IndexRole::Run(CandidateRole::Publish)),
            role(false, IndexRole::Reuse),
            role(false, IndexRole::Run(CandidateRole::Use)),
            role(false, IndexRole::Reuse),
            LayerRole::Window,
        ];
        let configs = roles.map(|role| AttentionConfig {
            role,
            owns_index_k: role.owns_kv(),
            ..odd_config(ratio)
        });
        let layers = configs.iter().zip(1..).map(|(cfg, seed)| {
            let weights = Weights::from_tensors(random_weights(cfg, seed * 100)).unwrap();
            let layer = Attention::new(cfg, Arc::new(LocalComm), weights.var_builder(&CPU));
            let window = WindowCache::new(geometry, cfg.head_dim, format, &CPU);
            (layer.unwrap(), window.unwrap())
        });
        let sources = configs
            .iter()
            .filter_map(|cfg| CompressedCache::for_layer(cfg, geometry, format, &CPU).unwrap());
        let rope = RopeConfig {
            dim: 8,
            theta: 10000.0,
            original_seq_len: 0,
            factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        Self {
            geometry,
            ratio,
            layers: layers.collect(),
            sources: sources.collect(),
            rope: Rope::new(&rope).unwrap(),
            shared: SharedAttentionRuntime::new(),
        }
    }

    /// Every layer gets the sum of its predecessors' outputs and the input.
    fn step(&mut self, chunks: &[ChunkSpec], xs: &Tensor) -> Vec<bf16> {
        let plan = AttnPlan::new(chunks, &self.geometry, &[self.ratio], &CPU).unwrap();
        let ropes = RopeTables::new(&plan, &self.rope, &self.rope, &CPU).unwrap();
        let replay = self.shared.replay.take();
        self.shared = SharedAttentionRuntime::new();
        self.shared.replay = replay;
        let mut xs = xs.clone();
        for (layer, window) in &mut self.layers {
            let owns = layer.role().owns_kv();
            let (source, kv) = match &mut self.sources[..] {
                [own] if owns => (Some(own), None),
                [lent] => (None, Some(&*lent)),
                _ => (None, None),
            };
            let cache = LayerCache {
                window,
                source,
                kv,
                index_k: IndexKeySource::Owner,
            };
            let y = layer
                .forward(&xs, &plan, &ropes, cache, &mut self.shared)
                .unwrap();
            xs = (xs + y).unwrap();
        }
        bits(&xs)
    }

    fn feed(&mut self, xs: &Tensor, lens: &[u32]) -> Vec<bf16> {
        let len = xs.dims()[0] as u32;
        let (mut at, mut out) = (0, Vec::new());
        for n in lens.iter().copied().chain(std::iter::repeat(len)) {
            let n = n.min(len - at);
            let part = xs.narrow(0, at as usize, n as usize).unwrap();
            out.extend(self.step(&[chunk(0, at, n)], &part));
            at += n;
            if at == len {
                return out;
            }
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_chunking_is_one_shot(ratio in 1usize..4, lens in prop::collection::vec(0u32..9, 0..20), seed in 0u64..1000) {
        let xs = input(45, 64, seed);
        let run = |lens: &[u32], format| {
            Stack::new(ratio, geometry(7, 2, 48, 1), format).feed(&xs, lens)
        };
        let one_shot = run(&[], KvFormat::Bf16);
        assert_bits_eq(&run(&lens, KvFormat::Bf16), &one_shot);
        assert_bits_eq(&run(&[1; 45], KvFormat::Packed), &one_shot);
    }
}

/// Later selections stay inside the candidate blocks, which hold the newest rows of each query.
#[test]
fn selections_stay_inside_the_candidates() {
    let mut stack = Stack::new(1, geometry(7, 0, 48, 1), KvFormat::Bf16);
    stack.feed(&input(40, 64, 1), &[]);
    let cfg = odd_config(1).index;
    let blocks: Vec<Vec<i32>> = stack.shared.candidates().unwrap().ids.to_vec2().unwrap();
    let rows: Vec<Vec<i32>> = stack.shared.topk().unwrap().0.to_vec2().unwrap();
    for (pos, (blocks, rows)) in blocks.iter().zip(&rows).enumerate() {
        let block = |row: i32| row / cfg.candidate_block_size as i32;
        assert!(
            blocks.contains(&block(pos as i32)),
            "{pos} pins its own newest block"
        );
        assert!(
            rows.iter()
                .all(|&row| row == -1 || blocks.contains(&block(row)))
        );
        assert!(rows.contains(&0) || pos > 0);
    }
}

/// The test hook: what an indexer computed is kept for comparison, and what is replayed is used.
#[test]
fn replayed_selections_are_used() {
    let xs = input(20, 64, 1);
    let run = |replay: Option<Vec<i32>>| {
        let mut stack = Stack::new(1, geometry(7, 0, 48, 1), KvFormat::Bf16);
        stack.shared.replay =
            replay.map(|row| TopkIdxs(Tensor::from_vec(row.repeat(20), (20, 2), &CPU).unwrap()));
        let y = stack.feed(&xs, &[]);
        let computed = stack
            .shared
            .computed
            .clone()
            .unwrap()
            .0
            .to_vec2::<i32>()
            .unwrap();
        (y, computed)
    };
    let (free, selected) = run(None);
    let (forced, computed) = run(Some(vec![0, -1]));
    assert_ne!(free, forced);
    assert_eq!(selected[0], computed[0]);
    assert!(selected.iter().all(|row| row.len() == 4));
}
