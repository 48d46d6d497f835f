//! Activations and the residual sum.
//!
//! ```text
//! swiglu[i] = bf16(bf16(silu(gate[i])) * up[i])       silu(x) = x / (1 + exp(-x))
//! gelu[i]   = bf16(x / 2 * (1 + erf(x / sqrt 2)))
//! add[i]    = bf16(a[i] + b[i])
//! ```

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use half::bf16;
use rayon::prelude::*;

use super::{dense_bf16, exp::exp};

/// Rows of element-wise work are cut into pieces of this many values.
const PIECE: usize = 4096;

/// The gated half of the MLP: `xs: [n, 2 * inter]` bf16, gates first → `[n, inter]`.
///
/// # Errors
/// Another dtype, rank, or an odd width.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    let xs = dense_bf16(xs, "swiglu")?;
    if xs.rank() != 2 || !xs.dims()[1].is_multiple_of(2) {
        return Err(Error::shape(
            "swiglu",
            format!("expected [n, 2 * inter], found {:?}", xs.shape()),
        ));
    }
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return crate::cuda::vit_swiglu(&xs);
    }
    Ok(xs.apply_op1_no_bwd(&Swiglu)?)
}

/// One row: `gate: [inter]`, `up: [inter]` → `out: [inter]`.
pub fn swiglu_ref(gate: &[bf16], up: &[bf16], out: &mut [bf16]) {
    swiglu_body(gate, up, out);
}

#[inline(always)]
fn swiglu_body(gate: &[bf16], up: &[bf16], out: &mut [bf16]) {
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        let g = g.to_f32();
        let silu = bf16::from_f32(g / (1.0 + exp(-g)));
        *o = bf16::from_f32(silu.to_f32() * u.to_f32());
    }
}

fn swiglu_fast(gate: &[bf16], up: &[bf16], out: &mut [bf16]) {
    simd_dispatch!(swiglu_body(gate: &[bf16], up: &[bf16], out: &mut [bf16]))
}

struct Swiglu;

impl CustomOp1 for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, "swiglu")?;
        let (n, width) = l.shape().dims2()?;
        let inter = width / 2;
        let mut out = vec![bf16::ZERO; n * inter];
        let row = |(x, out): (&[bf16], &mut [bf16])| swiglu_fast(&x[..inter], &x[inter..], out);
        if !out.is_empty() {
            if cpu::should_parallelise(out.len() * 30) {
                xs.par_chunks(width)
                    .zip(out.par_chunks_mut(inter))
                    .for_each(row);
            } else {
                xs.chunks(width).zip(out.chunks_mut(inter)).for_each(row);
            }
        }
        Ok((CpuStorage::BF16(out), Shape::from((n, inter))))
    }
}

/// The exact (erf) gelu of every element, bf16.
///
/// # Errors
/// Another dtype.
pub fn gelu(xs: &Tensor) -> Result<Tensor> {
    let xs = dense_bf16(xs, "gelu")?;
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return crate::cuda::vit_gelu(&xs);
    }
    Ok(xs.apply_op1_no_bwd(&Gelu)?)
}

/// `out[i] = gelu(xs[i])`.
pub fn gelu_ref(xs: &[bf16], out: &mut [bf16]) {
    for (o, x) in out.iter_mut().zip(xs) {
        let x = x.to_f32();
        let erf = candle_core::cpu::erf::erf_f32(x * std::f32::consts::FRAC_1_SQRT_2);
        *o = bf16::from_f32(x * 0.5 * (1.0 + erf));
    }
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, "gelu")?;
        let mut out = vec![bf16::ZERO; xs.len()];
        if cpu::should_parallelise(out.len() * 60) {
            let pieces = xs.par_chunks(PIECE).zip(out.par_chunks_mut(PIECE));
            pieces.for_each(|(x, out)| gelu_ref(x, out));
        } else {
            gelu_ref(xs, &mut out);
        }
        Ok((CpuStorage::BF16(out), l.shape().clone()))
    }
}

/// The residual sum of two bf16 tensors of one shape.
///
/// # Errors
/// Another dtype, or shapes that differ.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.shape() != b.shape() {
        return Err(Error::shape(
            "add",
            format!("{:?} and {:?} differ", a.shape(), b.shape()),
        ));
    }
    let (a, b) = (dense_bf16(a, "add")?, dense_bf16(b, "add")?);
    #[cfg(feature = "cuda")]
    if a.device().is_cuda() {
        return crate::cuda::vit_add(&a, &b);
    }
    Ok(a.apply_op2_no_bwd(&b, &Add)?)
}

/// `out[i] = a[i] + b[i]`, rounded once.
pub fn add_ref(a: &[bf16], b: &[bf16], out: &mut [bf16]) {
    add_body(a, b, out);
}

#[inline(always)]
fn add_body(a: &[bf16], b: &[bf16], out: &mut [bf16]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = bf16::from_f32(a.to_f32() + b.to_f32());
    }
}

fn add_fast(a: &[bf16], b: &[bf16], out: &mut [bf16]) {
    simd_dispatch!(add_body(a: &[bf16], b: &[bf16], out: &mut [bf16]))
}

struct Add;

impl CustomOp2 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let a = cpu::contiguous::<bf16>(s1, l1, "add")?;
        let b = cpu::contiguous::<bf16>(s2, l2, "add")?;
        let mut out = vec![bf16::ZERO; a.len()];
        if cpu::should_parallelise(out.len() * 4) {
            let pieces = a.par_chunks(PIECE).zip(b.par_chunks(PIECE));
            let pieces = pieces.zip(out.par_chunks_mut(PIECE));
            pieces.for_each(|((a, b), out)| add_fast(a, b, out));
        } else {
            add_fast(a, b, &mut out);
        }
        Ok((CpuStorage::BF16(out), l1.shape().clone()))
    }
}
