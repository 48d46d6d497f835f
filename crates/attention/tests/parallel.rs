//! Heads and output groups over two ranks, against one.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use std::sync::Arc;

use common::{CPU, bits, chunk, geometry, input, kept, odd_config, random_weights};
use deepseek_v41_attention::{
    Attention, AttentionConfig, AttnPlan, CompressedCache, IndexKeySource, KvFormat, LayerCache,
    RopeTables, SharedAttentionRuntime, WindowCache,
};
use deepseek_v41_core::{Comm, Error, LocalComm, Rope, RopeConfig, ThreadComm, Weights};
use deepseek_v41_testing::{assert_bits_eq, rel_rms};
use half::bf16;

/// Each rank's part of `wo_b` is rounded to bf16 before the f32 sum: 2^-9 of each part.
const TOLERANCE: f64 = 0.004;

fn config() -> AttentionConfig {
    AttentionConfig {
        n_heads: 6,
        o_groups: 2,
        ..odd_config(2)
    }
}

/// Output, window rows and compressed rows of a prompt and a step.
fn run(comm: Arc<dyn Comm>) -> [Vec<bf16>; 3] {
    let cfg = config();
    let vb = Weights::from_tensors(random_weights(&cfg, 8))
        .unwrap()
        .var_builder(&CPU);
    let layer = Attention::new(&cfg, comm, vb).unwrap();
    let g = geometry(7, 0, 32, 1);
    let mut window = WindowCache::new(g, cfg.head_dim, KvFormat::Bf16, &CPU).unwrap();
    let mut source =
        CompressedCache::new(g, 2, cfg.head_dim, Some(32), KvFormat::Bf16, &CPU).unwrap();
    let rope = RopeConfig {
        dim: cfg.rope_head_dim,
        theta: 10000.0,
        original_seq_len: 0,
        factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    let rope = Rope::new(&rope).unwrap();
    let mut y = Vec::new();
    for (start, len) in [(0, 15), (15, 1)] {
        let plan = AttnPlan::new(&[chunk(0, start, len)], &g, &[2], &CPU).unwrap();
        let ropes = RopeTables::new(&plan, &rope, &rope, &CPU).unwrap();
        let cache = LayerCache {
            window: &mut window,
            source: Some(&mut source),
            kv: None,
            index_k: IndexKeySource::Owner,
        };
        let xs = input(len as usize, cfg.dim, u64::from(start));
        let mut shared = SharedAttentionRuntime::new();
        y.extend(bits(
            &layer
                .forward(&xs, &plan, &ropes, cache, &mut shared)
                .unwrap(),
        ));
    }
    [y, kept(window.kv()), kept(source.kv())]
}

#[test]
fn two_ranks_are_one() {
    let alone = run(Arc::new(LocalComm));
    let handles: Vec<_> = ThreadComm::group(2)
        .into_iter()
        .map(|comm| std::thread::spawn(move || run(Arc::new(comm))))
        .collect();
    let ranks: Vec<_> = handles.into_iter().map(|h| h.join().unwrap()).collect();
    for rank in &ranks {
        let f32s = |xs: &[bf16]| xs.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let error = rel_rms(&f32s(&rank[0]), &f32s(&alone[0]));
        println!("two ranks: {error:.5}");
        assert!(error <= TOLERANCE, "{error}");
        // Caches come from replicated weights and the layer's input alone.
        assert_bits_eq(&rank[1], &alone[1]);
        assert_bits_eq(&rank[2], &alone[2]);
        assert_bits_eq(&rank[0], &ranks[0][0]);
    }
}

#[test]
fn groups_that_do_not_divide_are_refused() {
    let cfg = config();
    let vb = Weights::from_tensors(random_weights(&cfg, 8))
        .unwrap()
        .var_builder(&CPU);
    let comm: Arc<dyn Comm> = Arc::new(ThreadComm::group(3).remove(0));
    let refused = Attention::new(&cfg, comm, vb);
    assert!(matches!(refused, Err(Error::Config { .. })), "{refused:?}");
}
