//! Packed pools: byte for byte the CPU's, and read to the bits of bf16 ones.

use deepseek_v41::attention::{KvFormat, KvPool};

use super::*;

/// bf16 rows as a cache gets them: rounded, some small, large or zero, a group of one NaN.
fn rounded(rng: &Random, quant: RowQuant, n: usize, d: usize) -> Result<Tensor> {
    let rows = rng.uneven(n, d)?;
    let rows = match quant {
        RowQuant::Window => fake_quant_fp8(&rows)?,
        RowQuant::Compressed => fake_quant_fp4(&rows, 16, ScaleFormat::E4M3)?,
        RowQuant::Index => fake_quant_fp4(&rows, 32, ScaleFormat::E8M0)?,
    };
    let mut values = rows.flatten_all()?.to_vec1::<bf16>()?;
    if let Some(last) = values.last_mut().filter(|_| n > 3) {
        *last = bf16::NAN;
    }
    Ok(Tensor::from_vec(values, (n, d), &Device::Cpu)?)
}

/// Rows in packed form with any codes, and scales from the ends of their range among usual ones.
fn wild(rng: &Random, quant: RowQuant, n: usize, d: usize) -> Result<Tensor> {
    let (codes, groups) = match quant {
        RowQuant::Window => (d, d / 32),
        RowQuant::Compressed => (d / 2, d / 16),
        RowQuant::Index => (d / 2, d / 32),
    };
    let mut bytes = Vec::with_capacity(n * (codes + groups));
    for _ in 0..n {
        bytes.extend((0..codes).map(|_| match rng.below(256) as u8 {
            // A window row's code is never NaN: its scale is.
            code if quant == RowQuant::Window && code & 0x7f == 0x7f => code ^ 1,
            code => code,
        }));
        bytes.extend((0..groups).map(|_| match (rng.below(40), quant) {
            (0, _) => 0,
            (1, RowQuant::Compressed) => 0x7f,
            (1, _) if rng.below(4) == 0 => 255,
            (2, RowQuant::Compressed) => 1,
            // A key's sums stay exact, in whatever order.
            (2, RowQuant::Index) => 118,
            (2, _) => 100,
            (_, RowQuant::Compressed) => 40 + rng.below(30) as u8,
            _ => 120 + rng.below(8) as u8,
        }));
    }
    Ok(Tensor::from_vec(bytes, (n, codes + groups), &Device::Cpu)?)
}

/// A pool with the rows `packed`.
fn pool(
    packed: &Tensor,
    quant: RowQuant,
    d: usize,
    format: KvFormat,
    dev: &Device,
) -> Result<KvPool> {
    let n = packed.dim(0)?;
    let mut pool = KvPool::new(n, d, quant, format, dev)?;
    let rows: Vec<u32> = (0..n as u32).collect();
    pool.import(&packed.to_device(dev)?, &rows)?;
    Ok(pool)
}

pub(super) fn packed(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    writes(gpu, rng, r)?;
    attention(gpu, rng, r)?;
    scores(gpu, rng, r)
}

fn writes(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    let quants = [RowQuant::Window, RowQuant::Compressed, RowQuant::Index];
    for (quant, (n, d)) in quants
        .into_iter()
        .flat_map(|q| [(1, 32), (5, 96), (37, 128), (70, 512), (3, 1056)].map(|s| (q, s)))
    {
        let rows = rounded(rng, quant, n, d)?;
        let slots: Vec<i32> = (0..n as i32)
            .map(|i| {
                if i % 7 == 5 {
                    -1
                } else {
                    (i * 2) % (n as i32 + n as i32 % 2 + 1)
                }
            })
            .collect();
        // Distinct rows: 2 and an odd number of rows share no factor.
        let kept = n + n % 2 + 1;
        let slots = Tensor::from_vec(slots, n, &Device::Cpu)?;
        let shape = format!("{n} of {kept}x{d} {quant:?}");
        r.both("pack_rows", &shape, gpu, 0.0, &[&rows, &slots], |o, dev| {
            let mut pool = KvPool::new(kept, d, quant, KvFormat::Packed, dev)?;
            pool.write(&o[0], &o[1])?;
            pool.copy_rows(0, kept as u32 - 1, 1)?;
            pool.export((0..kept as u32).collect())
        })?;
        let bytes = wild(rng, quant, n, d)?;
        r.both(
            "packed rows in and out",
            &shape,
            gpu,
            0.0,
            &[&bytes],
            |o, dev| {
                let pool = pool(&o[0], quant, d, KvFormat::Packed, dev)?;
                pool.export((0..n as u32).rev().collect())
            },
        )?;
        r.both("packed rows read", &shape, gpu, 0.0, &[&bytes], |o, dev| {
            pool(&o[0], quant, d, KvFormat::Packed, dev)?.read(0..n as u32)
        })?;
    }
    Ok(())
}

/// The compressed form at a place of the window's and the other way round as well: kernels do not care.
fn attention(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    use RowQuant::{Compressed, Index, Window};
    for (t, h, d, widths, quants) in [
        (1, 1, 32, [7, 0, 0], [Window, Compressed, Index]),
        (3, 5, 64, [7, 3, 20], [Window, Window, Compressed]),
        (5, 4, 96, [7, 5, 3], [Compressed, Index, Window]),
        (2, 64, 512, [128, 1, 512], [Window, Window, Compressed]),
        (70, 8, 512, [40, 6, 64], [Window, Window, Compressed]),
        (9, 5, 512, [7, 3, 130], [Window, Window, Index]),
        (1, 64, 512, [128, 1, 512], [Window, Window, Compressed]),
        (300, 64, 512, [128, 30, 90], [Window, Window, Compressed]),
    ] {
        let (q, sink) = (rng.bf16(&[t, h, d], 1.0)?, rng.f32(&[h], 1.0)?);
        let scale = 1.0 / (d as f32).sqrt();
        for wild_rows in [false, true] {
            let mut scopes = Vec::new();
            for (i, (n, quant)) in widths.into_iter().zip(quants).enumerate() {
                if n == 0 {
                    continue;
                }
                let rows = 2 * n + 3;
                let bytes = match wild_rows {
                    true => wild(rng, quant, rows, d)?,
                    false => {
                        let values = rng.bf16(&[rows, d], 1.0)?;
                        let mut own = KvPool::new(rows, d, quant, KvFormat::Bf16, &Device::Cpu)?;
                        let values = match quant {
                            Window => fake_quant_fp8(&values)?,
                            Compressed => fake_quant_fp4(&values, 16, ScaleFormat::E4M3)?,
                            Index => fake_quant_fp4(&values, 32, ScaleFormat::E8M0)?,
                        };
                        let slots: Vec<i32> = (0..rows as i32).collect();
                        own.write(&values, &Tensor::from_vec(slots, rows, &Device::Cpu)?)?;
                        own.export((0..rows as u32).collect())?
                    }
                };
                let idxs: Vec<i32> = (0..t * n)
                    .map(|j| match (rng.below(4), t > 2 && j / n == t - 1) {
                        (0, _) | (_, true) => -1,
                        _ => rng.below(rows) as i32,
                    })
                    .collect();
                let idxs = Tensor::from_vec(idxs, (t, n), &Device::Cpu)?;
                // The step's own rows are bf16 in either format.
                scopes.push((bytes, quant, idxs, i == 1));
            }
            let run = |format, dev: &Device| -> Result<Tensor> {
                let pools: Vec<(KvPool, Tensor)> = scopes
                    .iter()
                    .map(|(bytes, quant, idxs, present)| {
                        let format = if *present { KvFormat::Bf16 } else { format };
                        let pool = pool(bytes, *quant, d, format, dev)?;
                        Ok((pool, idxs.to_device(dev)?))
                    })
                    .collect::<Result<_>>()?;
                let scopes: Vec<KvScope<'_>> = pools
                    .iter()
                    .map(|(pool, idxs)| KvScope::new(pool.stored(), idxs))
                    .collect();
                sparse_attn(&q.to_device(dev)?, &scopes, &sink.to_device(dev)?, scale)
            };
            let rows = if wild_rows { "wild" } else { "rounded" };
            let shape = format!("{t}x{h}x{d} of {widths:?} {rows}");
            let same = run(KvFormat::Packed, gpu)?;
            let plain = run(KvFormat::Bf16, gpu)?;
            r.close("sparse_attn, packed = bf16", &shape, &plain, &same, 0.0)?;
            if !wild_rows {
                let cpu = run(KvFormat::Packed, &Device::Cpu)?;
                r.close("sparse_attn, packed", &shape, &cpu, &same, PRODUCT)?;
            }
        }
    }
    Ok(())
}

fn scores(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (t, h, d, rows, k, topk_blocks, block) in [
        (1, 5, 32, 50, 8, 3, 4),
        (5, 16, 32, 300, 40, 5, 16),
        (1, 32, 128, 700, 512, 40, 8),
        (9, 32, 128, 5000, 512, 40, 64),
        (2, 5, 64, 70_000, 512, 300, 64),
        (1, 32, 128, 70_000, 512, 300, 64),
        (40, 32, 128, 40_000, 300, 300, 64),
        (130, 32, 128, 700, 48, 24, 8),
    ] {
        let q = rng.fp4(&[t, h, d])?;
        let weights: Vec<bf16> = (0..t * h)
            .map(|_| bf16::from_f32(f32::powi(2.0, rng.below(3) as i32 - 4)))
            .collect();
        let weights = Tensor::from_vec(weights, (t, h), &Device::Cpu)?;
        let bytes = wild(rng, RowQuant::Index, rows, d)?;
        for one_base in [true, false] {
            let spans: Vec<IndexSpan> = (0..t)
                .map(|i| IndexSpan {
                    base: if one_base { 3 } else { (i * 5 % 20) as u32 },
                    visible: (rows - 20 - i.min(rows - 21)) as u32,
                })
                .collect();
            // Rows, rows beside their blocks, the blocks, rows inside of them; then of one query alone.
            let run = |format, dev: &Device| -> Result<[Tensor; 5]> {
                let keys = pool(&bytes, RowQuant::Index, d, format, dev)?;
                let (q, w) = (q.to_device(dev)?, weights.to_device(dev)?);
                let alone = index_topk(&q, &w, keys.stored(), &spans, k, None)?;
                let (beside, blocks) = index_topk_with_candidates(
                    &q,
                    &w,
                    keys.stored(),
                    &spans,
                    k,
                    topk_blocks,
                    block,
                )?;
                let inside = index_topk(&q, &w, keys.stored(), &spans, k, Some(&blocks))?;
                let (q, w) = (q.narrow(0, 0, 1)?, w.narrow(0, 0, 1)?);
                let one = index_topk(&q, &w, keys.stored(), &spans[..1], k, None)?;
                Ok([alone.0, beside.0, blocks.ids, inside.0, one.0])
            };
            let shape = format!("{t}x{h}x{d} of {rows} top {k}, one base {one_base}");
            let same = run(KvFormat::Packed, gpu)?;
            let plain = run(KvFormat::Bf16, gpu)?;
            let cpu = run(KvFormat::Packed, &Device::Cpu)?;
            for (i, name) in ["alone", "publishing", "blocks", "in candidates", "of one"]
                .into_iter()
                .enumerate()
            {
                let op = format!("packed keys {name} = bf16");
                r.close(&op, &shape, &plain[i], &same[i], 0.0)?;
                let op = format!("packed keys {name}");
                r.close(&op, &shape, &cpu[i], &same[i], 0.0)?;
            }
        }
    }
    Ok(())
}
