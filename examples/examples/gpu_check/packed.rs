//! The embedded model with packed caches: the same text as with bf16 ones, and files that go anywhere.

use std::{fs, path::Path};

use candle_core::Device;
use deepseek_v41::{
    DeepSeekV41, Error, Event, GenerateOptions, LoadOptions, Result, Session, Speculation,
    attention::KvFormat,
    model::Limits,
    speculative::{DraftLength, PromptLookup},
};

use crate::correctness::Report;

const FORMATS: [KvFormat; 2] = [KvFormat::Bf16, KvFormat::Packed];

fn limits(kv_format: KvFormat) -> Limits {
    Limits {
        max_len: 512,
        kv_format,
        ..Limits::default()
    }
}

fn write(
    session: &mut Session<'_>,
    prompt: &str,
    n: usize,
    speculation: &Speculation,
) -> Result<Vec<u32>> {
    let options = GenerateOptions {
        max_tokens: n,
        ignore_eos: true,
        speculation: speculation.clone(),
        ..GenerateOptions::default()
    };
    let mut tokens = Vec::new();
    for event in session.generate(prompt, &options)? {
        if let Event::Token(token) = event? {
            tokens.push(token.token);
        }
    }
    Ok(tokens)
}

fn saved(session: &mut Session<'_>, path: &Path) -> Result<Vec<u8>> {
    session.save(path)?;
    fs::read(path).map_err(|e| Error::io(path, e))
}

pub(crate) fn tiny(gpu: &Device, r: &mut Report) -> Result<()> {
    let load = |device: &Device| {
        DeepSeekV41::tiny_with(&LoadOptions {
            device: device.clone(),
            ..LoadOptions::default()
        })
    };
    let (cpu, model) = (load(&Device::Cpu)?, load(gpu)?);
    let path = std::env::temp_dir().join(format!("gpu_check-{}.packed", std::process::id()));
    let differs = |differs: bool| f64::from(u8::from(differs));
    for (name, speculation) in [
        ("plain", Speculation::Off),
        (
            "prompt lookup",
            Speculation::PromptLookup(PromptLookup::default()),
        ),
        ("draft head", Speculation::DraftHead(DraftLength::Full)),
    ] {
        // A text, put away, brought back in the other format, and gone on with.
        let mut runs = Vec::new();
        for (format, other) in FORMATS.into_iter().zip([KvFormat::Packed, KvFormat::Bf16]) {
            let mut session = model.session(limits(format))?;
            let mut tokens = write(&mut session, "Once upon a time", 100, &speculation)?;
            let file = saved(&mut session, &path)?;
            drop(session);
            let mut session = Session::restore(&model, limits(other), &path)?;
            tokens.extend(write(&mut session, " and", 60, &speculation)?);
            runs.push((tokens, file));
        }
        let same = differs(runs[0].0 != runs[1].0);
        r.error(
            "packed text = bf16",
            &format!("{name}, 160 tokens"),
            same,
            0.0,
        );
        r.error(
            "packed file = bf16",
            name,
            differs(runs[0].1 != runs[1].1),
            0.0,
        );
    }
    // A file of the CPU through the GPU, and the other way round: nothing in it changes.
    for (from, to, name) in [(&cpu, &model, "from the CPU"), (&model, &cpu, "to the CPU")] {
        for format in FORMATS {
            let mut session = from.session(limits(format))?;
            write(&mut session, "Once upon a time", 40, &Speculation::Off)?;
            let file = saved(&mut session, &path)?;
            drop(session);
            for back in FORMATS {
                let mut session = Session::restore(to, limits(back), &path)?;
                let again = saved(&mut session, &path)?;
                let shape = format!("{name}, {format:?} to {back:?}");
                r.error(
                    "a file brought back and saved",
                    &shape,
                    differs(again != file),
                    0.0,
                );
            }
        }
    }
    fs::remove_file(&path).map_err(|e| Error::io(&path, e))
}
