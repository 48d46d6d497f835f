//! The tower at the released widths, beside the same block in candle's own operations.

use candle_core::{D, DType, Device, Tensor};
use deepseek_v41::{Result, core::RawTensor};
use deepseek_v41_vision::{
    Aligner, GridConfig, VisionBlock, VisionConfig,
    ops::{PatchRuns, Rope2d, Rope2dTable, full_attention},
};

use super::{Ceilings, Work, noise, row, time};
use crate::data::{Random, checkpoint};

fn config() -> VisionConfig {
    VisionConfig {
        dim: 5120,
        vision_n_layers: 32,
        vision_dim: 1024,
        vision_n_heads: 16,
        vision_inter_dim: 2816,
        vision_rope_theta: 1e4,
        grid: GridConfig {
            patch_size: 14,
            downsample_ratio: 3,
            max_n_token: 1024,
            min_pixels: 295_936,
            max_wh_ratio: None,
        },
    }
}

fn linear(rng: &Random, name: &str, n: usize, k: usize, bias: bool) -> Result<Vec<RawTensor>> {
    use deepseek_v41::quant::WeightFormat::Bf16;
    let mut all = rng.weight(&format!("{name}."), n, k, Bf16);
    if bias {
        all.push(rng.named(&format!("{name}.bias"), &[n], 0.1, DType::BF16)?);
    }
    Ok(all)
}

pub(super) fn run(device: &Device, rng: &Random, top: &Ceilings) -> Result<()> {
    let cfg = config();
    let (dim, inter, heads) = (cfg.vision_dim, cfg.vision_inter_dim, cfg.vision_n_heads);
    let mut weights = linear(rng, "attn.wqkv", 3 * dim, dim, true)?;
    weights.extend(linear(rng, "attn.wo", dim, dim, true)?);
    weights.extend(linear(rng, "mlp.w1", 2 * inter, dim, false)?);
    weights.extend(linear(rng, "mlp.w2", dim, inter, false)?);
    for name in ["norm1.weight", "norm2.weight"] {
        weights.push(rng.named(name, &[dim], 1.0, DType::BF16)?);
    }
    let vb = checkpoint(weights, device);
    let block = VisionBlock::new(&cfg, vb.clone())?;
    let rope = Rope2d::new(cfg.head_dim(), cfg.vision_rope_theta)?;
    let part = |name: &str, shape: &[usize]| vb.tensor(name, DType::BF16, shape);
    let peer = Peer {
        norms: [part("norm1.weight", &[dim])?, part("norm2.weight", &[dim])?],
        wqkv: (
            part("attn.wqkv.weight", &[3 * dim, dim])?,
            part("attn.wqkv.bias", &[3 * dim])?,
        ),
        wo: (
            part("attn.wo.weight", &[dim, dim])?,
            part("attn.wo.bias", &[dim])?,
        ),
        w1: part("mlp.w1.weight", &[2 * inter, dim])?,
        w2: part("mlp.w2.weight", &[dim, inter])?,
        heads,
    };
    for grids in [
        vec![(39, 39)],
        vec![(93, 93)],
        vec![(39, 39), (45, 30), (39, 60), (27, 27)],
    ] {
        let lens: Vec<usize> = grids.iter().map(|(h, w)| h * w).collect();
        let n: usize = lens.iter().sum();
        let table = rope.tables(&grids).on(device)?;
        let runs = PatchRuns::new(&lens, device)?;
        let xs = noise(device, &[n, dim])?;
        let squares: usize = lens.iter().map(|len| len * len).sum();
        let attended = 4.0 * (squares * dim) as f64;
        let flops = attended + 2.0 * (n * dim * (4 * dim + 3 * inter)) as f64;
        let shape = format!("{n} patches of {} images", lens.len());
        let seconds = time(device, 50, |_| block.forward(&xs, &table, &runs))?;
        row("vision block", &shape, seconds, Work::Flops(flops), top);
        let qkv = noise(device, &[n, 3, heads, cfg.head_dim()])?;
        let seconds = time(device, 50, |_| full_attention(&qkv, &runs))?;
        row(
            "full_attention",
            &shape,
            seconds,
            Work::Flops(attended),
            top,
        );
        if let [(n_h, n_w)] = grids[..] {
            let tables = peer_table(&rope.table(n_h, n_w), device)?;
            let seconds = time(device, 5, |_| peer.block(&xs, &tables))?;
            row(
                "the same block, candle",
                &shape,
                seconds,
                Work::Flops(flops),
                top,
            );
        }
    }
    let mut weights = linear(rng, "w1", cfg.dim, cfg.cell_dim(), true)?;
    weights.extend(linear(rng, "w2", cfg.dim, cfg.dim, true)?);
    let aligner = Aligner::new(&cfg, checkpoint(weights, device))?;
    for side in [39, 93] {
        let features = noise(device, &[side * side, dim])?;
        let rows = (side / 3) * (side / 3);
        let flops = 2.0 * (rows * cfg.dim * (cfg.cell_dim() + cfg.dim)) as f64;
        let seconds = time(device, 50, |_| aligner.forward(&features, side, side))?;
        let shape = format!("{rows} rows, 9216 -> 5120 -> 5120");
        row("aligner", &shape, seconds, Work::Flops(flops), top);
    }
    Ok(())
}

/// Cosines and sines `[1, n, rd]`.
fn peer_table(table: &Rope2dTable, device: &Device) -> Result<(Tensor, Tensor)> {
    let copy = |values: &[f32]| -> Result<Tensor> {
        let shape = (1, table.patches(), table.angles());
        Ok(Tensor::from_slice(values, shape, device)?)
    };
    Ok((copy(&table.cos)?, copy(&table.sin)?))
}

/// A block of one image from candle's operations, one after the other.
struct Peer {
    norms: [Tensor; 2],
    wqkv: (Tensor, Tensor),
    wo: (Tensor, Tensor),
    w1: Tensor,
    w2: Tensor,
    heads: usize,
}

impl Peer {
    fn norm(&self, xs: &Tensor, at: usize) -> Result<Tensor> {
        let xs = xs.to_dtype(DType::F32)?;
        let mean = (xs.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?;
        let xs = xs.broadcast_div(&mean.sqrt()?)?;
        let weight = self.norms[at].to_dtype(DType::F32)?;
        Ok(xs.broadcast_mul(&weight)?.to_dtype(DType::BF16)?)
    }

    fn rope(xs: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
        let xs = xs.to_dtype(DType::F32)?;
        let rd = cos.dim(D::Minus1)?;
        let (lo, hi) = (xs.narrow(2, 0, rd)?, xs.narrow(2, rd, rd)?);
        let a = (lo.broadcast_mul(cos)? - hi.broadcast_mul(sin)?)?;
        let b = (hi.broadcast_mul(cos)? + lo.broadcast_mul(sin)?)?;
        Ok(Tensor::cat(&[a, b], 2)?.to_dtype(DType::BF16)?)
    }

    fn block(&self, xs: &Tensor, table: &(Tensor, Tensor)) -> Result<Tensor> {
        let (n, dim) = xs.dims2()?;
        let hd = dim / self.heads;
        let linear = |xs: &Tensor, (w, b): &(Tensor, Tensor)| -> Result<Tensor> {
            Ok(xs.matmul(&w.t()?)?.broadcast_add(b)?)
        };
        let qkv = linear(&self.norm(xs, 0)?, &self.wqkv)?.reshape((n, 3, self.heads, hd))?;
        let part = |i: usize| -> Result<Tensor> {
            Ok(qkv
                .narrow(1, i, 1)?
                .squeeze(1)?
                .transpose(0, 1)?
                .contiguous()?)
        };
        let (q, k) = (Self::rope(&part(0)?, table)?, Self::rope(&part(1)?, table)?);
        let scores = (q.matmul(&k.t()?)? * (hd as f64).sqrt().recip())?;
        let weights = scores
            .broadcast_sub(&scores.max_keepdim(D::Minus1)?)?
            .exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        let out = weights.matmul(&part(2)?)?.transpose(0, 1)?;
        let xs = (xs + linear(&out.reshape((n, dim))?, &self.wo)?)?;
        let up = self.norm(&xs, 1)?.matmul(&self.w1.t()?)?;
        let inter = up.dim(1)? / 2;
        let gated = (up.narrow(1, 0, inter)?.silu()? * up.narrow(1, inter, inter)?)?;
        Ok((&xs + gated.matmul(&self.w2.t()?)?)?)
    }
}
