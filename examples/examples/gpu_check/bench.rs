//! How long operations take, host side included, and what share of the measured ceilings that is.
//!
//! Calls are queued back to back, so an operation whose launches take the host longer than the device
//! shows the host's time. The copy ceiling counts bytes read and written. Weights rotate through copies that together pass the level-2 cache.

mod packed;
mod vision;

use std::{sync::Arc, time::Instant};

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    DeepSeekV41, LoadOptions, Result,
    attention::ops::{IndexSpan, KvScope, index_topk, sparse_attn},
    core::{
        LocalComm, RmsNorm, argmax, best,
        cuda::sample::{DrawRow, sample},
        rms_norm,
    },
    hyperconn::{Flow, HyperConn, HyperConnConfig, PreMix, Site},
    model::{ForwardBatch, Limits, ModelState},
    moe::{Moe, MoeConfig, ScoreFunc},
    quant::{GroupedLinear, Linear, WeightFormat, act_quant, fake_quant_fp8},
    sampling::{Sampler, SamplingParams, TokenHistory},
};

use crate::data::{Random, checkpoint};

/// A share of which ceiling.
enum Work {
    Bytes(f64),
    Flops(f64),
}

struct Ceilings {
    bytes: f64,
    flops: f64,
}

/// Median seconds of one call in runs of `n`.
fn time<T>(device: &Device, n: usize, mut f: impl FnMut(usize) -> Result<T>) -> Result<f64> {
    for i in 0..n.min(10) {
        f(i)?;
    }
    device.synchronize()?;
    let mut runs = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        for i in 0..n {
            f(i)?;
        }
        device.synchronize()?;
        runs.push(start.elapsed().as_secs_f64() / n as f64);
    }
    runs.sort_by(f64::total_cmp);
    Ok(runs[2])
}

#[allow(clippy::print_stdout, reason = "the table is what this program is for")]
fn row(op: &str, shape: &str, seconds: f64, work: Work, top: &Ceilings) {
    let (rate, share) = match work {
        Work::Bytes(bytes) => {
            let rate = bytes / seconds;
            (format!("{:8.0} GB/s", rate / 1e9), rate / top.bytes)
        }
        Work::Flops(flops) => {
            let rate = flops / seconds;
            (format!("{:6.1} TFLOP/s", rate / 1e12), rate / top.flops)
        }
    };
    println!(
        "| {op:<22} | {shape:<38} | {:10.1} | {rate:>16} | {:5.1} % |",
        seconds * 1e6,
        share * 100.0
    );
}

/// Random bf16 on the device.
fn noise(device: &Device, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(DType::BF16)?)
}

#[allow(clippy::print_stdout, reason = "the table is what this program is for")]
pub(crate) fn run(device: &Device, only: &str) -> Result<()> {
    let big = noise(device, &[1 << 14, 1 << 15])?;
    let copy = time(device, 20, |_| {
        big.copy()?;
        Ok(())
    })?;
    drop(big);
    let (a, b) = (noise(device, &[8192, 8192])?, noise(device, &[8192, 8192])?);
    let product = time(device, 10, |_| Ok(a.matmul(&b.t()?)?))?;
    let top = Ceilings {
        bytes: 2.0 * 2.0 * f64::from(1 << 29) / copy,
        flops: 2.0 * 8192f64.powi(3) / product,
    };
    println!(
        "ceilings: copy {:.0} GB/s, bf16 product {:.0} TFLOP/s\n",
        top.bytes / 1e9,
        top.flops / 1e12
    );
    if only == "layer" {
        return crate::layer::run(device, top.bytes);
    }
    println!("| op | shape | µs | rate | of ceiling |\n| --- | --- | ---: | ---: | ---: |");
    let rng = Random::new(7);
    match only {
        "packed" => return packed::run(device, &rng, &top),
        "vision" => return vision::run(device, &rng, &top),
        "sampling" => return sampling(device, &top),
        _ => {}
    }
    linears(device, &rng, &top)?;
    rows(device, &rng, &top)?;
    experts(device, &rng, &top)?;
    sampling(device, &top)?;
    attention(device, &rng, &top)?;
    packed::run(device, &rng, &top)?;
    vision::run(device, &rng, &top)?;
    crate::layer::run(device, top.bytes)?;
    model(device)
}

fn linears(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    for (k, n) in [(5120, 1280), (1280, 32_768), (8192, 5120), (5120, 2304)] {
        let weights = rng.weight("", n, k, WeightFormat::Fp8);
        // 64 MB and more of weights, so that none is found in the cache.
        let copies = (96 << 20usize) / (n * k) + 1;
        let layers: Vec<Linear> = (0..copies)
            .map(|_| Linear::new(k, n, WeightFormat::Fp8, checkpoint(weights.clone(), device)))
            .collect::<Result<_>>()?;
        for m in [1, 16, 4096] {
            let x = noise(device, &[m, k])?;
            let calls = if m > 64 { 10 } else { 200 };
            let seconds = time(device, calls, |i| layers[i % copies].forward(&x))?;
            let work = match m {
                4096 => Work::Flops(2.0 * (m * n * k) as f64),
                _ => Work::Bytes((n * k + n * k / 1024 + 2 * m * (n + k)) as f64),
            };
            row("linear fp8", &format!("M{m} {k}->{n}"), seconds, work, top);
        }
    }
    let (g, k, n) = (8, 4096, 1024);
    let weights = rng.weight("", g * n, k, WeightFormat::Fp8);
    let layers: Vec<GroupedLinear> = (0..4)
        .map(|_| GroupedLinear::new(g, k, n, checkpoint(weights.clone(), device)))
        .collect::<Result<_>>()?;
    for m in [1, 16, 4096] {
        let x = noise(device, &[m, g * k])?;
        let calls = if m > 64 { 10 } else { 200 };
        let seconds = time(device, calls, |i| layers[i % 4].forward(&x))?;
        let work = match m {
            4096 => Work::Flops(2.0 * (m * n * k * g) as f64),
            _ => Work::Bytes((g * n * k + g * n * k / 1024 + 2 * m * g * (n + k)) as f64),
        };
        let shape = format!("M{m} {g} groups of {k}->{n}");
        row("grouped linear fp8", &shape, seconds, work, top);
    }
    Ok(())
}

fn rows(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    let dim = 5120;
    let w = noise(device, &[dim])?.to_dtype(DType::F32)?;
    for t in [1, 4096] {
        let x = noise(device, &[t, dim])?;
        let bytes = |factor: f64| Work::Bytes(factor * (t * dim) as f64);
        let calls = if t > 64 { 50 } else { 500 };
        let shape = format!("{t}x{dim}");
        let seconds = time(device, calls, |_| rms_norm(&x, &w, 1e-20))?;
        row("rms_norm", &shape, seconds, bytes(4.0), top);
        let seconds = time(device, calls, |_| act_quant(&x))?;
        row("act_quant", &shape, seconds, bytes(3.03), top);
        let seconds = time(device, calls, |_| fake_quant_fp8(&x))?;
        row("fake_quant_fp8", &shape, seconds, bytes(4.0), top);
        let cfg = HyperConnConfig {
            hc_mult: 4,
            dim,
            sinkhorn_iters: 20,
            hc_eps: 1e-6,
            norm_eps: 1e-20,
        };
        let weights = vec![
            rng.named("hc_attn_fn", &[24, 4 * dim], 0.01, DType::F32)?,
            rng.named("hc_attn_base", &[24], 0.3, DType::F32)?,
            rng.named("hc_attn_scale", &[3], 0.5, DType::F32)?,
            rng.named("norm.weight", &[dim], 1.0, DType::BF16)?,
        ];
        let vb = checkpoint(weights, device);
        let norm = RmsNorm::new(dim, 1e-20, vb.pp("norm"))?;
        let hc = HyperConn::new(&cfg, Site::Attn, vb)?;
        let stream = noise(device, &[t, 4, dim])?;
        let y = noise(device, &[t, dim])?;
        let mut flow = Flow::new(stream, PreMix::one_hot(t, 4, device)?);
        let seconds = time(device, calls, |_| {
            flow.enter(&hc, &norm)?;
            flow.leave(y.clone())
        })?;
        // The stream is read once and written once by a fused step; the weights are read once.
        let bytes = Work::Bytes((2 * 2 * t * 4 * dim + 24 * 4 * dim * 4) as f64);
        row(
            "hyper-connection",
            &format!("{t}x4x{dim}, between sublayers"),
            seconds,
            bytes,
            top,
        );
    }
    Ok(())
}

/// A row of logits from where it is to a token on the host: all of it copied, or the token alone.
fn sampling(device: &Device, top: &Ceilings) -> Result<()> {
    let vocab = 129_280;
    for rows in [1, 6] {
        let logits = Tensor::randn(0f32, 3.0, (rows, vocab), device)?;
        let bytes = || Work::Bytes((4 * rows * vocab) as f64);
        let shape = format!("{rows}x{vocab}");
        let seconds = time(device, 500, |_| argmax(&logits))?;
        row("argmax", &shape, seconds, bytes(), top);
        let seconds = time(device, 100, |_| Ok(argmax(&logits)?.to_vec1::<u32>()?))?;
        row("argmax, read back", &shape, seconds, bytes(), top);
        let seconds = time(device, 100, |_| {
            let rows = logits.to_vec2::<f32>()?;
            Ok(rows.iter().map(|row| best(row)).collect::<Vec<_>>())
        })?;
        row("greedy on the host", &shape, seconds, bytes(), top);
        for (name, top_k, top_p) in [
            ("temperature", 0, 1.0),
            ("top-p 0.95", 0, 0.95),
            ("top-k 50, top-p 0.95", 50, 0.95),
        ] {
            let params = SamplingParams {
                top_k,
                top_p,
                seed: Some(1),
                ..SamplingParams::default()
            };
            let draw = DrawRow {
                state: 3,
                inc: 5,
                temperature: 1.0,
                top_k,
                top_p,
                min_p: 0.0,
            };
            let draws = vec![draw; rows];
            let seconds = time(device, 100, |_| sample(&logits, &argmax(&logits)?, &draws))?;
            row(&format!("drawn, {name}"), &shape, seconds, bytes(), top);
            let mut sampler = Sampler::new(params)?;
            let seconds = time(device, 10, |_| {
                let rows = logits.to_vec2::<f32>()?;
                let rows = rows.iter();
                rows.map(|row| sampler.sample(row, TokenHistory::default()))
                    .collect::<Result<Vec<_>>>()
            })?;
            row(&format!("host, {name}"), &shape, seconds, bytes(), top);
        }
    }
    Ok(())
}

fn experts(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    let (dim, inter, e, k) = (5120, 2304, 48, 6);
    let cfg = MoeConfig {
        dim,
        inter_dim: inter,
        n_routed: e,
        n_activated: k,
        score_func: ScoreFunc::SqrtSoftplus,
        gate_temp: 1.0,
        norm_topk_prob: true,
        route_scale: 1.5,
        swiglu_limit: 10.0,
        expert_format: WeightFormat::Fp4,
        shared_format: WeightFormat::Fp8,
        bias_vl: false,
    };
    let mut weights = rng.weight("gate.", e, dim, WeightFormat::Bf16);
    weights.push(rng.named("gate.bias", &[e], 0.1, DType::F32)?);
    // One expert's bytes under every name: the device has a copy of each.
    let one = [("w1", inter, dim), ("w2", dim, inter), ("w3", inter, dim)]
        .map(|(w, n, k)| rng.weight(&format!("{w}."), n, k, WeightFormat::Fp4));
    for j in 0..e {
        for mut part in one.iter().flatten().cloned() {
            part.name = format!("experts.{j}.{}", part.name);
            weights.push(part);
        }
    }
    for (w, n, k) in [("w1", inter, dim), ("w2", dim, inter), ("w3", inter, dim)] {
        weights.extend(rng.weight(&format!("shared_experts.{w}."), n, k, WeightFormat::Fp8));
    }
    let moe = Moe::new(&cfg, Arc::new(LocalComm), checkpoint(weights, device))?;
    let expert = 3 * dim * inter;
    for t in [1usize, 4, 64, 1024] {
        let x = noise(device, &[t, dim])?;
        let routing = moe.gate().forward(&x, None)?;
        let calls = if t > 64 { 5 } else { 200 };
        let seconds = time(device, calls, |_| moe.forward_routed(&x, &routing))?;
        let active = (t * k).min(e);
        let work = match t {
            1024 => Work::Flops(2.0 * (expert * (k + 1) * t) as f64),
            _ => Work::Bytes((active * expert * 17 / 32 + expert) as f64),
        };
        row(
            "moe fp4 + shared fp8",
            &format!("T{t}, {k} of {e}, {dim}<->{inter}"),
            seconds,
            work,
            top,
        );
        let seconds = time(device, 200, |_| moe.gate().forward(&x, None))?;
        row(
            "gate",
            &format!("T{t}, {k} of {e}"),
            seconds,
            Work::Bytes((2 * e * dim + 2 * t * dim) as f64),
            top,
        );
    }
    Ok(())
}

fn attention(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    let (h, d, n) = (64, 512, 640);
    let sink = Tensor::zeros(h, DType::F32, device)?;
    for (t, rows) in [(1, 4224), (64, 4224), (4096, 6144)] {
        let (q, kv) = (noise(device, &[t, h, d])?, noise(device, &[rows, d])?);
        let idxs: Vec<i32> = (0..t * n).map(|_| rng.below(rows) as i32).collect();
        let idxs = Tensor::from_vec(idxs, (t, n), device)?;
        let scopes = [KvScope::new(&kv, &idxs)];
        let calls = if t > 64 { 10 } else { 200 };
        let seconds = time(device, calls, |_| sparse_attn(&q, &scopes, &sink, 0.044))?;
        let work = Work::Flops(4.0 * (t * h * d * n) as f64);
        row(
            "sparse_attn",
            &format!("{t} queries, {h}x{d}, {n} of {rows} rows"),
            seconds,
            work,
            top,
        );
    }
    let (h, d) = (32, 128);
    for (t, rows, k) in [(1, 1 << 19, 512), (1, 1 << 15, 512), (512, 8192, 512)] {
        let (q, w) = (noise(device, &[t, h, d])?, noise(device, &[t, h])?);
        let keys = noise(device, &[rows, d])?;
        let spans = vec![
            IndexSpan {
                base: 0,
                visible: rows as u32
            };
            t
        ];
        let calls = if t > 64 { 10 } else { 100 };
        let seconds = time(device, calls, |_| {
            index_topk(&q, &w, &keys, &spans, k, None)
        })?;
        let work = match t {
            1 => Work::Bytes((2 * rows * d) as f64),
            _ => Work::Flops(2.0 * (t * h * d * rows) as f64),
        };
        row(
            "index_topk",
            &format!("{t} queries over {rows} bf16 keys, top {k}"),
            seconds,
            work,
            top,
        );
    }
    Ok(())
}

/// The embedded model: passes of one token and of a prompt.
#[allow(clippy::print_stdout, reason = "the table is what this program is for")]
fn model(device: &Device) -> Result<()> {
    let model = DeepSeekV41::tiny_with(&LoadOptions {
        device: device.clone(),
        ..LoadOptions::default()
    })?;
    let transformer = model.transformer();
    let limits = Limits {
        max_len: 2048,
        ..Limits::default()
    };
    let mut state = ModelState::new(transformer.config(), limits, device)?;
    let seq = state.create()?;
    let prompt: Vec<u32> = (0..1024).map(|i| 3 + (i * 37 % 3000) as u32).collect();
    let start = Instant::now();
    let out = transformer.forward(&ForwardBatch::one(seq, prompt), &mut state)?;
    out.logits.flatten_all()?.to_vec1::<f32>()?;
    println!(
        "\ntiny model, 1024 tokens of prompt: {:.1} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    let steps = 200;
    let start = Instant::now();
    for i in 0..steps {
        let out = transformer.forward(&ForwardBatch::one(seq, vec![5 + i]), &mut state)?;
        out.logits.flatten_all()?.to_vec1::<f32>()?;
    }
    let seconds = start.elapsed().as_secs_f64() / f64::from(steps);
    println!(
        "tiny model, one token: {:.0} µs (8 layers, replayed)",
        seconds * 1e6
    );
    Ok(())
}
