//! The activation inside an expert.
//!
//! ```text
//! up  = clamp(up, -limit, limit)        only when limit > 0
//! gate = min(gate, limit)               from above only
//! out = bf16(weight * (silu(gate) * up))
//! ```
//!
//! `gate` and `up` are bf16 products, widened; the routing weight multiplies the f32 activation
//! *before* the rounding, and so before `w2`. Clamps keep NaN. `silu(-inf)` is NaN, as in torch.

use deepseek_v41_core::cpu;
use half::bf16;

/// One token: `gate`, `up`, `out: [inter]`. `weight` is the routing weight; the shared expert has
/// none.
///
/// Reference: `Expert.forward`.
pub fn swiglu_ref(gate: &[bf16], up: &[bf16], limit: f32, weight: Option<f32>, out: &mut [bf16]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let (mut gate, mut up) = (cpu::widen(*gate), cpu::widen(*up));
        if limit > 0.0 {
            up = up.clamp(-limit, limit);
            // Not `min`, which would replace NaN by the limit.
            gate = if gate > limit { limit } else { gate };
        }
        let act = gate / (1.0 + (-gate).exp()) * up;
        *out = cpu::round_bf16(weight.map_or(act, |weight| weight * act));
    }
}
