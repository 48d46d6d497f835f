//! Norms, rotary embeddings, window indices, candidate blocks, hyper-connections.

use std::collections::BTreeSet;

use candle_core::Tensor;
use deepseek_v41::{
    Result,
    attention::{
        AttnPlan, CacheGeometry, ChunkSpec, DraftChunk, DraftPlan, ops::select_candidate_blocks_ref,
    },
    core::{Rope, RopeConfig, RopeTable, apply_rope, rms_norm},
    hyperconn::{HyperConn, HyperConnConfig, PreMix, Site, hc_post, hc_pre},
};

use crate::{
    case::Case,
    tolerance::{HC_MIXES, ROPE},
};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    match case.name {
        "apply_rope" => rotate(case)?,
        "hc" => hyper_connections(case)?,
        "window_W_S_START" => windows(case)?,
        "draftwin_W_BLOCK_START" => draft_windows(case)?,
        name if name.starts_with("rmsnorm_") => norm(case)?,
        name if name.starts_with("rope_") => rope_table(case)?,
        name if name.starts_with("candidates_") => candidates(case)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn norm(case: &mut Case<'_>) -> Result<()> {
    let eps = case
        .name
        .trim_start_matches("rmsnorm_")
        .parse()
        .map_err(|_| case.bad("no eps in its name"))?;
    let weight = case.f32s("weight")?;
    let weight = Tensor::from_slice(&weight, weight.len(), case.device)?;
    case.one_ulp(&rms_norm(&case.tensor("x")?, &weight, eps)?, "y")
}

fn rope_table(case: &mut Case<'_>) -> Result<()> {
    let rope = Rope::new(&RopeConfig {
        dim: case.arg("dim")?,
        theta: case.arg("theta")?,
        original_seq_len: case.arg("orig")?,
        factor: case.arg("factor")?,
        beta_fast: 32.0,
        beta_slow: 1.0,
    })?;
    let table = rope.table(&case.ids("positions")?, case.device)?;
    case.close_tensor(&table.cos, "cos", ROPE)?;
    case.close_tensor(&table.sin, "sin", ROPE)
}

fn rotate(case: &mut Case<'_>) -> Result<()> {
    let table = RopeTable {
        cos: case.tensor("cos")?,
        sin: case.tensor("sin")?,
    };
    for (x, y, inverse) in [("x3", "y3", false), ("x4", "y4_inverse", true)] {
        let xs = case.tensor(x)?;
        let rotated = (0..xs.dims()[0]).map(|b| apply_rope(&xs.get(b)?, &table, inverse));
        let rotated = Tensor::stack(&rotated.collect::<Result<Vec<_>>>()?, 0)?;
        case.one_ulp(&rotated, y)?;
    }
    Ok(())
}

/// The positions each query sees, as slots of the reference: of its chunk in prefill, of its ring of W
/// in decode.
fn windows(case: &mut Case<'_>) -> Result<()> {
    let names: Vec<String> = case
        .data
        .names()
        .filter(|n| n.starts_with("window_"))
        .map(str::to_owned)
        .collect();
    for name in names {
        let numbers: Vec<u32> = name.split('_').filter_map(|n| n.parse().ok()).collect();
        let &[window, len, start] = numbers.as_slice() else {
            return Err(case.bad(format!("`{name}` is not window_W_S_START")));
        };
        let geometry = CacheGeometry {
            window: window as usize,
            max_rollback: 0,
            max_len: (start + len) as usize,
            max_seqs: 1,
        };
        let chunk = ChunkSpec {
            slot: 0,
            start,
            len,
        };
        let plan = AttnPlan::new(&[chunk], &geometry, &[], case.device)?.window;
        let (ring, present) = (
            plan.ring_idxs.to_vec2::<i32>()?,
            plan.present_idxs.to_vec2::<i32>()?,
        );
        // In decode the reference has the query's own token in the ring already.
        let own = |p: i32| match start {
            0 => i64::from(p),
            _ => i64::from(start % window) + i64::from(p),
        };
        let got: Vec<BTreeSet<i64>> = ring
            .iter()
            .zip(&present)
            .map(|(ring, present)| {
                let ring = ring.iter().filter(|i| **i >= 0).map(|i| i64::from(*i));
                ring.chain(present.iter().filter(|i| **i >= 0).map(|i| own(*i)))
                    .collect()
            })
            .collect();
        let want = case.data.integers(&name)?;
        let want: Vec<BTreeSet<i64>> = want
            .chunks(want.len() / len as usize)
            .map(|row| row.iter().copied().filter(|i| *i >= 0).collect())
            .collect();
        case.exact(&name, &got, &want)?;
    }
    Ok(())
}

/// The rows each position of a draft block sees: of the ring of W, in any order, then of its own block,
/// which the reference numbers on from W.
fn draft_windows(case: &mut Case<'_>) -> Result<()> {
    let names = case.data.names().filter(|n| n.starts_with("draftwin_"));
    let names: Vec<String> = names.map(str::to_owned).collect();
    for name in names {
        let numbers: Vec<u32> = name.split('_').filter_map(|n| n.parse().ok()).collect();
        let &[window, block, start] = numbers.as_slice() else {
            return Err(case.bad(format!("`{name}` is not draftwin_W_BLOCK_START")));
        };
        let geometry = CacheGeometry {
            window: window as usize,
            max_rollback: 0,
            max_len: start as usize + 1,
            max_seqs: 1,
        };
        let chunk = DraftChunk {
            committed: ChunkSpec {
                slot: 0,
                start,
                len: 1,
            },
            draft: true,
        };
        let plan = DraftPlan::new(&[chunk], block as usize, &geometry, case.device)?;
        let (ring, own) = (
            plan.ring_idxs.to_vec2::<i32>()?,
            plan.block_idxs.to_vec2::<i32>()?,
        );
        let got: Vec<i64> = ring
            .into_iter()
            .zip(own)
            .flat_map(|(mut ring, own)| {
                ring.sort_unstable();
                ring.extend(own.iter().map(|row| window as i32 + row));
                ring.into_iter().filter(|row| *row >= 0).map(i64::from)
            })
            .collect();
        let want = case.data.integers(&name)?;
        case.exact(&name, &got, &want)?;
    }
    Ok(())
}

fn candidates(case: &mut Case<'_>) -> Result<()> {
    let (topk_blocks, block): (usize, usize) = (case.noted("topk_blocks")?, case.noted("block")?);
    let lens = case.ids("lens")?;
    for (logits, keep) in [("logits", "keep"), ("decode_logits", "decode_keep")] {
        let shape = case.shape(logits)?;
        let (batch, queries, width) = (shape[0], shape[1], shape[2]);
        let visible = match keep {
            "keep" => lens.repeat(batch),
            _ => vec![width as u32; batch * queries],
        };
        let ids =
            select_candidate_blocks_ref(&case.f32s(logits)?, width, &visible, topk_blocks, block);
        let mut kept = vec![0u8; batch * queries * width];
        for (ids, kept) in ids.chunks(topk_blocks).zip(kept.chunks_mut(width)) {
            for id in ids.iter().filter(|id| **id >= 0) {
                let start = *id as usize * block;
                kept[start..(start + block).min(width)].fill(1);
            }
        }
        let want = case.bytes(keep)?;
        case.exact(keep, &kept, &want)?;
    }
    Ok(())
}

fn hyper_connections(case: &mut Case<'_>) -> Result<()> {
    let stream = case.tensor("x")?.flatten(0, 1)?;
    let (_, hc_mult, dim) = stream.dims3()?;
    // Those of the released model: the case has no others.
    let cfg = HyperConnConfig {
        hc_mult,
        dim,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-20,
    };
    let names = [
        ("fn", "hc_ffn_fn"),
        ("base", "hc_ffn_base"),
        ("scale", "hc_ffn_scale"),
    ];
    let mix = HyperConn::new(&cfg, Site::Ffn, case.weights_named(&names))?.mixes(&stream)?;
    case.close_tensor(mix.pre.tensor(), "mix_pre", HC_MIXES)?;
    case.close_tensor(&mix.post, "mix_post", HC_MIXES)?;
    case.close_tensor(&mix.comb, "mix_comb", HC_MIXES)?;
    let flat = |part: &str| Ok::<_, deepseek_v41::Error>(case.tensor(part)?.flatten(0, 1)?);
    let collapsed = hc_pre(&stream, &PreMix::from_tensor(flat("pre")?)?)?;
    let expanded = hc_post(&flat("branch")?, &stream, &flat("post")?, &flat("comb")?)?;
    case.one_ulp(&collapsed, "collapsed")?;
    case.one_ulp(&expanded, "expanded")
}
