//! The n-gram hash used alone: which table rows a sentence falls into, and that chunks do not show.
//!
//!     cargo run --release --example engram_hash -- "The cat sat. The cat sat."
//!
//! Prints one line a token: position, text, compressed id, and its rows in the first Engram layer of the
//! embedded tiny model (2-, 3- and 4-grams, two heads each). Case and leading spaces do not matter to
//! the hash: `The` and ` The` are one, and by the last token the sentence has met all its rows again.

use deepseek_v41::{
    AddedTokens, DeepSeekV41, Result, SpecialTokens,
    engram::{EngramLayout, NgramWindow, engram_hash},
    token_map,
};

fn main() -> Result<()> {
    let text = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "The cat sat. The cat sat.".to_owned());
    // The tiny model lends its tokenizer and its config; its weights play no part.
    let model = DeepSeekV41::tiny()?;
    let tokenizer = model.tokenizer();
    let cfg = model
        .config()
        .engram()
        .expect("the tiny model has engram layers");

    // Primes and multipliers come from the config alone, the compressed ids from the tokenizer.
    let layout = EngramLayout::new(&cfg)?;
    let map = token_map(tokenizer, cfg.compressed_vocab_size, cfg.pad_id)?;

    let ids = tokenizer.encode(&text, AddedTokens::AsText)?;
    let whole = engram_hash(
        &[NgramWindow {
            ids: &ids,
            ..Default::default()
        }],
        &layout,
        &map,
    )?;
    let columns = layout.columns();
    for (p, (&id, rows)) in ids
        .iter()
        .zip(whole.layer(0).chunks_exact(columns))
        .enumerate()
    {
        let token = format!("{:?}", tokenizer.decode(&[id], SpecialTokens::Keep)?);
        println!("{p:3}  {token:10}  {:5}  {rows:?}", map.compress(id)?);
    }

    // The same from single tokens, each given the three ids before it.
    for (p, id) in ids.iter().enumerate() {
        let history = &ids[p.saturating_sub(layout.lookback())..p];
        let ids = std::slice::from_ref(id);
        let one = NgramWindow {
            history,
            start: p,
            ids,
            ..Default::default()
        };
        let hashes = engram_hash(&[one], &layout, &map)?;
        assert_eq!(
            hashes.layer(0),
            &whole.layer(0)[p * columns..(p + 1) * columns]
        );
    }
    println!("token by token: the same rows");
    Ok(())
}
