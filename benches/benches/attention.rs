//! Attention and index selection at the released shapes, against the same maths composed of candle's
//! own f32 operations.
//!
//! Throughput counts floating-point operations (a multiply-add is two), so criterion's `elem/s` reads
//! as FLOP/s. Run: `cargo bench -p deepseek-v41-benches --bench attention`.

use candle_core::{D, DType, Device, Result, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41_attention::ops::{
    CandidateBlocks, IndexSpan, KvScope, index_topk, index_topk_with_candidates, sparse_attn,
};
use deepseek_v41_testing::{random_bf16, random_f32};
use half::bf16;

const CPU: Device = Device::Cpu;

fn tensor(shape: &[usize], std: f32, seed: u64) -> Tensor {
    let values = random_bf16(shape.iter().product(), std, seed);
    Tensor::from_vec(values, shape, &CPU).expect("a bench tensor")
}

/// 64 heads of 512 over 128 window rows and 512 selected rows of a pool of 16 384.
fn bench_sparse_attn(c: &mut Criterion) {
    const HEADS: usize = 64;
    const DIM: usize = 512;
    const WINDOW: usize = 128;
    const TOPK: usize = 512;
    const POOL: usize = 16_384;

    let mut group = c.benchmark_group("cpu/sparse_attn");
    group.sample_size(20);
    let pool = tensor(&[POOL, DIM], 1.0, 1);
    let sink = Tensor::from_vec(random_f32(HEADS, 1.0, 2), HEADS, &CPU).expect("sink");
    let scale = (DIM as f32).powf(-0.5);
    for t in [1usize, 16] {
        let q = tensor(&[t, HEADS, DIM], 1.0, 3);
        let window = tensor(&[WINDOW + t, DIM], 1.0, 4);
        let idxs = |n: usize, f: &dyn Fn(usize, usize) -> usize| {
            let flat: Vec<i32> = (0..t * n).map(|i| f(i / n, i % n) as i32).collect();
            Tensor::from_vec(flat, (t, n), &CPU).expect("indices")
        };
        let near = idxs(WINDOW, &|t, i| t + i);
        let far = idxs(TOPK, &|t, i| (i * 31 + t * 7) % POOL);
        // Two products of [H, D] with K rows.
        group.throughput(Throughput::Elements(
            (4 * t * HEADS * DIM * (WINDOW + TOPK)) as u64,
        ));
        group.bench_function(format!("T={t},K=640"), |b| {
            let scopes = [KvScope::new(&window, &near), KvScope::new(&pool, &far)];
            b.iter(|| sparse_attn(&q, &scopes, &sink, scale).expect("sparse_attn"));
        });
        let near = near.to_dtype(DType::U32).expect("indices");
        let far = far.to_dtype(DType::U32).expect("indices");
        group.bench_function(format!("candle/T={t},K=640"), |b| {
            b.iter(|| candle_attn(&q, &window, &near, &pool, &far, &sink, scale).expect("candle"));
        });
    }
    group.finish();
}

/// gather, widen, matmul, softmax with the sink as one more column, matmul.
fn candle_attn(
    q: &Tensor,
    window: &Tensor,
    near: &Tensor,
    pool: &Tensor,
    far: &Tensor,
    sink: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    let (t, h, d) = q.dims3()?;
    let near = window
        .index_select(&near.flatten_all()?, 0)?
        .reshape((t, (), d))?;
    let far = pool
        .index_select(&far.flatten_all()?, 0)?
        .reshape((t, (), d))?;
    let kv = Tensor::cat(&[near, far], 1)?.to_dtype(DType::F32)?;
    let scores = (q.to_dtype(DType::F32)?.matmul(&kv.t()?)? * f64::from(scale))?;
    let sink = sink.reshape((1, h, 1))?.broadcast_as((t, h, 1))?;
    let all = Tensor::cat(&[&scores, &sink], D::Minus1)?;
    let e = all.broadcast_sub(&all.max_keepdim(D::Minus1)?)?.exp()?;
    let p = e.broadcast_div(&e.sum_keepdim(D::Minus1)?)?;
    let n = kv.dims()[1];
    p.narrow(D::Minus1, 0, n)?
        .contiguous()?
        .matmul(&kv)?
        .to_dtype(DType::BF16)
}

/// One query of 32 heads of 128 over 65 536 index keys, keeping 512 (release shapes).
fn bench_index_topk(c: &mut Criterion) {
    const HEADS: usize = 32;
    const DIM: usize = 128;
    const ROWS: usize = 65_536;
    const TOPK: usize = 512;
    const BLOCK: usize = 8;
    const BLOCKS: usize = 2048;

    let mut group = c.benchmark_group("cpu/index_topk");
    group.sample_size(20);
    let keys = tensor(&[ROWS, DIM], 1.0, 5);
    let q = tensor(&[1, HEADS, DIM], 1.0, 6);
    let weights = tensor(&[1, HEADS], 0.1, 7);
    let spans = [IndexSpan {
        base: 0,
        visible: ROWS as u32,
    }];
    let flops = |rows: usize| Throughput::Elements((2 * rows * HEADS * DIM) as u64);

    group.throughput(flops(ROWS));
    group.bench_function("T=1,rows=65536", |b| {
        b.iter(|| index_topk(&q, &weights, &keys, &spans, TOPK, None).expect("index_topk"));
    });
    group.bench_function("publish/T=1,rows=65536", |b| {
        b.iter(|| {
            index_topk_with_candidates(&q, &weights, &keys, &spans, TOPK, BLOCKS, BLOCK)
                .expect("index_topk_with_candidates")
        });
    });
    group.bench_function("candle/T=1,rows=65536", |b| {
        b.iter(|| candle_topk(&q, &weights, &keys, TOPK).expect("candle"));
    });

    let ids: Vec<i32> = (0..BLOCKS as i32).map(|i| 4 * i).collect();
    let ids = Tensor::from_vec(ids, (1, BLOCKS), &CPU).expect("ids");
    let candidates = CandidateBlocks { block: BLOCK, ids };
    group.throughput(flops(BLOCKS * BLOCK));
    group.bench_function("candidates/T=1,rows=16384", |b| {
        b.iter(|| {
            index_topk(&q, &weights, &keys, &spans, TOPK, Some(&candidates)).expect("index_topk")
        });
    });
    group.finish();
}

/// The whole `[T, heads, rows]` product, its bf16 roundings, and a sort.
fn candle_topk(q: &Tensor, weights: &Tensor, keys: &Tensor, k: usize) -> Result<Vec<u32>> {
    let q = q.squeeze(0)?.to_dtype(DType::F32)?;
    let scores = q
        .matmul(&keys.to_dtype(DType::F32)?.t()?)?
        .to_dtype(DType::BF16)?
        .relu()?;
    let scores = scores
        .broadcast_mul(&weights.t()?)?
        .to_dtype(DType::F32)?
        .sum(0)?;
    let scores: Vec<bf16> = scores.to_dtype(DType::BF16)?.to_vec1()?;
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
    order.truncate(k);
    order.sort_unstable();
    Ok(order)
}

criterion_group!(benches, bench_sparse_attn, bench_index_topk);
criterion_main!(benches);
