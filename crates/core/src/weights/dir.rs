//! Finding and opening the files of a checkpoint directory.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use memmap2::Mmap;
use serde::Deserialize;

use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// How the bytes of a checkpoint come into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadPolicy {
    /// Map the files; pages are read when a layer first uses them. The files must not change while
    /// the weights are in use.
    #[default]
    Mmap,
    /// Read the files whole, for file systems where mapping is slow and memory that is shared with
    /// the accelerator.
    Read,
}

/// A shard with the names the index expects in it (`None` without an index).
pub(super) struct ShardFile {
    pub(super) path: PathBuf,
    pub(super) bytes: Bytes,
    pub(super) expected: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens every shard of `dir`: those of the index, or `model.safetensors`, or all `*.safetensors`.
pub(super) fn open_shards(dir: &Path, policy: LoadPolicy) -> Result<Vec<ShardFile>> {
    let index_path = dir.join(INDEX);
    if index_path.is_file() {
        let text = std::fs::read(&index_path).map_err(|e| Error::io(&index_path, e))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|e| Error::checkpoint(&index_path, format!("not a safetensors index: {e}")))?;
        let mut by_file: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, file) in index.weight_map {
            // A shard is a sibling of its index: a path would let an index read any file.
            if Path::new(&file)
                .file_name()
                .is_none_or(|f| f != file.as_str())
            {
                return Err(Error::checkpoint(
                    &index_path,
                    format!("`{name}`: shard `{file}` is not a plain file name"),
                ));
            }
            by_file.entry(file).or_default().push(name);
        }
        return by_file
            .into_iter()
            .map(|(file, names)| open_shard(dir.join(file), policy, Some(names)))
            .collect();
    }
    let single = dir.join(SINGLE);
    if single.is_file() {
        return Ok(vec![open_shard(single, policy, None)?]);
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .map_err(|e| Error::io(dir, e))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(Error::checkpoint(
            dir,
            format!("holds neither `{INDEX}` nor `{SINGLE}`"),
        ));
    }
    files
        .into_iter()
        .map(|path| open_shard(path, policy, None))
        .collect()
}

fn open_shard(
    path: PathBuf,
    policy: LoadPolicy,
    expected: Option<Vec<String>>,
) -> Result<ShardFile> {
    let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
    // An empty file cannot be mapped on every system.
    if file.metadata().map_err(|e| Error::io(&path, e))?.len() == 0 {
        return Err(Error::checkpoint(&path, "the file is empty"));
    }
    let bytes = match policy {
        LoadPolicy::Read => Bytes::from(std::fs::read(&path).map_err(|e| Error::io(&path, e))?),
        LoadPolicy::Mmap => {
            // SAFETY: the map is read-only and private to this value. That nobody truncates or
            // rewrites the file while it is mapped is the documented contract of
            // `LoadPolicy::Mmap`; `LoadPolicy::Read` is there for those who cannot promise it.
            let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(&path, e))?;
            Bytes::from_owner(map)
        }
    };
    Ok(ShardFile {
        path,
        bytes,
        expected,
    })
}
