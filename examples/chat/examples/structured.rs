//! JSON of a given schema from the embedded model: a grammar rules out every token that could not be
//! continued to a valid value. The model knows a toy world, so only the form is guaranteed.
//!
//!     cargo run --release -p deepseek-v41-examples-chat --example structured -- "Tell me about a fox."

use deepseek_v41::{
    DeepSeekV41, GenerateOptions, Prompt, Result, SamplingParams, grammar::Grammar,
};
use serde_json::{Value, json};

fn main() -> Result<()> {
    let question = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "Tell me about a fox.".into());
    let schema = json!({
        "type": "object",
        "properties": {
            "animal": {"enum": ["fox", "snail", "owl", "cow"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "friends": {"type": "array", "items": {"enum": ["Otto", "Ruby", "Oscar"]}, "maxItems": 3},
        },
        "required": ["animal", "age", "friends"],
        "additionalProperties": false,
    });
    let model = DeepSeekV41::tiny()?;
    let grammar = Grammar::json_schema(&model, schema)?;
    let options = GenerateOptions {
        sampling: SamplingParams {
            temperature: 0.8,
            seed: Some(7),
            ..SamplingParams::default()
        },
        ..GenerateOptions::default()
    };
    let prompt = format!("<｜begin▁of▁sentence｜><｜User｜>{question}<｜Assistant｜></think>");
    let mut generation = model.generate(Prompt::Rendered(prompt), &options)?;
    generation.sampler().add_hook(grammar.hook()?);
    let mut text = String::new();
    for piece in generation.text() {
        text.push_str(&piece?);
    }
    match serde_json::from_str::<Value>(&text) {
        Ok(value) => println!("{value:#}"),
        Err(err) => println!("cut short: {err}: {text}"),
    }
    Ok(())
}
