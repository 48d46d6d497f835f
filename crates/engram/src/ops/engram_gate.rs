//! Adds the shared value to each copy of the stream, gated by how well the copy matches its key.
//!
//! For token t and copy c, with `w = q_weight * k_weight` and means over `dim`:
//!
//! dot  = sum(h * w * key) * (rsqrt(mean h^2 + eps) * rsqrt(mean key^2 + eps)) * dim^-0.5
//! gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)), 0 at masked tokens
//! out  = bf16(h + gate * value)
//!
//! There is one key per copy but a single value, shared by all of them. The floor under `|dot|` means
//! that a zero dot opens the gate by sigmoid(±0.001), so the sign of zero shows. A NaN anywhere in
//! stream, key or value of a token that is not masked gives NaN.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor};
use deepseek_v41_core::{
    Error, Result,
    cpu::{self, Isa, LANES, sum_lanes},
};
use half::bf16;
use rayon::prelude::*;

use super::dispatch::dispatch;

const OP: &str = "engram_gate";
const DOT_FLOOR: f32 = 1e-6;

/// `stream: [T, C, dim]` bf16, `kv: [N, (C + 1) * dim]` bf16 (C keys, then the value),
/// `weight: [C, dim]` f32 (`q_weight * k_weight`), `image_mask: [N]` u8 → `[T, C, dim]` bf16.
///
/// Tokens inside an image span pass through untouched, and so do those from `N` on: a rank of a
/// sequence-parallel group pads its share with rows that have no key.
///
/// # Errors
/// Shapes or dtypes that do not fit, `N > T`.
pub fn engram_gate(
    stream: &Tensor,
    kv: &Tensor,
    weight: &Tensor,
    image_mask: Option<&Tensor>,
    eps: f32,
) -> Result<Tensor> {
    let (copies, dim) = check(stream, kv, weight, image_mask)?;
    #[cfg(feature = "cuda")]
    if stream.device().is_cuda() {
        return Err(Error::Unsupported {
            what: format!(
                "{OP} with a joined weight on a GPU: use `Engram` or `cuda::engram_gate`"
            ),
        });
    }
    let image_mask = image_mask.map(Tensor::contiguous).transpose()?;
    let op = EngramGate {
        image_mask,
        params: GateParams { copies, dim, eps },
    };
    Ok(stream
        .contiguous()?
        .apply_op3_no_bwd(&kv.contiguous()?, &weight.contiguous()?, &op)?)
}

/// Refuses operands that do not fit; `(copies, dim)`.
pub(crate) fn check(
    stream: &Tensor,
    kv: &Tensor,
    weight: &Tensor,
    image_mask: Option<&Tensor>,
) -> Result<(usize, usize)> {
    let (tokens, copies, dim) = stream.dims3()?;
    let (rows, width) = kv.dims2()?;
    if stream.dtype() != DType::BF16 || kv.dtype() != DType::BF16 || weight.dtype() != DType::F32 {
        let found = (stream.dtype(), kv.dtype(), weight.dtype());
        return Err(Error::shape(
            OP,
            format!("expected BF16, BF16 and F32, found {found:?}"),
        ));
    }
    if width != (copies + 1) * dim || weight.dims() != [copies, dim] || rows > tokens || dim == 0 {
        return Err(Error::shape(
            OP,
            format!(
                "stream {:?}, kv {:?}, weight {:?}",
                stream.shape(),
                kv.shape(),
                weight.shape()
            ),
        ));
    }
    if let Some(mask) = image_mask
        && (mask.dtype() != DType::U8 || mask.dims() != [rows])
    {
        let (shape, dtype) = (mask.shape(), mask.dtype());
        return Err(Error::shape(
            OP,
            format!("mask: expected [{rows}] U8, found {shape:?} {dtype:?}"),
        ));
    }
    Ok((copies, dim))
}

/// Sizes of one gate call.
#[derive(Debug, Clone, Copy)]
pub struct GateParams {
    /// Copies of the stream.
    pub copies: usize,
    /// Width of a copy.
    pub dim: usize,
    /// Added to the mean squares.
    pub eps: f32,
}

struct EngramGate {
    image_mask: Option<Tensor>,
    params: GateParams,
}

impl CustomOp3 for EngramGate {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        stream: &CpuStorage,
        stream_layout: &Layout,
        kv: &CpuStorage,
        kv_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let stream = cpu::contiguous::<bf16>(stream, stream_layout, OP)?;
        let kv = cpu::contiguous::<bf16>(kv, kv_layout, OP)?;
        let weight = cpu::contiguous::<f32>(weight, weight_layout, OP)?;
        let mask = self.image_mask.as_ref().map(Tensor::storage_and_layout);
        let mask = match &mask {
            None => None,
            Some((storage, layout)) => match &**storage {
                Storage::Cpu(storage) => Some(cpu::contiguous::<u8>(storage, layout, OP)?),
                _ => candle_core::bail!("{OP}: the mask is on another device than the stream"),
            },
        };
        let mut out = vec![bf16::ZERO; stream.len()];
        gate_into(stream, kv, weight, mask, self.params, &mut out);
        Ok((CpuStorage::BF16(out), stream_layout.shape().clone()))
    }
}

/// The definition, with sums in f64. `image_mask` covers the tokens that have a row of `kv`.
pub fn engram_gate_ref(
    stream: &[bf16],
    kv: &[bf16],
    weight: &[f32],
    image_mask: Option<&[u8]>,
    params: GateParams,
    out: &mut [bf16],
) {
    let GateParams { copies, dim, eps } = params;
    out.copy_from_slice(stream);
    for (t, kv) in kv.chunks_exact((copies + 1) * dim).enumerate() {
        if image_mask.is_some_and(|mask| mask[t] != 0) {
            continue;
        }
        for c in 0..copies {
            let h = &stream[(t * copies + c) * dim..][..dim];
            let (key, value) = (&kv[c * dim..][..dim], &kv[copies * dim..]);
            let (mut hh, mut kk, mut hwk) = (0f64, 0f64, 0f64);
            for i in 0..dim {
                let (h, k) = (h[i].to_f64(), key[i].to_f64());
                hh += h * h;
                kk += k * k;
                hwk += h * f64::from(weight[c * dim + i]) * k;
            }
            let gate = gate(hh as f32, kk as f32, hwk as f32, dim, eps);
            let out = &mut out[(t * copies + c) * dim..][..dim];
            for i in 0..dim {
                out[i] = cpu::round_bf16(h[i].to_f32() + gate * value[i].to_f32());
            }
        }
    }
}

/// The gate from the three sums of a (token, copy).
fn gate(hh: f32, kk: f32, hwk: f32, dim: usize, eps: f32) -> f32 {
    let n = dim as f32;
    let rstd = (1.0 / (hh / n + eps).sqrt()) * (1.0 / (kk / n + eps).sqrt());
    let dot = hwk * rstd * (dim as f64).powf(-0.5) as f32;
    // Not `max`: it would turn a NaN into the floor and hide it.
    let magnitude = if dot.abs() < DOT_FLOOR {
        DOT_FLOOR
    } else {
        dot.abs()
    };
    1.0 / (1.0 + (-magnitude.sqrt().copysign(dot)).exp())
}

/// [`engram_gate_ref`] with f32 sums over eight fixed lanes: at most one bf16 ulp away, and the same
/// bits for any number of tokens and threads.
pub fn gate_into(
    stream: &[bf16],
    kv: &[bf16],
    weight: &[f32],
    image_mask: Option<&[u8]>,
    params: GateParams,
    out: &mut [bf16],
) {
    gate_with(Isa::detect(), stream, kv, weight, image_mask, params, out);
}

/// [`gate_into`] with the instructions of `isa`.
pub fn gate_with(
    isa: Isa,
    stream: &[bf16],
    kv: &[bf16],
    weight: &[f32],
    image_mask: Option<&[u8]>,
    params: GateParams,
    out: &mut [bf16],
) {
    let GateParams { copies, dim, .. } = params;
    let row = copies * dim;
    if row == 0 {
        return;
    }
    let token = |t: usize, stream: &[bf16], out: &mut [bf16]| {
        let kv = kv.get(t * (row + dim)..(t + 1) * (row + dim));
        match kv.filter(|_| image_mask.is_none_or(|mask| mask[t] == 0)) {
            Some(kv) => gate_token(isa, stream, kv, weight, params, out),
            None => out.copy_from_slice(stream),
        }
    };
    if cpu::should_parallelise(stream.len() * 8) {
        let tokens = stream
            .par_chunks_exact(row)
            .zip(out.par_chunks_exact_mut(row));
        tokens
            .enumerate()
            .for_each(|(t, (stream, out))| token(t, stream, out));
    } else {
        let tokens = stream.chunks_exact(row).zip(out.chunks_exact_mut(row));
        tokens
            .enumerate()
            .for_each(|(t, (stream, out))| token(t, stream, out));
    }
}

fn gate_token(
    isa: Isa,
    stream: &[bf16],
    kv: &[bf16],
    weight: &[f32],
    params: GateParams,
    out: &mut [bf16],
) {
    let GateParams { copies, dim, eps } = params;
    let (keys, value) = kv.split_at(copies * dim);
    for c in 0..copies {
        let span = c * dim..(c + 1) * dim;
        let h = &stream[span.clone()];
        let sums = lane_sums(isa, h, &keys[span.clone()], &weight[span.clone()]);
        let [hh, kk, hwk] = sums.map(|lanes| sum_lanes(&lanes));
        add_gated(isa, h, gate(hh, kk, hwk, dim, eps), value, &mut out[span]);
    }
}

dispatch! {
    /// Lanes of `[sum h^2, sum key^2, sum h * w * key]`, element `i` on lane `i % 8`.
    ///
    /// Adding the lanes up is left to the caller: in one function with the loop, the compiler takes
    /// the accumulators apart to suit the order of that last sum, several times slower.
    fn lane_sums(h: &[bf16], key: &[bf16], weight: &[f32]) -> [[f32; LANES]; 3] = lane_sums_body
}

#[inline(always)]
fn lane_sums_body(h: &[bf16], key: &[bf16], weight: &[f32]) -> [[f32; LANES]; 3] {
    let (h8, h_rest) = h.as_chunks::<LANES>();
    let (key8, key_rest) = key.as_chunks::<LANES>();
    let (weight8, weight_rest) = weight.as_chunks::<LANES>();
    let mut sums = [[0f32; LANES]; 3];
    for ((h, key), weight) in h8.iter().zip(key8).zip(weight8) {
        add_block(&mut sums, h, key, weight);
    }
    // The rest padded with zeros, which leave every lane as it is.
    let (mut h, mut key, mut weight) = ([bf16::ZERO; LANES], [bf16::ZERO; LANES], [0f32; LANES]);
    h[..h_rest.len()].copy_from_slice(h_rest);
    key[..key_rest.len()].copy_from_slice(key_rest);
    weight[..weight_rest.len()].copy_from_slice(weight_rest);
    add_block(&mut sums, &h, &key, &weight);
    sums
}

#[inline(always)]
fn add_block(
    sums: &mut [[f32; LANES]; 3],
    h: &[bf16; LANES],
    key: &[bf16; LANES],
    weight: &[f32; LANES],
) {
    let [hh, kk, hwk] = sums;
    for l in 0..LANES {
        let (h, key) = (cpu::widen(h[l]), cpu::widen(key[l]));
        hh[l] += h * h;
        kk[l] += key * key;
        hwk[l] += h * weight[l] * key;
    }
}

dispatch! {
    /// `out = bf16(h + gate * value)`.
    fn add_gated(h: &[bf16], gate: f32, value: &[bf16], out: &mut [bf16]) = add_gated_body
}

#[inline(always)]
fn add_gated_body(h: &[bf16], gate: f32, value: &[bf16], out: &mut [bf16]) {
    for ((out, &h), &v) in out.iter_mut().zip(h).zip(value) {
        *out = cpu::round_bf16(cpu::widen(h) + gate * cpu::widen(v));
    }
}
