//! The file of a saved sequence: a safetensors file with these tensors, in this order.
//!
//! ```text
//! ids              U32 [len]                tokens of the sequence
//! pending          U32 [p]                  tokens that follow and have not been run
//! image_mask       U8  [len]                only if the sequence has pictures
//! window.L         U8  [min(len, W), w]     per layer: the newest rows of its ring
//! compressed.S.kv, .index_k
//!                  U8  [len / r, w]         per source: finished groups
//! compressed.S.pending
//!                  F32 [len % r, 2 * D]     per source with r > 1: the open group
//! draft.L          U8  [min(drafted, W), w] per draft layer
//! checksum         U8  [8]                  of every byte before it
//! ```
//!
//! Rows are packed whatever the state's format, see [`RowCodec`](deepseek_v41_attention::RowCodec).
//! Which tensors there are, their shapes and offsets follow from the [`Facts`] in the metadata and the
//! model: a reader needs no number of the file but those, and checks those first.

use candle_core::DType;
use deepseek_v41_attention::{CompressedCache, WindowCache};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::ModelState;

/// What a file says it is.
pub(super) const FORMAT: &str = "deepseek-v41 sequence";
/// Changes with every change of the layout.
pub(super) const VERSION: u32 = 1;
/// The last tensor, whose bytes are a hash of all bytes before.
pub(super) const CHECKSUM_BYTES: usize = 8;
/// Longest header in bytes; a real one has some ten kilobytes.
pub(super) const MAX_HEADER: u64 = 1 << 20;

/// The numbers from which everything else about a file follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// Tokens that were run.
    pub(super) len: usize,
    /// Tokens that follow and were not.
    pub(super) pending: usize,
    pub(super) drafted: usize,
    pub(super) prefill: usize,
    /// Whether there is an image mask.
    pub(super) masked: bool,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

/// A part as the header describes it.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Entry {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) data_offsets: (usize, usize),
}

impl Part {
    fn new(name: impl Into<String>, dtype: DType, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    /// Its header entry when its bytes begin at `at`.
    pub(super) fn entry(&self, at: usize) -> Entry {
        let dtype = match self.dtype {
            DType::U32 => "U32",
            DType::F32 => "F32",
            _ => "U8",
        };
        Entry {
            dtype: dtype.to_owned(),
            shape: self.shape.clone(),
            data_offsets: (at, at + self.bytes()),
        }
    }
}

/// Every part in order, with its header entry.
pub(super) fn entries(parts: &[Part]) -> impl Iterator<Item = (&Part, Entry)> {
    let mut at = 0;
    parts.iter().map(move |part| {
        let entry = part.entry(at);
        at = entry.data_offsets.1;
        (part, entry)
    })
}

/// The file's first bytes: the length of the header and the header, padded to whole words.
pub(super) fn header(parts: &[Part], facts: &Facts, fingerprint: u64) -> Vec<u8> {
    let mut map = Map::new();
    map.insert(
        "__metadata__".into(),
        json!({
            "format": FORMAT,
            "version": VERSION.to_string(),
            "fingerprint": format!("{fingerprint:016x}"),
            "tokens": facts.len.to_string(),
            "pending": facts.pending.to_string(),
            "drafted": facts.drafted.to_string(),
            "prefill": facts.prefill.to_string(),
            "images": facts.masked.to_string(),
        }),
    );
    for (
        part,
        Entry {
            dtype,
            shape,
            data_offsets,
        },
    ) in entries(parts)
    {
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": data_offsets});
        map.insert(part.name.clone(), entry);
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.append(&mut text);
    out
}

impl ModelState {
    /// The tensors of a file with these facts, in order.
    pub(super) fn parts(&self, facts: &Facts) -> Vec<Part> {
        let window = self.geometry.window;
        let ring = |name: String, cache: &WindowCache, len: usize| {
            Part::new(
                name,
                DType::U8,
                &[len.min(window), cache.kv().codec().row_bytes()],
            )
        };
        let mut parts = vec![
            Part::new("ids", DType::U32, &[facts.len]),
            Part::new("pending", DType::U32, &[facts.pending]),
        ];
        if facts.masked {
            parts.push(Part::new("image_mask", DType::U8, &[facts.len]));
        }
        for (i, cache) in self.window.iter().enumerate() {
            parts.push(ring(window_name(i), cache, facts.len));
        }
        for (i, cache) in self.compressed.iter().enumerate() {
            parts.extend(compressed_parts(i, cache, facts.len));
        }
        for (i, cache) in self.draft.iter().enumerate() {
            parts.push(ring(draft_name(i), cache, facts.drafted));
        }
        parts.push(Part::new("checksum", DType::U8, &[CHECKSUM_BYTES]));
        parts
    }

    /// Bytes of tensors that [`ModelState::save`] writes for a sequence of `len` tokens without
    /// pictures; the header is some ten kilobytes more.
    pub fn saved_bytes(&self, len: usize) -> usize {
        let facts = Facts {
            len,
            pending: 0,
            drafted: len,
            prefill: len,
            masked: false,
        };
        self.parts(&facts).iter().map(Part::bytes).sum()
    }
}

/// In the order in which a cache exports them.
fn compressed_parts(i: usize, cache: &CompressedCache, len: usize) -> Vec<Part> {
    let (rows, open) = (len / cache.ratio(), len % cache.ratio());
    let name = |part: &str| compressed_name(i, part);
    let mut parts = vec![Part::new(
        name("kv"),
        DType::U8,
        &[rows, cache.kv().codec().row_bytes()],
    )];
    if let Ok(keys) = cache.index_k() {
        parts.push(Part::new(
            name("index_k"),
            DType::U8,
            &[rows, keys.codec().row_bytes()],
        ));
    }
    if let Some(pending) = cache.pending() {
        parts.push(Part::new(
            name("pending"),
            DType::F32,
            &[open, pending.dims()[1]],
        ));
    }
    parts
}

pub(super) fn window_name(layer: usize) -> String {
    format!("window.{layer}")
}

pub(super) fn draft_name(layer: usize) -> String {
    format!("draft.{layer}")
}

pub(super) fn compressed_name(source: usize, part: &str) -> String {
    format!("compressed.{source}.{part}")
}
