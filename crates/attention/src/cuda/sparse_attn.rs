//! Attention over rows, bf16 or packed.

use candle_core::{DType, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, Ptr, Scope, is_hopper, kernels, multiprocessors,
        ops::{RowKind, device, supported},
    },
};
use half::bf16;

use crate::ops::KvScope;
use crate::stored::StoredRows;

const OP: &str = "sparse_attn";
/// Most parts that one query's rows are split into.
const MAX_SPLITS: usize = 64;

/// [`sparse_attn`](crate::ops::sparse_attn) of checked operands.
pub(crate) fn sparse_attn(
    q: &Tensor,
    scopes: &[KvScope<'_>],
    sink: &Tensor,
    scale: f32,
) -> Result<Tensor> {
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
    let mut words = [Scope::NONE; 3];
    for (word, scope) in words.iter_mut().zip(scopes) {
        *word = scope_words(scope)?;
        listed += word.n;
    }
    let packed = words.iter().any(|scope| scope.kind != RowKind::Plain);
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
    let (module, name) = match (hopper, packed) {
        (true, false) => (kernels::SPARSE_ATTN_SM90, "sparse_attn_sm90"),
        (true, true) => (kernels::SPARSE_ATTN_SM90, "sparse_attn_packed_sm90"),
        (false, false) => (kernels::SPARSE_ATTN, "sparse_attn"),
        (false, true) => (kernels::SPARSE_ATTN, "sparse_attn_packed"),
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

fn scope_words<'a>(scope: &KvScope<'a>) -> Result<Scope<'a>> {
    let (rows, scales, kind) = match scope.kv {
        StoredRows::Whole(rows) => {
            supported(
                rows.dtype() == DType::BF16,
                OP,
                "packed rows in one tensor",
                "those of a pool on the GPU",
            )?;
            let rows = Held::new(rows, OP).ptr::<bf16>()?;
            (rows, Ptr::NULL, RowKind::Plain)
        }
        StoredRows::Planes(planes) => (
            Held::new(planes.codes(), OP).ptr::<u8>()?,
            Held::new(planes.scales(), OP).ptr::<u8>()?,
            super::kind(planes.codec().quant()),
        ),
    };
    Ok(Scope {
        rows,
        scales,
        idxs: Held::new(scope.idxs, OP).ptr::<i32>()?,
        n: scope.idxs.dim(1)?,
        kind,
    })
}
