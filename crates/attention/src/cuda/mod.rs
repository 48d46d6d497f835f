//! The operations of this crate on a GPU.
//!
//! Indices are not checked there: a row outside of its pool is the caller's error that the CPU reports.

mod index_topk;
mod query_heads;
mod sparse_attn;
mod sparse_attn_few;
mod topk_rows;

use candle_core::{CudaStorage, DType, Layout, Tensor, backend::BackendStorage as _};
use deepseek_v41_core::{
    Error, Result, RmsNorm, RopeTable,
    cuda::{
        Held, Launch, Out, Ptr, contiguous, kernels,
        ops::{RowKind, device, norm_rope_quant},
    },
};
use half::bf16;

pub(crate) use self::{
    index_topk::{Spans, Wanted, index_topk},
    query_heads::{Row, query_heads},
    sparse_attn::{Around, sparse_attn},
};
use crate::rows::RowQuant;
use crate::stored::RowPlanes;

/// A number format as kernels name it.
fn kind(quant: RowQuant) -> RowKind {
    match quant {
        RowQuant::Window => RowKind::Fp8,
        RowQuant::Compressed => RowKind::Fp4E4m3,
        RowQuant::Index => RowKind::Fp4E8m0,
    }
}

/// [`finish_rows`](crate::finish_rows) of checked operands: one kernel.
pub(crate) fn finish_rows(
    xs: &Tensor,
    norm: Option<&RmsNorm>,
    table: &RopeTable,
    quant: RowQuant,
) -> Result<Tensor> {
    let norm = norm.map(half_norm).transpose()?;
    norm_rope_quant(xs, norm, (&table.cos, &table.sin), kind(quant), false)
}

/// A norm as kernels take it.
fn half_norm(norm: &RmsNorm) -> Result<(&Tensor, f32)> {
    let weight = norm.weight_bf16().ok_or_else(|| Error::Unsupported {
        what: "a norm loaded on the CPU given rows on the GPU".into(),
    })?;
    Ok((weight, norm.eps()))
}

/// [`compress`](crate::ops::compress) of checked operands, then the norm if there is one; `sources` as
/// [`KernelRows`](crate::KernelRows) has them.
pub(crate) fn compress(
    kv: &Tensor,
    score: &Tensor,
    pending: Option<&Tensor>,
    sources: &Tensor,
    ratio: usize,
    norm: Option<&RmsNorm>,
) -> Result<Tensor> {
    const OP: &str = "compress";
    let (kv, score) = (kv.contiguous()?, score.contiguous()?);
    let dev = device(&kv)?;
    let dim = kv.dim(1)?;
    let groups = sources.elem_count() / ratio;
    let pending = pending
        .map(|p| Held::new(p, OP).ptr::<f32>())
        .transpose()?
        .unwrap_or(Ptr::NULL);
    let norm = norm.map(half_norm).transpose()?;
    let out = Out::<bf16>::new(dev, groups * dim)?;
    let launch = Launch::new(dev, kernels::COMPRESS, "compress")
        .ptr(Held::new(&kv, OP).ptr::<f32>()?)
        .ptr(Held::new(&score, OP).ptr::<f32>()?)
        .ptr(pending)
        .ptr(pending.offset(dim * size_of::<f32>()))
        .ptr(Held::new(sources, OP).ptr::<i32>()?)
        .maybe(
            norm.map(|(w, _)| Held::new(w, OP).ptr::<bf16>())
                .transpose()?,
        )
        .ptr(out.ptr())
        .int(dim)
        .int(ratio)
        .f32(norm.map_or(0.0, |(_, eps)| eps));
    let block = dim.next_multiple_of(32).min(512);
    // SAFETY: sources were checked against both tensors; [G, dim] out, a block a group.
    unsafe { launch.launch((groups, 1, 1), block, 4 * dim)? };
    out.into_tensor((groups, dim))
}

/// [`write_rows`](crate::ops::write_rows) of checked operands.
pub(crate) fn write_rows(
    pool: &mut CudaStorage,
    pool_layout: &Layout,
    rows: &CudaStorage,
    rows_layout: &Layout,
    slots: &CudaStorage,
    slots_layout: &Layout,
) -> Result<()> {
    const OP: &str = "write_rows";
    let dev = pool.device.clone();
    let (n, width) = rows_layout.shape().dims2()?;
    let slots = contiguous::<i32>(slots, slots_layout, OP)?;
    let (pool, rows, size) = match pool.dtype() {
        DType::BF16 => (
            contiguous::<bf16>(pool, pool_layout, OP)?,
            contiguous::<bf16>(rows, rows_layout, OP)?,
            2,
        ),
        DType::F32 => (
            contiguous::<f32>(pool, pool_layout, OP)?,
            contiguous::<f32>(rows, rows_layout, OP)?,
            4,
        ),
        _ => (
            contiguous::<u8>(pool, pool_layout, OP)?,
            contiguous::<u8>(rows, rows_layout, OP)?,
            1,
        ),
    };
    let bytes = width * size;
    let launch = Launch::new(&dev, kernels::WRITE_ROWS, "write_rows")
        .ptr(rows)
        .ptr(slots)
        .ptr(pool)
        .int(bytes);
    // SAFETY: n rows of the pool's width and n slots, which plans make from rows of the pool.
    unsafe { launch.launch((n, 1, 1), 128, 0) }
}

/// [`RowPlanes::write`] of checked operands: what [`pack_rows`](crate::pack_rows) and then
/// [`write_rows`](crate::ops::write_rows) do on the CPU.
pub(crate) fn pack_rows(planes: &RowPlanes, rows: &Tensor, slots: &Tensor) -> Result<()> {
    const OP: &str = "pack_rows";
    let rows = rows.contiguous()?;
    let dev = device(&rows)?;
    let codec = planes.codec();
    let launch = Launch::new(dev, kernels::PACK_ROWS, "pack_rows")
        .ptr(Held::new(&rows, OP).ptr::<bf16>()?)
        .ptr(Held::new(slots, OP).ptr::<i32>()?)
        .ptr(Held::new(planes.codes(), OP).ptr::<u8>()?)
        .ptr(Held::new(planes.scales(), OP).ptr::<u8>()?)
        .int(codec.dim())
        .int(kind(codec.quant()) as usize);
    // SAFETY: n rows of D and n slots, which plans make from rows of the pool; a block a row.
    unsafe { launch.launch((rows.dims()[0], 1, 1), 128, 0) }
}
