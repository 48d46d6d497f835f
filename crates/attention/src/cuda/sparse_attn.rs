//! Attention over rows, bf16 or packed, and what a layer does around it.

use candle_core::{CudaDevice, DType, Tensor};
use deepseek_v41_core::{
    Error, Result, RopeTable, apply_rope,
    cuda::{
        Held, Launch, Out, Ptr, Scope, is_hopper, kernels, multiprocessors,
        ops::{RowKind, device, supported},
    },
};
use half::bf16;

use super::sparse_attn_few::Few;
use crate::ops::KvScope;
use crate::pool::Entering;
use crate::stored::StoredRows;

pub(super) const OP: &str = "sparse_attn";
/// Most parts that one query's rows are split into.
const MAX_SPLITS: usize = 64;

/// What a layer does around its attention.
#[derive(Debug, Default)]
pub(crate) struct Around<'a> {
    /// Rotations of the queries before, and back of what comes out.
    pub(crate) turn: Option<&'a RopeTable>,
    /// Rows that enter a pool behind it.
    pub(crate) entering: Option<Entering<'a>>,
}

/// [`sparse_attn`](crate::ops::sparse_attn) of checked operands. What is `around` it is in its launches where their
/// kernels can, and in launches of its own elsewhere: the same bits.
pub(crate) fn sparse_attn(
    q: &Tensor,
    scopes: &[KvScope<'_>],
    sink: &Tensor,
    scale: f32,
    around: Around<'_>,
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
    let mut words = [Scope::NONE; 3];
    for (word, scope) in words.iter_mut().zip(scopes) {
        *word = scope_words(scope)?;
    }
    let listed = words.iter().map(|scope| scope.n).sum();
    let Around { turn, entering } = around;
    let dims = (t, h, d);
    if let Some(few) = Few::new(dev, dims, &words, turn)? {
        return few.launch(&q, words, (sink, scale), turn, entering);
    }
    let cut = Cut::new(dev, dims, listed)?;
    let within = turn.filter(|table| cut.turns(table));
    let turned = match turn {
        Some(table) if within.is_none() => apply_rope(&q, table, false)?,
        _ => q.clone(),
    };
    let sink = Held::new(sink, OP).ptr::<f32>()?;
    let out = Out::<bf16>::new(dev, q.elem_count())?;
    let parts = Parts::new(dev, dims, cut.splits)?;
    cut.launch(&turned, words, (sink, scale), &out, parts.as_ref(), within)?;
    // One part a query: there are so many that launches are little.
    let mut back = turn;
    match parts {
        Some(parts) => {
            parts.combine(dev, sink, &out, within, entering)?;
            back = back.filter(|_| within.is_none());
        }
        None => entering.map_or(Ok(()), Entering::enter)?,
    }
    let out = out.into_tensor(dims)?;
    match back {
        Some(table) => apply_rope(&out, table, true),
        None => Ok(out),
    }
}

/// Columns that turn.
pub(super) fn rope_of(table: &RopeTable) -> usize {
    2 * table.cos.dims().last().map_or(0, |half| *half)
}

/// How the work is cut into blocks.
struct Cut {
    dims: (usize, usize, usize),
    /// Rows that each query lists.
    listed: usize,
    /// Shared memory of Hopper's kernel, if that one runs.
    hopper: Option<usize>,
    /// Blocks that share a query's rows.
    splits: usize,
}

impl Cut {
    fn new(dev: &CudaDevice, dims: (usize, usize, usize), listed: usize) -> Result<Self> {
        let (t, h, d) = dims;
        let shared = 2 * 65_536 + 4 * 16_384 + 2 * 8192 + 1024 + 4 * listed;
        let hopper = (d == 512 && is_hopper(dev)? && shared <= 232_448).then_some(shared);
        let (heads, tile, per_sm) = match hopper {
            Some(_) => (64, 64, 1),
            None => (32, 32, 2),
        };
        let blocks = t * h.div_ceil(heads);
        let splits = (per_sm * multiprocessors(dev)? / blocks.max(1))
            .min(listed / tile)
            .clamp(1, MAX_SPLITS);
        Ok(Self {
            dims,
            listed,
            hopper,
            splits,
        })
    }

    /// Whether the kernels rotate by this table.
    fn turns(&self, table: &RopeTable) -> bool {
        let rope = rope_of(table);
        let most = self.hopper.map_or(self.dims.2, |_| 64);
        table.cos.dims().first() == Some(&self.dims.0) && rope.is_multiple_of(8) && rope <= most
    }

    fn launch(
        &self,
        q: &Tensor,
        scopes: [Scope<'_>; 3],
        (sink, scale): (Ptr<'_>, f32),
        out: &Out<bf16>,
        parts: Option<&Parts>,
        turn: Option<&RopeTable>,
    ) -> Result<()> {
        let dev = device(q)?;
        let (t, h, d) = self.dims;
        let packed = scopes.iter().any(|scope| scope.kind != RowKind::Plain);
        let (module, name) = match (self.hopper.is_some(), packed) {
            (true, false) => (kernels::SPARSE_ATTN_SM90, "sparse_attn_sm90"),
            (true, true) => (kernels::SPARSE_ATTN_SM90, "sparse_attn_packed_sm90"),
            (false, false) => (kernels::SPARSE_ATTN, "sparse_attn"),
            (false, true) => (kernels::SPARSE_ATTN, "sparse_attn_packed"),
        };
        let (cos, sin, rope) = angles(turn)?;
        let mut launch = Launch::new(dev, module, name)
            .ptr(Held::new(q, OP).ptr::<bf16>()?)
            .maybe(cos)
            .maybe(sin)
            .scopes(scopes)
            .ptr(sink)
            .ptr(out.ptr())
            .maybe(parts.map(|parts| parts.o.ptr()))
            .maybe(parts.map(|parts| parts.ml.ptr()))
            .int(t)
            .int(h);
        if self.hopper.is_none() {
            launch = launch.int(d);
        }
        let launch = launch.int(rope).f32(scale);
        match self.hopper {
            // SAFETY: q and out are [T, H, 512], lists [T, n] of rows of their pools, parts [S, T, H, ..], cosines
            // and sines [T, rope / 2].
            Some(shared) => unsafe { launch.launch((self.splits, h.div_ceil(64), t), 384, shared) },
            None => {
                let shared = 2 * 32 * 2 * d.next_multiple_of(64) + 7296 + 4 * self.listed;
                // SAFETY: as above, for any D.
                unsafe { launch.launch((self.splits, h.div_ceil(32), t), 256, shared) }
            }
        }
    }
}

/// Results over parts of the rows, to be put together.
struct Parts {
    dims: (usize, usize, usize),
    splits: usize,
    /// `[S, T, H, D]`.
    o: Out<f32>,
    /// Maxima and sums, `[S, T, H, 2]`.
    ml: Out<f32>,
}

impl Parts {
    /// `None` if there is one part.
    fn new(dev: &CudaDevice, dims: (usize, usize, usize), splits: usize) -> Result<Option<Self>> {
        let (t, h, d) = dims;
        if splits == 1 {
            return Ok(None);
        }
        Ok(Some(Self {
            dims,
            splits,
            o: Out::new(dev, splits * t * h * d)?,
            ml: Out::new(dev, splits * t * h * 2)?,
        }))
    }

    /// Puts them together, turned back by `turn`, and `entering` rows where they go.
    fn combine(
        &self,
        dev: &CudaDevice,
        sink: Ptr<'_>,
        out: &Out<bf16>,
        turn: Option<&RopeTable>,
        entering: Option<Entering<'_>>,
    ) -> Result<()> {
        let (t, h, d) = self.dims;
        let write = entering.as_ref().map(|rows| Write::new(rows, (t, d)));
        let write = write.transpose()?;
        let (cos, sin, rope) = angles(turn)?;
        let launch = Launch::new(dev, kernels::SPARSE_ATTN_COMBINE, "sparse_attn_combine")
            .ptr(self.o.ptr())
            .ptr(self.ml.ptr())
            .ptr(sink)
            .maybe(cos)
            .maybe(sin)
            .ptr(out.ptr())
            .maybe(write.as_ref().map(|write| write.rows))
            .maybe(write.as_ref().map(|write| write.slots))
            .maybe(write.as_ref().map(|write| write.pool))
            .maybe(write.as_ref().map(|write| write.scales))
            .int(t)
            .int(h)
            .int(d)
            .int(self.splits)
            .int(rope)
            .int(write.as_ref().map_or(0, |write| write.kind as usize));
        // SAFETY: the parts of all queries; a block a head of a token, and one for its row; T rows and slots,
        // which plans make from rows of the pool.
        unsafe { launch.launch((h + usize::from(write.is_some()), t, 1), 128, 0) }
    }
}

/// Rows and the pool they enter, as kernels take them.
pub(super) struct Write<'a> {
    pub(super) rows: Ptr<'a>,
    pub(super) slots: Ptr<'a>,
    pub(super) pool: Ptr<'a>,
    pub(super) scales: Ptr<'a>,
    pub(super) kind: RowKind,
}

impl<'a> Write<'a> {
    /// Rows of `t` tokens of width `d`.
    pub(super) fn new(entering: &Entering<'a>, (t, d): (usize, usize)) -> Result<Self> {
        let (rows, slots) = entering.rows();
        if rows.dims() != [t, d] || slots.dims() != [t] || !entering.stored().fit(d) {
            let (rows, slots) = (rows.shape(), slots.shape());
            let pool = entering.stored().describe();
            let found = format!("rows {rows:?} for places {slots:?} of {pool}, {t} tokens of {d}");
            return Err(Error::shape(OP, found));
        }
        let (pool, scales, kind) = stored_words(entering.stored())?;
        Ok(Self {
            rows: Held::new(rows, OP).ptr::<bf16>()?,
            slots: Held::new(slots, OP).ptr::<i32>()?,
            pool,
            scales,
            kind,
        })
    }
}

/// Cosines, sines and rotated columns as kernels take them.
pub(super) fn angles(
    turn: Option<&RopeTable>,
) -> Result<(Option<Ptr<'_>>, Option<Ptr<'_>>, usize)> {
    let Some(table) = turn else {
        return Ok((None, None, 0));
    };
    let cos = Held::new(&table.cos, OP).ptr::<f32>()?;
    let sin = Held::new(&table.sin, OP).ptr::<f32>()?;
    Ok((Some(cos), Some(sin), 2 * table.cos.dim(1)?))
}

/// Where stored rows are, where their scales, and what they are.
fn stored_words(stored: StoredRows<'_>) -> Result<(Ptr<'_>, Ptr<'_>, RowKind)> {
    Ok(match stored {
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
    })
}

fn scope_words<'a>(scope: &KvScope<'a>) -> Result<Scope<'a>> {
    let (rows, scales, kind) = stored_words(scope.kv)?;
    Ok(Scope {
        rows,
        scales,
        idxs: Held::new(scope.idxs, OP).ptr::<i32>()?,
        n: scope.idxs.dim(1)?,
        kind,
    })
}
