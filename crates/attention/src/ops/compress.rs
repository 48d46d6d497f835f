//! Pooling `r` consecutive tokens into one latent, with a softmax gate per channel.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Storage, Tensor};
use deepseek_v41_core::{Error, Result, cpu::contiguous};
use half::bf16;

use super::simd::exp;

const OP: &str = "compress";

/// Pools finished groups of `ratio` tokens: `out[g][d] = bf16(sum_i kv_i[d] * softmax_i(score_i[d]))`.
///
/// The gate is a softmax over the group's tokens **for each channel** on its own. The result is the
/// latent before its norm.
///
/// * `kv`, `score`: `[T, D]` f32, this chunk's projections;
/// * `pending`: `[slots, 2D]` f32, earlier tokens of groups this chunk finishes, `kv | score`;
/// * `group_src`: `G * ratio` sources, group by group in token order: `v >= 0` is row `v` of the chunk,
///   `v < 0` row `-(v + 1)` of `pending`.
///
/// → `[G, D]` bf16. A channel whose scores are all minus infinity, or one NaN, is NaN, as in the
/// reference.
///
/// # Errors
/// Shapes or dtypes that do not fit, a source outside its tensor.
///
/// Reference: `Compressor.forward`.
pub fn compress(
    kv: &Tensor,
    score: &Tensor,
    pending: Option<&Tensor>,
    group_src: &[i64],
    ratio: usize,
) -> Result<Tensor> {
    let (t, dim) = kv
        .dims2()
        .map_err(|_| shape(format!("kv is {:?}", kv.shape())))?;
    if score.dims() != [t, dim] || kv.dtype() != DType::F32 || score.dtype() != DType::F32 {
        return Err(shape(format!(
            "kv {:?} {:?}, score {:?} {:?}",
            kv.shape(),
            kv.dtype(),
            score.shape(),
            score.dtype()
        )));
    }
    if let Some(p) = pending
        && (p.rank() != 2 || p.dims()[1] != 2 * dim || p.dtype() != DType::F32)
    {
        return Err(shape(format!(
            "pending {:?} {:?} for D {dim}",
            p.shape(),
            p.dtype()
        )));
    }
    if dim == 0 || ratio == 0 || !group_src.len().is_multiple_of(ratio) {
        return Err(shape(format!(
            "{} sources in groups of {ratio}, D {dim}",
            group_src.len()
        )));
    }
    let slots = pending.map_or(0, |p| p.dims()[0]);
    for &src in group_src {
        let (row, rows) = if src >= 0 {
            (src, t)
        } else {
            (-(src + 1), slots)
        };
        if row as u64 >= rows as u64 {
            return Err(Error::value(
                format!("{OP}: source {src}"),
                format!("the chunk has {t} rows, the pending ring {slots}"),
            ));
        }
    }
    #[cfg(feature = "cuda")]
    if kv.device().is_cuda() {
        let sources = group_src.iter().map(|&src| crate::plan::kernel_source(src));
        let sources = crate::plan::i32_tensor(sources.collect(), kv.device())?;
        return crate::cuda::compress(kv, score, pending, &sources, ratio, None);
    }
    let op = Compress {
        pending,
        group_src,
        ratio,
    };
    Ok(kv
        .contiguous()?
        .apply_op2_no_bwd(&score.contiguous()?, &op)?)
}

fn shape(reason: String) -> Error {
    Error::shape(OP, reason)
}

struct Compress<'a> {
    pending: Option<&'a Tensor>,
    group_src: &'a [i64],
    ratio: usize,
}

impl CustomOp2 for Compress<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        kv: &CpuStorage,
        kv_layout: &Layout,
        score: &CpuStorage,
        score_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let dim = kv_layout.dims()[1];
        let kv = contiguous::<f32>(kv, kv_layout, OP)?;
        let score = contiguous::<f32>(score, score_layout, OP)?;
        let held = self.pending.map(Tensor::storage_and_layout);
        let pending = match &held {
            Some((storage, layout)) => match &**storage {
                Storage::Cpu(storage) => contiguous::<f32>(storage, layout, OP)?,
                _ => candle_core::bail!("{OP}: kv is on the CPU, pending is not"),
            },
            None => &[],
        };
        let groups = self.group_src.len() / self.ratio;
        let mut out = vec![bf16::ZERO; groups * dim];
        compress_ref(
            kv,
            score,
            pending,
            self.group_src,
            self.ratio,
            dim,
            &mut out,
        );
        Ok((CpuStorage::BF16(out), Shape::from((groups, dim))))
    }
}

/// [`compress`] over slices; also its CPU backend, since the projections around it cost far more.
///
/// Per channel, in f32 and in token order: `e_i = exp(s_i - max s)`, then the sum of
/// `kv_i * (e_i / sum e)`.
pub fn compress_ref(
    kv: &[f32],
    score: &[f32],
    pending: &[f32],
    group_src: &[i64],
    ratio: usize,
    dim: usize,
    out: &mut [bf16],
) {
    let mut weights = vec![0f32; ratio];
    for (sources, out) in group_src.chunks_exact(ratio).zip(out.chunks_exact_mut(dim)) {
        let rows: Vec<(&[f32], &[f32])> = sources
            .iter()
            .map(|&src| match usize::try_from(src) {
                Ok(row) => (&kv[row * dim..][..dim], &score[row * dim..][..dim]),
                Err(_) => pending[(-(src + 1)) as usize * 2 * dim..][..2 * dim].split_at(dim),
            })
            .collect();
        for d in 0..dim {
            let top = rows.iter().fold(f32::NEG_INFINITY, |m, (_, s)| m.max(s[d]));
            let mut sum = 0f32;
            for (w, (_, s)) in weights.iter_mut().zip(&rows) {
                *w = exp(s[d] - top);
                sum += *w;
            }
            let mut pooled = 0f32;
            for (w, (kv, _)) in weights.iter().zip(&rows) {
                pooled += kv[d] * (w / sum);
            }
            out[d] = bf16::from_f32(pooled);
        }
    }
}
