//! The n-gram memory: layout, random numbers, hashes, lookup, gate; and the token map.

use candle_core::Tensor;
use deepseek_v41::{
    Result,
    engram::{
        Engram, EngramConfig, EngramHashes, EngramLayout, NgramWindow, TokenMap, engram_hash,
        layout::multipliers, pcg64::Pcg64,
    },
    model::Config,
    quant::WeightFormat,
};

use crate::{
    case::{Case, f32s},
    read_json,
    tolerance::ENGRAM,
};

pub(super) fn run(case: &mut Case<'_>) -> Result<bool> {
    match case.name {
        "engram_real" => real(case)?,
        "multipliers_LAYERS_TERMS_VOCAB" => all_multipliers(case)?,
        "pcg64" => generator(case)?,
        "engram_fwd" => forward(case)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// The layout of the released model, from its configuration.
fn released_config(case: &Case<'_>) -> Result<EngramConfig> {
    let path = case.dir.join("config_released.json");
    let config = Config::from_json(&read_json(&path)?["inference"].to_string())?;
    config
        .engram()
        .ok_or_else(|| case.bad("config_released.json has no engram"))
}

/// `[T, layers, columns]`, as the files store it.
fn interleaved(hashes: &EngramHashes, layers: usize) -> Vec<i64> {
    let columns = hashes.columns();
    let places = (0..hashes.tokens()).flat_map(|t| (0..layers).map(move |l| (t, l)));
    let row = |(t, l): (usize, usize)| &hashes.layer(l)[t * columns..(t + 1) * columns];
    places.flat_map(row).map(|v| i64::from(*v)).collect()
}

/// The mask of the files is 0 for image tokens; the library's is 1.
fn image_mask(alive: &[i64]) -> Vec<u8> {
    alive.iter().map(|alive| u8::from(*alive == 0)).collect()
}

fn real(case: &mut Case<'_>) -> Result<()> {
    let cfg = released_config(case)?;
    let layout = EngramLayout::new(&cfg)?;
    let layers = layout.layers().len();
    let flat = |values: fn(&deepseek_v41::engram::LayerLayout) -> Vec<i64>| {
        layout
            .layers()
            .iter()
            .flat_map(values)
            .collect::<Vec<i64>>()
    };
    let primes = flat(|l| l.primes().iter().map(|v| i64::from(*v)).collect());
    let offsets = flat(|l| l.offsets().iter().map(|v| i64::from(*v)).collect());
    let factors = flat(|l| l.multipliers().iter().map(|v| *v as i64).collect());
    for (part, got) in [
        ("primes", primes),
        ("offsets", offsets),
        ("multipliers", factors),
    ] {
        let want = case.ints(part)?;
        case.exact(part, &got, &want)?;
    }

    // The ids of the case are compressed already.
    let pad = case.ids("pad_id")?[0];
    let vocab = cfg.compressed_vocab_size;
    let map = TokenMap::new((0..vocab as u32).collect(), vocab, pad)?;
    let (ids, mask) = (case.ids("compressed")?, case.ints("mask")?);
    let shape = case.shape("compressed")?;
    let (batch, len) = (shape[0], shape[1]);
    let chunks: Vec<usize> = case.arg("chunks")?;
    let (mut whole, mut chunked) = (Vec::new(), Vec::new());
    for b in 0..batch {
        let (ids, image) = (
            &ids[b * len..(b + 1) * len],
            image_mask(&mask[b * len..(b + 1) * len]),
        );
        let window = NgramWindow {
            ids,
            ..NgramWindow::default()
        };
        whole.extend(interleaved(&engram_hash(&[window], &layout, &map)?, layers));
        let mut at = 0;
        for n in &chunks {
            let from = at - at.min(layout.lookback());
            let window = NgramWindow {
                history: &ids[from..at],
                history_image_mask: Some(&image[from..at]),
                start: at,
                ids: &ids[at..at + n],
                image_mask: Some(&image[at..at + n]),
            };
            chunked.extend(interleaved(&engram_hash(&[window], &layout, &map)?, layers));
            at += n;
        }
    }
    for (part, got) in [("hashes", whole), ("hashes_masked", chunked)] {
        let want = case.ints(part)?;
        case.exact(part, &got, &want)?;
    }
    Ok(())
}

fn all_multipliers(case: &mut Case<'_>) -> Result<()> {
    let names: Vec<String> = case
        .data
        .names()
        .filter(|n| n.starts_with("multipliers_"))
        .map(str::to_owned)
        .collect();
    for name in names {
        let numbers: Vec<u64> = name.split('_').filter_map(|n| n.parse().ok()).collect();
        let [layers @ .., terms, vocab] = numbers.as_slice() else {
            return Err(case.bad(format!("`{name}` is not multipliers_LAYERS_TERMS_VOCAB")));
        };
        let mut got = Vec::new();
        for layer in layers {
            got.extend(
                multipliers(*layer as usize, *terms as usize, *vocab)?
                    .iter()
                    .map(|v| *v as i64),
            );
        }
        let want = case.data.integers(&name)?;
        case.exact(&name, &got, &want)?;
    }
    Ok(())
}

fn generator(case: &mut Case<'_>) -> Result<()> {
    let per_seed = case.shape("raw_as_i64")?[1];
    let mut raw = Vec::new();
    for seed in case.ints("seeds")? {
        let mut rng = Pcg64::from_seed(seed as u64);
        raw.extend((0..per_seed).map(|_| rng.next_u64() as i64));
    }
    let want = case.ints("raw_as_i64")?;
    case.exact("raw", &raw, &want)?;
    let per_bound = case.shape("bounded")?[1];
    let mut bounded = Vec::new();
    for bound in case.ints("bounds")? {
        let mut rng = Pcg64::from_seed(10_007);
        bounded.extend((0..per_bound).map(|_| rng.integer_up_to(bound as u64 - 1) as i64));
    }
    let want = case.ints("bounded")?;
    case.exact("bounded", &bounded, &want)
}

fn forward(case: &mut Case<'_>) -> Result<()> {
    let stream = case.tensor("x")?.flatten(0, 1)?;
    let (tokens, hc_mult, dim) = stream.dims3()?;
    let layer_ids: Vec<usize> = case.arg("engram_layer_ids")?;
    // The case is the second layer of its layout.
    let layer = 1;
    let cfg = EngramConfig {
        max_ngram_size: case.arg("engram_max_ngram_size")?,
        vocab_size: case.arg("engram_vocab_size")?,
        n_heads: case.arg("engram_n_heads")?,
        head_dim: case.arg("engram_head_dim")?,
        num_embeddings: case.arg("engram_num_embeddings")?,
        layer_ids,
        // The layer itself knows neither vocabulary nor padding.
        compressed_vocab_size: 2,
        pad_id: 0,
        dim,
        hc_mult,
        norm_eps: 1e-20,
        linear_format: WeightFormat::Fp8,
    };
    let names = [
        ("table", "embed.weight"),
        ("table_scale", "embed.scale"),
        ("wkv.weight", "wkv.weight"),
        ("wkv.scale", "wkv.scale"),
        ("q_weight", "q_weight"),
        ("k_weight", "k_weight"),
    ];
    let engram = Engram::new(&cfg, layer, case.weights_named(&names))?;
    let ids = case.ids("hash_ids")?;
    let columns = ids.len() / tokens;
    let rows = engram.gather(&Tensor::from_vec(ids, (tokens, columns), case.device)?)?;
    case.exact_tensor(&rows, "rows")?;
    let image = image_mask(&case.ints("mask")?);
    let image = Tensor::from_vec(image, tokens, case.device)?;
    for (part, mask) in [("y", None), ("y_masked", Some(&image))] {
        let got = f32s(&engram.forward(&stream, &rows, mask)?)?;
        let want = case.f32s(part)?;
        case.rms(part, &got, &want, ENGRAM)?;
    }
    Ok(())
}

/// The hashes of the released layout behind the released tokenizer's map.
pub(super) fn released(case: &mut Case<'_>) -> Result<bool> {
    let cfg = released_config(case)?;
    let layout = EngramLayout::new(&cfg)?;
    let token_map = ids(case, "token_map")?;
    let map = TokenMap::new(token_map, cfg.compressed_vocab_size, cfg.pad_id)?;
    let (all, mask) = (ids(case, "ids")?, case.data.integers("mask")?);
    let len = case.data.shape("ids")?[1];
    let mut got = Vec::new();
    for (ids, alive) in all.chunks(len).zip(mask.chunks(len)) {
        let image = image_mask(alive);
        let window = NgramWindow {
            ids,
            image_mask: Some(&image),
            ..NgramWindow::default()
        };
        got.extend(interleaved(
            &engram_hash(&[window], &layout, &map)?,
            layout.layers().len(),
        ));
    }
    let want = case.data.integers("hashes")?;
    case.exact("hashes", &got, &want)?;
    Ok(true)
}

fn ids(case: &Case<'_>, name: &str) -> Result<Vec<u32>> {
    Ok(case
        .data
        .integers(name)?
        .into_iter()
        .map(|v| v as u32)
        .collect())
}

/// The compressed id of every token of a small tokenizer.
pub(super) fn token_map(case: &mut Case<'_>) -> Result<bool> {
    if case.name != "token_map" {
        return Ok(false);
    }
    let path = case.dir.join("tokenizer_small.json");
    let json = std::fs::read(&path).map_err(|e| deepseek_v41::Error::io(&path, e))?;
    let tokenizer = deepseek_v41::Tokenizer::from_bytes(&json)?;
    let map: Vec<i64> = deepseek_v41::compressed_token_map(&tokenizer)?
        .into_iter()
        .map(i64::from)
        .collect();
    let size = map.iter().max().map_or(0, |max| max + 1);
    let (want, want_size) = (case.ints("table")?, case.ints("size")?);
    case.exact("table", &map, &want)?;
    case.exact("size", &[size], &want_size)?;
    Ok(true)
}
