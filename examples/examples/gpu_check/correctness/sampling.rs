//! Choosing tokens.

use super::*;
use deepseek_v41::{
    core::{
        ArgmaxWork, argmax, argmax_ref, argmax_sum,
        cuda::sample::{DrawRow, sample},
    },
    engram::pcg64::Pcg64,
    sampling::{Sampler, SamplingParams, TokenHistory},
};

pub(super) fn sampling(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    const INF: f32 = f32::INFINITY;
    for (rows, vocab) in [
        (1, 1),
        (3, 5),
        (2, 257),
        (16, 4096),
        (5, 129_280),
        (300, 3001),
    ] {
        // Whole numbers: ties at the top are common.
        let mut values = rng.f32s(rows * vocab, 3.0);
        values.iter_mut().for_each(|v| *v = v.round());
        for (i, odd) in [f32::NAN, INF, -INF, -0.0].into_iter().enumerate() {
            if rows > i + 1 {
                values[(i + 1) * vocab + rng.below(vocab)] = odd;
            }
        }
        if rows > 4 {
            values[4 * vocab..5 * vocab].fill(-INF);
        }
        let logits = Tensor::from_vec(values, (rows, vocab), &Device::Cpu)?;
        let shape = format!("{rows}x{vocab}");
        r.both("argmax", &shape, gpu, 0.0, &[&logits], |o, d| match d {
            Device::Cpu => {
                let rows = o[0].to_vec2::<f32>()?;
                let codes = rows.iter().map(|row| argmax_ref(row).code());
                Ok(Tensor::from_vec(codes.collect::<Vec<_>>(), rows.len(), d)?)
            }
            _ => argmax(&o[0]),
        })?;
        // Rows further apart than they are long, and a bias.
        let bias = rng.f32s(rows * vocab, 2.0).into_iter().map(f32::round);
        let bias = Tensor::from_vec(bias.collect::<Vec<_>>(), (rows, vocab), &Device::Cpu)?;
        let blocks = Tensor::stack(&[&bias, &logits], 1)?;
        let operands = [&blocks, &bias];
        r.both("argmax of sums", &shape, gpu, 0.0, &operands, |o, d| {
            let work = ArgmaxWork::new(rows, d)?;
            let logits = o[0].narrow(1, 1, 1)?.squeeze(1)?;
            argmax_sum(&logits, &o[1], &work)?;
            argmax_sum(&logits, &o[1], &work)
        })?;
    }
    draws(gpu, rng, r)
}

/// Tokens drawn on both sides from the same seeds, many in a row, so that the streams must stay together.
fn draws(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
    let params = |temperature, top_k, top_p, min_p| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        ..SamplingParams::default()
    };
    for params in [
        params(1.0, 0, 1.0, 0.0),
        params(0.6, 0, 0.95, 0.0),
        params(1.3, 0, 0.5, 0.0),
        params(1.0, 1, 1.0, 0.0),
        params(1.0, 50, 1.0, 0.0),
        params(0.8, 700, 0.9, 0.0),
        params(1.0, 20, 0.8, 0.1),
        params(2.0, 0, 1.0, 0.02),
        params(1e-6, 0, 0.9, 0.0),
        params(1.0, 1 << 20, 0.999, 0.0),
    ] {
        for (vocab, spread, whole) in [
            (7, 2.0, true),
            (4096, 3.0, false),
            (129_280, 4.0, false),
            (5000, 3.0, true),
        ] {
            differing(gpu, rng, r, &params, (vocab, spread, whole))?;
        }
    }
    // What nothing can be drawn from comes back without a token, and without a number used.
    let row = |values: Vec<f32>| Tensor::from_vec(values, (1, 3), gpu);
    let draw = DrawRow {
        state: 1,
        inc: 1,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
    };
    for values in [
        [0.0, f32::NAN, 1.0],
        [0.0, f32::INFINITY, 1.0],
        [f32::NEG_INFINITY; 3],
    ] {
        let logits = row(values.to_vec())?;
        let drawn = sample(&logits, &argmax(&logits)?, &[draw])?;
        let refused = drawn[0].token.is_none() && drawn[0].numbers == 0;
        r.error(
            "sample",
            &format!("{values:?}"),
            f64::from(u8::from(!refused)),
            0.0,
        );
    }
    // Vocabularies that the kernels do not serve are the host's.
    for (vocab, left) in [(1 << 19, false), ((1 << 19) + 1, true)] {
        let logits = Tensor::from_vec(rng.f32s(2 * vocab, 3.0), (2, vocab), gpu)?;
        let drawn = sample(&logits, &argmax(&logits)?, &[draw, draw])?;
        let holds = drawn
            .iter()
            .all(|d| d.token.is_none() == left && (d.numbers == 0) == left);
        r.holds(
            "sample, left to the host",
            &format!("{vocab}, {left}"),
            holds,
        );
    }
    Ok(())
}

/// Four sequences with seeds of their own, a dozen tokens each.
fn differing(
    gpu: &Device,
    rng: &Random,
    r: &mut Report,
    params: &SamplingParams,
    (vocab, spread, whole): (usize, f32, bool),
) -> Result<()> {
    const ROWS: usize = 4;
    let seeds: Vec<u64> = (0..ROWS).map(|_| rng.bits()).collect();
    let mut samplers = Vec::new();
    for seed in &seeds {
        samplers.push(Sampler::new(SamplingParams {
            seed: Some(*seed),
            ..params.clone()
        })?);
    }
    let mut streams: Vec<Pcg64> = seeds.iter().map(|seed| Pcg64::from_seed(*seed)).collect();
    let (mut wrong, mut left, mut all) = (0, 0, 0);
    for _ in 0..12 {
        let mut values = rng.f32s(ROWS * vocab, spread);
        if whole {
            // Ties everywhere, at the limits too.
            values.iter_mut().for_each(|v| *v = v.round());
        }
        values[rng.below(vocab)] = f32::NEG_INFINITY;
        let logits = Tensor::from_vec(values, (ROWS, vocab), &Device::Cpu)?;
        let rows: Vec<DrawRow> = streams
            .iter()
            .map(|stream| DrawRow {
                state: stream.parts().0,
                inc: stream.parts().1,
                temperature: params.temperature,
                top_k: params.top_k,
                top_p: params.top_p,
                min_p: params.min_p,
            })
            .collect();
        let on_gpu = logits.to_device(gpu)?;
        let drawn = sample(&on_gpu, &argmax(&on_gpu)?, &rows)?;
        for (i, row) in logits.to_vec2::<f32>()?.iter().enumerate() {
            let token = samplers[i].sample(row, TokenHistory::default())?.token;
            all += 1;
            match drawn[i].token {
                Some(own) => {
                    wrong += usize::from(own != token);
                    streams[i].advance(drawn[i].numbers);
                }
                // The host decides: both go on from another seed.
                None => {
                    left += 1;
                    let seed = rng.bits();
                    streams[i] = Pcg64::from_seed(seed);
                    samplers[i] = Sampler::new(SamplingParams {
                        seed: Some(seed),
                        ..params.clone()
                    })?;
                }
            }
        }
    }
    let shape = format!(
        "{vocab}, t {} k {} p {} min {}{}, {left} of {all} left",
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        if whole { ", ties" } else { "" }
    );
    r.error("sample", &shape, wrong as f64, 0.0);
    Ok(())
}
