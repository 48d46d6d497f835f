//! Hyper-connections used alone: a stream of four copies through two sublayers.
//!
//!     cargo run --release --example hyperconn_step
//!
//! Prints the coefficients one token gets, shows that `comb` is doubly stochastic, and that the mix a
//! sublayer derives is used by the one after it.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Result, Weights,
    hyperconn::{HyperConn, HyperConnConfig, PreMix, Site, hc_expand, hc_mean},
};

/// Smooth made-up numbers: the example needs no checkpoint.
fn wave(len: usize, step: f32, size: f32, shape: &[usize]) -> Result<Tensor> {
    let data = (0..len).map(|i| (i as f32 * step).sin() * size).collect();
    Ok(Tensor::from_vec::<_, f32>(data, shape, &Device::Cpu)?)
}

#[allow(
    clippy::print_stdout,
    reason = "the numbers are what this program is for"
)]
fn main() -> Result<()> {
    let (tokens, c, dim) = (2, 4, 64);
    let cfg = HyperConnConfig {
        hc_mult: c,
        dim,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-20,
    };
    let width = (2 + c) * c;
    let mut weights = HashMap::new();
    for (site, step) in [("attn", 0.7), ("ffn", 1.3)] {
        weights.insert(
            format!("hc_{site}_fn"),
            wave(width * c * dim, step, 0.2, &[width, c * dim])?,
        );
        weights.insert(
            format!("hc_{site}_base"),
            wave(width, 2.0 * step, 1.0, &[width])?,
        );
        weights.insert(format!("hc_{site}_scale"), wave(3, 0.1, 1.0, &[3])?.cos()?);
    }
    let vb = Weights::from_tensors(weights)?.var_builder(&Device::Cpu);
    let attn = HyperConn::new(&cfg, Site::Attn, vb.clone())?;
    let ffn = HyperConn::new(&cfg, Site::Ffn, vb)?;

    let embedded = wave(tokens * dim, 0.05, 1.0, &[tokens, dim])?.to_dtype(DType::BF16)?;
    let stream = hc_expand(&embedded, c)?;

    // The coefficients of the first sublayer, looked at by hand.
    let mix = attn.mixes(&stream)?;
    println!("token 0");
    println!(
        "  pre  {:.3?}  (for the next sublayer)",
        mix.pre.tensor().get(0)?.to_vec1::<f32>()?
    );
    println!("  post {:.3?}", mix.post.get(0)?.to_vec1::<f32>()?);
    let comb = mix.comb.get(0)?;
    for row in comb.to_vec2::<f32>()? {
        println!(
            "  comb {row:.3?}  row sums to {:.5}",
            row.iter().sum::<f32>()
        );
    }
    println!("  columns sum to {:.5?}", comb.sum(0)?.to_vec1::<f32>()?);

    // A block: two sublayers, each fed by the mix of the one before. The closures stand in for norm
    // and attention, norm and experts; the first starts from copy 0 alone.
    let first = PreMix::one_hot(tokens, c, &Device::Cpu)?;
    let (stream, carried) = attn.around(&stream, first, |x| Ok((x * 0.5)?))?;
    let (stream, _next_block) = ffn.around(&stream, carried, |x| Ok(x.tanh()?))?;

    let mean = hc_mean(&stream)?.to_dtype(DType::F32)?;
    println!(
        "stream {:?}, mean of the copies of token 0 starts",
        stream.dims()
    );
    println!("  {:.3?}", mean.get(0)?.narrow(0, 0, 6)?.to_vec1::<f32>()?);
    Ok(())
}
