//! Enters the stream: every copy starts as the same embedding.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Error, Result, cpu};
use half::bf16;

use super::rows::for_each_token;

/// `xs: [T, dim]` bf16 → `[T, c, dim]` bf16, `c` equal copies.
///
/// # Errors
/// Another rank or dtype, an empty row, or `c == 0`.
///
/// Reference: `h.unsqueeze(2).repeat(1, 1, hc_mult, 1)` in `Transformer.forward`.
pub fn hc_expand(xs: &Tensor, c: usize) -> Result<Tensor> {
    match (xs.dims(), xs.dtype()) {
        (&[_, dim], DType::BF16) if dim > 0 && c > 0 => {
            #[cfg(feature = "cuda")]
            if xs.device().is_cuda() {
                return crate::cuda::hc_expand(xs, c);
            }
            Ok(xs.contiguous()?.apply_op1_no_bwd(&HcExpand { c })?)
        }
        (dims, dtype) => Err(Error::shape(
            "hc_expand",
            format!("expected [T, dim] bf16 and c > 0, found {dims:?} {dtype:?} and c = {c}"),
        )),
    }
}

/// One token: `x: [dim]` → `out: [c, dim]`, where `c` is `out.len() / x.len()`.
pub fn hc_expand_ref(x: &[bf16], out: &mut [bf16]) {
    for copy in out.chunks_exact_mut(x.len()) {
        copy.copy_from_slice(x);
    }
}

struct HcExpand {
    c: usize,
}

impl CustomOp1 for HcExpand {
    fn name(&self) -> &'static str {
        "hc_expand"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (t, dim) = l.shape().dims2()?;
        let xs = cpu::contiguous::<bf16>(s, l, "hc_expand")?;
        let len = self.c * dim;
        let mut out = vec![bf16::ZERO; t * len];
        for_each_token(&mut out, len, len, |t, out| {
            hc_expand_ref(&xs[t * dim..(t + 1) * dim], out)
        });
        Ok((CpuStorage::BF16(out), (t, self.c, dim).into()))
    }
}
