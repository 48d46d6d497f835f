//! The linear layer in every storage a checkpoint has.

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result, StoredDtype, VarBuilder,
    cpu::{self, Bf16Rows, F32Rows, WeightRows},
};
use half::bf16;

use crate::{
    load,
    ops::act_quant::act_quant_values,
    weight::{Fp4Weight, Fp8Weight},
};

/// How a linear layer's weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// bf16 weights, bf16 activations.
    Bf16,
    /// Computed in f32, stored as BF16 or F32.
    F32,
    /// e4m3 in tiles of 32 × 32, activations quantised to e4m3.
    Fp8,
    /// Packed e2m1 with a scale per row and 32 columns, activations quantised to e4m3.
    Fp4,
}

/// `y = x · Wᵀ`, no bias; the weight stays as the checkpoint stores it.
///
/// Sums are f32 in the order of [`cpu::dot`] and rounded to bf16 once, so a row of `y` has the same
/// bits whatever the batch it is computed in and however many threads there are.
#[derive(Debug, Clone)]
pub enum Linear {
    /// bf16 weights.
    Bf16(Bf16Rows),
    /// f32 products, of weights stored as BF16 or F32.
    F32(WideRows),
    /// e4m3 weights.
    Fp8(Fp8Weight),
    /// e2m1 weights.
    Fp4(Fp4Weight),
}

/// Weights of an f32 product: widening a stored bf16 gives the same values as storing f32.
#[derive(Debug, Clone)]
pub enum WideRows {
    /// Stored as BF16.
    Bf16(Bf16Rows),
    /// Stored as F32.
    F32(F32Rows),
}

impl Linear {
    /// Reads `weight`, and `scale` if `format` has one, under `vb`.
    ///
    /// | format | `weight` | `scale` |
    /// | --- | --- | --- |
    /// | `Bf16` | BF16 `[out, in]` | |
    /// | `F32` | BF16 or F32 `[out, in]` | |
    /// | `Fp8` | F8_E4M3 or U8 `[out, in]` | F8_E8M0 or U8 `[ceil(out/32), in/32]` |
    /// | `Fp4` | I8 or U8 `[out, in/2]`, or F4 `[out, in]` | F8_E8M0 or U8 `[out, in/32]` |
    ///
    /// # Errors
    /// [`Error::Weight`] for a missing tensor or another dtype or shape; [`Error::Config`] when
    /// `in_dim` is not a multiple of 32 in a quantised format; [`Error::Unsupported`] off the CPU without
    /// the feature `cuda`, [`Error::Device`] when a GPU's memory is full.
    pub fn new(
        in_dim: usize,
        out_dim: usize,
        format: WeightFormat,
        vb: VarBuilder,
    ) -> Result<Self> {
        load::linear(in_dim, out_dim, format, &vb, load::WHOLE)
    }

    /// Input features.
    pub fn in_dim(&self) -> usize {
        self.weight_rows().cols()
    }

    /// Output features.
    pub fn out_dim(&self) -> usize {
        self.weight_rows().rows()
    }

    /// The storage.
    pub fn format(&self) -> WeightFormat {
        match self {
            Self::Bf16(_) => WeightFormat::Bf16,
            Self::F32(_) => WeightFormat::F32,
            Self::Fp8(_) => WeightFormat::Fp8,
            Self::Fp4(_) => WeightFormat::Fp4,
        }
    }

    /// Bytes of weights and scales that one product reads.
    pub fn weight_bytes(&self) -> usize {
        match self {
            Self::Bf16(w) | Self::F32(WideRows::Bf16(w)) => w.bytes().len(),
            Self::F32(WideRows::F32(w)) => w.bytes().len(),
            Self::Fp8(w) => w.byte_len(),
            Self::Fp4(w) => w.byte_len(),
        }
    }

    /// The weight as rows of values.
    pub fn weight_rows(&self) -> &dyn WeightRows {
        match self {
            Self::Bf16(w) | Self::F32(WideRows::Bf16(w)) => w,
            Self::F32(WideRows::F32(w)) => w,
            Self::Fp8(w) => w,
            Self::Fp4(w) => w,
        }
    }

    /// `xs: [.., in]` → `[.., out]`.
    ///
    /// bf16 in and out. Only [`WeightFormat::F32`] gives f32, and takes bf16 (widened) or f32.
    /// NaN in a row's input makes that row's outputs NaN and no other's.
    ///
    /// # Errors
    /// Another last dimension or dtype.
    ///
    /// Reference: `linear()` in `model.py`.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let dtype_ok = match self {
            Self::F32(_) => matches!(xs.dtype(), DType::BF16 | DType::F32),
            _ => xs.dtype() == DType::BF16,
        };
        if !dtype_ok || xs.dim(D::Minus1)? != self.in_dim() {
            return Err(Error::shape(
                "linear",
                format!(
                    "{:?} {:?} into {:?} [{}, {}]",
                    xs.dtype(),
                    xs.dims(),
                    self.format(),
                    self.out_dim(),
                    self.in_dim()
                ),
            ));
        }
        #[cfg(feature = "cuda")]
        if xs.device().is_cuda() {
            return crate::cuda::linear(self, xs);
        }
        Ok(xs.contiguous()?.apply_op1_no_bwd(&LinearOp(self))?)
    }

    /// [`Linear::forward`] on slices: `xs: [m, in]`, `out: [m, out]`.
    ///
    /// # Errors
    /// Lengths that do not fit; [`WeightFormat::F32`], whose result is not bf16.
    pub fn forward_slice(&self, xs: &[bf16], m: usize, out: &mut [bf16]) -> Result<()> {
        self.check_lengths(xs.len(), m, out.len())?;
        cpu::with_scratch(xs.len(), |values| {
            self.input_values(xs, values);
            self.forward_values(values, m, out)
        })
    }

    /// The values that a product takes for `xs`, in f32: quantised for fp8 and fp4, widened else.
    /// Layers that share an input and a quantised format share these.
    ///
    /// `xs: [m, in]`, `values: [m, in]`.
    pub fn input_values(&self, xs: &[bf16], values: &mut [f32]) {
        match self {
            Self::Bf16(_) | Self::F32(_) => cpu::widen_slice(xs, values),
            Self::Fp8(_) | Self::Fp4(_) => act_quant_values(xs, values),
        }
    }

    /// [`Linear::forward_slice`] from what [`Linear::input_values`] made.
    ///
    /// # Errors
    /// As [`Linear::forward_slice`].
    pub fn forward_values(&self, values: &[f32], m: usize, out: &mut [bf16]) -> Result<()> {
        self.check_lengths(values.len(), m, out.len())?;
        match self {
            Self::Bf16(w) => cpu::matmul_bf16(w, values, m, out),
            Self::Fp8(w) => cpu::matmul_bf16(w, values, m, out),
            Self::Fp4(w) => cpu::matmul_bf16(w, values, m, out),
            Self::F32(_) => {
                return Err(Error::shape("linear", "an f32 layer has no bf16 result"));
            }
        }
        Ok(())
    }

    /// The f32 product, before any rounding, of any format: `values: [m, in]`, `out: [m, out]`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn forward_values_f32(&self, values: &[f32], m: usize, out: &mut [f32]) -> Result<()> {
        self.check_lengths(values.len(), m, out.len())?;
        match self {
            Self::Bf16(w) | Self::F32(WideRows::Bf16(w)) => cpu::matmul(w, values, m, out),
            Self::F32(WideRows::F32(w)) => cpu::matmul(w, values, m, out),
            Self::Fp8(w) => cpu::matmul(w, values, m, out),
            Self::Fp4(w) => cpu::matmul(w, values, m, out),
        }
        Ok(())
    }

    fn check_lengths(&self, xs: usize, m: usize, out: usize) -> Result<()> {
        let (k, n) = (self.in_dim(), self.out_dim());
        if m.checked_mul(k) == Some(xs) && m.checked_mul(n) == Some(out) {
            return Ok(());
        }
        Err(Error::shape(
            "linear",
            format!("{m} rows of [{n}, {k}]: {xs} inputs and {out} outputs do not fit"),
        ))
    }
}

struct LinearOp<'a>(&'a Linear);

impl CustomOp1 for LinearOp<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let linear = self.0;
        let (k, n) = (linear.in_dim(), linear.out_dim());
        let m = l.shape().elem_count().checked_div(k).unwrap_or(0);
        let mut dims = l.shape().dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = n;
        }
        let storage = match linear {
            Linear::F32(_) => {
                let mut out = vec![0f32; m * n];
                if let CpuStorage::BF16(_) = s {
                    let xs = cpu::contiguous::<bf16>(s, l, self.name())?;
                    cpu::with_scratch(xs.len(), |values| {
                        cpu::widen_slice(xs, values);
                        linear.forward_values_f32(values, m, &mut out)
                    })?;
                } else {
                    let xs = cpu::contiguous::<f32>(s, l, self.name())?;
                    linear.forward_values_f32(xs, m, &mut out)?;
                }
                CpuStorage::F32(out)
            }
            _ => {
                let xs = cpu::contiguous::<bf16>(s, l, self.name())?;
                let mut out = vec![bf16::ZERO; m * n];
                linear.forward_slice(xs, m, &mut out)?;
                CpuStorage::BF16(out)
            }
        };
        Ok((storage, Shape::from(dims)))
    }
}

/// The stored dtypes of one-byte codes and scales: released files name them, converted ones may use
/// plain bytes.
pub(crate) const FP8_CODES: &[StoredDtype] = &[StoredDtype::F8_E4M3, StoredDtype::U8];
pub(crate) const FP4_CODES: &[StoredDtype] = &[StoredDtype::I8, StoredDtype::U8];
pub(crate) const SCALES: &[StoredDtype] = &[StoredDtype::F8_E8M0, StoredDtype::U8];
