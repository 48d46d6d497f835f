//! Kernels that begin before the one ahead has ended wait for it: what `OVERLAPPING` promises, read from the PTX that nvcc makes of them.
#![cfg(feature = "cuda")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use deepseek_v41_kernels::{MODULES, OVERLAPPING};

/// Kernels that read weights before they wait.
const AHEAD: [&str; 6] = [
    "bf16_linear",
    "fp8_few",
    "fp8_linear",
    "gate_one",
    "hc_step",
    "query_heads",
];

fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut out = Vec::new();
    for group in ["core", "quant", "moe", "attention", "hyperconn", "engram"] {
        for entry in fs::read_dir(root.join(group)).expect("a folder of kernels") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|e| e == "cu") {
                out.push(path);
            }
        }
    }
    out
}

/// The PTX of every kernel of a source file, by name.
fn entries(source: &Path) -> BTreeMap<String, String> {
    let home = std::env::var("CUDA_HOME").expect("CUDA_HOME, as for the build");
    let stem = source.file_stem().and_then(|s| s.to_str()).expect("a name");
    let arch = if stem.ends_with("_sm90") { "90a" } else { "90" };
    let made = Command::new(Path::new(&home).join("bin/nvcc"))
        .args(["-O3", "-std=c++17", "--ptx", "-o", "-"])
        .arg(format!("-arch=compute_{arch}"))
        .arg(source)
        .output()
        .expect("nvcc runs");
    assert!(made.status.success(), "{}: nvcc failed", source.display());
    let text = String::from_utf8(made.stdout).expect("PTX is text");
    let kernels = text.split(".entry ").skip(1);
    kernels
        .map(|kernel| {
            let name = kernel.split('(').next().unwrap_or("").trim();
            (name.to_owned(), kernel.to_owned())
        })
        .collect()
}

#[test]
fn overlapping_kernels_wait_before_they_write() {
    let mut unseen: Vec<_> = OVERLAPPING.to_vec();
    assert!(unseen.is_sorted(), "the list is in order");
    assert!(!MODULES.is_empty());
    for source in sources() {
        let text = fs::read_to_string(&source).expect("a source file");
        let file = source.display();
        // Kernels call it by way of functions of their file or of the headers that several files share.
        let shared = ["few_product.cuh", "linear.cuh"];
        if !text.contains("after_previous") && !shared.iter().any(|header| text.contains(header)) {
            continue;
        }
        for (name, ptx) in entries(&source) {
            let Some(at) = unseen.iter().position(|kernel| *kernel == name) else {
                continue;
            };
            unseen.remove(at);
            let (before, after) = ptx
                .split_once("griddepcontrol.wait")
                .unwrap_or_else(|| panic!("{file}: {name} does not wait"));
            assert!(
                after.contains("griddepcontrol.launch_dependents"),
                "{file}: {name}"
            );
            let instructions = |start: &str| {
                before
                    .split_whitespace()
                    .any(|word| word.starts_with(start))
            };
            for write in ["st.global", "st.relaxed", "atom.", "red."] {
                assert!(
                    !instructions(write),
                    "{file}: {name} writes ({write}) before it waits"
                );
            }
            let early = ["ld.global", "ld.relaxed", "cp.async"]
                .iter()
                .any(|start| instructions(start));
            let may = AHEAD.iter().any(|stem| name.starts_with(stem));
            assert!(may || !early, "{file}: {name} reads before it waits");
        }
    }
    assert!(unseen.is_empty(), "no source has {unseen:?}");
}
