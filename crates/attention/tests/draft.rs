//! The draft layers' attention: against a composition of its parts, and its own equalities.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use common::{CPU, bits, chunk, geometry, input, kept, odd_config, random_weights};
use deepseek_v41_attention::ops::{KvScope, sparse_attn};
use deepseek_v41_attention::{
    AttentionConfig, CacheGeometry, ChunkSpec, DSparkAttention, DraftChunk, DraftPlan, DraftRopes,
    KvFormat, WindowCache,
};
use deepseek_v41_core::{Error, LocalComm, RmsNorm, Rope, RopeConfig, Weights, apply_rope};
use deepseek_v41_quant::{GroupedLinear, Linear, fake_quant_fp8};
use deepseek_v41_testing::{Golden, assert_bits_eq};
use half::bf16;
use proptest::prelude::*;

const BLOCK: usize = 4;

struct Rig {
    cfg: AttentionConfig,
    geometry: CacheGeometry,
    attention: DSparkAttention,
    cache: WindowCache,
    rope: Rope,
    weights: HashMap<String, Tensor>,
}

impl Rig {
    fn new(geometry: CacheGeometry, seed: u64) -> Self {
        let cfg = odd_config(0);
        let weights = random_weights(&cfg, seed);
        let vb = Weights::from_tensors(weights.clone())
            .unwrap()
            .var_builder(&CPU);
        let rope = RopeConfig {
            dim: cfg.rope_head_dim,
            theta: 10000.0,
            original_seq_len: 0,
            factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        Self {
            attention: DSparkAttention::new(&cfg, Arc::new(LocalComm), vb).unwrap(),
            cache: WindowCache::new(geometry, cfg.head_dim, KvFormat::default(), &CPU).unwrap(),
            rope: Rope::new(&rope).unwrap(),
            cfg,
            geometry,
            weights,
        }
    }

    fn step(&mut self, chunks: &[DraftChunk], main_x: &Tensor, xs: &Tensor) -> Vec<bf16> {
        let plan = DraftPlan::new(chunks, BLOCK, &self.geometry, &CPU).unwrap();
        self.planned(&plan, main_x, xs)
    }

    fn planned(&mut self, plan: &DraftPlan, main_x: &Tensor, xs: &Tensor) -> Vec<bf16> {
        let ropes = DraftRopes::new(plan, &self.rope, &CPU).unwrap();
        self.attention
            .commit(main_x, plan, &ropes, &mut self.cache)
            .unwrap();
        bits(
            &self
                .attention
                .forward(xs, plan, &ropes, &self.cache)
                .unwrap(),
        )
    }

    fn seed(&mut self, spec: ChunkSpec, main_x: &Tensor) {
        let none = Tensor::zeros((0, self.cfg.dim), DType::BF16, &CPU).unwrap();
        self.step(
            &[DraftChunk {
                committed: spec,
                draft: false,
            }],
            main_x,
            &none,
        );
    }
}

fn drafted(slot: u32, start: u32, len: u32) -> DraftChunk {
    DraftChunk {
        committed: chunk(slot, start, len),
        draft: true,
    }
}

/// `draftwin_W_BLOCK_START`: ring slots, then `W + row` for the rows of the block.
#[test]
fn golden_draft_window() {
    let golden = Golden::open("ops_basic");
    let mut cases = 0;
    for key in golden.keys() {
        let Some(rest) = key.strip_prefix("draftwin_") else {
            continue;
        };
        let n: Vec<u32> = rest.split('_').map(|n| n.parse().unwrap()).collect();
        let (window, block, start) = (n[0], n[1], n[2]);
        let g = geometry(window as usize, 0, 4096, 1);
        let plan = DraftPlan::new(&[drafted(0, start, 1)], block as usize, &g, &CPU).unwrap();
        let ring = plan.ring_idxs.to_vec2::<i32>().unwrap();
        let own = plan.block_idxs.to_vec2::<i32>().unwrap();
        let want = golden.i64(key);
        for (i, want) in want.chunks(want.len() / block as usize).enumerate() {
            let got: BTreeSet<i64> = ring[i]
                .iter()
                .map(|&r| i64::from(r))
                .chain(own[i].iter().map(|&r| i64::from(window) + i64::from(r)))
                .collect();
            assert_eq!(got, want.iter().copied().collect(), "{key} row {i}");
            assert_eq!(got.len(), want.len());
        }
        assert_eq!(
            plan.block_positions,
            (start + 1..=start + block).collect::<Vec<_>>()
        );
        cases += 1;
    }
    assert!(cases >= 4, "only {cases} cases");
}

/// The layer spelled out over one concatenated KV tensor, as the reference computes it.
#[test]
fn equals_the_composition_of_its_parts() {
    for len in [1usize, 5, 7, 12] {
        let mut rig = Rig::new(geometry(7, 0, 32, 1), 5);
        let cfg = rig.cfg.clone();
        let (main_x, xs) = (input(len, cfg.dim, 1), input(BLOCK, cfg.dim, 2));
        let got = rig.step(&[drafted(0, 0, len as u32)], &main_x, &xs);

        let vb = Weights::from_tensors(rig.weights.clone())
            .unwrap()
            .var_builder(&CPU);
        let linear = |name, i, o, xs: &Tensor| {
            Linear::new(i, o, cfg.linear_format, vb.pp(name))
                .unwrap()
                .forward(xs)
                .unwrap()
        };
        let norm = |name, width, xs: Tensor| {
            RmsNorm::new(width, cfg.norm_eps, vb.pp(name))
                .unwrap()
                .forward(&xs)
                .unwrap()
        };
        let kv = |xs: &Tensor, first: usize| {
            let positions: Vec<u32> = (first..first + xs.dims()[0]).map(|p| p as u32).collect();
            let table = rig.rope.table(&positions, &CPU).unwrap();
            let kv = norm(
                "kv_norm",
                cfg.head_dim,
                linear("wkv", cfg.dim, cfg.head_dim, xs),
            );
            fake_quant_fp8(&apply_rope(&kv, &table, false).unwrap()).unwrap()
        };
        let all = Tensor::cat(&[kv(&main_x, 0), kv(&xs, len)], 0).unwrap();
        let seen: Vec<i32> = (len.saturating_sub(7)..len + BLOCK)
            .map(|r| r as i32)
            .collect();
        let idxs = Tensor::from_vec(seen.repeat(BLOCK), (BLOCK, seen.len()), &CPU).unwrap();
        let positions: Vec<u32> = (len..len + BLOCK).map(|p| p as u32).collect();
        let table = rig.rope.table(&positions, &CPU).unwrap();
        let qr = norm(
            "q_norm",
            cfg.q_lora_rank,
            linear("wq_a", cfg.dim, cfg.q_lora_rank, &xs),
        );
        let q = linear("wq_b", cfg.q_lora_rank, cfg.n_heads * cfg.head_dim, &qr);
        let q = q.reshape((BLOCK, cfg.n_heads, cfg.head_dim)).unwrap();
        let q = apply_rope(&q, &table, false).unwrap();
        let scope = KvScope::new(&all, &idxs);
        let scale = (cfg.head_dim as f64).powf(-0.5) as f32;
        let o = sparse_attn(&q, &[scope], &rig.weights["attn_sink"], scale).unwrap();
        let o = apply_rope(&o, &table, true)
            .unwrap()
            .flatten_from(1)
            .unwrap();
        let wo_a = GroupedLinear::new(5, cfg.head_dim, cfg.o_lora_rank, vb.pp("wo_a")).unwrap();
        let o = wo_a.forward(&o).unwrap();
        assert_bits_eq(
            &got,
            &bits(&linear("wo_b", 5 * cfg.o_lora_rank, cfg.dim, &o)),
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// However the committed tokens were split over calls, and whatever was drafted in between.
    #[test]
    fn several_commits_at_once_are_one_at_a_time(len in 1u32..30, slack in 0usize..4, last in 1u32..6, seed in 0u64..1000) {
        let last = last.min(len);
        let g = geometry(7, slack, 32, 2);
        let main_x = input(len as usize, 64, seed);
        let xs = input(BLOCK, 64, seed + 1);
        let part = |start: u32, n: u32| main_x.narrow(0, start as usize, n as usize).unwrap();
        let mut at_once = Rig::new(g, 3);
        at_once.seed(chunk(1, 0, len - last), &part(0, len - last));
        let got = at_once.step(&[drafted(1, len - last, last)], &part(len - last, last), &xs);
        let mut singly = Rig::new(g, 3);
        let mut want = Vec::new();
        for pos in 0..len {
            want = singly.step(&[drafted(0, pos, 1)], &part(pos, 1), &xs);
        }
        assert_bits_eq(&got, &want);
        // Drafting again from the same place, without new tokens.
        assert_bits_eq(&singly.step(&[drafted(0, len, 0)], &part(0, 0), &xs), &want);
    }

    #[test]
    fn a_batch_of_blocks_is_each_alone(lens in prop::collection::vec(1u32..20, 3), seed in 0u64..1000) {
        let g = geometry(7, 1, 32, 3);
        let main_x: Vec<Tensor> = (0..3).map(|i| input(lens[i as usize] as usize, 64, seed + i)).collect();
        let xs: Vec<Tensor> = (0..3).map(|i| input(BLOCK, 64, seed + 10 + i)).collect();
        // The middle sequence is a prompt still on its way in: it commits and does not draft.
        let chunks: Vec<DraftChunk> = (0..3u32)
            .map(|i| DraftChunk { draft: i != 1, ..drafted(2 - i, 0, lens[i as usize]) })
            .collect();
        let drafts = [xs[0].clone(), xs[2].clone()];
        let got = Rig::new(g, 4).step(
            &chunks,
            &Tensor::cat(&main_x, 0).unwrap(),
            &Tensor::cat(&drafts, 0).unwrap(),
        );
        let want: Vec<bf16> = [0, 2]
            .iter()
            .flat_map(|&i| Rig::new(g, 4).step(&[drafted(0, 0, lens[i])], &main_x[i], &xs[i]))
            .collect();
        assert_bits_eq(&got, &want);
    }
}

/// Shapes of a plan's tensors, on which a GPU's launches depend.
fn shapes(plan: &DraftPlan) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    plan.map(&mut |tensor| {
        all.push(tensor.dims().to_vec());
        Ok(tensor.clone())
    })
    .unwrap();
    all
}

#[test]
fn small_steps_for_kernels_are_laid_out_alike_and_give_the_same() {
    let g = geometry(7, 6, 64, 4);
    for sequences in 1..=3u32 {
        let mut first = None;
        for (start, len) in [(1, 1), (2, 5), (5, 2), (6, 1), (20, 3), (31, 5)] {
            let (mut own, mut for_kernels) = (Rig::new(g, 6), Rig::new(g, 6));
            for rig in [&mut own, &mut for_kernels] {
                for slot in 0..sequences {
                    rig.seed(chunk(slot, 0, start), &input(start as usize, 64, 7));
                }
            }
            // Not all of them got as far.
            let committed = |slot| len - u32::from(slot == 1 && len > 1);
            let chunks: Vec<_> = (0..sequences)
                .map(|slot| drafted(slot, start, committed(slot)))
                .collect();
            let rows: u32 = (0..sequences).map(committed).sum();
            let main_x = input(rows as usize, 64, 8);
            let xs = input(BLOCK * sequences as usize, 64, 9);
            let want = own.step(&chunks, &main_x, &xs);

            let plan = DraftPlan::on_host(&chunks, BLOCK, &g, true).unwrap();
            let filled = sequences as usize * (BLOCK + 1);
            assert_eq!(plan.main_positions.len(), filled);
            // Nobody may read what fills up.
            let nan = vec![bf16::NAN; (filled - rows as usize) * 64];
            let nan = Tensor::from_vec(nan, (filled - rows as usize, 64), &CPU).unwrap();
            let main_x = Tensor::cat(&[&main_x, &nan], 0).unwrap();
            assert_bits_eq(&for_kernels.planned(&plan, &main_x, &xs), &want);
            assert_bits_eq(&kept(for_kernels.cache.kv()), &kept(own.cache.kv()));
            assert_eq!(first.get_or_insert_with(|| shapes(&plan)), &shapes(&plan));
        }
    }
    // Larger ones are what they are: so many sequences, so long a prompt.
    let many: Vec<_> = (0..4).map(|slot| drafted(slot, 0, 1)).collect();
    for chunks in [&many[..], &[drafted(0, 0, 17)]] {
        let plan = DraftPlan::on_host(chunks, BLOCK, &g, true).unwrap();
        let own = DraftPlan::new(chunks, BLOCK, &g, &CPU).unwrap();
        assert_eq!(shapes(&plan), shapes(&own));
        assert_eq!(plan.main_positions, own.main_positions);
    }
    // Without a committed token there is nothing to fill up to.
    let plan = DraftPlan::on_host(&[drafted(0, 9, 0)], BLOCK, &g, true).unwrap();
    assert!(plan.main_positions.is_empty());
}

#[test]
fn the_first_block_row_sees_the_last() {
    let mut rig = Rig::new(geometry(7, 0, 32, 1), 5);
    let main_x = input(3, 64, 1);
    let xs = input(BLOCK, 64, 2);
    let a = rig.step(&[drafted(0, 0, 3)], &main_x, &xs);
    let changed = Tensor::cat(&[xs.narrow(0, 0, BLOCK - 1).unwrap(), input(1, 64, 3)], 0).unwrap();
    let b = rig.step(&[drafted(0, 0, 3)], &main_x, &changed);
    assert_ne!(a[..64], b[..64]);
}

#[test]
fn drafts_are_never_written() {
    let mut rig = Rig::new(geometry(7, 2, 32, 1), 5);
    rig.seed(chunk(0, 0, 9), &input(9, 64, 1));
    let before = kept(rig.cache.kv());
    rig.step(&[drafted(0, 9, 0)], &input(0, 64, 1), &input(BLOCK, 64, 2));
    assert_bits_eq(&kept(rig.cache.kv()), &before);
}

#[test]
fn a_block_may_pass_the_end_of_the_context() {
    let mut rig = Rig::new(geometry(7, 0, 9, 1), 5);
    let y = rig.step(&[drafted(0, 0, 9)], &input(9, 64, 1), &input(BLOCK, 64, 2));
    assert!(y.iter().all(|v| v.is_finite()));
}

#[test]
fn what_cannot_be_drafted_is_refused() {
    let g = geometry(7, 0, 32, 2);
    let plan = |chunks: &[DraftChunk], block| DraftPlan::new(chunks, block, &g, &CPU);
    assert!(matches!(
        plan(&[drafted(0, 0, 0)], 4),
        Err(Error::Value { .. })
    ));
    assert!(matches!(
        plan(&[drafted(0, 0, 1)], 0),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        plan(&[drafted(0, 30, 3)], 4),
        Err(Error::Capacity { .. })
    ));
    assert!(matches!(
        plan(&[drafted(0, 0, 1), drafted(0, 1, 1)], 4),
        Err(Error::Value { .. })
    ));
    let cfg = odd_config(2);
    let vb = Weights::from_tensors(random_weights(&cfg, 1))
        .unwrap()
        .var_builder(&CPU);
    assert!(DSparkAttention::new(&cfg, Arc::new(LocalComm), vb).is_err());
}
