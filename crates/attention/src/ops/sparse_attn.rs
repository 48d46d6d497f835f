//! Attention of every head of a query over the rows its index lists name, with a sink.
//!
//! K and V are one shared row per position. Per query and head, over the query's rows in tiles of 64:
//!
//! ```text
//! m = -1e30, l = 0, o = 0
//! s_r = (q . kv_r) * scale                       f32, one chain of multiply-adds in ascending column
//! m'  = max(m, max_r s_r)      c = exp(m - m')     p_r = exp(s_r - m')
//! l   = l * c + sum_r p_r                        unrounded p, ascending r
//! o   = o * c + sum_r bf16(p_r) * kv_r           rounded p, ascending r
//! out = bf16(o / (l + exp(sink - m)))            the sink enters the denominator only
//! ```
//!
//! The reference tiles the index list as given, holes included. Here the valid rows of all scopes are
//! packed first and the tiles run over those. Where holes fall in a list depends on how a sequence
//! was cut into chunks and on the ring's size, so this is what makes a result a function of the rows
//! alone: one prefill, any chunking and token-by-token decoding give the same bits.

mod cpu;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Storage, Tensor};
use deepseek_v41_core::{Error, Result, cpu::contiguous};
use half::bf16;

use super::pool_rows::{PoolRow, PoolRows};
use super::simd::{exp, round_bf16};
use super::tile::{TILE, dot};
use crate::stored::StoredRows;

const OP: &str = "sparse_attn";

/// The running maximum before the first row, as in the official kernel: finite, so that a query
/// without rows needs no special case in the recurrence.
const NO_MAX: f32 = -1e30;

/// One pool of rows and, per query, which of its rows to attend to.
#[derive(Debug, Clone, Copy)]
pub struct KvScope<'a> {
    /// Rows of `D`; contiguous (a `narrow` over rows is fine).
    pub kv: StoredRows<'a>,
    /// `[T, n]` i32: rows of `kv`, or -1 for nothing, anywhere in the list. A row named twice counts
    /// twice.
    pub idxs: &'a Tensor,
}

impl<'a> KvScope<'a> {
    /// Rows of a pool, or of a tensor as [`StoredRows::Whole`] has it.
    pub fn new(kv: impl Into<StoredRows<'a>>, idxs: &'a Tensor) -> Self {
        Self {
            kv: kv.into(),
            idxs,
        }
    }
}

/// [`KvScope`] over slices.
#[derive(Debug, Clone, Copy)]
pub struct KvRows<'a> {
    /// `[rows, D]`.
    pub kv: PoolRows<'a>,
    /// `[T, n]`, -1 for nothing.
    pub idxs: &'a [i32],
    /// `n`.
    pub width: usize,
}

/// Attention of `q` over the rows of all `scopes`, walked in the order of the scopes and, within one,
/// in the order listed.
///
/// `q: [T, H, D]` bf16, `sink: [H]` f32 → `[T, H, D]` bf16. `scale` multiplies the scores (not the
/// sink). A query without a valid row gives zeros, whatever the sink. NaN in a row or in `q` makes the
/// heads that see it NaN.
///
/// A query's result depends on its own valid rows and their order, bit for bit: not on `T`, on the
/// holes, on the split of rows among scopes, or on threads.
///
/// # Errors
/// Shapes or dtypes that do not fit, and on the CPU an index below -1 or past the end of its pool.
///
/// Reference: `kernel.py`, `sparse_attn`.
pub fn sparse_attn(
    q: &Tensor,
    scopes: &[KvScope<'_>],
    sink: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    let dim = check_attn(q, scopes, sink)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return crate::cuda::sparse_attn(q, scopes, sink, scale, crate::cuda::Around::default());
    }
    if q.device().is_cpu() {
        with_rows(scopes, dim, |rows| check_indices(rows, dim))?;
    }
    Ok(q.contiguous()?
        .apply_op2_no_bwd(sink, &SparseAttn { scopes, scale })?)
}

/// Refuses operands that do not fit each other; the head width of those that do.
pub(crate) fn check_attn(q: &Tensor, scopes: &[KvScope<'_>], sink: &Tensor) -> Result<usize> {
    let (t, heads, dim) = q
        .dims3()
        .map_err(|_| shape(format!("q is {:?}", q.shape())))?;
    if heads == 0 || dim == 0 {
        return Err(shape(format!("no heads or columns in q {:?}", q.shape())));
    }
    if sink.dims() != [heads] {
        return Err(shape(format!(
            "sink is {:?} for {heads} heads",
            sink.shape()
        )));
    }
    if q.dtype() != DType::BF16 || sink.dtype() != DType::F32 {
        return Err(shape(format!(
            "q is {:?}, sink {:?}",
            q.dtype(),
            sink.dtype()
        )));
    }
    for KvScope { kv, idxs } in scopes {
        if !kv.fit(dim) {
            return Err(shape(format!("kv is {} for D {dim}", kv.describe())));
        }
        if idxs.rank() != 2 || idxs.dims()[0] != t || idxs.dtype() != DType::I32 {
            return Err(shape(format!(
                "idxs is {:?} {:?} for T {t}",
                idxs.shape(),
                idxs.dtype()
            )));
        }
    }
    Ok(dim)
}

fn shape(reason: String) -> Error {
    Error::shape(OP, reason)
}

/// The scopes' slices for the duration of `f`.
fn with_rows<R>(
    scopes: &[KvScope<'_>],
    dim: usize,
    f: impl FnOnce(&[KvRows<'_>]) -> Result<R>,
) -> Result<R> {
    let held = scopes.iter().map(|s| {
        let kv = s.kv.whole(OP)?.storage_and_layout();
        Ok((kv, s.idxs.storage_and_layout()))
    });
    let held: Vec<_> = held.collect::<Result<_>>()?;
    let mut rows = Vec::with_capacity(scopes.len());
    for ((kv, kv_layout), (idxs, idxs_layout)) in &held {
        let (Storage::Cpu(kv), Storage::Cpu(idxs)) = (&**kv, &**idxs) else {
            return Err(shape("q is on the CPU, a scope is not".into()));
        };
        rows.push(KvRows {
            kv: PoolRows::new(kv, kv_layout, dim, OP)?,
            idxs: contiguous::<i32>(idxs, idxs_layout, OP)?,
            width: idxs_layout.dims()[1],
        });
    }
    f(&rows)
}

/// Once, up front: the kernel then needs no fallible access, and nothing is computed for bad input.
fn check_indices(scopes: &[KvRows<'_>], dim: usize) -> Result<()> {
    for (s, scope) in scopes.iter().enumerate() {
        let rows = scope.kv.count(dim);
        if let Some(at) = scope
            .idxs
            .iter()
            .position(|&i| i < -1 || i >= 0 && i as usize >= rows)
        {
            let (t, n) = (at / scope.width, at % scope.width);
            return Err(Error::value(
                format!("{OP}: index [{t}, {n}] of scope {s}"),
                format!("{} is neither -1 nor one of {rows} rows", scope.idxs[at]),
            ));
        }
    }
    Ok(())
}

struct SparseAttn<'a> {
    scopes: &'a [KvScope<'a>],
    scale: f32,
}

impl CustomOp2 for SparseAttn<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        sink: &CpuStorage,
        sink_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let dim = q_layout.dims()[2];
        let q = contiguous::<bf16>(q, q_layout, OP)?;
        let sink = contiguous::<f32>(sink, sink_layout, OP)?;
        let mut out = vec![bf16::ZERO; q.len()];
        with_rows(self.scopes, dim, |scopes| {
            cpu::sparse_attn(q, scopes, sink, dim, self.scale, &mut out);
            Ok(())
        })?;
        Ok((CpuStorage::BF16(out), q_layout.shape().clone()))
    }
}

/// The valid rows of query `t`, in order.
fn valid_rows<'a>(scopes: &[KvRows<'a>], t: usize, dim: usize, rows: &mut Vec<PoolRow<'a>>) {
    rows.clear();
    for scope in scopes {
        let idxs = &scope.idxs[t * scope.width..][..scope.width];
        rows.extend(
            idxs.iter()
                .filter(|&&i| i >= 0)
                .map(|&i| scope.kv.row(i as usize, dim)),
        );
    }
}

/// The definition: one head at a time, straight loops.
///
/// `q: [T, H, D]`, `sink: [H]`, `out: [T, H, D]`, with `D = dim`. Indices other than -1 must be rows of
/// their scope.
pub fn sparse_attn_ref(
    q: &[bf16],
    scopes: &[KvRows<'_>],
    sink: &[f32],
    dim: usize,
    scale: f32,
    out: &mut [bf16],
) {
    let heads = sink.len();
    let mut rows = Vec::new();
    for (th, (q, out)) in q
        .chunks_exact(dim)
        .zip(out.chunks_exact_mut(dim))
        .enumerate()
    {
        let (t, h) = (th / heads, th % heads);
        valid_rows(scopes, t, dim, &mut rows);
        if rows.is_empty() {
            out.fill(bf16::ZERO);
            continue;
        }
        let (mut m, mut l, mut o) = (NO_MAX, 0f32, vec![0f32; dim]);
        let rows: Vec<_> = rows.iter().map(PoolRow::values).collect();
        for tile in rows.chunks(TILE) {
            let scores: Vec<f32> = tile.iter().map(|row| dot(row, q) * scale).collect();
            let top = scores.iter().fold(m, |m, &s| if s > m { s } else { m });
            let c = exp(m - top);
            o.iter_mut().for_each(|o| *o *= c);
            let mut sum = 0f32;
            for (row, s) in tile.iter().zip(scores) {
                let p = exp(s - top);
                sum += p;
                let p = round_bf16(p);
                for (o, v) in o.iter_mut().zip(row.iter()) {
                    *o = p.mul_add(v.to_f32(), *o);
                }
            }
            l = l.mul_add(c, sum);
            m = top;
        }
        l += exp(sink[h] - m);
        for (out, o) in out.iter_mut().zip(o) {
            *out = bf16::from_f32(o / l);
        }
    }
}
