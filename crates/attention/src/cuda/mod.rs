//! The operations of this crate on a GPU.
//!
//! Indices are not checked there: a row outside of its pool is the caller's error that the CPU reports.

mod index_topk;

use candle_core::{CudaStorage, DType, Layout, Tensor, backend::BackendStorage as _};
use deepseek_v41_core::{
    Error, Result, RmsNorm, RopeTable,
    cuda::{
        Held, Launch, Out, Ptr, contiguous, is_hopper, kernels, multiprocessors,
        ops::{RowKind, device, norm_rope_quant, supported},
    },
};
use half::bf16;

pub(crate) use self::index_topk::{Spans, Wanted, index_topk};
use crate::ops::KvScope;
use crate::rows::RowQuant;

/// [`finish_rows`](crate::finish_rows) of checked operands: one kernel.
pub(crate) fn finish_rows(
    xs: &Tensor,
    norm: Option<&RmsNorm>,
    table: &RopeTable,
    quant: RowQuant,
) -> Result<Tensor> {
    let kind = match quant {
        RowQuant::Window => RowKind::Fp8,
        RowQuant::Compressed => RowKind::Fp4E4m3,
        RowQuant::Index => RowKind::Fp4E8m0,
    };
    let norm = norm.map(half_norm).transpose()?;
    norm_rope_quant(xs, norm, (&table.cos, &table.sin), kind, false)
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
    supported(
        bytes.is_multiple_of(4),
        OP,
        bytes,
        "rows of multiples of 4 bytes",
    )?;
    let launch = Launch::new(&dev, kernels::WRITE_ROWS, "write_rows")
        .ptr(rows)
        .ptr(slots)
        .ptr(pool)
        .int(bytes);
    // SAFETY: n rows of the pool's width and n slots, which plans make from rows of the pool.
    unsafe { launch.launch((n, 1, 1), 128, 0) }
}

/// Most parts that one query's rows are split into.
const MAX_SPLITS: usize = 64;

/// [`sparse_attn`](crate::ops::sparse_attn) of checked operands.
pub(crate) fn sparse_attn(
    q: &Tensor,
    scopes: &[KvScope<'_>],
    sink: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    const OP: &str = "sparse_attn";
    let q = q.contiguous()?;
    let dev = device(&q)?;
    let (t, h, d) = q.dims3()?;
    supported(
        d.is_multiple_of(16) && d <= 512,
        OP,
        d,
        "head widths of multiples of 16 up to 512",
    )?;
    supported(scopes.len() <= 3, OP, scopes.len(), "up to 3 scopes")?;
    let mut listed = 0;
    let mut words = [(Ptr::NULL, Ptr::NULL, 0); 3];
    for (word, scope) in words.iter_mut().zip(scopes) {
        supported(
            scope.kv.dtype() == DType::BF16,
            OP,
            "packed rows",
            "bf16 rows (KvFormat::Bf16)",
        )?;
        let n = scope.idxs.dim(1)?;
        listed += n;
        *word = (
            Held::new(scope.kv, OP).ptr::<bf16>()?,
            Held::new(scope.idxs, OP).ptr::<i32>()?,
            n,
        );
    }
    let hopper_shared = 2 * 65_536 + 4 * 16_384 + 2 * 8192 + 1024 + 4 * listed;
    let hopper = d == 512 && is_hopper(dev)? && hopper_shared <= 232_448;
    let (heads, tile) = if hopper { (64, 64) } else { (32, 32) };
    let blocks = t * h.div_ceil(heads);
    let per_sm = if hopper { 1 } else { 2 };
    let splits = (per_sm * multiprocessors(dev)? / blocks.max(1))
        .min(listed / tile)
        .clamp(1, MAX_SPLITS);

    let out = Out::<bf16>::new(dev, q.elem_count())?;
    let split = splits > 1;
    let part_o = split
        .then(|| Out::<f32>::new(dev, splits * t * h * d))
        .transpose()?;
    let part_ml = split
        .then(|| Out::<f32>::new(dev, splits * t * h * 2))
        .transpose()?;
    let sink = Held::new(sink, OP).ptr::<f32>()?;
    let (module, name) = match hopper {
        true => (kernels::SPARSE_ATTN_SM90, "sparse_attn_sm90"),
        false => (kernels::SPARSE_ATTN, "sparse_attn"),
    };
    let mut launch = Launch::new(dev, module, name)
        .ptr(Held::new(&q, OP).ptr::<bf16>()?)
        .scopes(words)
        .ptr(sink)
        .ptr(out.ptr())
        .maybe(part_o.as_ref().map(Out::ptr))
        .maybe(part_ml.as_ref().map(Out::ptr))
        .int(t)
        .int(h);
    if !hopper {
        launch = launch.int(d);
    }
    let launch = launch.f32(scale);
    let grid = (splits, h.div_ceil(heads), t);
    match hopper {
        // SAFETY: q and out are [T, H, 512], lists [T, n] of rows of their pools, parts [S, T, H, ..].
        true => unsafe { launch.launch(grid, 384, hopper_shared)? },
        false => {
            let shared = 2 * 32 * 2 * d.next_multiple_of(64) + 7296 + 4 * listed;
            // SAFETY: as above, for any D.
            unsafe { launch.launch(grid, 256, shared)? };
        }
    }
    if let (Some(o), Some(ml)) = (&part_o, &part_ml) {
        let launch = Launch::new(dev, kernels::SPARSE_ATTN_COMBINE, "sparse_attn_combine")
            .ptr(o.ptr())
            .ptr(ml.ptr())
            .ptr(sink)
            .ptr(out.ptr())
            .int(t)
            .int(h)
            .int(d)
            .int(splits);
        // SAFETY: the parts written above; a block a head of a token.
        unsafe { launch.launch((h, t, 1), 128, 0)? };
    }
    out.into_tensor((t, h, d))
}
