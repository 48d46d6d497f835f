//! Choosing tokens.

use super::*;
use deepseek_v41::core::{argmax, argmax_ref};

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
    }
    Ok(())
}
