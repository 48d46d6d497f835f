//! Text from the small trained model that ships with the library: nothing to download.
//!
//!     cargo run --release --example quickstart -- "Once upon a time"

use std::io::Write;

use deepseek_v41::{DeepSeekV41, GenerateOptions, Result};

fn main() -> Result<()> {
    let prompt = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "Once upon a time".into());
    let model = DeepSeekV41::tiny()?;
    print!("{prompt}");
    for piece in model.generate(prompt, &GenerateOptions::default())?.text() {
        print!("{}", piece?);
        std::io::stdout().flush().ok();
    }
    println!();
    Ok(())
}
