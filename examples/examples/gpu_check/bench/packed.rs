//! Packed rows beside bf16 ones: attention at the release's shapes, and scores with their selection.

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Result,
    attention::{
        KvFormat, KvPool, RowQuant,
        ops::{CandidateBlocks, IndexSpan, KvScope, index_topk, sparse_attn},
    },
    quant::{ScaleFormat, fake_quant_fp4, fake_quant_fp8},
};

use super::{Ceilings, Work, noise, row, time};
use crate::data::Random;

const FORMATS: [KvFormat; 2] = [KvFormat::Bf16, KvFormat::Packed];

/// A pool of `rows` rows of noise.
fn pool(
    rows: usize,
    dim: usize,
    quant: RowQuant,
    format: KvFormat,
    device: &Device,
) -> Result<KvPool> {
    let mut pool = KvPool::new(rows, dim, quant, format, device)?;
    let part = 1 << 16;
    for start in (0..rows).step_by(part) {
        let n = part.min(rows - start);
        let values = noise(device, &[n, dim])?;
        let values = match (quant, format) {
            (RowQuant::Index, KvFormat::Bf16) => fake_quant_fp4(&values, 32, ScaleFormat::E8M0)?,
            _ => values,
        };
        let slots: Vec<i32> = (start as i32..(start + n) as i32).collect();
        pool.write(&values, &Tensor::from_vec(slots, n, device)?)?;
    }
    Ok(pool)
}

pub(super) fn run(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    attention(device, rng, top)?;
    writes(device, top)?;
    scores(device, rng, top)
}

/// A query's 128 rows of the ring, its own, and 512 compressed ones.
fn attention(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    let (h, d) = (64, 512);
    let sink = Tensor::zeros(h, DType::F32, device)?;
    for (t, rows) in [(1usize, 4096), (64, 4096), (4096, 4096)] {
        let q = noise(device, &[t, h, d])?;
        let own = noise(device, &[t, d])?;
        let list = |n: usize, rows: usize| {
            let idxs: Vec<i32> = (0..t * n).map(|_| rng.below(rows) as i32).collect();
            Tensor::from_vec(idxs, (t, n), device)
        };
        let (near, present, far) = (list(128, 136)?, list(1, t)?, list(512, rows)?);
        for format in FORMATS {
            let ring = pool(136, d, RowQuant::Window, format, device)?;
            let kv = pool(rows, d, RowQuant::Compressed, format, device)?;
            let scopes = [
                KvScope::new(ring.stored(), &near),
                KvScope::new(&own, &present),
                KvScope::new(kv.stored(), &far),
            ];
            let calls = if t > 64 { 10 } else { 200 };
            let seconds = time(device, calls, |_| sparse_attn(&q, &scopes, &sink, 0.044))?;
            let work = Work::Flops(4.0 * (t * h * d * 641) as f64);
            let shape = format!("{t} queries, 128 + 1 + 512 rows, {format:?}");
            row("sparse_attn", &shape, seconds, work, top);
        }
    }
    Ok(())
}

fn writes(device: &Device, top: &Ceilings) -> Result<()> {
    for (t, dim, quant) in [
        (1, 512, RowQuant::Window),
        (1, 512, RowQuant::Compressed),
        (4096, 512, RowQuant::Compressed),
    ] {
        let rows = match quant {
            RowQuant::Window => fake_quant_fp8(&noise(device, &[t, dim])?)?,
            _ => fake_quant_fp4(&noise(device, &[t, dim])?, 16, ScaleFormat::E4M3)?,
        };
        let slots: Vec<i32> = (0..t as i32).collect();
        let slots = Tensor::from_vec(slots, t, device)?;
        for format in FORMATS {
            let mut kv = KvPool::new(t, dim, quant, format, device)?;
            let seconds = time(device, 500, |_| kv.write(&rows, &slots))?;
            let bytes = Work::Bytes((t * (2 * dim + kv.row_bytes())) as f64);
            let shape = format!("{t}x{dim} {quant:?}, {format:?}");
            row("write of rows", &shape, seconds, bytes, top);
        }
    }
    Ok(())
}

fn scores(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    let (h, d, k) = (32, 128, 512);
    for (t, rows) in [
        (1usize, 1usize << 19),
        (1, 1 << 15),
        (4, 1 << 17),
        (512, 8192),
    ] {
        let q = rng.fp4(&[t, h, d])?.to_device(device)?;
        let w = noise(device, &[t, h])?;
        let span = IndexSpan {
            base: 0,
            visible: rows as u32,
        };
        let spans = vec![span; t];
        for format in FORMATS {
            // Past the second-level cache together.
            let copies = if t == 1 { 5 } else { 1 };
            let keys: Vec<KvPool> = (0..copies)
                .map(|_| pool(rows, d, RowQuant::Index, format, device))
                .collect::<Result<_>>()?;
            let calls = if t > 64 { 10 } else { 100 };
            let work = || match t {
                512 => Work::Flops(2.0 * (t * h * d * rows) as f64),
                _ => Work::Bytes((rows * keys[0].row_bytes()) as f64),
            };
            let shape = format!("{t} over {rows} keys, top {k}, {format:?}");
            let seconds = time(device, calls, |i| {
                index_topk(&q, &w, keys[i % copies].stored(), &spans, k, None)
            })?;
            row("index_topk", &shape, seconds, work(), top);
            let seconds = time(device, calls, |i| {
                index_topk(&q, &w, keys[i % copies].stored(), &spans, 0, None)
            })?;
            row("index_topk, scores alone", &shape, seconds, work(), top);
            if rows < 1 << 17 {
                continue;
            }
            let ids: Vec<i32> = (0..t * 512).map(|i| 2 * (i % 512) as i32).collect();
            let candidates = CandidateBlocks {
                block: 64,
                ids: Tensor::from_vec(ids, (t, 512), device)?,
            };
            let seconds = time(device, calls, |i| {
                let keys = keys[i % copies].stored();
                index_topk(&q, &w, keys, &spans, k, Some(&candidates))
            })?;
            let bytes = Work::Bytes((t * 512 * 64 * keys[0].row_bytes()) as f64);
            row("index_topk in 512 blocks", &shape, seconds, bytes, top);
        }
    }
    Ok(())
}
