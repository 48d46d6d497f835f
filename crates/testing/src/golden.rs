use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use half::bf16;
use safetensors::{Dtype, SafeTensors};

/// Directory of the workspace's golden data.
pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/golden")
}

/// A golden safetensors file, whole in memory.
pub struct Golden {
    tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Golden {
    /// Opens `NAME.safetensors` (or a path with folders) under [`golden_dir`].
    pub fn open(name: &str) -> Self {
        let path = golden_dir().join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("golden files are valid safetensors");
        let tensors = file
            .iter()
            .map(|(k, t)| {
                (
                    k.to_owned(),
                    (t.dtype(), t.shape().to_vec(), t.data().to_vec()),
                )
            })
            .collect();
        Self { tensors }
    }

    fn get(&self, key: &str) -> &(Dtype, Vec<usize>, Vec<u8>) {
        self.tensors
            .get(key)
            .unwrap_or_else(|| panic!("no golden tensor `{key}`"))
    }

    /// Whether the file has this tensor.
    pub fn contains(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    /// Every key, sorted.
    pub fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    /// Shape of a tensor.
    pub fn shape(&self, key: &str) -> &[usize] {
        &self.get(key).1
    }

    /// Raw bytes of a tensor.
    pub fn bytes(&self, key: &str) -> &[u8] {
        &self.get(key).2
    }

    /// A BF16 tensor.
    pub fn bf16(&self, key: &str) -> Vec<bf16> {
        let (dtype, _, bytes) = self.get(key);
        assert_eq!(*dtype, Dtype::BF16, "{key}");
        bytes
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]))
            .collect()
    }

    /// An F32 tensor, or a BF16 one widened.
    pub fn f32(&self, key: &str) -> Vec<f32> {
        let (dtype, _, bytes) = self.get(key);
        match dtype {
            Dtype::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Dtype::BF16 => self.bf16(key).iter().map(|v| v.to_f32()).collect(),
            other => panic!("{key}: {other:?} is not a float tensor"),
        }
    }

    /// An I64, I32 or U8 tensor.
    pub fn i64(&self, key: &str) -> Vec<i64> {
        let (dtype, _, bytes) = self.get(key);
        match dtype {
            Dtype::I64 => bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes")))
                .collect(),
            Dtype::I32 => bytes
                .chunks_exact(4)
                .map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect(),
            Dtype::U8 => bytes.iter().map(|b| i64::from(*b)).collect(),
            other => panic!("{key}: {other:?} is not an integer tensor"),
        }
    }

    /// Any tensor on the CPU, in its own dtype.
    pub fn tensor(&self, key: &str) -> Tensor {
        let (dtype, shape, bytes) = self.get(key);
        let dtype = match dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F32 => DType::F32,
            Dtype::I64 => DType::I64,
            Dtype::I32 => DType::I32,
            Dtype::U8 => DType::U8,
            other => panic!("{key}: {other:?}"),
        };
        Tensor::from_raw_buffer(bytes, dtype, shape, &Device::Cpu).expect("golden tensor")
    }

    /// The tensors under `prefix.`, with the prefix removed, as a map for `Weights::from_tensors`.
    pub fn subtree(&self, prefix: &str) -> HashMap<String, Tensor> {
        self.keys()
            .into_iter()
            .filter_map(|k| {
                let name = k.strip_prefix(prefix)?.strip_prefix('.')?;
                (!matches!(self.get(k).0, Dtype::I32)).then(|| (name.to_owned(), self.tensor(k)))
            })
            .collect()
    }
}
