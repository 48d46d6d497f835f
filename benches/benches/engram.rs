//! The n-gram memory at the released shapes: two layers of 24 columns, rows of 256, four copies of 5120.
//!
//! The table has a million rows of random bytes instead of 384 million: 264 MB, far beyond any cache,
//! which is what a lookup costs. Hashing counts rows found, lookup and gate the bytes they read and
//! write. Run: `cargo bench -p deepseek-v41-benches --bench engram`.

use candle_core::{Device, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41::{
    engram::{
        EngramConfig, EngramLayout, EngramTable, NgramWindow, TokenMap, engram_hash,
        ops::{engram_gate::engram_gate, engram_lookup::engram_lookup},
        pcg64::Pcg64,
    },
    quant::WeightFormat,
};
use half::bf16;

const CPU: Device = Device::Cpu;
const COLUMNS: usize = 24;
const HEAD_DIM: usize = 256;
const ROWS: usize = 1 << 20;
const COPIES: usize = 4;
const DIM: usize = 5120;

fn released() -> EngramConfig {
    EngramConfig {
        layer_ids: vec![1, 14],
        max_ngram_size: 4,
        vocab_size: 16_000_000,
        n_heads: 8,
        head_dim: HEAD_DIM,
        num_embeddings: vec![384_006_168, 384_016_682],
        compressed_vocab_size: 99_092,
        pad_id: 2,
        dim: DIM,
        hc_mult: COPIES,
        norm_eps: 1e-20,
        linear_format: WeightFormat::Fp8,
    }
}

fn bench_hash(c: &mut Criterion) {
    let layout = EngramLayout::new(&released()).expect("the released layout");
    let map = TokenMap::new((0..99_092).collect(), 99_092, 2).expect("one id a token");
    let ids: Vec<u32> = (0..256u32)
        .map(|i| i.wrapping_mul(2_654_435_761) % 99_092)
        .collect();
    let mut group = c.benchmark_group("cpu/engram_hash");
    for t in [1, 256] {
        let history = [1, 2, 3];
        let window = NgramWindow {
            history: &history,
            start: 3,
            ids: &ids[..t],
            ..Default::default()
        };
        group.throughput(Throughput::Elements((t * 2 * COLUMNS) as u64));
        group.bench_function(format!("T={t},layers=2,cols={COLUMNS}"), |b| {
            b.iter(|| engram_hash(&[window], &layout, &map).expect("hashes"));
        });
    }
    group.finish();
}

fn bench_lookup(c: &mut Criterion) {
    let mut rng = Pcg64::from_seed(1);
    let mut bytes = |n: usize| -> Vec<u8> {
        (0..n / 8)
            .flat_map(|_| rng.next_u64().to_le_bytes())
            .collect()
    };
    let codes = bytes(ROWS * HEAD_DIM);
    // Scales as checkpoints have them: within a few powers of two of 1.
    let scales = bytes(ROWS * HEAD_DIM / 32)
        .iter()
        .map(|b| 119 + b % 8)
        .collect::<Vec<u8>>();
    let table =
        EngramTable::from_bytes(ROWS, HEAD_DIM, codes.into(), scales.into()).expect("a table");
    let mut group = c.benchmark_group("cpu/engram_lookup");
    for t in [1, 256] {
        // New rows every time: a cache that saw them before would flatter.
        let batches: Vec<Tensor> = (0..64)
            .map(|_| {
                let rows: Vec<u32> = (0..t * COLUMNS)
                    .map(|_| rng.integer_up_to(ROWS as u64 - 1) as u32)
                    .collect();
                Tensor::from_vec(rows, (t, COLUMNS), &CPU).expect("row numbers")
            })
            .collect();
        let mut next = batches.iter().cycle();
        let row_bytes = HEAD_DIM + HEAD_DIM / 32 + HEAD_DIM * 2;
        group.throughput(Throughput::Bytes((t * COLUMNS * row_bytes) as u64));
        group.bench_function(format!("T={t},cols={COLUMNS},dim={HEAD_DIM}"), |b| {
            b.iter(|| engram_lookup(next.next().expect("a cycle"), &table).expect("rows"));
        });
    }
    group.finish();
}

fn bench_gate(c: &mut Criterion) {
    let mut rng = Pcg64::from_seed(2);
    let mut random = |shape: &[usize]| {
        let n = shape.iter().product();
        let values: Vec<bf16> = (0..n)
            .map(|_| bf16::from_f64(rng.next_f64() - 0.5))
            .collect();
        Tensor::from_vec(values, shape, &CPU).expect("a bench tensor")
    };
    let weight = random(&[COPIES, DIM])
        .to_dtype(candle_core::DType::F32)
        .expect("f32");
    let mut group = c.benchmark_group("cpu/engram_gate");
    for t in [1, 256] {
        let stream = random(&[t, COPIES, DIM]);
        let kv = random(&[t, (COPIES + 1) * DIM]);
        // Stream and keys once in, the value once, the stream once out.
        group.throughput(Throughput::Bytes((2 * t * DIM * (3 * COPIES + 1)) as u64));
        group.bench_function(format!("T={t},{COPIES}x{DIM}"), |b| {
            b.iter(|| engram_gate(&stream, &kv, &weight, None, 1e-20).expect("the stream"));
        });
    }
    group.finish();
}

criterion_group!(benches, bench_hash, bench_lookup, bench_gate);
criterion_main!(benches);
