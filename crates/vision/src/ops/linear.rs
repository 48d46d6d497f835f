//! `x · Wᵀ + b` with bf16 weights as stored and one rounding.
//!
//! ```text
//! out[t][n] = bf16(dot(x[t], w[n]) + b[n])
//! ```
//!
//! with [`cpu::dot`]'s order of additions. The bias joins in f32: adding it to a product already rounded
//! to bf16 would round twice. On a GPU cuBLAS adds, in an order of its own.

mod blocks;
mod packed;
mod tile;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result, StoredDtype, VarBuilder,
    cpu::{self, Bf16Rows, WeightRows},
};
use half::bf16;

use super::dense_bf16;
use crate::simd::Isa;

/// What the layers of a module share on a device.
#[derive(Debug, Clone)]
pub(crate) struct Products {
    #[cfg(feature = "cuda")]
    blas: Option<std::sync::Arc<deepseek_v41_core::cuda::Blas>>,
}

impl Products {
    /// For layers on `device`.
    ///
    /// # Errors
    /// The device refuses.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            #[cfg(feature = "cuda")]
            blas: match device {
                Device::Cuda(dev) => Some(deepseek_v41_core::cuda::Blas::new(dev)?.into()),
                _ => None,
            },
        })
    }
}

/// A layer's weights on a GPU.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
struct OnDevice {
    blas: std::sync::Arc<deepseek_v41_core::cuda::Blas>,
    /// `[out_dim, in_dim]` bf16.
    weight: Tensor,
    /// `[out_dim]` bf16.
    bias: Option<Tensor>,
}

/// A linear layer of the tower or the aligner.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Bf16Rows,
    bias: Option<Vec<f32>>,
    #[cfg(feature = "cuda")]
    on_device: Option<OnDevice>,
}

impl Linear {
    /// Reads `weight: [out_dim, in_dim]` and, if asked for, `bias: [out_dim]`, both stored bf16. The
    /// weight is used where it lies, and nothing is copied, except to a GPU.
    ///
    /// # Errors
    /// A tensor is missing or of another shape or dtype; the device refuses it.
    pub fn new(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Self> {
        let products = Products::new(vb.device())?;
        Self::with(in_dim, out_dim, bias, vb, &products)
    }

    /// [`Linear::new`] with what other layers use too.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn with(
        in_dim: usize,
        out_dim: usize,
        bias: bool,
        vb: VarBuilder,
        products: &Products,
    ) -> Result<Self> {
        let raw = vb.raw("weight", &[StoredDtype::BF16], &[out_dim, in_dim])?;
        let bias = match bias {
            true => Some(vb.tensor_f32("bias", &[out_dim])?),
            false => None,
        };
        #[cfg(feature = "cuda")]
        let on_device = match &products.blas {
            Some(blas) => Some(OnDevice {
                blas: blas.clone(),
                weight: raw.to_tensor(vb.device())?,
                bias: bias
                    .as_ref()
                    .map(|b| deepseek_v41_core::cuda::bf16_weight(b, &vb.full_name("bias")))
                    .transpose()?,
            }),
            None => None,
        };
        let len = raw.bytes.len();
        let weight = Bf16Rows::new(raw.bytes, out_dim, in_dim).ok_or_else(|| {
            Error::shape(
                "linear",
                format!("[{out_dim}, {in_dim}] bf16 in {len} bytes"),
            )
        })?;
        Ok(Self {
            weight,
            bias: bias.map(|b| b.to_vec1::<f32>()).transpose()?,
            #[cfg(feature = "cuda")]
            on_device,
        })
    }

    /// A layer over weights already in memory, on the CPU: `weight: [out_dim, in_dim]`, `bias: [out_dim]`.
    ///
    /// # Errors
    /// A bias of another length.
    pub fn from_rows(weight: Bf16Rows, bias: Option<Vec<f32>>) -> Result<Self> {
        if bias.as_ref().is_some_and(|b| b.len() != weight.rows()) {
            return Err(Error::shape("linear", "bias and weight differ in length"));
        }
        Ok(Self {
            weight,
            bias,
            #[cfg(feature = "cuda")]
            on_device: None,
        })
    }

    /// Input features.
    pub fn in_dim(&self) -> usize {
        self.weight.cols()
    }

    /// Output features.
    pub fn out_dim(&self) -> usize {
        self.weight.rows()
    }

    /// `xs: [n, in_dim]` bf16 → `[n, out_dim]` bf16.
    ///
    /// # Errors
    /// Another dtype or shape, or another device than the layer's.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = dense_bf16(xs, "linear")?;
        if xs.rank() != 2 || xs.dims()[1] != self.in_dim() {
            return Err(Error::shape(
                "linear",
                format!("expected [n, {}], found {:?}", self.in_dim(), xs.shape()),
            ));
        }
        #[cfg(feature = "cuda")]
        match (&self.on_device, xs.device().is_cuda()) {
            (Some(own), true) => {
                return own.blas.linear(&xs, &own.weight, own.bias.as_ref());
            }
            (None, false) => {}
            _ => {
                return Err(Error::shape(
                    "linear",
                    "weights and values on different devices",
                ));
            }
        }
        Ok(xs.apply_op1_no_bwd(&LinearOp(self))?)
    }
}

struct LinearOp<'a>(&'a Linear);

impl CustomOp1 for LinearOp<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, "linear")?;
        let (m, _) = l.shape().dims2()?;
        let mut out = vec![bf16::ZERO; m * self.0.out_dim()];
        self.0.forward_slice(xs, &mut out, Isa::detect());
        Ok((CpuStorage::BF16(out), Shape::from((m, self.0.out_dim()))))
    }
}

/// Straight loops over [`cpu::dot`]: `xs: [m, k]`, `weight: [n, k]`, `bias: [n]` → `out: [m, n]`.
pub fn linear_ref(xs: &[f32], weight: &[f32], bias: Option<&[f32]>, k: usize, out: &mut [bf16]) {
    let n = weight.len() / k;
    for (x, out) in xs.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (j, o) in out.iter_mut().enumerate() {
            let sum = cpu::dot(x, &weight[j * k..(j + 1) * k]);
            *o = cpu::round_bf16(sum + bias.map_or(0.0, |b| b[j]));
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn layer() -> Linear {
        let rows = Bf16Rows::new(Bytes::from(vec![0; 2 * 3 * 4]), 3, 4).unwrap();
        Linear::from_rows(rows, None).unwrap()
    }

    #[test]
    fn no_rows_give_no_rows() {
        let linear = layer();
        let xs = Tensor::zeros((0, 4), candle_core::DType::BF16, &candle_core::Device::Cpu);
        assert_eq!(linear.forward(&xs.unwrap()).unwrap().dims(), [0, 3]);
    }

    #[test]
    fn other_width_is_refused() {
        let linear = layer();
        let xs = Tensor::zeros((2, 5), candle_core::DType::BF16, &candle_core::Device::Cpu);
        assert!(matches!(
            linear.forward(&xs.unwrap()),
            Err(Error::Shape { op: "linear", .. })
        ));
    }
}
