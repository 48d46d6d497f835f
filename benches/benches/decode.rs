//! The embedded model end to end: a prompt, a token, and a token at long contexts.
//!
//! Long contexts are made up (`ModelState::create_synthetic`): speed does not depend on what the rows
//! hold. Before the measurements it prints, per layer, what the attention of one token takes at each
//! context, and the memory. Layers 2, 4 and 5 score every compressed row they may see; layer 7 scores
//! the candidates that layer 5 chose; 3 and 6 use what another layer selected; the rest have a window.
//!
//! Run: `cargo bench -p deepseek-v41-benches --bench decode`.
#![allow(clippy::print_stdout, reason = "a table beside criterion's own output")]

use std::time::{Duration, Instant};

use candle_core::Tensor;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use deepseek_v41::{
    DeepSeekV41, Result,
    attention::KvFormat,
    model::{ForwardBatch, Limits, ModelState, Probe, ProbePoint, SequenceId},
};

const CONTEXTS: [usize; 4] = [1 << 10, 1 << 13, 1 << 16, 1 << 18];

struct Text<'m> {
    model: &'m DeepSeekV41,
    state: ModelState,
    seq: SequenceId,
    len: usize,
}

impl<'m> Text<'m> {
    fn synthetic(model: &'m DeepSeekV41, len: usize, kv_format: KvFormat) -> Result<Self> {
        let limits = Limits {
            max_seqs: 1,
            max_len: len + 16,
            max_rollback: 16,
            kv_format,
        };
        let device = model.transformer().device();
        let mut state = ModelState::new(model.config(), limits, device)?;
        let seq = state.create_synthetic(model.config(), len)?;
        Ok(Self {
            model,
            state,
            seq,
            len,
        })
    }

    /// Runs `n` tokens and takes them back.
    fn step(&mut self, n: usize, probe: Option<&mut Timer>) -> Result<Tensor> {
        let batch = ForwardBatch::one(self.seq, vec![7; n]);
        let transformer = self.model.transformer();
        let out = match probe {
            Some(probe) => transformer.forward_probed(&batch, &mut self.state, probe)?,
            None => transformer.forward(&batch, &mut self.state)?,
        };
        self.state.truncate(self.seq, self.len)?;
        Ok(out.logits)
    }
}

/// Adds up what the attention of every layer takes, its hyper-connection included.
struct Timer {
    last: Instant,
    attention: Vec<Duration>,
}

impl Probe for Timer {
    fn value(&mut self, layer: usize, point: ProbePoint, _: &Tensor) -> Result<()> {
        if point == ProbePoint::Attn {
            self.attention[layer] += self.last.elapsed();
        }
        self.last = Instant::now();
        Ok(())
    }
}

/// The most memory this process has had, in MiB; Linux only.
fn peak_mib() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<usize>().ok()? / 1024)
}

fn print_layers(model: &DeepSeekV41) -> Result<()> {
    const STEPS: u32 = 50;
    let layers = model.config().n_layers;
    let heads: Vec<String> = (0..layers).map(|l| format!("{l:>7}")).collect();
    println!(
        "attention of one token by layer, µs\n{:>8} {}",
        "context",
        heads.join("")
    );
    for len in CONTEXTS {
        let mut text = Text::synthetic(model, len, KvFormat::Packed)?;
        let mut timer = Timer {
            last: Instant::now(),
            attention: vec![Duration::ZERO; layers],
        };
        text.step(1, None)?;
        for _ in 0..STEPS {
            timer.last = Instant::now();
            text.step(1, Some(&mut timer))?;
        }
        let us = timer
            .attention
            .iter()
            .map(|d| (*d / STEPS).as_nanos() as f64 / 1e3);
        let row: String = us.map(|us| format!("{us:>7.1}")).collect();
        let caches = text.state.memory_usage() >> 10;
        println!("{len:>8} {row}   caches {caches} KiB");
    }
    if let Some(peak) = peak_mib() {
        println!("peak memory of the process: {peak} MiB");
    }
    Ok(())
}

fn bench(c: &mut Criterion) {
    let model = DeepSeekV41::tiny().expect("the embedded model");
    print_layers(&model).expect("a table");
    let mut group = c.benchmark_group("cpu");
    group.sample_size(20);
    let mut text = Text::synthetic(&model, 512, KvFormat::Bf16).expect("a state");
    group.throughput(Throughput::Elements(512));
    group.bench_function("prefill/T=512", |b| {
        b.iter(|| {
            // All of it again: a sequence may always go back to its start.
            text.state.truncate(text.seq, 0).expect("to the start");
            let batch = ForwardBatch::one(text.seq, vec![7; 512]);
            model
                .transformer()
                .forward(&batch, &mut text.state)
                .expect("a prompt")
        });
    });
    for tokens in [1, 6] {
        // 6: the newest token and a block of five drafts.
        let mut text = Text::synthetic(&model, 512, KvFormat::Bf16).expect("a state");
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(format!("decode/T={tokens},context=512"), |b| {
            b.iter(|| text.step(tokens, None).expect("a step"));
        });
    }
    group.throughput(Throughput::Elements(1));
    for len in CONTEXTS {
        for format in [KvFormat::Bf16, KvFormat::Packed] {
            let mut text = Text::synthetic(&model, len, format).expect("a state");
            group.bench_function(format!("decode/T=1,context={len},{format:?}"), |b| {
                b.iter(|| text.step(1, None).expect("a step"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
