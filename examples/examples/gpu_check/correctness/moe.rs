//! Gate and experts.

use super::*;

pub(super) fn moe(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
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
        (5120, 2304, 4, 3, 300),
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
