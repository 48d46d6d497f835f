//! Random operands, made on the CPU.

use std::cell::Cell;

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Result, Weights,
    core::{RawTensor, StoredDtype, VarBuilder},
};
use half::bf16;

/// A seeded source of numbers.
pub(crate) struct Random(Cell<u64>);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Cell::new(seed))
    }

    /// splitmix64.
    pub(crate) fn bits(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Roughly normal.
    fn value(&self) -> f32 {
        let bits = self.bits();
        let part = |i: u32| ((bits >> (16 * i)) & 0xffff) as f32 / 65536.0 - 0.5;
        (part(0) + part(1) + part(2) + part(3)) * 1.732
    }

    pub(crate) fn f32s(&self, n: usize, std: f32) -> Vec<f32> {
        (0..n).map(|_| self.value() * std).collect()
    }

    pub(crate) fn f32(&self, shape: &[usize], std: f32) -> Result<Tensor> {
        Ok(Tensor::from_vec(
            self.f32s(shape.iter().product(), std),
            shape,
            &Device::Cpu,
        )?)
    }

    pub(crate) fn bf16(&self, shape: &[usize], std: f32) -> Result<Tensor> {
        let values: Vec<bf16> = self
            .f32s(shape.iter().product(), std)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }

    /// bf16 rows of different sizes: tiny, large, and one of zeros.
    pub(crate) fn uneven(&self, rows: usize, cols: usize) -> Result<Tensor> {
        let mut values = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            let std = [1.0, 1e-6, 300.0, 0.0, 0.03][row % 5];
            values.extend(self.f32s(cols, std).into_iter().map(bf16::from_f32));
        }
        Ok(Tensor::from_vec(values, (rows, cols), &Device::Cpu)?)
    }

    /// Values of e2m1 codes: their products and sums are exact.
    pub(crate) fn fp4(&self, shape: &[usize]) -> Result<Tensor> {
        let codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let n: usize = shape.iter().product();
        let values: Vec<bf16> = (0..n)
            .map(|_| {
                let bits = self.below(16);
                let v = codes[bits & 7];
                bf16::from_f32(if bits > 7 { -v } else { v })
            })
            .collect();
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }

    fn raw(
        &self,
        name: String,
        dtype: StoredDtype,
        shape: Vec<usize>,
        bytes: Vec<u8>,
    ) -> RawTensor {
        RawTensor {
            name,
            file: None,
            dtype,
            shape,
            bytes: bytes.into(),
        }
    }

    /// `weight` (and `scale`) of a linear layer as a checkpoint has them.
    pub(crate) fn weight(
        &self,
        prefix: &str,
        n: usize,
        k: usize,
        format: deepseek_v41::quant::WeightFormat,
    ) -> Vec<RawTensor> {
        use deepseek_v41::quant::WeightFormat as F;
        let name = |part: &str| format!("{prefix}{part}");
        let scale = |len: usize| {
            (0..len)
                .map(|_| 117 + self.below(4) as u8)
                .collect::<Vec<_>>()
        };
        match format {
            F::Bf16 | F::F32 => {
                let std = 1.0 / (k as f32).sqrt();
                let bytes = self
                    .f32s(n * k, std)
                    .into_iter()
                    .flat_map(|v| bf16::from_f32(v).to_le_bytes())
                    .collect();
                vec![self.raw(name("weight"), StoredDtype::BF16, vec![n, k], bytes)]
            }
            F::Fp8 => {
                let codes = (0..n * k)
                    .map(|_| {
                        let code = self.below(256) as u8;
                        if code & 0x7f == 0x7f { code ^ 1 } else { code }
                    })
                    .collect();
                let tiles = vec![n.div_ceil(32), k / 32];
                vec![
                    self.raw(name("weight"), StoredDtype::F8_E4M3, vec![n, k], codes),
                    self.raw(
                        name("scale"),
                        StoredDtype::F8_E8M0,
                        tiles.clone(),
                        scale(tiles[0] * tiles[1]),
                    ),
                ]
            }
            F::Fp4 => {
                let codes = (0..n * k / 2).map(|_| self.below(256) as u8).collect();
                vec![
                    self.raw(name("weight"), StoredDtype::I8, vec![n, k / 2], codes),
                    self.raw(
                        name("scale"),
                        StoredDtype::F8_E8M0,
                        vec![n, k / 32],
                        scale(n * k / 32),
                    ),
                ]
            }
        }
    }

    /// A tensor under a checkpoint's name.
    pub(crate) fn named(
        &self,
        name: &str,
        shape: &[usize],
        std: f32,
        dtype: DType,
    ) -> Result<RawTensor> {
        let values = self.f32s(shape.iter().product(), std);
        let (dtype, bytes) = match dtype {
            DType::BF16 => (
                StoredDtype::BF16,
                values
                    .iter()
                    .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                    .collect(),
            ),
            _ => (
                StoredDtype::F32,
                values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            ),
        };
        Ok(self.raw(name.into(), dtype, shape.to_vec(), bytes))
    }
}

/// A checkpoint of `tensors`, for both devices.
pub(crate) fn checkpoint(tensors: Vec<RawTensor>, device: &Device) -> VarBuilder {
    Weights::from_raw(tensors).var_builder(device)
}

/// Tensors by name, moved to `device`.
pub(crate) fn on(device: &Device, tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(|t| Ok(t.to_device(device)?)).collect()
}

/// Values of a tensor of any dtype, in f64.
pub(crate) fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
    Ok(match flat.dtype() {
        DType::BF16 => flat.to_vec1::<bf16>()?.into_iter().map(f64::from).collect(),
        DType::F32 => flat.to_vec1::<f32>()?.into_iter().map(f64::from).collect(),
        DType::U8 => flat.to_vec1::<u8>()?.into_iter().map(f64::from).collect(),
        DType::U32 => flat.to_vec1::<u32>()?.into_iter().map(f64::from).collect(),
        _ => flat.to_vec1::<i32>()?.into_iter().map(f64::from).collect(),
    })
}
