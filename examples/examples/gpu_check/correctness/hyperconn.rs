//! The stream and its coefficients.

use super::*;

pub(super) fn hyperconn(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
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
