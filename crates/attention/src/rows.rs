//! The last steps of every row that is cached or scored: norm, rotation and rounding in one pass.

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Storage, Tensor};
use deepseek_v41_core::{
    Error, Result, RmsNorm, RopeTable, apply_rope, apply_rope_row, cpu, rms_norm_row,
};
use deepseek_v41_quant::{
    ScaleFormat, fake_quant_fp4, fake_quant_fp4_slice, fake_quant_fp8, fake_quant_fp8_slice,
};
use half::bf16;

/// The number format a row's values are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowQuant {
    /// e4m3 with a power-of-two scale for 32 elements: window KV.
    Window,
    /// e2m1 with an e4m3 scale for 16 elements: compressed KV.
    Compressed,
    /// e2m1 with a power-of-two scale for 32 elements: index queries and keys.
    Index,
}

impl RowQuant {
    /// Elements that share a scale.
    pub(crate) fn group(self) -> usize {
        match self {
            Self::Window | Self::Index => 32,
            Self::Compressed => 16,
        }
    }

    fn slice(self, row: &mut [bf16]) {
        match self {
            Self::Window => fake_quant_fp8_slice(row),
            Self::Compressed => fake_quant_fp4_slice(row, 16, ScaleFormat::E4M3),
            Self::Index => fake_quant_fp4_slice(row, 32, ScaleFormat::E8M0),
        }
    }

    fn tensor(self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Window => fake_quant_fp8(xs),
            Self::Compressed => fake_quant_fp4(xs, 16, ScaleFormat::E4M3),
            Self::Index => fake_quant_fp4(xs, 32, ScaleFormat::E8M0),
        }
    }
}

/// `quant(rope(norm(xs)))`, each step rounding as it does alone; the norm is optional.
///
/// `xs: [T, D]` or `[T, H, D]` bf16, `table` of `T` rows → same shape and dtype.
///
/// # Errors
/// Shapes that do not fit each other, or `D` not a multiple of the quantisation group.
///
/// Reference: `Attention._window_kv`, `Attention._compress_kv`, `Indexer.forward`.
pub fn finish_rows(
    xs: &Tensor,
    norm: Option<&RmsNorm>,
    table: &RopeTable,
    quant: RowQuant,
) -> Result<Tensor> {
    check_shapes(xs, norm, table, quant)?;
    let xs = xs.contiguous()?;
    #[cfg(feature = "cuda")]
    if xs.device().is_cuda() {
        return crate::cuda::finish_rows(&xs, norm, table, quant);
    }
    let op = FinishRows {
        norm: norm.map(|n| (n.weight().clone(), n.eps())),
        quant,
    };
    Ok(xs.apply_op3_no_bwd(&table.cos, &table.sin, &op)?)
}

/// [`finish_rows`] as the three operations it stands for.
///
/// # Errors
/// Those of the operations.
pub fn finish_rows_unfused(
    xs: &Tensor,
    norm: Option<&RmsNorm>,
    table: &RopeTable,
    quant: RowQuant,
) -> Result<Tensor> {
    let normed = norm.map(|norm| norm.forward(xs)).transpose()?;
    quant.tensor(&apply_rope(normed.as_ref().unwrap_or(xs), table, false)?)
}

fn check_shapes(
    xs: &Tensor,
    norm: Option<&RmsNorm>,
    table: &RopeTable,
    quant: RowQuant,
) -> Result<()> {
    let (tokens, half) = table.cos.dims2()?;
    let width = xs.dims().last().copied().unwrap_or(0);
    let ok = xs.dtype() == candle_core::DType::BF16
        && matches!(xs.rank(), 2 | 3)
        && xs.dims()[0] == tokens
        && width >= 2 * half
        && width > 0
        && width.is_multiple_of(quant.group())
        && norm.is_none_or(|norm| norm.weight().elem_count() == width);
    if ok {
        return Ok(());
    }
    Err(Error::shape(
        "finish_rows",
        format!(
            "expected [{tokens}, D] or [{tokens}, H, D] bf16, D a multiple of {} and at least {}, \
             found {:?} {:?} (norm over {:?})",
            quant.group(),
            2 * half,
            xs.shape(),
            xs.dtype(),
            norm.map(|norm| norm.weight().elem_count())
        ),
    ))
}

struct FinishRows {
    norm: Option<(Tensor, f32)>,
    quant: RowQuant,
}

/// One row: normalised by way of `copy` if there is a norm, then rotated and rounded.
fn finish_row(
    row: &mut [bf16],
    copy: &mut [bf16],
    norm: Option<(&[f32], f32)>,
    (cos, sin): (&[f32], &[f32]),
    quant: RowQuant,
) {
    if let Some((weight, eps)) = norm {
        copy.copy_from_slice(row);
        rms_norm_row(copy, weight, eps, row);
    }
    apply_rope_row(row, cos, sin, false);
    quant.slice(row);
}

impl CustomOp3 for FinishRows {
    fn name(&self) -> &'static str {
        "finish_rows"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let mut out = cpu::contiguous::<bf16>(s1, l1, self.name())?.to_vec();
        let cos = cpu::contiguous::<f32>(s2, l2, self.name())?;
        let sin = cpu::contiguous::<f32>(s3, l3, self.name())?;
        let guard = self
            .norm
            .as_ref()
            .map(|(weight, eps)| (weight.storage_and_layout(), *eps));
        let norm = match &guard {
            None => None,
            Some(((storage, layout), eps)) => match &**storage {
                Storage::Cpu(storage) => {
                    Some((cpu::contiguous::<f32>(storage, layout, self.name())?, *eps))
                }
                _ => candle_core::bail!("finish_rows: the norm's weight is on another device"),
            },
        };
        let (dims, half) = (l1.dims(), l2.dims()[1]);
        let width = dims[dims.len() - 1];
        let heads = if dims.len() == 3 { dims[1] } else { 1 };
        let token = |t: usize, rows: &mut [bf16]| {
            let mut copy = vec![bf16::ZERO; if norm.is_some() { width } else { 0 }];
            let at = t * half..(t + 1) * half;
            for row in rows.chunks_exact_mut(width) {
                finish_row(
                    row,
                    &mut copy,
                    norm,
                    (&cos[at.clone()], &sin[at.clone()]),
                    self.quant,
                );
            }
        };
        if heads > 0 {
            cpu::for_each_piece(out.len() * 24, &mut out, heads * width, token);
        }
        Ok((CpuStorage::BF16(out), l1.shape().clone()))
    }
}
