//! Attention of few queries on Hopper in one launch.

use candle_core::{CudaDevice, Tensor};
use deepseek_v41_core::{
    Result, RopeTable,
    cuda::{
        Held, Launch, Out, Scope, clusters_at_once, is_hopper, kernels,
        ops::{RowKind, device},
    },
};
use half::bf16;

use super::sparse_attn::{OP, Write, angles, rope_of};
use crate::pool::Entering;

/// Most queries of which this is sooner than parts put together: of bf16 rows, of packed ones.
const MOST_QUERIES: [usize; 2] = [8, 4];
/// Bytes of a block's shared memory.
const SHARED: usize = 101_664;

/// `sparse_attn_few`: a query's rows are shared by a cluster of blocks, each for 16 heads.
pub(super) struct Few {
    dims: (usize, usize, usize),
    name: &'static str,
    cluster: usize,
}

impl Few {
    /// `None` where another kernel is sooner, or this one does not take the operands or fit the device.
    pub(super) fn new(
        dev: &CudaDevice,
        dims: (usize, usize, usize),
        scopes: &[Scope<'_>; 3],
        turn: Option<&RopeTable>,
    ) -> Result<Option<Self>> {
        let packed = scopes.iter().any(|scope| scope.kind != RowKind::Plain);
        let (t, _, d) = dims;
        let turns = turn.is_none_or(|table| {
            let rope = rope_of(table);
            table.cos.dims().first() == Some(&t) && rope.is_multiple_of(8) && rope <= 64
        });
        let few = t <= MOST_QUERIES[usize::from(packed)] && d == 512 && turns;
        if t == 0 || !few || !is_hopper(dev)? {
            return Ok(None);
        }
        let (name, cluster) = match (t, packed) {
            (1 | 2, false) => ("sparse_attn_few_16", 16),
            (1 | 2, true) => ("sparse_attn_few_packed_16", 16),
            (_, false) => ("sparse_attn_few_8", 8),
            (_, true) => ("sparse_attn_few_packed_8", 8),
        };
        let block = (256, SHARED);
        let at_once = clusters_at_once(dev, kernels::SPARSE_ATTN_FEW_SM90, name, cluster, block)?;
        Ok((at_once > 0).then_some(Self {
            dims,
            name,
            cluster,
        }))
    }

    pub(super) fn launch(
        &self,
        q: &Tensor,
        scopes: [Scope<'_>; 3],
        (sink, scale): (&Tensor, f32),
        turn: Option<&RopeTable>,
        entering: Option<Entering<'_>>,
    ) -> Result<Tensor> {
        let dev = device(q)?;
        let (t, h, d) = self.dims;
        // Its blocks do not wait for each other: rows that push others out enter behind it.
        let (within, behind) = match entering {
            Some(rows) if rows.apart() => (Some(rows), None),
            rows => (None, rows),
        };
        let write = within.as_ref().map(|rows| Write::new(rows, (t, d)));
        let write = write.transpose()?;
        let (cos, sin, rope) = angles(turn)?;
        let out = Out::<bf16>::new(dev, q.elem_count())?;
        let launch = Launch::new(dev, kernels::SPARSE_ATTN_FEW_SM90, self.name)
            .ptr(Held::new(q, OP).ptr::<bf16>()?)
            .maybe(cos)
            .maybe(sin)
            .scopes(scopes)
            .ptr(Held::new(sink, OP).ptr::<f32>()?)
            .ptr(out.ptr())
            .maybe(write.as_ref().map(|write| write.rows))
            .maybe(write.as_ref().map(|write| write.slots))
            .maybe(write.as_ref().map(|write| write.pool))
            .maybe(write.as_ref().map(|write| write.scales))
            .int(t)
            .int(h)
            .int(rope)
            .int(write.as_ref().map_or(0, |write| write.kind as usize))
            .f32(scale)
            .clusters(self.cluster);
        let clusters = t * h.div_ceil(16) + usize::from(write.is_some());
        // SAFETY: q and out are [T, H, 512], lists [T, n] of rows of their pools, cosines and sines [T, rope / 2];
        // T rows and slots, which plans make from rows of the pool and of which none is listed; a cluster for 16
        // heads of a query, and one for the rows.
        unsafe { launch.launch((self.cluster, clusters, 1), 256, SHARED)? };
        behind.map_or(Ok(()), Entering::enter)?;
        out.into_tensor((t, h, d))
    }
}
