//! Formats, quantisers and linear layers.

use super::*;

pub(super) fn quant(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
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
    // A prompt's products at the release's widths.
    for (n, k, m) in [(32_768, 1280, 4096), (1280, 5120, 300), (5120, 8192, 300)] {
        let weights = rng.weight("", n, k, WeightFormat::Fp8);
        let x = rng.bf16(&[m, k], 1.0)?;
        let shape = format!("M{m} N{n} K{k}");
        r.both("linear Fp8", &shape, gpu, PRODUCT, &[&x], |o, d| {
            Linear::new(k, n, WeightFormat::Fp8, checkpoint(weights.clone(), d))?.forward(&o[0])
        })?;
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
    for (g, k, n, m) in [
        (2, 64, 32, 3),
        (8, 4096, 1024, 2),
        (4, 128, 64, 33),
        (3, 192, 256, 67),
        (2, 96, 128, 130),
        (8, 4096, 1024, 130),
    ] {
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
