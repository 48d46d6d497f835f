//! One layer against the official code, and its own equalities, bit for bit.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use candle_core::Tensor;
use common::{CPU, Rig, bits, chunk, geometry, input, kept, odd_config, random_weights};
use deepseek_v41_attention::{
    AttentionConfig, CandidateRole, IndexConfig, IndexRole, KvFormat, LayerRole,
    SharedAttentionRuntime,
};
use deepseek_v41_core::Error;
use deepseek_v41_quant::WeightFormat;
use deepseek_v41_testing::{Golden, assert_bits_eq, rel_rms, with_threads};
use half::bf16;
use proptest::prelude::*;

/// The manifest's limit for a layer's output, relative to its rms.
const OUTPUT_TOLERANCE: f64 = 0.03;
/// And for its caches: the share of entries that may be a quantisation step off.
const CACHE_FLIPS: f64 = 0.01;

fn golden_config(ratio: usize, topk: usize) -> AttentionConfig {
    AttentionConfig {
        dim: 64,
        n_heads: 4,
        q_lora_rank: 32,
        head_dim: 64,
        rope_head_dim: 16,
        o_groups: 2,
        o_lora_rank: 32,
        window_size: 8,
        norm_eps: 1e-20,
        role: LayerRole::Compressed {
            ratio,
            owns_kv: true,
            index: IndexRole::Run(CandidateRole::None),
        },
        linear_format: WeightFormat::Fp8,
        index: IndexConfig {
            n_heads: 8,
            head_dim: 32,
            topk,
            candidate_topk_blocks: 0,
            candidate_block_size: 0,
        },
        owns_index_k: true,
    }
}

fn floats(rows: &[bf16]) -> Vec<f32> {
    rows.iter().map(|v| v.to_f32()).collect()
}

/// Prefill, then single steps, with outputs, selections and all three caches.
#[test]
fn golden_layer_with_its_caches() {
    let golden = Golden::open("ops_attention");
    // (case, ratio, topk, prefill)
    for (case, ratio, topk, prefill) in [
        ("attention_0", 2, 6, 21),
        ("attention_1", 1, 7, 19),
        ("attention_2", 2, 6, 1),
    ] {
        let x = golden.tensor(&format!("{case}.x"));
        let (batch, len, dim) = x.dims3().unwrap();
        let cfg = golden_config(ratio, topk);
        let g = geometry(8, 0, 64, batch);
        let mut weights = golden.subtree(case);
        weights.retain(|name, _| {
            name.ends_with("weight") || name.ends_with("scale") || name == "attn_sink"
        });
        let mut rig = Rig::with_weights(&cfg, g, weights);

        let mut got = vec![Vec::new(); batch];
        let (mut same, mut all) = (0, 0);
        let mut compare = |got: Vec<Vec<i32>>, key: String, offset: i64| {
            let want = golden.i64(&key);
            let width = *golden.shape(&key).last().unwrap();
            for (got, want) in got.iter().zip(want.chunks(width)) {
                let want: Vec<i32> = want
                    .iter()
                    .filter(|&&i| i >= 0)
                    .map(|&i| (i - offset) as i32)
                    .collect();
                assert_eq!(got.len(), want.len(), "{key}");
                same += got.iter().filter(|i| want.contains(i)).count();
                all += want.len();
            }
        };
        let steps = std::iter::once((0, prefill)).chain((prefill..len).map(|p| (p, 1)));
        let mut seen = 0;
        for (start, n) in steps {
            let specs: Vec<_> = (0..batch as u32)
                .map(|b| chunk(b, start as u32, n as u32))
                .collect();
            let xs = x
                .narrow(1, start, n)
                .unwrap()
                .reshape((batch * n, dim))
                .unwrap();
            let y = bits(&rig.step(&specs, &xs));
            for (b, y) in y.chunks(n * dim).enumerate() {
                got[b].extend_from_slice(y);
            }
            let slots: Vec<u32> = (0..batch * n).map(|i| (i / n) as u32).collect();
            if start == 0 && golden.contains(&format!("{case}.prefill_idx")) {
                compare(
                    rig.selected(&slots),
                    format!("{case}.prefill_idx"),
                    n as i64,
                );
            } else if start > 0 && (start + 1) / ratio > 0 {
                compare(rig.selected(&slots), format!("{case}.step_idx.{seen}"), 8);
                seen += 1;
            }
        }
        let error = rel_rms(&floats(&got.concat()), &golden.f32(&format!("{case}.y")));
        println!("{case}: y {error:.5}, selected {same}/{all}");
        assert!(error <= OUTPUT_TOLERANCE, "{case}: {error}");
        assert!(same * 100 >= all * 99, "{case}: {same} of {all} selections");

        let source = rig.source.as_ref().unwrap();
        let groups = (len / ratio) as u32;
        let read =
            |pool: &deepseek_v41_attention::KvPool, map: deepseek_v41_attention::SlotMap, n| {
                let base = map.rows().start;
                floats(&bits(&pool.read(base..base + n).unwrap()))
            };
        for (name, part) in [
            ("window_cache", 0),
            ("compress_cache", 1),
            ("index_cache", 2),
        ] {
            let want = golden.f32(&format!("{case}.{name}"));
            let got: Vec<f32> = (0..batch as u32)
                .flat_map(|b| match part {
                    0 => read(rig.window.kv(), g.ring(b), 8),
                    1 => read(source.kv(), source.rows(b), groups),
                    _ => read(source.index_k().unwrap(), source.rows(b), groups),
                })
                .collect();
            assert_eq!(got.len(), want.len());
            let flips = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            println!("{case}: {name} {flips} of {} entries differ", want.len());
            assert!(
                flips as f64 <= CACHE_FLIPS * want.len() as f64,
                "{case}: {name} {flips}"
            );
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.34 * a.abs().max(b.abs()).max(0.1);
            assert!(
                got.iter().zip(&want).all(near),
                "{case}: {name} is more than a step off"
            );
        }
    }
}

/// Chunk lengths that cut a sequence anywhere, empty chunks included.
fn cuts() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![Just(1u32), 0u32..12, 1u32..30], 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_chunking_is_one_shot_is_token_by_token(ratio in 0usize..4, slack in 0usize..6, lens in cuts(), seed in 0u64..1000) {
        let cfg = odd_config(ratio);
        let xs = input(29, cfg.dim, seed);
        let run = |lens: &[u32]| {
            Rig::new(&cfg, geometry(7, slack, 32, 1), seed).feed(0, 0, &xs, lens)
        };
        let one_shot = run(&[29]);
        assert_bits_eq(&run(&[1]), &one_shot);
        assert_bits_eq(&run(&lens), &one_shot);
    }

    /// How rows are stored shows in no result, nor in what is selected.
    #[test]
    fn packed_caches_give_the_same_bits(ratio in 0usize..4, lens in cuts(), back in 0u32..4, seed in 0u64..1000) {
        let cfg = odd_config(ratio);
        let g = geometry(7, 4, 48, 2);
        let (xs, more) = (input(29, cfg.dim, seed), input(9, cfg.dim, seed + 1));
        let run = |format| {
            let mut rig = Rig::new(&cfg, g, seed).kept_as(format);
            let mut out = rig.feed(1, 0, &xs, &lens);
            out.extend(rig.feed(1, 29 - back, &more, &[2, 1]));
            rig.window.copy_slot(1, 0).unwrap();
            if let Some(source) = &mut rig.source {
                source.copy_slot(1, 0, 38 - back).unwrap();
            }
            out.extend(rig.feed(0, 38 - back, &more, &[3]));
            let selected = rig.source.is_some().then(|| rig.selected(&[0; 3]));
            (out, selected)
        };
        let (want, got) = (run(KvFormat::Bf16), run(KvFormat::Packed));
        assert_bits_eq(&got.0, &want.0);
        prop_assert_eq!(got.1, want.1);
    }

    #[test]
    fn a_batch_of_sequences_is_each_alone(ratio in 0usize..4, starts in prop::collection::vec((0u32..14, 0u32..11), 3), seed in 0u64..1000) {
        let cfg = odd_config(ratio);
        let g = geometry(7, 3, 32, 5);
        let xs: Vec<Tensor> = (0..3).map(|s| input(25, cfg.dim, seed + s)).collect();
        // Slots in an order of their own, and one left out.
        let slots = [4, 0, 2];
        let mut together = Rig::new(&cfg, g, seed);
        let mut alone: Vec<Rig> = (0..3).map(|_| Rig::new(&cfg, g, seed)).collect();
        let (mut specs, mut parts, mut want) = (Vec::new(), Vec::new(), Vec::new());
        for (s, &(start, len)) in starts.iter().enumerate() {
            let past = xs[s].narrow(0, 0, start as usize).unwrap();
            together.feed(slots[s], 0, &past, &[5]);
            alone[s].feed(1, 0, &past, &[5]);
            let part = xs[s].narrow(0, start as usize, len as usize).unwrap();
            want.extend(bits(&alone[s].step(&[chunk(1, start, len)], &part)));
            specs.push(chunk(slots[s], start, len));
            parts.push(part);
        }
        let got = together.step(&specs, &Tensor::cat(&parts, 0).unwrap());
        assert_bits_eq(&bits(&got), &want);
    }

    /// Rejected tokens leave no trace within the rings' slack.
    #[test]
    fn rewound_is_never_written(ratio in 0usize..4, len in 1u32..24, back in 0u32..5, seed in 0u64..1000) {
        let cfg = odd_config(ratio);
        let g = geometry(7, 4, 40, 1);
        let back = back.min(len);
        let (kept, rest) = (len - back, 9);
        let (xs, wrong) = (input(40, cfg.dim, seed), input(40, cfg.dim, seed + 1));
        let tail = xs.narrow(0, kept as usize, rest).unwrap();
        let head = xs.narrow(0, 0, kept as usize).unwrap();
        let rejected = wrong.narrow(0, 0, back as usize).unwrap();

        let mut straight = Rig::new(&cfg, g, seed);
        straight.feed(0, 0, &head, &[3]);
        let want = straight.feed(0, kept, &tail, &[2, 1]);
        let mut rewound = Rig::new(&cfg, g, seed);
        rewound.feed(0, 0, &head, &[3]);
        rewound.feed(0, kept, &rejected, &[back.max(1)]);
        assert_bits_eq(&rewound.feed(0, kept, &tail, &[2, 1]), &want);
    }

    /// A copied slot, and one written out and read back elsewhere, go on as the original does.
    #[test]
    fn forked_and_restored_slots_go_on_alike(ratio in 0usize..4, len in 0u32..24, seed in 0u64..1000) {
        let cfg = odd_config(ratio);
        let g = geometry(7, 2, 40, 3);
        let xs = input(40, cfg.dim, seed);
        let (head, tail) = (xs.narrow(0, 0, len as usize).unwrap(), xs.narrow(0, 24, 10).unwrap());
        let mut rig = Rig::new(&cfg, g, seed);
        rig.feed(1, 0, &head, &[4]);
        // Something else was in the slots before.
        rig.feed(0, 0, &xs, &[9]);
        rig.feed(2, 0, &xs, &[9]);

        rig.window.copy_slot(1, 0).unwrap();
        let window = rig.window.export_slot(1, len).unwrap();
        rig.window.import_slot(2, len, &window).unwrap();
        if let Some(source) = &mut rig.source {
            source.copy_slot(1, 0, len).unwrap();
            let rows = source.export_slot(1, len).unwrap();
            source.import_slot(2, len, &rows).unwrap();
            // Rows of another length are refused.
            prop_assert!(ratio > 24 || source.import_slot(2, len + 24, &rows).is_err());
        }
        let want = rig.feed(1, len, &tail, &[3, 1]);
        assert_bits_eq(&rig.feed(0, len, &tail, &[1]), &want);
        assert_bits_eq(&rig.feed(2, len, &tail, &[10]), &want);
    }
}

#[test]
fn one_thread_is_four_threads() {
    for ratio in 0..4 {
        let mut cfg = odd_config(ratio);
        cfg.dim = 128;
        let xs = input(150, cfg.dim, 9);
        let run = |threads| {
            with_threads(threads, || {
                let mut rig = Rig::new(&cfg, geometry(7, 3, 160, 1), 9);
                rig.feed(0, 0, &xs, &[140, 1])
            })
        };
        assert_bits_eq(&run(1), &run(4));
    }
}

/// Fewer tokens than a group: there is nothing to score and nothing to attend to but the window.
#[test]
fn shorter_than_a_group() {
    let cfg = odd_config(3);
    let mut rig = Rig::new(&cfg, geometry(7, 0, 16, 1), 1);
    let y = rig.step(&[chunk(0, 0, 2)], &input(2, cfg.dim, 1));
    assert!(bits(&y).iter().all(|v| v.is_finite()));
    assert_eq!(rig.shared.topk().unwrap().0.dims(), [2, 0]);
}

#[test]
fn empty_chunks_change_nothing() {
    let cfg = odd_config(2);
    let mut rig = Rig::new(&cfg, geometry(7, 0, 16, 2), 1);
    let xs = input(6, cfg.dim, 1);
    rig.feed(0, 0, &xs, &[6]);
    let before = kept(rig.window.kv());
    let empty = Tensor::zeros((0, cfg.dim), candle_core::DType::BF16, &CPU).unwrap();
    assert_eq!(
        rig.step(&[chunk(0, 6, 0), chunk(1, 0, 0)], &empty).dims(),
        [0, cfg.dim]
    );
    assert_eq!(rig.step(&[], &empty).dims(), [0, cfg.dim]);
    assert_bits_eq(&kept(rig.window.kv()), &before);
}

/// More selections asked for than rows visible: the rest is empty, not the first row again.
#[test]
fn topk_wider_than_visible_rows() {
    let mut cfg = odd_config(2);
    cfg.index.topk = 100;
    let mut rig = Rig::new(&cfg, geometry(7, 0, 16, 1), 1);
    rig.feed(0, 0, &input(9, cfg.dim, 1), &[9]);
    let want: Vec<Vec<i32>> = (0..9).map(|pos| (0..(pos + 1) / 2).collect()).collect();
    assert_eq!(rig.selected(&[0; 9]), want);
}

/// The reference sees NaN in none of these: an all-zero input has all-zero norms at eps 1e-20.
#[test]
fn zero_input_stays_finite() {
    for ratio in 0..3 {
        let cfg = odd_config(ratio);
        let mut rig = Rig::new(&cfg, geometry(7, 0, 16, 1), 1);
        let zeros = Tensor::zeros((5, cfg.dim), candle_core::DType::BF16, &CPU).unwrap();
        assert!(
            rig.feed(0, 0, &zeros, &[2, 1])
                .iter()
                .all(|v| *v == bf16::ZERO)
        );
    }
}

#[test]
fn reading_before_publishing_is_an_error() {
    let mut cfg = odd_config(2);
    let weights = random_weights(&cfg, 1);
    // A reader of another layer's cache and selection, alone.
    cfg.role = LayerRole::Compressed {
        ratio: 2,
        owns_kv: false,
        index: IndexRole::Reuse,
    };
    cfg.owns_index_k = false;
    let mut rig = Rig::with_weights(&cfg, geometry(7, 0, 16, 1), weights.clone());
    let xs = input(3, cfg.dim, 1);
    let missing = rig.try_step(&[chunk(0, 0, 3)], &xs);
    assert!(
        matches!(missing, Err(Error::MissingSource { .. })),
        "{missing:?}"
    );
    // An indexer that looks inside candidate blocks that nobody published.
    cfg = odd_config(2);
    cfg.role = LayerRole::Compressed {
        ratio: 2,
        owns_kv: true,
        index: IndexRole::Run(CandidateRole::Use),
    };
    let mut rig = Rig::with_weights(&cfg, geometry(7, 0, 16, 1), weights.clone());
    let missing = rig.try_step(&[chunk(0, 0, 3)], &xs);
    assert!(matches!(
        missing,
        Err(Error::MissingSource {
            what: "candidate blocks"
        })
    ));
    // A source without its own cache.
    let mut rig = Rig::with_weights(&odd_config(2), geometry(7, 0, 16, 1), weights);
    rig.source = None;
    assert!(matches!(
        rig.try_step(&[chunk(0, 0, 3)], &xs),
        Err(Error::MissingSource { .. })
    ));
    assert!(SharedAttentionRuntime::new().topk().is_err());
}

#[test]
fn impossible_configs_name_the_field() {
    let field = |change: fn(&mut AttentionConfig)| {
        let mut cfg = odd_config(2);
        change(&mut cfg);
        match cfg.validate() {
            Err(Error::Config { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(field(|c| c.dim = 0), "dim");
    assert_eq!(field(|c| c.head_dim = 48), "head_dim");
    assert_eq!(field(|c| c.rope_head_dim = 7), "rope_head_dim");
    assert_eq!(field(|c| c.rope_head_dim = 64), "rope_head_dim");
    assert_eq!(field(|c| c.o_groups = 2), "o_groups");
    assert_eq!(field(|c| c.n_heads = usize::MAX / 5 * 5), "n_heads");
    assert_eq!(field(|c| c.norm_eps = f32::NAN), "norm_eps");
    assert_eq!(field(|c| c.linear_format = WeightFormat::Fp4), "dtype");
    assert_eq!(field(|c| c.window_size = 0), "window_size");
    assert_eq!(field(|c| c.index.topk = 0), "index_topk");
    assert_eq!(field(|c| c.index.head_dim = 16), "index_head_dim");
    assert_eq!(
        field(|c| {
            c.role = LayerRole::Compressed {
                ratio: 0,
                owns_kv: true,
                index: IndexRole::Reuse,
            }
        }),
        "compress_ratios"
    );
    assert_eq!(
        field(|c| {
            c.role = LayerRole::Compressed {
                ratio: 2,
                owns_kv: true,
                index: IndexRole::Reuse,
            }
        }),
        "kv_source_layers"
    );
    assert_eq!(
        field(|c| {
            let index = IndexRole::Run(CandidateRole::Publish);
            c.role = LayerRole::Compressed {
                ratio: 2,
                owns_kv: true,
                index,
            };
            c.index.candidate_block_size = 0;
        }),
        "candidate_block_size"
    );
    assert!(odd_config(2).validate().is_ok());
}
