//! The tensors of a checkpoint by name.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;

use super::{LoadPolicy, RawTensor, StoredDtype, VarBuilder, dir, header};
use crate::{Error, Result, WeightError};

/// The tensors of a checkpoint, shared and cheap to clone. Remembers which ones were asked for, so
/// that a checkpoint with tensors nobody uses can be refused.
#[derive(Clone, Debug)]
pub struct Weights {
    tensors: Arc<BTreeMap<String, RawTensor>>,
    taken: Arc<Mutex<HashSet<String>>>,
}

impl Weights {
    /// Opens a directory as released: `model.safetensors.index.json` with its shards, or
    /// `model.safetensors`, or every `*.safetensors` file in it.
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be read, [`Error::Checkpoint`] for a file that is truncated
    /// or whose header does not describe it, [`Error::Weight`] when index and shards disagree.
    pub fn open(dir: impl AsRef<Path>, policy: LoadPolicy) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for shard in dir::open_shards(dir.as_ref(), policy)? {
            let file: Arc<Path> = Arc::from(shard.path.as_path());
            let before = tensors.len();
            read_shard(&file, &shard.bytes, &mut tensors)?;
            let Some(expected) = shard.expected else {
                continue;
            };
            // The index is what tools look names up in: it must tell the truth about the shard.
            let wrong = |name: &str, reason| Error::Weight {
                name: name.to_owned(),
                file: Some(shard.path.clone()),
                reason,
            };
            for name in &expected {
                if tensors
                    .get(name)
                    .is_none_or(|t| t.file.as_deref() != Some(&file))
                {
                    return Err(wrong(name, WeightError::Missing));
                }
            }
            if tensors.len() - before != expected.len() {
                let known: HashSet<&String> = expected.iter().collect();
                let extra = tensors
                    .values()
                    .find(|t| t.file.as_deref() == Some(&file) && !known.contains(&t.name));
                if let Some(extra) = extra {
                    return Err(wrong(&extra.name, WeightError::Unexpected));
                }
            }
        }
        Ok(Self::from_map(tensors))
    }

    /// Safetensors files already in memory, each with a label for error messages.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn from_shards(shards: Vec<(String, Bytes)>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (label, bytes) in shards {
            read_shard(&Arc::from(Path::new(&label)), &bytes, &mut tensors)?;
        }
        Ok(Self::from_map(tensors))
    }

    /// Tensors made by the caller, as they would lie in a file.
    pub fn from_raw(tensors: impl IntoIterator<Item = RawTensor>) -> Self {
        Self::from_map(tensors.into_iter().map(|t| (t.name.clone(), t)).collect())
    }

    /// Candle tensors on the CPU, copied. BF16, F32, U8, U32 and I64 are understood.
    ///
    /// # Errors
    /// Another dtype.
    pub fn from_tensors(tensors: HashMap<String, Tensor>) -> Result<Self> {
        let raw = tensors.into_iter().map(|(name, t)| {
            let flat = t.flatten_all()?.to_device(&Device::Cpu)?;
            let (dtype, bytes) = match t.dtype() {
                DType::BF16 => {
                    let v = flat.to_vec1::<half::bf16>()?;
                    (
                        StoredDtype::BF16,
                        v.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    )
                }
                DType::F32 => {
                    let v = flat.to_vec1::<f32>()?;
                    (
                        StoredDtype::F32,
                        v.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    )
                }
                DType::U8 => (StoredDtype::U8, flat.to_vec1::<u8>()?),
                DType::U32 => {
                    let v = flat.to_vec1::<u32>()?;
                    (
                        StoredDtype::U32,
                        v.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    )
                }
                DType::I64 => {
                    let v = flat.to_vec1::<i64>()?;
                    (
                        StoredDtype::I64,
                        v.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    )
                }
                other => {
                    let reason = WeightError::Content(format!("dtype {other:?} is not understood"));
                    return Err(Error::weight(name, reason));
                }
            };
            let shape = t.dims().to_vec();
            Ok(RawTensor {
                name,
                file: None,
                dtype,
                shape,
                bytes: Bytes::from(bytes),
            })
        });
        Ok(Self::from_raw(raw.collect::<Result<Vec<_>>>()?))
    }

    fn from_map(tensors: BTreeMap<String, RawTensor>) -> Self {
        Self {
            tensors: Arc::new(tensors),
            taken: Arc::default(),
        }
    }

    /// A builder at the root of the name tree whose tensors go to `device`.
    pub fn var_builder(&self, device: &Device) -> VarBuilder {
        VarBuilder::new(self.clone(), device.clone())
    }

    /// The tensor of this name, as stored; it counts as used from now on.
    ///
    /// # Errors
    /// [`WeightError::Missing`].
    pub fn get(&self, name: &str) -> Result<&RawTensor> {
        let tensor = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::weight(name, WeightError::Missing))?;
        self.taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.to_owned());
        Ok(tensor)
    }

    /// Whether the checkpoint has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Every tensor, by name in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = &RawTensor> {
        self.tensors.values()
    }

    /// The tensors nobody has asked for so far, by name in ascending order.
    pub fn unused(&self) -> Vec<&RawTensor> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        self.tensors
            .values()
            .filter(|t| !taken.contains(&t.name))
            .collect()
    }
}

fn read_shard(
    file: &Arc<Path>,
    bytes: &Bytes,
    tensors: &mut BTreeMap<String, RawTensor>,
) -> Result<()> {
    // `deserialize` checks the header against the file: length, overlaps, holes, and that every
    // shape times its dtype is the length of its data.
    let view = SafeTensors::deserialize(bytes)
        .map_err(|e| Error::checkpoint(file, header::explain(&e, bytes)))?;
    for (name, tensor) in view.iter() {
        let raw = RawTensor {
            name: name.to_owned(),
            file: Some(file.clone()),
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            bytes: bytes.slice_ref(tensor.data()),
        };
        if let Some(first) = tensors.insert(name.to_owned(), raw) {
            let place = first
                .file
                .as_deref()
                .unwrap_or(Path::new("?"))
                .display()
                .to_string();
            return Err(Error::Weight {
                name: name.to_owned(),
                file: Some(file.to_path_buf()),
                reason: WeightError::Content(format!("also stored in {place}")),
            });
        }
    }
    Ok(())
}
