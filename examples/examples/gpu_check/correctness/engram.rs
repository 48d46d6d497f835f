//! N-gram hashes, tables and gate.

use super::*;

pub(super) fn engram(gpu: &Device, rng: &Random, r: &mut Report) -> Result<()> {
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
