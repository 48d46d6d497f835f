//! One token's query heads.

use candle_core::Tensor;
use deepseek_v41_core::{
    Error, Result, RmsNorm, RopeTable,
    cuda::{
        Held, Launch, Out, Ptr, kernels,
        ops::{device, supported},
    },
};
use deepseek_v41_quant::{
    Linear,
    cuda::{Activation, FewPlan},
};
use half::bf16;

use super::half_norm;

const OP: &str = "query_heads";

/// What becomes a token's window row: its latent `[1, D]` bf16, the norm and the rotation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<'a> {
    pub(crate) kv: &'a Tensor,
    pub(crate) norm: &'a RmsNorm,
    pub(crate) table: &'a RopeTable,
}

/// `layer(rms_norm(latent))` of one token `[1, K]` bf16 on Hopper in one launch, `[1, N]`, and its window row beside
/// it. `None` for anything else.
pub(crate) fn query_heads(
    latent: &Tensor,
    norm: &RmsNorm,
    layer: &Linear,
    row: Option<Row<'_>>,
) -> Result<Option<(Tensor, Option<Tensor>)>> {
    let dev = device(latent)?;
    let (n, k) = (layer.out_dim(), layer.in_dim());
    let Linear::Fp8(own) = layer else {
        return Ok(None);
    };
    let Some(weight) = own.device() else {
        return Ok(None);
    };
    if latent.dims() != [1, k] || !Activation::takes_codes(dev, 1)? {
        return Ok(None);
    }
    let d = row.map_or(0, |row| row.kv.elem_count());
    if row.is_some() && !matches!(d, 64 | 128 | 256 | 512) {
        return Ok(None);
    }
    supported(
        k.is_multiple_of(32),
        OP,
        k,
        "input widths of multiples of 32",
    )?;
    let (q_norm, eps) = half_norm(norm)?;
    if q_norm.dims() != [k] {
        let found = format!("a norm of {:?} for a latent of {k}", q_norm.shape());
        return Err(Error::shape(OP, found));
    }
    let few = FewPlan::one_token(
        dev,
        (kernels::QUERY_HEADS_SM90, "query_heads_m1"),
        (n, k),
        usize::from(row.is_some()),
    )?;
    let q = Out::<bf16>::new(dev, n)?;
    let out = row.map(|_| Out::<bf16>::new(dev, d)).transpose()?;
    let parts = row.map(RowPtrs::new).transpose()?;
    let launch = Launch::new(dev, kernels::QUERY_HEADS_SM90, "query_heads_m1")
        .ptr(Held::new(latent, OP).ptr::<bf16>()?)
        .ptr(Held::new(q_norm, OP).ptr::<bf16>()?)
        .ptr(Held::new(&weight.codes, OP).ptr::<u8>()?)
        .ptr(Held::new(&weight.scales, OP).ptr::<u8>()?)
        .ptr(q.ptr())
        .maybe(parts.as_ref().map(|row| row.kv))
        .maybe(parts.as_ref().map(|row| row.norm))
        .maybe(parts.as_ref().map(|row| row.cos))
        .maybe(parts.as_ref().map(|row| row.sin))
        .maybe(out.as_ref().map(Out::ptr))
        .int(n)
        .int(k)
        .int(d)
        .int(parts.as_ref().map_or(0, |row| row.rope))
        .f32(eps)
        .f32(parts.as_ref().map_or(0.0, |row| row.eps))
        .clusters(few.split);
    // SAFETY: latent and norm [K], the weight [N, K] with its scales, q [N]; of a row D values, as many weights and
    // outputs, and half as many cosines and sines as columns turn.
    unsafe { launch.launch(few.grid, 256, few.shared)? };
    let row = out.map(|out| out.into_tensor((1, d))).transpose()?;
    Ok(Some((q.into_tensor((1, n))?, row)))
}

/// [`Row`] as the kernel takes it.
struct RowPtrs<'a> {
    kv: Ptr<'a>,
    norm: Ptr<'a>,
    eps: f32,
    cos: Ptr<'a>,
    sin: Ptr<'a>,
    rope: usize,
}

impl<'a> RowPtrs<'a> {
    fn new(row: Row<'a>) -> Result<Self> {
        let (weight, eps) = half_norm(row.norm)?;
        let (d, table) = (row.kv.elem_count(), row.table.cos.dims());
        if weight.dims() != [d] || !matches!(table, [1, half] if 2 * half <= d) {
            let weight = weight.shape();
            let found = format!("a row of {d}, its norm {weight:?}, its rotation {table:?}");
            return Err(Error::shape(OP, found));
        }
        Ok(Self {
            kv: Held::new(row.kv, OP).ptr::<bf16>()?,
            norm: Held::new(weight, OP).ptr::<bf16>()?,
            eps,
            cos: Held::new(&row.table.cos, OP).ptr::<f32>()?,
            sin: Held::new(&row.table.sin, OP).ptr::<f32>()?,
            rope: 2 * row.table.cos.dim(1)?,
        })
    }
}
