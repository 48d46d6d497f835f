//! The plan of a step against the reference's index sets, and its own rules.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests: a panic is the report, and the margins are worth reading"
)]

mod common;

use std::collections::{BTreeSet, HashSet};

use common::{CPU, chunk, geometry};
use deepseek_v41_attention::plan::{
    GroupRow, finished_groups, kept_positions, visible_rows, window_positions,
};
use deepseek_v41_attention::{AttnPlan, CacheGeometry, ChunkSpec, SlotMap};
use deepseek_v41_core::Error;
use deepseek_v41_testing::Golden;
use proptest::prelude::*;

fn rows(idxs: &candle_core::Tensor) -> Vec<Vec<i32>> {
    idxs.to_vec2().unwrap()
}

/// `window_W_S_START`: the slots each query sees, in the reference's ring of `W` slots (decode) or its
/// chunk (prefill).
#[test]
fn golden_window_rows() {
    let golden = Golden::open("ops_basic");
    let mut cases = 0;
    for key in golden.keys() {
        let Some(rest) = key.strip_prefix("window_") else {
            continue;
        };
        let n: Vec<u32> = rest.split('_').map(|n| n.parse().unwrap()).collect();
        let (window, len, start) = (n[0], n[1], n[2]);
        let want = golden.i64(key);
        let want: Vec<BTreeSet<i64>> = want
            .chunks(want.len() / len as usize)
            .map(|row| row.iter().copied().filter(|&i| i >= 0).collect())
            .collect();

        let g = geometry(window as usize, 0, 4096, 1);
        let plan = AttnPlan::new(&[chunk(0, start, len)], &g, &[], &CPU).unwrap();
        let (ring, present) = (
            rows(&plan.window.ring_idxs),
            rows(&plan.window.present_idxs),
        );
        for (i, want) in want.iter().enumerate() {
            // In decode the reference has its own token in the ring already.
            let present = present[i]
                .iter()
                .filter(|&&p| p >= 0)
                .map(|&p| match start {
                    0 => i64::from(p),
                    _ => i64::from(start % window) + i64::from(p),
                });
            let ring = ring[i].iter().filter(|&&r| r >= 0).map(|&r| i64::from(r));
            let got: BTreeSet<i64> = ring.chain(present).collect();
            assert_eq!(&got, want, "{key} row {i}");
        }
        cases += 1;
    }
    assert!(cases >= 8, "only {cases} cases");
}

fn chunks() -> impl Strategy<Value = (CacheGeometry, Vec<ChunkSpec>, usize)> {
    let one = (0u32..60, prop_oneof![Just(0u32), Just(1), 1u32..40]);
    (
        1usize..12,
        0usize..6,
        1usize..5,
        prop::collection::vec(one, 1..4),
    )
        .prop_map(|(window, max_rollback, ratio, chunks)| {
            let specs = chunks
                .iter()
                .zip(0..)
                .map(|(&(start, len), slot)| chunk(slot, start, len));
            (
                geometry(window, max_rollback, 128, 4),
                specs.collect(),
                ratio,
            )
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Ring and chunk together hold exactly the last `min(W, pos + 1)` positions, ascending.
    #[test]
    fn window_is_the_last_positions((g, specs, _) in chunks()) {
        let plan = AttnPlan::new(&specs, &g, &[], &CPU).unwrap();
        let (ring, present) = (rows(&plan.window.ring_idxs), rows(&plan.window.present_idxs));
        let mut token = 0;
        let mut first = 0;
        for spec in &specs {
            let map = g.ring(spec.slot);
            for pos in spec.positions() {
                let seen = window_positions(pos, g.window as u32);
                prop_assert_eq!(seen.len(), g.window.min(pos as usize + 1));
                let past: Vec<i32> =
                    (seen.start..spec.start.min(seen.end)).map(|p| map.row(p).unwrap() as i32).collect();
                let own: Vec<i32> =
                    (seen.start.max(spec.start)..seen.end).map(|p| (first + p - spec.start) as i32).collect();
                for (got, want) in [(&ring[token], past), (&present[token], own)] {
                    prop_assert_eq!(&got[..want.len()], &want[..]);
                    prop_assert!(got[want.len()..].iter().all(|&i| i == -1));
                }
                token += 1;
            }
            first += spec.len;
        }
        prop_assert_eq!(plan.tokens, token);
    }

    /// Of a chunk exactly the last `min(len, capacity)` rows are kept, each in a slot of its own.
    #[test]
    fn ring_slots_are_distinct((g, specs, ratio) in chunks()) {
        let plan = AttnPlan::new(&specs, &g, &[ratio], &CPU).unwrap();
        let capacities = [g.ring_capacity(), g.pending_capacity(ratio)];
        let slots = [&plan.window.ring_slots, &plan.compress[0].pending_slots];
        for (slots, capacity) in slots.into_iter().zip(capacities) {
            let slots = slots.to_vec1::<i32>().unwrap();
            let written: Vec<i32> = slots.iter().copied().filter(|&s| s >= 0).collect();
            let want: usize = specs.iter().map(|c| kept_positions(c, capacity as u32).len()).sum();
            prop_assert_eq!(written.len(), want);
            prop_assert_eq!(written.iter().collect::<HashSet<_>>().len(), want);
        }
    }

    /// Every group is completed by exactly one chunk, its tokens are where it says, and it becomes
    /// visible to the very token that completes it.
    #[test]
    fn groups_come_from_their_tokens((g, specs, ratio) in chunks()) {
        let plan = AttnPlan::new(&specs, &g, &[ratio], &CPU).unwrap();
        let plan = plan.compress(ratio).unwrap();
        let r = ratio as u32;
        let (mut group, mut first, mut token) = (0, 0, 0);
        for spec in &specs {
            let pending = g.pending(spec.slot, ratio);
            let rows = g.compressed(spec.slot, ratio);
            for j in finished_groups(spec, r) {
                prop_assert_eq!(plan.group_pos[group], j * r);
                let slots = plan.group_slots.to_vec1::<i32>().unwrap();
                prop_assert_eq!(slots[group], rows.row(j).unwrap() as i32);
                for (i, pos) in (j * r..(j + 1) * r).enumerate() {
                    let want = if pos < spec.start {
                        GroupRow::Pending(pending.row(pos).unwrap())
                    } else {
                        GroupRow::Chunk(first + pos - spec.start)
                    };
                    prop_assert_eq!(plan.group_src[group * ratio + i], want.encode());
                }
                group += 1;
            }
            for pos in spec.positions() {
                prop_assert_eq!(plan.spans[token].visible, visible_rows(pos, r));
                prop_assert_eq!(plan.spans[token].base, rows.rows().start);
                token += 1;
            }
            first += spec.len;
        }
        prop_assert_eq!(plan.groups(), group);
    }

    /// A ring never hands out one slot twice among the positions it holds, nor a row of another
    /// sequence; and rewinding by the slack leaves the window before it whole.
    #[test]
    fn slot_maps_do_not_collide(window in 1usize..20, slack in 0usize..8, ratio in 1usize..5, end in 0u32..200) {
        let g = geometry(window, slack, 256, 3);
        for slot in 0..3 {
            for map in [g.ring(slot), g.pending(slot, ratio)] {
                let held = end.saturating_sub(map.capacity())..end;
                let rows: HashSet<u32> = held.clone().map(|p| map.row(p).unwrap()).collect();
                prop_assert_eq!(rows.len(), held.len());
                prop_assert!(rows.iter().all(|r| map.rows().contains(r)));
            }
            let left = end.saturating_sub(slack as u32);
            let needed = window_positions(left, window as u32).start..left;
            prop_assert!(needed.is_empty() || needed.start + g.ring_capacity() as u32 >= end);
            let open = left - left % ratio as u32..left;
            prop_assert!(open.is_empty() || open.start + g.pending_capacity(ratio) as u32 >= end);
        }
        for a in 0..3 {
            for b in a + 1..3 {
                prop_assert!(g.ring(a).rows().end <= g.ring(b).rows().start);
                prop_assert!(g.compressed(a, ratio).rows().end <= g.compressed(b, ratio).rows().start);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// A plan for kernels lists the rows of one for the CPU, in lists that may be wider, and says the
    /// same about groups and spans in the kernels' own terms.
    #[test]
    fn plans_for_kernels_list_the_same((g, specs, ratio) in chunks()) {
        let cpu = AttnPlan::new(&specs, &g, &[ratio], &CPU).unwrap();
        let kernels = AttnPlan::on_host(&specs, &g, &[ratio], true).unwrap();
        for (a, b) in rows(&cpu.window.ring_idxs).iter().zip(rows(&kernels.window.ring_idxs)) {
            prop_assert_eq!(&b[..a.len()], &a[..]);
            prop_assert!(b[a.len()..].iter().all(|&i| i == -1));
        }
        prop_assert_eq!(rows(&cpu.window.present_idxs), rows(&kernels.window.present_idxs));
        let (a, b) = (&cpu.compress[0], &kernels.compress[0]);
        prop_assert!(a.kernel_rows.is_none() && a.columns == a.max_visible);
        prop_assert!(b.columns >= b.max_visible && b.max_visible == a.max_visible);
        let own = b.kernel_rows.as_ref().unwrap();
        let spans: Vec<Vec<i32>> =
            a.spans.iter().map(|s| vec![s.base as i32, s.visible as i32]).collect();
        prop_assert_eq!(rows(&own.spans), spans);
        let sources: Vec<i32> = own.sources.to_vec1().unwrap();
        let wanted = a.group_src.iter().map(|&src| match src {
            0.. => src,
            // Entry p of the open groups is half-width row 2p, named as -2 - 2p.
            _ => -2 - 2 * (-1 - src),
        });
        prop_assert!(sources.into_iter().map(i64::from).eq(wanted));
    }
}

/// Steps of one token of whatever position have the same shapes, as long as as many groups end in them
/// and the visible rows stay below the same power of two.
#[test]
fn decode_plans_repeat() {
    let g = geometry(8, 2, 4096, 1);
    let shapes = |start: u32| {
        let plan = AttnPlan::on_host(&[chunk(0, start, 1)], &g, &[2], true).unwrap();
        let mut shapes = vec![vec![plan.compress[0].columns as usize]];
        let mapped = plan.map(&mut |tensor| {
            shapes.push(tensor.dims().to_vec());
            Ok(tensor.clone())
        });
        assert_eq!(mapped.unwrap().positions, plan.positions);
        shapes
    };
    for start in [0, 2, 6, 60, 126] {
        assert_eq!(shapes(start), shapes(0), "position {start}");
        assert_eq!(shapes(start + 1), shapes(1), "position {}", start + 1);
    }
    assert_ne!(shapes(0), shapes(1));
    assert_ne!(shapes(0), shapes(130));
}

#[test]
fn empty_steps_plan_to_nothing() {
    let g = geometry(7, 2, 32, 2);
    for specs in [
        vec![],
        vec![chunk(0, 0, 0)],
        vec![chunk(1, 9, 0), chunk(0, 3, 0)],
    ] {
        let plan = AttnPlan::new(&specs, &g, &[1, 2], &CPU).unwrap();
        assert_eq!(plan.tokens, 0);
        assert_eq!(plan.window.ring_idxs.dims(), [0, 0]);
        assert!(
            plan.compress
                .iter()
                .all(|c| c.groups() == 0 && c.max_visible == 0)
        );
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let g = geometry(7, 2, 32, 2);
    let plan = |specs: &[ChunkSpec]| AttnPlan::new(specs, &g, &[2], &CPU);
    assert!(plan(&[chunk(0, 30, 2)]).is_ok());
    assert!(matches!(
        plan(&[chunk(0, 30, 3)]),
        Err(Error::Capacity { needed: 33, .. })
    ));
    assert!(matches!(
        plan(&[chunk(0, u32::MAX, u32::MAX)]),
        Err(Error::Capacity { .. })
    ));
    assert!(matches!(
        plan(&[chunk(2, 0, 1)]),
        Err(Error::Capacity { needed: 3, .. })
    ));
    assert!(matches!(
        plan(&[chunk(1, 0, 1), chunk(1, 1, 1)]),
        Err(Error::Value { .. })
    ));
    assert!(matches!(
        plan(&[chunk(0, 0, 1)]).unwrap().compress(3),
        Err(Error::MissingSource { .. })
    ));
    assert!(
        SlotMap::Linear {
            base: 5,
            capacity: 2
        }
        .row(2)
        .is_err()
    );
    assert!(
        SlotMap::Ring {
            base: 5,
            capacity: 0
        }
        .row(0)
        .is_err()
    );
    assert!(geometry(7, 0, 1 << 40, 1).validate(&[2]).is_err());
    assert!(geometry(usize::MAX, 1, 8, 1).validate(&[2]).is_err());
    assert!(geometry(7, 0, 8, 1).validate(&[0]).is_err());
    assert!(geometry(7, 0, 8, 1).validate(&[usize::MAX]).is_err());
}
