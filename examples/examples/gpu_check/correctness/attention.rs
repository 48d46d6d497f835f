//! Attention over rows, the indexer, the compressor, the caches.

use super::*;

pub(super) fn attention(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (quant, name) in [
        (RowQuant::Window, "window"),
        (RowQuant::Compressed, "compressed"),
        (RowQuant::Index, "index"),
    ] {
        for (t, h, d, rd) in [
            (3, 1, 64, 16),
            (5, 3, 96, 32),
            (2, 1, 512, 64),
            (33, 32, 128, 64),
        ] {
            let (x, table) = (rng.bf16(&[t, h, d], 1.0)?, rope_table(rng, t, rd)?);
            let weight = vec![rng.named("weight", &[d], 1.0, DType::BF16)?];
            for normed in [false, true] {
                let shape = format!("{t}x{h}x{d} {name} norm {normed}");
                // Without a norm nothing is summed, and the codes are the same.
                let bound = if normed { REQUANTISED } else { 0.0 };
                r.both(
                    "finish_rows",
                    &shape,
                    gpu,
                    bound,
                    &[&x, &table.cos, &table.sin],
                    |o, dev| {
                        let norm = RmsNorm::new(d, 1e-20, checkpoint(weight.clone(), dev))?;
                        let table = RopeTable {
                            cos: o[1].clone(),
                            sin: o[2].clone(),
                        };
                        finish_rows(&o[0], normed.then_some(&norm), &table, quant)
                    },
                )?;
            }
        }
    }
    for (t, d, ratio, slots) in [(7, 64, 2, 4), (9, 512, 4, 8), (5, 40, 3, 6)] {
        let (kv, score) = (rng.f32(&[t, d], 1.0)?, rng.f32(&[t, d], 2.0)?);
        let pending = rng.f32(&[slots, 2 * d], 1.0)?;
        let sources: Vec<i64> = (0..3 * ratio)
            .map(|_| match rng.below(2) {
                0 => rng.below(t) as i64,
                _ => -1 - rng.below(slots) as i64,
            })
            .collect();
        let shape = format!("{t}x{d}, groups of {ratio}");
        r.both(
            "compress",
            &shape,
            gpu,
            ROUNDING,
            &[&kv, &score, &pending],
            |o, _| compress(&o[0], &o[1], Some(&o[2]), &sources, ratio),
        )?;
    }
    for (n, d, rows) in [(3, 64, 7), (65, 512, 200)] {
        let src = rng.bf16(&[n, d], 1.0)?;
        let pool = rng.bf16(&[rows, d], 1.0)?;
        // Distinct rows: which of two equal ones stays is the CPU's promise alone.
        let slots: Vec<i32> = (0..n)
            .map(|i| {
                if i % 5 == 4 {
                    -1
                } else {
                    (i * 3 % rows) as i32
                }
            })
            .collect();
        let slots = Tensor::from_vec(slots, n, &Device::Cpu)?;
        r.both(
            "write_rows",
            &format!("{n} of {rows}x{d}"),
            gpu,
            0.0,
            &[&src, &pool, &slots],
            |o, _| {
                let pool = o[1].copy()?;
                write_rows(&pool, &o[0], &o[2])?;
                Ok(pool)
            },
        )?;
    }
    for (t, h, d, widths) in [
        (1, 1, 64, &[7][..]),
        (3, 5, 64, &[9, 3, 20]),
        (5, 4, 96, &[0, 5, 3]),
        (2, 64, 512, &[128, 1, 512]),
        (70, 8, 512, &[40, 64]),
        (1, 64, 512, &[128, 1, 512]),
        (64, 64, 512, &[128, 1, 512]),
    ] {
        let q = rng.bf16(&[t, h, d], 1.0)?;
        let sink = rng.f32(&[h], 1.0)?;
        let mut pools = Vec::new();
        for &n in widths {
            let rows = 2 * n + 3;
            let kv = rng.bf16(&[rows, d], 1.0)?;
            // Holes anywhere; the last query sees nothing where there are several.
            let idxs: Vec<i32> = (0..t * n)
                .map(|i| match (rng.below(4), t > 2 && i / n.max(1) == t - 1) {
                    (0, _) | (_, true) => -1,
                    _ => rng.below(rows) as i32,
                })
                .collect();
            pools.push((kv, deepseek_v41::core::upload(idxs, (t, n), &Device::Cpu)?));
        }
        let shape = format!("{t}x{h}x{d} of {widths:?}");
        r.both(
            "sparse_attn",
            &shape,
            gpu,
            PRODUCT,
            &[&q, &sink],
            |o, dev| {
                let pools: Vec<(Tensor, Tensor)> = pools
                    .iter()
                    .filter(|(_, idxs)| idxs.elem_count() > 0)
                    .map(|(kv, idxs)| Ok((kv.to_device(dev)?, idxs.to_device(dev)?)))
                    .collect::<Result<_>>()?;
                let scopes: Vec<KvScope<'_>> = pools
                    .iter()
                    .map(|(kv, idxs)| KvScope::new(kv, idxs))
                    .collect();
                sparse_attn(&o[0], &scopes, &o[1], 1.0 / (d as f32).sqrt())
            },
        )?;
    }
    Ok(())
}

pub(super) fn index(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (t, h, d, rows, k, topk_blocks, block) in [
        (1, 4, 32, 50, 8, 3, 4),
        (5, 16, 32, 300, 40, 5, 16),
        (9, 32, 128, 5000, 512, 40, 64),
        (2, 5, 64, 70_000, 512, 300, 64),
        (130, 4, 64, 700, 48, 24, 8),
    ] {
        // fp4 values: every product and sum is exact, so that scores and ties are the same.
        let (q, keys) = (rng.fp4(&[t, h, d])?, rng.fp4(&[rows, d])?);
        let weights: Vec<half::bf16> = (0..t * h)
            .map(|_| half::bf16::from_f32(f32::powi(2.0, rng.below(3) as i32 - 4)))
            .collect();
        let weights = Tensor::from_vec(weights, (t, h), &Device::Cpu)?;
        for one_base in [true, false] {
            let spans: Vec<IndexSpan> = (0..t)
                .map(|i| {
                    let base = if one_base { 3 } else { (i * 5 % 20) as u32 };
                    IndexSpan {
                        base,
                        visible: (rows - 20 - i.min(rows - 21)) as u32,
                    }
                })
                .collect();
            let shape = format!("{t}x{h}x{d} of {rows} top {k}, one base {one_base}");
            let operands = [&q, &weights, &keys];
            r.both("index_topk", &shape, gpu, 0.0, &operands, |o, _| {
                Ok(index_topk(&o[0], &o[1], &o[2], &spans, k, None)?.0)
            })?;
            for blocks in [false, true] {
                let name = if blocks {
                    "index_topk, its blocks"
                } else {
                    "index_topk, publishing"
                };
                r.both(name, &shape, gpu, 0.0, &operands, |o, _| {
                    let (rows, found) = index_topk_with_candidates(
                        &o[0],
                        &o[1],
                        &o[2],
                        &spans,
                        k,
                        topk_blocks,
                        block,
                    )?;
                    Ok(if blocks { found.ids } else { rows.0 })
                })?;
            }
            let chosen = candidate_blocks(&q, &weights, &keys, &spans, topk_blocks, block)?;
            let operands = [&q, &weights, &keys, &chosen.ids];
            r.both(
                "index_topk in candidates",
                &shape,
                gpu,
                0.0,
                &operands,
                |o, _| {
                    let candidates = CandidateBlocks {
                        block,
                        ids: o[3].clone(),
                    };
                    Ok(index_topk(&o[0], &o[1], &o[2], &spans, k, Some(&candidates))?.0)
                },
            )?;
        }
    }
    Ok(())
}
