//! Root-mean-square normalisation.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Tensor};
use half::bf16;

use crate::{Error, Result, VarBuilder, cpu};

/// RMSNorm over the last dimension: `bf16(w * (x * rsqrt(mean(x²) + eps)))`.
///
/// Everything in f32 with one rounding at the end. The released model has `eps = 1e-20`: rows of
/// zeros stay zeros.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    /// As the kernels read it, on a GPU.
    #[cfg(feature = "cuda")]
    half: Option<Tensor>,
    eps: f32,
}

impl RmsNorm {
    /// Reads `weight: [dim]` (stored bf16 or f32) under `vb`.
    ///
    /// # Errors
    /// The weight is missing or of another shape or dtype.
    pub fn new(dim: usize, eps: f32, vb: VarBuilder) -> Result<Self> {
        let weight = vb.tensor_f32("weight", &[dim])?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            half: match weight.device().is_cuda() {
                true => Some(crate::cuda::bf16_weight(&weight, &vb.full_name("weight"))?),
                false => None,
            },
            weight,
            eps,
        })
    }

    /// `xs: [.., dim]` bf16 → same shape and dtype.
    ///
    /// # Errors
    /// Another dtype or last dimension.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(half) = &self.half {
            check(xs, &self.weight)?;
            return crate::cuda::ops::rms_norm(xs, half, self.eps);
        }
        rms_norm(xs, &self.weight, self.eps)
    }

    /// `[dim]` f32, the weight widened.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[dim]` bf16, as the kernels read it; `None` off the GPU.
    #[cfg(feature = "cuda")]
    pub fn weight_bf16(&self) -> Option<&Tensor> {
        self.half.as_ref()
    }

    /// The constant under the root.
    pub fn eps(&self) -> f32 {
        self.eps
    }
}

/// RMSNorm as an operation: `xs: [.., dim]` bf16, `weight: [dim]` f32 → `[.., dim]` bf16.
///
/// On a GPU the weight is read as bf16, which is what checkpoints store.
///
/// # Errors
/// Another dtype, or a last dimension that is not the weight's length.
///
/// Reference: `RMSNorm.forward`.
pub fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    check(xs, weight)?;
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return crate::cuda::ops::rms_norm(xs, &weight.to_dtype(DType::BF16)?, eps);
    }
    Ok(xs
        .contiguous()?
        .apply_op2_no_bwd(weight, &RmsNormOp { eps })?)
}

fn check(xs: &Tensor, weight: &Tensor) -> Result<()> {
    let dim = weight.elem_count();
    if xs.dtype() != DType::BF16 || weight.dtype() != DType::F32 || xs.dims().last() != Some(&dim) {
        return Err(Error::shape(
            "rms_norm",
            format!(
                "expected [.., {dim}] bf16 and an f32 weight, found {:?} {:?} and {:?}",
                xs.shape(),
                xs.dtype(),
                weight.dtype()
            ),
        ));
    }
    Ok(())
}

/// One row: `x: [dim]`, `w: [dim]` → `out: [dim]`.
///
/// f64 inside, so that the one rounding is the only one: an f32 mean that is an ulp off moves every
/// element of the row, and with fp8 layers behind it a single flipped bf16 rounding is amplified to
/// per cents. The sum of squares runs in eight lanes (`k mod 8`, ascending) and a fixed tree.
pub fn rms_norm_ref(x: &[f32], w: &[f32], eps: f32, out: &mut [bf16]) {
    row_body(x, |x| x, w, eps, out);
}

/// [`rms_norm_ref`] of a bf16 row, bit for bit, with wider instructions where there are any.
pub fn rms_norm_row(x: &[bf16], w: &[f32], eps: f32, out: &mut [bf16]) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2(x: &[bf16], w: &[f32], eps: f32, out: &mut [bf16]) {
        row_body(x, cpu::widen, w, eps, out);
    }
    match cpu::Isa::detect() {
        cpu::Isa::Portable => row_body(x, cpu::widen, w, eps, out),
        // SAFETY: both variants are only made where the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        cpu::Isa::Avx2 | cpu::Isa::Avx512 => unsafe { avx2(x, w, eps, out) },
    }
}

#[inline(always)]
fn row_body<T: Copy>(x: &[T], widen: impl Fn(T) -> f32, w: &[f32], eps: f32, out: &mut [bf16]) {
    let mut lanes = [0f64; 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for l in 0..8 {
            let v = f64::from(widen(chunk[l]));
            lanes[l] += v * v;
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        let v = f64::from(widen(*v));
        *lane += v * v;
    }
    let l = lanes;
    let sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
    let rstd = 1.0 / (sum / x.len() as f64 + f64::from(eps)).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(w) {
        *o = cpu::round_bf16((f64::from(*w) * (f64::from(widen(*x)) * rstd)) as f32);
    }
}

struct RmsNormOp {
    eps: f32,
}

impl CustomOp2 for RmsNormOp {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s1, l1, "rms_norm")?;
        let w = cpu::contiguous::<f32>(s2, l2, "rms_norm")?;
        let dim = w.len();
        let mut out = vec![bf16::ZERO; xs.len()];
        if dim > 0 {
            cpu::for_each_piece(xs.len() * 4, &mut out, dim, |i, out| {
                rms_norm_row(&xs[i * dim..][..dim], w, self.eps, out);
            });
        }
        Ok((CpuStorage::BF16(out), l1.shape().clone()))
    }
}
