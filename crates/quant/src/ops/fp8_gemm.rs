//! e4m3 activations times e4m3 weights with e8m0 scales.
//!
//! ```text
//! out[m, n] = bf16(sum_k  (a[m,k] * sa[m, k/g]) * (b[n,k] * sb[n/t, k/t]))
//! ```
//! All four factors of a term are exact in f32 and so is their product, so only the order of the
//! additions is left to define: it is [`cpu::dot`]'s, one for every product of the workspace.
//!
//! Reference: `kernel.py`, `fp8_gemm` (partial sums per K block; within 1 bf16 ulp of this order).

use candle_core::{CpuStorage, CustomOp2, D, Layout, Shape, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, WeightRows},
};
use half::bf16;

use super::act_quant::{QuantizedActivation, is_bytes};
use crate::{
    formats::{e4m3, e8m0},
    weight::Fp8Weight,
};

/// `a: [.., k]` codes with e8m0 scales, `weight: [n, k]` → `[.., n]` bf16.
///
/// The activation's group may differ from the weight's tile. Scales in f32 are refused: scaling by
/// them is not exact, and no model uses them here.
///
/// # Errors
/// `k` differs, or the activation is not U8 codes with U8 scales.
pub fn fp8_gemm(a: &QuantizedActivation, weight: &Fp8Weight) -> Result<Tensor> {
    quantised_gemm("fp8_gemm", a, weight)
}

/// [`fp8_gemm`] on slices, as its definition says: decode both sides, then [`cpu::dot`].
///
/// `a: [m, k]`, `a_s: [m, k/group]`, `b: [n, k]`, `b_s: [ceil(n/tile), k/tile]`, `out: [m, n]`.
pub fn fp8_gemm_ref(
    a: &[u8],
    a_s: &[u8],
    b: &[u8],
    b_s: &[u8],
    k: usize,
    group: usize,
    tile: usize,
    out: &mut [bf16],
) {
    let n = b.len() / k;
    let b: Vec<f32> = (0..b.len())
        .map(|i| e4m3::decode(b[i]) * e8m0::decode(b_s[i / k / tile * (k / tile) + i % k / tile]))
        .collect();
    let mut x = vec![0f32; k];
    for (m, out) in out.chunks_mut(n).enumerate() {
        activation_values(
            &a[m * k..][..k],
            &a_s[m * (k / group)..][..k / group],
            group,
            &mut x,
        );
        for (n, out) in out.iter_mut().enumerate() {
            *out = cpu::round_bf16(cpu::dot(&x, &b[n * k..][..k]));
        }
    }
}

/// `q * s` of activation codes, in f32.
pub(crate) fn activation_values(codes: &[u8], scales: &[u8], group: usize, values: &mut [f32]) {
    for ((codes, values), byte) in codes
        .chunks(group)
        .zip(values.chunks_mut(group))
        .zip(scales)
    {
        let scale = e8m0::decode(*byte);
        for (value, code) in values.iter_mut().zip(codes) {
            *value = e4m3::decode(*code) * scale;
        }
    }
}

/// Both products: the weight formats differ only in how a row is decoded.
pub(crate) fn quantised_gemm<W: WeightRows + Quantised>(
    op: &'static str,
    a: &QuantizedActivation,
    weight: &W,
) -> Result<Tensor> {
    if !is_bytes(&a.data) || !is_bytes(&a.scale) {
        return Err(Error::shape(
            op,
            "activation codes and scales must be U8 (e4m3 and e8m0)",
        ));
    }
    let (k, group) = (a.data.dim(D::Minus1)?, a.group()?);
    if k != weight.cols() {
        return Err(Error::shape(
            op,
            format!("activation has k = {k}, weight {}", weight.cols()),
        ));
    }
    #[cfg(feature = "cuda")]
    if a.data.device().is_cuda() {
        return crate::cuda::gemm(a, group, weight);
    }
    let op = Gemm {
        name: op,
        weight,
        group,
    };
    Ok(a.data
        .contiguous()?
        .apply_op2_no_bwd(&a.scale.contiguous()?, &op)?)
}

/// A weight that a product takes as codes and scales.
pub(crate) trait Quantised {
    /// The layer that the weight makes, which knows its format.
    #[cfg(feature = "cuda")]
    fn linear(&self) -> crate::Linear;
}

impl Quantised for Fp8Weight {
    #[cfg(feature = "cuda")]
    fn linear(&self) -> crate::Linear {
        crate::Linear::Fp8(self.clone())
    }
}

impl Quantised for crate::weight::Fp4Weight {
    #[cfg(feature = "cuda")]
    fn linear(&self) -> crate::Linear {
        crate::Linear::Fp4(self.clone())
    }
}

struct Gemm<'a, W> {
    name: &'static str,
    weight: &'a W,
    group: usize,
}

impl<W: WeightRows> CustomOp2 for Gemm<'_, W> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let codes = cpu::contiguous::<u8>(s1, l1, self.name)?;
        let scales = cpu::contiguous::<u8>(s2, l2, self.name)?;
        let (n, k) = (self.weight.rows(), self.weight.cols());
        let m = codes.len() / k.max(1);
        let mut out = vec![bf16::ZERO; m * n];
        cpu::with_scratch(m * k, |xs| {
            activation_values(codes, scales, self.group, xs);
            cpu::matmul_bf16(self.weight, xs, m, &mut out);
        });
        let mut dims = l1.shape().dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = n;
        }
        Ok((CpuStorage::BF16(out), Shape::from(dims)))
    }
}
