//! Linear layers split over tensor-parallel ranks.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Comm, Error, Result, Shard, VarBuilder};

use crate::{Linear, WeightFormat, load};

/// Splits the output features: each rank computes its own slice completely, nothing is exchanged.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear {
    linear: Linear,
}

impl ColumnParallelLinear {
    /// This rank's rows of a layer of full size `[out_dim, in_dim]`.
    ///
    /// # Errors
    /// As [`Linear::new`]; `out_dim` does not divide by the number of ranks, or an fp8 part is not
    /// made of whole tiles.
    pub fn new(
        in_dim: usize,
        out_dim: usize,
        format: WeightFormat,
        comm: &Arc<dyn Comm>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let shard = shard(0, comm.as_ref(), out_dim, "output")?;
        Ok(Self {
            linear: load::linear(in_dim, out_dim, format, &vb, shard)?,
        })
    }

    /// `xs: [.., in]` → this rank's `[.., out / ranks]`.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.linear.forward(xs)
    }

    /// This rank's part.
    pub fn linear(&self) -> &Linear {
        &self.linear
    }
}

/// Splits the input features: each rank has a partial sum, and the sums are added in f32.
#[derive(Debug, Clone)]
pub struct RowParallelLinear {
    linear: Linear,
    comm: Arc<dyn Comm>,
}

impl RowParallelLinear {
    /// This rank's columns of a layer of full size `[out_dim, in_dim]`. The split copies the rank's
    /// part of the weight, whose columns are not contiguous in the file.
    ///
    /// # Errors
    /// As [`Linear::new`]; `in_dim` does not divide by the number of ranks, or a quantised part is
    /// not made of whole groups.
    pub fn new(
        in_dim: usize,
        out_dim: usize,
        format: WeightFormat,
        comm: Arc<dyn Comm>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let shard = shard(1, comm.as_ref(), in_dim, "input")?;
        Ok(Self {
            linear: load::linear(in_dim, out_dim, format, &vb, shard)?,
            comm,
        })
    }

    /// This rank's `xs: [.., in / ranks]` → the whole `[.., out]`, in the dtype of `xs`.
    ///
    /// # Errors
    /// As [`Linear::forward`], or the exchange fails.
    ///
    /// Reference: `RowParallelLinear.forward`.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(xs)?;
        if self.comm.world_size() == 1 {
            return Ok(y.to_dtype(xs.dtype())?);
        }
        // f32 through the sum: adding bf16 partials in bf16 would lose more with every rank.
        Ok(self
            .comm
            .all_reduce_sum(&y.to_dtype(DType::F32)?)?
            .to_dtype(xs.dtype())?)
    }

    /// This rank's part.
    pub fn linear(&self) -> &Linear {
        &self.linear
    }
}

pub(crate) fn shard(dim: usize, comm: &dyn Comm, size: usize, what: &str) -> Result<Shard> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    if world_size == 0 || !size.is_multiple_of(world_size) {
        return Err(Error::shape(
            "parallel linear",
            format!("{what} dimension {size} does not divide by {world_size} ranks"),
        ));
    }
    Ok(Shard {
        dim,
        rank,
        world_size,
    })
}
