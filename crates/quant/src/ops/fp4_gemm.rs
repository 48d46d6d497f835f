//! e4m3 activations times packed e2m1 weights with e8m0 scales.
//!
//! ```text
//! out[m, n] = bf16(sum_k  (a[m,k] * sa[m, k/g]) * (b[n,k] * sb[n, k/32]))
//! ```
//! A weight scale belongs to one row: there are no tiles over N as in fp8. The order of the additions
//! is [`cpu::dot`]'s.
//!
//! Reference: `kernel.py`, `fp4_gemm`.

use candle_core::Tensor;
use deepseek_v41_core::{Result, cpu};
use half::bf16;

use super::{
    act_quant::QuantizedActivation,
    fp8_gemm::{activation_values, quantised_gemm},
};
use crate::{
    formats::{e2m1, e8m0},
    weight::{FP4_GROUP, Fp4Weight},
};

/// `a: [.., k]` codes with e8m0 scales (any group), `weight: [n, k]` → `[.., n]` bf16.
///
/// # Errors
/// `k` differs, or the activation is not U8 codes with U8 scales.
pub fn fp4_gemm(a: &QuantizedActivation, weight: &Fp4Weight) -> Result<Tensor> {
    quantised_gemm("fp4_gemm", a, weight)
}

/// [`fp4_gemm`] on slices, as its definition says: decode both sides, then [`cpu::dot`].
///
/// `a: [m, k]`, `a_s: [m, k/group]`, `b: [n, k/2]`, `b_s: [n, k/32]`, `out: [m, n]`.
pub fn fp4_gemm_ref(
    a: &[u8],
    a_s: &[u8],
    b: &[u8],
    b_s: &[u8],
    k: usize,
    group: usize,
    out: &mut [bf16],
) {
    let codes = b
        .iter()
        .flat_map(|byte| <[u8; 2]>::from(e2m1::unpack(*byte)));
    let b: Vec<f32> = codes
        .enumerate()
        .map(|(i, code)| e2m1::decode(code) * e8m0::decode(b_s[i / FP4_GROUP]))
        .collect();
    let n = b.len() / k;
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
