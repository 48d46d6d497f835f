//! Safetensors files made by hand, honest and otherwise.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;

use deepseek_v41_core::{Error, LoadPolicy, StoredDtype, Weights};

/// A file of this header and data, whether or not they fit each other.
pub(crate) fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

/// A valid file of these tensors, laid out in the order given.
pub(crate) fn valid(tensors: &[(&str, StoredDtype, &[usize], Vec<u8>)]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype:?}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        ));
        data.extend_from_slice(bytes);
    }
    file(&format!("{{{}}}", entries.join(",")), &data)
}

/// `n` different bytes, beginning with `seed`.
pub(crate) fn ramp(n: usize, seed: u8) -> Vec<u8> {
    (0..n)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

/// A checkpoint directory of these files.
pub(crate) fn dir(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temporary directory");
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).expect("writable");
    }
    dir
}

/// An index that puts each tensor into a file.
pub(crate) fn index(map: &[(&str, &str)]) -> Vec<u8> {
    let entries: Vec<String> = map
        .iter()
        .map(|(name, file)| format!(r#""{name}":"{file}""#))
        .collect();
    format!(
        r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#,
        entries.join(",")
    )
    .into_bytes()
}

/// The error of opening `dir`, the same under both policies.
#[track_caller]
pub(crate) fn open_err(dir: &Path) -> Error {
    let [mapped, read] = [LoadPolicy::Mmap, LoadPolicy::Read]
        .map(|policy| Weights::open(dir, policy).expect_err("a hostile checkpoint was accepted"));
    assert_eq!(
        format!("{mapped:?}"),
        format!("{read:?}"),
        "the policies disagree"
    );
    mapped
}
