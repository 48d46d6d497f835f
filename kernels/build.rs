//! Compiles each `<group>/<stem>.cu` into one fatbin and writes the table that `src/lib.rs` includes.
//! Without the feature `cuda` it does nothing, so that a default build needs no CUDA toolkit.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// One folder per crate whose ops the kernels serve.
const GROUPS: [&str; 7] = [
    "core",
    "quant",
    "moe",
    "attention",
    "hyperconn",
    "engram",
    "vision",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-env-changed=CUDA_COMPUTE_CAP");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(message) = build() {
        // Cargo prints these as the reason and fails the build.
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn build() -> Result<(), String> {
    let nvcc = find_nvcc()?;
    let chips = chips()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    // Headers are shared across groups: any change rebuilds everything, which takes seconds.
    println!("cargo::rerun-if-changed=common");
    let mut sources = BTreeMap::new();
    for group in GROUPS {
        println!("cargo::rerun-if-changed={group}");
        for entry in fs::read_dir(group).map_err(|e| format!("{group}: {e}"))? {
            let path = entry.map_err(|e| format!("{group}: {e}"))?.path();
            if path.extension().is_some_and(|e| e == "cu") {
                let stem = stem_of(&path)?;
                if let Some(other) = sources.insert(stem.clone(), path.clone()) {
                    return Err(format!(
                        "two kernel files share the stem `{stem}`: {} and {}",
                        other.display(),
                        path.display()
                    ));
                }
            }
        }
    }

    compile_all(&nvcc, &chips, &sources, &out)?;

    let mut table = String::new();
    for stem in sources.keys() {
        let image = out.join(format!("{stem}.fatbin"));
        let _ = writeln!(
            table,
            "/// `{stem}.cu`.\npub const {}: Module = Module {{ name: \"{stem}\", image: include_bytes!({:?}) }};",
            stem.to_uppercase(),
            image.display().to_string()
        );
    }
    let names: Vec<String> = sources.keys().map(|s| s.to_uppercase()).collect();
    let _ = writeln!(
        table,
        "/// Every module, in the order of their names.\npub static MODULES: &[Module] = &[{}];",
        names.join(", ")
    );
    fs::write(out.join("modules.rs"), table).map_err(|e| format!("modules.rs: {e}"))
}

fn stem_of(path: &Path) -> Result<String, String> {
    path.file_stem()
        .and_then(|s| s.to_str())
        .map(str::to_owned)
        .ok_or_else(|| format!("{}: not a usable file name", path.display()))
}

/// `$CUDA_HOME/bin/nvcc` and nothing else: `$NVCC` may be a wrapper meant for another crate's sources.
fn find_nvcc() -> Result<PathBuf, String> {
    let hint = "run `kernels/install-cuda.sh` (it needs no root and no GPU), then `source` the env.sh it names";
    let home = env::var_os("CUDA_HOME").ok_or_else(|| {
        format!("feature `cuda`: CUDA_HOME is not set, so nvcc cannot be found; {hint}")
    })?;
    let nvcc = Path::new(&home).join("bin/nvcc");
    if nvcc.is_file() {
        Ok(nvcc)
    } else {
        Err(format!(
            "feature `cuda`: no nvcc at {}; {hint}",
            nvcc.display()
        ))
    }
}

/// Chips to add machine code for, as 80, 86, 90, …: Hopper and `CUDA_COMPUTE_CAP`. PTX for 80 is always there and
/// serves every later one, at the price of a compilation when it is first loaded.
fn chips() -> Result<Vec<u32>, String> {
    match env::var("CUDA_COMPUTE_CAP") {
        Err(_) => Ok(vec![90]),
        Ok(text) => match text.trim().replace('.', "").parse::<u32>() {
            Ok(90) => Ok(vec![90]),
            Ok(cap) if cap >= 80 => Ok(vec![90, cap]),
            _ => Err(format!(
                "CUDA_COMPUTE_CAP=`{text}`: expected a number from 80 on, such as 80, 86 or 90"
            )),
        },
    }
}

fn compile_all(
    nvcc: &Path,
    chips: &[u32],
    sources: &BTreeMap<String, PathBuf>,
    out: &Path,
) -> Result<(), String> {
    let threads = env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse::<usize>().ok())
        .unwrap_or(1)
        .max(1);
    let work: Vec<_> = sources.iter().collect();
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads.min(work.len()))
            .map(|first| {
                let work = &work;
                scope.spawn(move || {
                    work.iter()
                        .skip(first)
                        .step_by(threads)
                        .try_for_each(|(stem, cu)| compile(nvcc, chips, stem, cu, out))
                })
            })
            .collect();
        handles
            .into_iter()
            .map(|h| {
                h.join()
                    .unwrap_or_else(|_| Err("a compile thread panicked".into()))
            })
            .collect()
    });
    results.into_iter().collect()
}

fn compile(nvcc: &Path, chips: &[u32], stem: &str, cu: &Path, out: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(["-O3", "-std=c++17", "--fatbin"]);
    if stem.ends_with("_sm90") {
        // wgmma and setmaxnreg exist in the `a` target alone, whose code runs on sm_90 alone.
        command.arg("-gencode=arch=compute_90a,code=sm_90a");
    } else {
        command.arg("-gencode=arch=compute_80,code=compute_80");
        for chip in chips {
            command.arg(format!("-gencode=arch=compute_{chip},code=sm_{chip}"));
        }
    }
    command
        .arg("-o")
        .arg(out.join(format!("{stem}.fatbin")))
        .arg(cu);
    let output = command
        .output()
        .map_err(|e| format!("{}: {e}", nvcc.display()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!(
            "nvcc failed on {}:\n{}{}",
            cu.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ))
    }
}
