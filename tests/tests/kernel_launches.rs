//! Launches pass what kernels take.
//!
//! Nothing checks a launch against its kernel when either is compiled: an argument more, less or of
//! another width shows as wrong numbers on a GPU. So their sources are compared here, on any machine.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files below `dir` that end in `suffix`.
fn files(dir: &Path, suffix: &str) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir)
        .expect("a folder of the repository")
        .flatten()
    {
        let path = entry.path();
        if path.is_dir() {
            out.extend(files(&path, suffix));
        } else if path.to_string_lossy().ends_with(suffix) {
            out.push(path);
        }
    }
    out
}

/// Without `//` comments and joined lines.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a source file");
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""));
    lines
        .map(|line| line.trim_end_matches('\\').to_owned() + "\n")
        .collect()
}

/// The text between the parenthesis at the start of `s` and its match, and what follows.
fn parenthesised(s: &str) -> Option<(&str, &str)> {
    let mut depth = 0;
    for (i, c) in s.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return Some((&s[1..i], &s[i + 1..]));
        }
    }
    None
}

/// One letter an argument: P pointer, S scopes, I int, L int64, U u32, Q u64, F float.
fn kernel_args(list: &str) -> String {
    let letter = |arg: &str| match arg.trim().trim_start_matches("const __grid_constant__ ") {
        arg if arg.contains('*') => 'P',
        arg if arg.starts_with("Scopes") => 'S',
        arg if arg.starts_with("int64_t") => 'L',
        arg if arg.starts_with("uint64_t") => 'Q',
        arg if arg.starts_with("uint32_t") => 'U',
        arg if arg.starts_with("int ") => 'I',
        arg if arg.starts_with("float ") => 'F',
        _ => '?',
    };
    list.split(',').map(letter).collect()
}

/// Kernels of a file and their arguments. Those that a macro defines keep what comes before its parameter:
/// `experts_up_##NAME` as `experts_up_`.
fn kernels_of(path: &Path) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let source = code(path);
    for piece in source.split("extern \"C\" __global__ void").skip(1) {
        let mut rest = piece.trim_start();
        while let Some(bound) = rest.strip_prefix("__") {
            // `__launch_bounds__(..)` and the like.
            let open = bound.find('(').expect("an attribute has arguments");
            rest = parenthesised(&bound[open..])
                .expect("closed")
                .1
                .trim_start();
        }
        let Some(open) = rest.find('(') else { continue };
        let name = rest[..open].split('#').next().unwrap_or("").trim();
        let (args, _) = parenthesised(&rest[open..]).expect("closed");
        // A macro whose whole name is its parameter is known by its file.
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or("");
        let name = if name == "NAME" { stem } else { name };
        out.push((name.to_owned(), kernel_args(args)));
    }
    out
}

/// All kernels by name.
fn kernels() -> HashMap<String, String> {
    files(&root().join("kernels"), ".cu")
        .iter()
        .flat_map(|path| kernels_of(path))
        .collect()
}

/// `(file, name as written, arguments)` of every launch.
fn launches() -> Vec<(String, String, String)> {
    let mut out = Vec::new();
    for path in files(&root().join("crates"), ".rs") {
        let source = code(&path);
        for (at, _) in source.match_indices("Launch::new(") {
            let (head, mut rest) = parenthesised(&source[at + 11..]).expect("closed");
            let name = head
                .rsplit(',')
                .find(|part| !part.trim().is_empty())
                .unwrap_or("");
            let mut args = String::new();
            loop {
                rest = rest.trim_start();
                let Some(call) = rest.strip_prefix('.') else {
                    break;
                };
                let open = call.find('(').expect("a method call");
                args.push(match &call[..open] {
                    "clusters" => {
                        rest = parenthesised(&call[open..]).expect("closed").1;
                        continue;
                    }
                    "ptr" | "maybe" => 'P',
                    "scopes" => 'S',
                    "int" => 'I',
                    "long" => 'L',
                    "u32" => 'U',
                    "u64" => 'Q',
                    "f32" => 'F',
                    _ => '?',
                });
                rest = parenthesised(&call[open..]).expect("closed").1;
            }
            let file = path
                .strip_prefix(root())
                .unwrap_or(&path)
                .display()
                .to_string();
            out.push((file, name.trim().trim_matches('"').to_owned(), args));
        }
    }
    out
}

#[test]
fn arguments_are_those_of_the_kernels() {
    let kernels = kernels();
    let launches = launches();
    assert!(
        kernels.len() > 30 && launches.len() > 20,
        "{} {}",
        kernels.len(),
        launches.len()
    );
    for (file, name, args) in launches {
        // Names held in a variable stand for families with one signature.
        let few = file.ends_with("quant/src/cuda/few.rs");
        let known = match (
            file.contains("/quant/"),
            file.contains("/moe/"),
            name.as_str(),
        ) {
            (true, _, "name") if few && args.ends_with('F') => "fp8_few_swiglu_m1",
            (true, _, "name") if few && args.starts_with("PPPPP") => "fp8_few_m",
            (true, _, "name") if few => {
                assert_eq!(kernels["fp8_few_plain_m"], kernels["fp8_few_raw_m1"]);
                "fp8_few_plain_m"
            }
            (true, _, "name") if args == kernels["fp8_linear"] => continue,
            (true, _, "name") => "fp8_many_256",
            (.., "scores") => {
                assert_eq!(kernels["index_scores_fp4"], kernels["index_scores_bf16"]);
                "index_scores_fp4"
            }
            (_, true, "up") => "experts_up_",
            (_, true, "down") => "experts_down_",
            (.., "name") if file.contains("/vision/") => "vit_attention_",
            (.., "self.name") => "sparse_attn_few_",
            // `sparse_attn` takes D behind H, and the Hopper form does not.
            (_, _, "name") => {
                for kernel in [
                    "sparse_attn",
                    "sparse_attn_packed",
                    "sparse_attn_sm90",
                    "sparse_attn_packed_sm90",
                ] {
                    assert!(kernels[kernel].starts_with(&args), "{file}: {args}");
                }
                continue;
            }
            (.., name) => name,
        };
        let kernel = kernels
            .get(known)
            .unwrap_or_else(|| panic!("{file}: no kernel `{known}`"));
        assert_eq!(&args, kernel, "{file}: arguments of `{known}`");
    }
}

/// The text of a source file and of the headers it includes.
fn with_headers(path: &Path) -> String {
    let text = code(path);
    let mut all = text.clone();
    for line in text.lines() {
        if let Some(name) = line.trim().strip_prefix("#include \"") {
            let folder = path.parent().expect("a file in a folder");
            all += &with_headers(&folder.join(name.trim_end_matches('"')));
        }
    }
    all
}

/// Kernels that may begin early are known to wait. `kernels/tests/overlapping.rs` reads the same from what nvcc
/// makes of them, where there is an nvcc.
#[test]
fn kernels_that_begin_early_wait() {
    let list = code(&root().join("kernels/src/lib.rs"));
    let list = list.split("OVERLAPPING").nth(1).expect("the list");
    let names: Vec<_> = list
        .split("];")
        .next()
        .unwrap_or("")
        .split('"')
        .skip(1)
        .step_by(2)
        .collect();
    assert!(names.len() > 30, "{names:?}");
    let mut waiting = Vec::new();
    for path in files(&root().join("kernels"), ".cu") {
        // Defined in a header that all include, so called where it is there twice.
        if with_headers(&path).matches("after_previous(").count() > 1 {
            waiting.extend(kernels_of(&path).into_iter().map(|(name, _)| name));
        }
    }
    for name in names {
        // Those that a macro defines are known by what they have in common.
        let waits = waiting.iter().any(|known| name.starts_with(known.as_str()));
        assert!(waits, "{name} may begin early and its source does not wait");
    }
}
