//! Every operation on both devices, from the same random operands.

mod attention;
mod engram;
mod hyperconn;
mod moe;
mod packed;
mod quant;
mod sampling;
mod vision;

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
        if !only.is_empty() && !only.split(',').any(|o| o == name) {
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

    /// Something that is so or not.
    pub(crate) fn holds(&mut self, op: &str, shape: &str, holds: bool) {
        self.error(op, shape, f64::from(u8::from(!holds)), 0.0);
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
    let groups: [(&str, Group); 10] = [
        ("core", core),
        ("quant", quant::quant),
        ("hyperconn", hyperconn::hyperconn),
        ("moe", moe::moe),
        ("attention", attention::attention),
        ("index", attention::index),
        ("packed", packed::packed),
        ("engram", engram::engram),
        ("vision", vision::vision),
        ("sampling", sampling::sampling),
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
