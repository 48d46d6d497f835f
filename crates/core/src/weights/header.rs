//! Which tensor of a file is to blame when the safetensors header does not add up.

use std::collections::BTreeMap;

use safetensors::{SafeTensorError, tensor::TensorInfo};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Tensor(TensorInfo),
    Other(serde::de::IgnoredAny),
}

/// The message for `err`, which [`safetensors`] gave for `file`, with the name of the tensor where
/// the library knows it but does not say it.
pub(super) fn explain(err: &SafeTensorError, file: &[u8]) -> String {
    match err {
        SafeTensorError::TensorInvalidInfo
        | SafeTensorError::ValidationOverflow
        | SafeTensorError::MisalignedSlice => match liar(file) {
            Some(what) => what,
            None => err.to_string(),
        },
        other => other.to_string(),
    }
}

/// The first tensor, by name, whose shape and dtype are not the length of its data.
fn liar(file: &[u8]) -> Option<String> {
    let len = usize::try_from(u64::from_le_bytes(file.get(..8)?.try_into().ok()?)).ok()?;
    let header = file.get(8..len.checked_add(8)?)?;
    let entries: BTreeMap<String, Entry> = serde_json::from_slice(header).ok()?;
    entries.into_iter().find_map(|(name, entry)| {
        let Entry::Tensor(info) = entry else {
            return None;
        };
        let bits = info
            .shape
            .iter()
            .try_fold(info.dtype.bitsize(), |bits, dim| bits.checked_mul(*dim));
        let (start, end) = info.data_offsets;
        let found = end.checked_sub(start)?;
        (bits != found.checked_mul(8)).then(|| {
            let TensorInfo { dtype, shape, .. } = info;
            format!("tensor `{name}`: {dtype:?} {shape:?} does not take {found} bytes")
        })
    })
}
