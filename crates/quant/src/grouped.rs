//! The block-diagonal product behind the grouped output projection.

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor};
use deepseek_v41_core::{Comm, Error, Result, Shard, VarBuilder, cpu};
use half::bf16;

use crate::{Linear, load, parallel};

/// `y[t, g, r] = sum_d x[t, g, d] * W[g, r, d]`: every group has its own inputs and outputs.
///
/// The activations are not quantised, whatever the weight's storage: bf16 times the values of the
/// weight's bf16 form, f32 sums in the order of [`cpu::dot`], one rounding. An e4m3 weight is read as
/// stored, since a power-of-two scale makes its bf16 form exact; only below scales of 2^-124 does that
/// form round, and there the values here are rounded the same way.
///
/// Reference: `wo_a` in `Attention.forward`, `einsum("bsgd,grd->bsgr")`.
#[derive(Debug, Clone)]
pub struct GroupedLinear {
    weight: Linear,
    groups: usize,
}

impl GroupedLinear {
    /// Reads `weight` `[groups * out_per_group, in_per_group]`: BF16, or F8_E4M3 (U8) with `scale` in
    /// tiles of 32 or 128.
    ///
    /// # Errors
    /// [`Error::Weight`] for a missing tensor or another dtype or shape.
    pub fn new(
        groups: usize,
        in_per_group: usize,
        out_per_group: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        Self::load(groups, in_per_group, out_per_group, &vb, load::WHOLE)
    }

    /// This rank's share of `groups`, whole groups each.
    ///
    /// # Errors
    /// As [`GroupedLinear::new`]; the groups do not divide by the number of ranks, or an fp8 part is
    /// not made of whole tiles.
    pub fn new_parallel(
        groups: usize,
        in_per_group: usize,
        out_per_group: usize,
        comm: &dyn Comm,
        vb: VarBuilder,
    ) -> Result<Self> {
        let shard = parallel::shard(0, comm, groups, "group")?;
        Self::load(groups, in_per_group, out_per_group, &vb, shard)
    }

    fn load(
        groups: usize,
        in_per_group: usize,
        out_per_group: usize,
        vb: &VarBuilder,
        shard: Shard,
    ) -> Result<Self> {
        let rows = groups
            .checked_mul(out_per_group)
            .filter(|rows| *rows > 0)
            .ok_or_else(|| {
                Error::shape(
                    "grouped linear",
                    format!("{groups} groups of {out_per_group} outputs"),
                )
            })?;
        let weight = load::grouped(in_per_group, rows, vb, shard)?;
        Ok(Self {
            weight,
            groups: groups / shard.world_size.max(1),
        })
    }

    /// Groups of this rank.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Inputs of one group.
    pub fn in_per_group(&self) -> usize {
        self.weight.in_dim()
    }

    /// Outputs of one group.
    pub fn out_per_group(&self) -> usize {
        self.weight.out_dim() / self.groups
    }

    /// Bytes of weights and scales that one product reads.
    pub fn weight_bytes(&self) -> usize {
        self.weight.weight_bytes()
    }

    /// `xs: [.., groups * in]` bf16 → `[.., groups * out]` bf16.
    ///
    /// # Errors
    /// Another last dimension or dtype.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let width = self.groups * self.in_per_group();
        if xs.dtype() != DType::BF16 || xs.dim(D::Minus1)? != width {
            return Err(Error::shape(
                "grouped linear",
                format!(
                    "expected bf16 [.., {width}], found {:?} {:?}",
                    xs.dtype(),
                    xs.dims()
                ),
            ));
        }
        #[cfg(feature = "cuda")]
        if xs.device().is_cuda() {
            return crate::cuda::grouped(self, &self.weight, xs);
        }
        Ok(xs.contiguous()?.apply_op1_no_bwd(&GroupedOp(self))?)
    }

    /// [`GroupedLinear::forward`] on slices: `xs: [m, groups * in]`, `out: [m, groups * out]`.
    ///
    /// # Errors
    /// Lengths that do not fit.
    pub fn forward_slice(&self, xs: &[bf16], m: usize, out: &mut [bf16]) -> Result<()> {
        let (g, k) = (self.groups, self.in_per_group());
        if m.checked_mul(g * k) != Some(xs.len())
            || m.checked_mul(self.weight.out_dim()) != Some(out.len())
        {
            return Err(Error::shape(
                "grouped linear",
                format!(
                    "{m} rows: {} inputs and {} outputs do not fit",
                    xs.len(),
                    out.len()
                ),
            ));
        }
        cpu::with_scratch(xs.len(), |values| {
            // [m, g, k] → [g, m, k]: each group's rows lie together.
            for (i, x) in xs.chunks_exact(k.max(1)).enumerate() {
                let (row, group) = (i / g, i % g);
                cpu::widen_slice(x, &mut values[(group * m + row) * k..][..k]);
            }
            match &self.weight {
                Linear::Bf16(w) => cpu::grouped_matmul_bf16(w, g, values, m, out),
                Linear::Fp8(w) => cpu::grouped_matmul_bf16(w, g, values, m, out),
                Linear::F32(_) | Linear::Fp4(_) => {
                    return Err(Error::shape("grouped linear", "weights are bf16 or fp8"));
                }
            }
            Ok(())
        })
    }
}

struct GroupedOp<'a>(&'a GroupedLinear);

impl CustomOp1 for GroupedOp<'_> {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let xs = cpu::contiguous::<bf16>(s, l, self.name())?;
        let n = self.0.weight.out_dim();
        let m = xs
            .len()
            .checked_div(self.0.groups * self.0.in_per_group())
            .unwrap_or(0);
        let mut out = vec![bf16::ZERO; m * n];
        self.0.forward_slice(xs, m, &mut out)?;
        let mut dims = l.shape().dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = n;
        }
        Ok((CpuStorage::BF16(out), Shape::from(dims)))
    }
}
