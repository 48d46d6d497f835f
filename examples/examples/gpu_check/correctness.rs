//! Every operation on both devices, from the same random operands.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Result,
    attention::{
        RowQuant, finish_rows,
        ops::{
            CandidateBlocks, IndexSpan, KvScope, candidate_blocks, compress, index_topk,
            index_topk_with_candidates, sparse_attn, write_rows,
        },
    },
    core::{LocalComm, RmsNorm, Rope, RopeConfig, RopeTable, apply_rope, rms_norm},
    engram::{Engram, EngramConfig, cuda::TablePlacement},
    hyperconn::{
        HyperConn, HyperConnConfig, PreMix, SinkhornParams, Site, hc_expand, hc_mean, hc_post,
        hc_pre, split_sinkhorn,
    },
    moe::{GateParams, Moe, MoeConfig, Routing, ScoreFunc, topk_gate},
    quant::{
        ActScale, Fp4Weight, Fp8Weight, GroupedLinear, Linear, QuantizedActivation, ScaleFormat,
        WeightFormat, act_quant, act_quant_with, fake_quant_fp4, fake_quant_fp8,
        fake_quant_fp8_with, fp4_act_quant, fp4_gemm, fp8_gemm,
    },
};
use half::bf16;

use crate::data::{Random, checkpoint, on, values};

/// One bf16 rounding that may fall the other way now and then.
const ROUNDING: f64 = 2e-3;
/// Sums in another order, then a rounding.
const PRODUCT: f64 = 3e-3;
/// As `PRODUCT`, with a rounding to fp8 or fp4 between: a flipped one is a step of that format.
const REQUANTISED: f64 = 1.5e-2;

/// What was compared, and whether it kept its bounds.
#[derive(Default)]
pub(crate) struct Report {
    compared: usize,
    failed: Vec<String>,
}

#[allow(
    clippy::print_stdout,
    reason = "the report is what this program is for"
)]
impl Report {
    pub(crate) fn group(
        &mut self,
        name: &str,
        only: &str,
        f: impl FnOnce(&mut Self) -> Result<()>,
    ) {
        if !only.is_empty() && only != name {
            return;
        }
        if let Err(err) = f(self) {
            println!("FAILED {name}: {err}");
            self.failed.push(format!("{name}: {err}"));
        }
    }

    /// A measured error against what it may be.
    pub(crate) fn error(&mut self, op: &str, shape: &str, error: f64, bound: f64) {
        self.compared += 1;
        // NaN is no match.
        let ok = error <= bound;
        println!(
            "{} {op:<28} {shape:<34} {error:.2e} of {bound:.0e}",
            if ok { "ok    " } else { "FAILED" }
        );
        if !ok {
            self.failed
                .push(format!("{op} {shape}: {error:.3e} > {bound:.0e}"));
        }
    }

    /// Relative error in the Euclidean norm; bound 0 asks for equal values.
    fn close(
        &mut self,
        op: &str,
        shape: &str,
        cpu: &Tensor,
        gpu: &Tensor,
        bound: f64,
    ) -> Result<()> {
        let (a, b) = (values(cpu)?, values(gpu)?);
        let error = if cpu.dims() != gpu.dims() || cpu.dtype() != gpu.dtype() {
            f64::INFINITY
        } else {
            distance(&a, &b)
        };
        self.error(op, shape, error, bound);
        Ok(())
    }

    /// Computes on both devices and compares.
    fn both(
        &mut self,
        op: &str,
        shape: &str,
        gpu: &Device,
        bound: f64,
        operands: &[&Tensor],
        f: impl Fn(&[Tensor], &Device) -> Result<Tensor>,
    ) -> Result<()> {
        let cpu = f(&on(&Device::Cpu, operands)?, &Device::Cpu)?;
        match f(&on(gpu, operands)?, gpu) {
            Ok(got) => self.close(op, shape, &cpu, &got, bound),
            Err(err) => {
                println!("FAILED {op} {shape}: {err}");
                self.failed.push(format!("{op} {shape}: {err}"));
                Ok(())
            }
        }
    }

    pub(crate) fn finish(self) -> bool {
        println!(
            "{} comparisons, {} failed",
            self.compared,
            self.failed.len()
        );
        for failure in &self.failed {
            println!("  {failure}");
        }
        self.failed.is_empty()
    }
}

/// `‖a - b‖ / ‖a‖`; where both are NaN they agree.
pub(crate) fn distance(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let (mut d, mut n) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        if a == b || (a.is_nan() && b.is_nan()) {
            n += if a.is_nan() { 0.0 } else { a * a };
        } else {
            d += (a - b) * (a - b);
            n += a * a;
        }
    }
    if d == 0.0 {
        0.0
    } else {
        (d / n.max(f64::MIN_POSITIVE)).sqrt()
    }
}

type Group = fn(&Device, &Random, &mut Report) -> Result<()>;

/// Every operation, or those of the crate named by `only`.
pub(crate) fn ops(gpu: &Device, only: &str, r: &mut Report) {
    let groups: [(&str, Group); 7] = [
        ("core", core),
        ("quant", quant),
        ("hyperconn", hyperconn),
        ("moe", moe),
        ("attention", attention),
        ("index", index),
        ("engram", engram),
    ];
    for (name, group) in groups {
        r.group(name, only, |r| group(gpu, &Random::new(20), r));
    }
}

fn rope_table(rng: &Random, t: usize, dim: usize) -> Result<RopeTable> {
    let rope = Rope::new(&RopeConfig {
        dim,
        theta: 10_000.0,
        original_seq_len: 0,
        factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    })?;
    let positions: Vec<u32> = (0..t).map(|_| rng.below(1 << 20) as u32).collect();
    rope.table(&positions, &Device::Cpu)
}

fn core(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (t, dim) in [(1, 32), (3, 96), (7, 512), (37, 1280), (5, 5120)] {
        let (x, w) = (
            rng.uneven(t, dim)?,
            rng.bf16(&[dim], 1.0)?.to_dtype(DType::F32)?,
        );
        r.both(
            "rms_norm",
            &format!("{t}x{dim}"),
            gpu,
            ROUNDING,
            &[&x, &w],
            |o, _| rms_norm(&o[0], &o[1], 1e-20),
        )?;
    }
    for (t, h, d, rd) in [
        (3, 5, 64, 16),
        (1, 64, 512, 64),
        (17, 1, 128, 64),
        (5, 3, 16, 16),
        (4, 2, 48, 32),
    ] {
        let (x, table) = (rng.bf16(&[t, h, d], 1.0)?, rope_table(rng, t, rd)?);
        for inverse in [false, true] {
            let shape = format!("{t}x{h}x{d}, {rd} inverse {inverse}");
            r.both(
                "apply_rope",
                &shape,
                gpu,
                0.0,
                &[&x, &table.cos, &table.sin],
                |o, _| {
                    apply_rope(
                        &o[0],
                        &RopeTable {
                            cos: o[1].clone(),
                            sin: o[2].clone(),
                        },
                        inverse,
                    )
                },
            )?;
        }
    }
    for (t, vocab, dim, copies) in [(3, 11, 40, 1), (9, 512, 5120, 4)] {
        let table = rng.bf16(&[vocab, dim], 1.0)?;
        let ids: Vec<u32> = (0..t).map(|_| rng.below(vocab) as u32).collect();
        let ids = Tensor::from_vec(ids, t, &Device::Cpu)?;
        let shape = format!("{t} of {vocab}x{dim}, {copies} copies");
        r.both(
            "embedding",
            &shape,
            gpu,
            0.0,
            &[&ids, &table],
            |o, d| match d {
                Device::Cpu => {
                    let rows = o[1].index_select(&o[0], 0)?.unsqueeze(1)?;
                    Ok(rows.broadcast_as((t, copies, dim))?.contiguous()?)
                }
                _ => deepseek_v41::core::cuda::ops::embedding(&o[0], &o[1], copies),
            },
        )?;
    }
    Ok(())
}

fn quant(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (t, k) in [(5, 32), (5, 96), (10, 1280), (5, 5120)] {
        let x = rng.uneven(t, k)?;
        let shape = format!("{t}x{k}");
        r.both("act_quant codes", &shape, gpu, 0.0, &[&x], |o, _| {
            Ok(act_quant(&o[0])?.data)
        })?;
        r.both("act_quant scales", &shape, gpu, 0.0, &[&x], |o, _| {
            Ok(act_quant(&o[0])?.scale)
        })?;
        r.both("fake_quant_fp8", &shape, gpu, 0.0, &[&x], |o, _| {
            fake_quant_fp8(&o[0])
        })?;
        for (group, format) in [(32, ScaleFormat::E8M0), (16, ScaleFormat::E4M3)] {
            let shape = format!("{t}x{k}, group {group}");
            let fake = |o: &[Tensor], _: &Device| fake_quant_fp4(&o[0], group, format);
            r.both("fake_quant_fp4", &shape, gpu, 0.0, &[&x], fake)?;
            let codes = |o: &[Tensor], _: &Device| Ok(fp4_act_quant(&o[0], group, format)?.data);
            r.both("fp4_act_quant codes", &shape, gpu, 0.0, &[&x], codes)?;
            let scales = |o: &[Tensor], _: &Device| Ok(fp4_act_quant(&o[0], group, format)?.scale);
            r.both("fp4_act_quant scales", &shape, gpu, 0.0, &[&x], scales)?;
        }
    }
    for (t, k, group) in [(5, 96, 48), (5, 256, 128), (10, 5120, 128), (3, 64, 16)] {
        let mut x = rng.uneven(t, k)?;
        if t == 10 {
            // A group with an infinity, one with NaN.
            let mut values = x.flatten_all()?.to_vec1::<bf16>()?;
            (values[3], values[k + 200]) = (bf16::INFINITY, bf16::NAN);
            x = Tensor::from_vec(values, (t, k), &Device::Cpu)?;
        }
        for format in [ActScale::E8M0, ActScale::F32] {
            let shape = format!("{t}x{k}, group {group} {format:?}");
            let part = |codes: bool| {
                move |o: &[Tensor], _: &Device| {
                    let a = act_quant_with(&o[0], group, format)?;
                    Ok(if codes { a.data } else { a.scale })
                }
            };
            r.both("act_quant codes", &shape, gpu, 0.0, &[&x], part(true))?;
            r.both("act_quant scales", &shape, gpu, 0.0, &[&x], part(false))?;
            r.both("fake_quant_fp8", &shape, gpu, 0.0, &[&x], |o, _| {
                fake_quant_fp8_with(&o[0], group, format)
            })?;
        }
    }
    // Products on ready codes, in the activation's own groups.
    for (m, n, k, group) in [(3, 70, 96, 32), (7, 256, 1280, 128), (40, 130, 5120, 32)] {
        let a = act_quant_with(&rng.bf16(&[m, k], 1.0)?, group, ActScale::E8M0)?;
        let shape = format!("M{m} N{n} K{k}, group {group}");
        for format in [WeightFormat::Fp8, WeightFormat::Fp4] {
            let stored = rng.weight("", n, k, format);
            let (codes, scales) = (stored[0].bytes.clone(), stored[1].bytes.clone());
            let op = match format {
                WeightFormat::Fp8 => "fp8_gemm",
                _ => "fp4_gemm",
            };
            r.both(op, &shape, gpu, PRODUCT, &[&a.data, &a.scale], |o, _| {
                let a = QuantizedActivation {
                    data: o[0].clone(),
                    scale: o[1].clone(),
                };
                let (codes, scales) = (codes.clone(), scales.clone());
                match format {
                    WeightFormat::Fp8 => fp8_gemm(&a, &Fp8Weight::new(codes, scales, n, k, 32)?),
                    _ => fp4_gemm(&a, &Fp4Weight::new(codes, scales, n, k)?),
                }
            })?;
        }
    }
    for format in [
        WeightFormat::Bf16,
        WeightFormat::F32,
        WeightFormat::Fp8,
        WeightFormat::Fp4,
    ] {
        for (n, k, ms) in [
            (5, 32, &[1, 3][..]),
            (130, 160, &[1, 9, 17, 40]),
            (512, 2304, &[2, 16, 33, 130]),
            (1280, 5120, &[1, 8, 20]),
            (2304, 1280, &[5]),
            (5120, 8192, &[1, 4, 16]),
        ] {
            let weights = rng.weight("", n, k, format);
            for &m in ms {
                let x = rng.bf16(&[m, k], 1.0)?;
                let name = format!("linear {format:?}");
                r.both(
                    &name,
                    &format!("M{m} N{n} K{k}"),
                    gpu,
                    PRODUCT,
                    &[&x],
                    |o, d| {
                        Linear::new(k, n, format, checkpoint(weights.clone(), d))?.forward(&o[0])
                    },
                )?;
            }
        }
    }
    // Widths that the kernels do not take go through cuBLAS.
    for format in [WeightFormat::Bf16, WeightFormat::F32] {
        let (weights, x) = (rng.weight("", 7, 80, format), rng.bf16(&[3, 80], 1.0)?);
        r.both(
            &format!("linear {format:?}"),
            "M3 N7 K80",
            gpu,
            PRODUCT,
            &[&x],
            |o, d| Linear::new(80, 7, format, checkpoint(weights.clone(), d))?.forward(&o[0]),
        )?;
    }
    for (g, k, n, m) in [(2, 64, 32, 3), (8, 4096, 1024, 2), (4, 128, 64, 33)] {
        for format in [WeightFormat::Bf16, WeightFormat::Fp8] {
            let weights = rng.weight("", g * n, k, format);
            let x = rng.bf16(&[m, g * k], 1.0)?;
            let shape = format!("M{m} {g} groups of N{n} K{k}");
            r.both(
                &format!("grouped linear {format:?}"),
                &shape,
                gpu,
                PRODUCT,
                &[&x],
                |o, d| GroupedLinear::new(g, k, n, checkpoint(weights.clone(), d))?.forward(&o[0]),
            )?;
        }
    }
    Ok(())
}

fn hyperconn(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (t, c, dim) in [
        (1, 4, 5120),
        (3, 4, 96),
        (6, 2, 64),
        (70, 4, 352),
        (9, 4, 5120),
        (2, 4, 5120),
        (17, 4, 5120),
        (150, 4, 352),
        (300, 4, 1280),
    ] {
        let width = (2 + c) * c;
        let shape = format!("{t}x{c}x{dim}");
        let stream = rng.bf16(&[t, c, dim], 1.0)?;
        let y = rng.bf16(&[t, dim], 1.0)?;
        let pre = rng.f32(&[t, c], 0.5)?;
        let (post, comb) = (rng.f32(&[t, c], 0.5)?, rng.f32(&[t, c, c], 0.5)?);
        let weights = vec![
            rng.named(
                "hc_attn_fn",
                &[width, c * dim],
                1.0 / (dim as f32).sqrt(),
                DType::F32,
            )?,
            rng.named("hc_attn_base", &[width], 0.3, DType::F32)?,
            rng.named("hc_attn_scale", &[3], 0.5, DType::F32)?,
            rng.named("norm.weight", &[dim], 1.0, DType::BF16)?,
        ];
        let cfg = HyperConnConfig {
            hc_mult: c,
            dim,
            sinkhorn_iters: 20,
            hc_eps: 1e-6,
            norm_eps: 1e-20,
        };
        for part in ["pre", "post", "comb"] {
            let name = format!("hc_mixes {part}");
            r.both(&name, &shape, gpu, 2e-5, &[&stream], |o, d| {
                let hc = HyperConn::new(&cfg, Site::Attn, checkpoint(weights.clone(), d))?;
                let mix = hc.mixes(&o[0])?;
                Ok(match part {
                    "pre" => mix.pre.tensor().contiguous()?,
                    "post" => mix.post,
                    _ => mix.comb,
                })
            })?;
        }
        r.both("hc_pre", &shape, gpu, ROUNDING, &[&stream, &pre], |o, _| {
            hc_pre(&o[0], &PreMix::from_tensor(o[1].clone())?)
        })?;
        r.both("hc_mean", &shape, gpu, ROUNDING, &[&stream], |o, _| {
            hc_mean(&o[0])
        })?;
        r.both("hc_expand", &shape, gpu, 0.0, &[&y], |o, _| {
            hc_expand(&o[0], c)
        })?;
        let operands = [&y, &stream, &post, &comb];
        r.both("hc_post", &shape, gpu, ROUNDING, &operands, |o, _| {
            hc_post(&o[0], &o[1], &o[2], &o[3])
        })?;
        let (mixes, scale) = (rng.f32(&[t, width], 2.0)?, rng.f32(&[3], 0.5)?);
        let base = rng.f32(&[width], 0.3)?;
        r.both(
            "split_sinkhorn",
            &shape,
            gpu,
            2e-5,
            &[&mixes, &scale, &base],
            |o, _| {
                let p = SinkhornParams {
                    hc_mult: c,
                    iters: 20,
                    eps: 1e-6,
                };
                Ok(split_sinkhorn(&o[0], &o[1], &o[2], p)?.comb)
            },
        )?;
        // Two sublayers in a row, as a block runs them.
        let operands = [&stream, &pre];
        r.both("two sublayers", &shape, gpu, PRODUCT, &operands, |o, d| {
            let vb = checkpoint(weights.clone(), d);
            let norm = RmsNorm::new(dim, 1e-20, vb.pp("norm"))?;
            let hc = HyperConn::new(&cfg, Site::Attn, vb)?;
            let (stream, mix) = hc.around(&o[0], PreMix::from_tensor(o[1].clone())?, |x| {
                norm.forward(&x)
            })?;
            Ok(hc.around(&stream, mix, |x| norm.forward(&x))?.0)
        })?;
    }
    Ok(())
}

fn moe(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (func, norm) in [
        (ScoreFunc::SqrtSoftplus, true),
        (ScoreFunc::Sigmoid, false),
        (ScoreFunc::Softmax, true),
    ] {
        for (t, e, k) in [(3, 5, 2), (33, 384, 6)] {
            let (logits, bias) = (rng.f32(&[t, e], 2.0)?, rng.f32(&[e], 0.2)?);
            let p = GateParams {
                n_activated: k,
                score_func: func,
                gate_temp: 1.3,
                norm_topk_prob: norm,
                route_scale: 1.5,
            };
            let shape = format!("{t}x{e} top {k} {func:?}");
            let gate = |o: &[Tensor]| topk_gate(&o[0], &o[1], p);
            r.both(
                "topk_gate experts",
                &shape,
                gpu,
                0.0,
                &[&logits, &bias],
                |o, _| Ok(gate(o)?.experts),
            )?;
            r.both(
                "topk_gate weights",
                &shape,
                gpu,
                1e-5,
                &[&logits, &bias],
                |o, _| Ok(gate(o)?.weights),
            )?;
        }
    }
    let sizes = [
        (64, 32, 3, 3, 5),
        (160, 96, 7, 2, 11),
        (512, 2304, 16, 6, 1),
        (5120, 2304, 7, 6, 1),
        (768, 256, 5, 3, 1),
        (5120, 256, 12, 6, 3),
        (128, 64, 8, 2, 300),
    ];
    for (format, shared) in [
        (WeightFormat::Fp4, WeightFormat::Fp8),
        (WeightFormat::Fp8, WeightFormat::Fp8),
        (WeightFormat::Bf16, WeightFormat::Bf16),
    ] {
        for (dim, inter, e, k, t) in sizes {
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
                expert_format: format,
                shared_format: shared,
                bias_vl: true,
            };
            let mut weights = rng.weight("gate.", e, dim, WeightFormat::Bf16);
            weights.push(rng.named("gate.bias", &[e], 0.1, DType::F32)?);
            weights.push(rng.named("gate.bias_vl", &[e], 0.1, DType::F32)?);
            for (name, format) in (0..e)
                .map(|j| (format!("experts.{j}"), format))
                .chain([("shared_experts".into(), shared)])
            {
                for (w, n, k) in [("w1", inter, dim), ("w2", dim, inter), ("w3", inter, dim)] {
                    weights.extend(rng.weight(&format!("{name}.{w}."), n, k, format));
                }
            }
            let x = rng.bf16(&[t, dim], 1.0)?;
            let mask: Vec<u8> = (0..t).map(|_| rng.below(2) as u8).collect();
            let mask = Tensor::from_vec(mask, t, &Device::Cpu)?;
            let shape = format!("T{t} {dim}x{inter} {k} of {e} {format:?}");
            let load =
                |d: &Device| Moe::new(&cfg, Arc::new(LocalComm), checkpoint(weights.clone(), d));
            let (cpu, dev) = (load(&Device::Cpu)?, load(gpu)?);
            let routing = cpu.gate().forward(&x, Some(&mask))?;
            let moved = |d: &Device| -> Result<Routing> {
                let [weights, experts] =
                    [&routing.weights, &routing.experts].map(|t| t.to_device(d));
                Ok(Routing {
                    weights: weights?,
                    experts: experts?,
                })
            };
            let of = |d: &Device| if d.is_cpu() { &cpu } else { &dev };
            r.both("gate experts", &shape, gpu, 0.0, &[&x, &mask], |o, d| {
                Ok(of(d).gate().forward(&o[0], Some(&o[1]))?.experts)
            })?;
            r.both("gate, given experts", &shape, gpu, 1e-4, &[&x], |o, d| {
                Ok(of(d)
                    .gate()
                    .forward_chosen(&o[0], &moved(d)?.experts)?
                    .weights)
            })?;
            r.both("moe", &shape, gpu, REQUANTISED, &[&x], |o, d| {
                of(d).forward_routed(&o[0], &moved(d)?)
            })?;
        }
    }
    Ok(())
}

fn attention(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
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
                    .map(|(kv, idxs)| KvScope { kv, idxs })
                    .collect();
                sparse_attn(&o[0], &scopes, &o[1], 1.0 / (d as f32).sqrt())
            },
        )?;
    }
    Ok(())
}

fn index(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
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

fn engram(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    for (t, c, dim, heads, hd) in [(3, 4, 64, 2, 32), (1, 4, 5120, 8, 256), (17, 2, 96, 2, 64)] {
        let rows = 500;
        let cfg = EngramConfig {
            layer_ids: vec![0],
            max_ngram_size: 4,
            vocab_size: 43,
            n_heads: heads,
            head_dim: hd,
            num_embeddings: vec![rows],
            compressed_vocab_size: 300,
            pad_id: 2,
            dim,
            hc_mult: c,
            norm_eps: 1e-20,
            linear_format: WeightFormat::Fp8,
        };
        let columns = cfg.columns();
        let mut weights = rng.weight("embed.", rows, hd, WeightFormat::Fp4);
        weights.clear();
        let table = rng.weight("embed.", rows * 32, hd, WeightFormat::Fp8);
        // A row of the table has scales of its own: as many as `rows * 32` rows in tiles of 32.
        for mut part in table {
            if part.name == "embed.weight" {
                part.bytes = part.bytes.slice(..rows * hd);
                part.shape = vec![rows, hd];
            }
            weights.push(part);
        }
        weights.extend(rng.weight("wkv.", (c + 1) * dim, columns * hd, WeightFormat::Fp8));
        weights.push(rng.named("q_weight", &[c, dim], 1.0, DType::BF16)?);
        weights.push(rng.named("k_weight", &[c, dim], 1.0, DType::BF16)?);
        let ids: Vec<u32> = (0..t * columns).map(|_| rng.below(rows) as u32).collect();
        let ids = Tensor::from_vec(ids, (t, columns), &Device::Cpu)?;
        let stream = rng.bf16(&[t, c, dim], 1.0)?;
        let mask: Vec<u8> = (0..t).map(|i| u8::from(i == 1)).collect();
        let mask = Tensor::from_vec(mask, t, &Device::Cpu)?;
        let shape = format!("{t}x{c}x{dim}, {columns} rows of {hd}");
        let load = |d: &Device| Engram::new(&cfg, 0, checkpoint(weights.clone(), d));
        for placement in [
            TablePlacement::Device,
            TablePlacement::Mapped,
            TablePlacement::Host,
        ] {
            let shape = format!("{shape}, {placement:?}");
            r.both("engram lookup", &shape, gpu, 0.0, &[&ids], |o, d| {
                let mut layer = load(d)?;
                layer.place_table(placement)?;
                layer.gather(&o[0])
            })?;
        }
        r.both(
            "engram",
            &shape,
            gpu,
            PRODUCT,
            &[&ids, &stream, &mask],
            |o, d| {
                let layer = load(d)?;
                let rows = layer.gather(&o[0])?;
                layer.forward(&o[1], &rows, Some(&o[2]))
            },
        )?;
    }
    Ok(())
}
