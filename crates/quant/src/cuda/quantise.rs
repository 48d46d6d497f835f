//! Quantisers: codes and scales, or the values that they stand for.

use candle_core::{CudaDevice, D, Tensor};
use deepseek_v41_core::{
    Result,
    cuda::{
        Held, Launch, Out, Ptr, kernels,
        ops::{device, supported},
    },
};
use half::bf16;

use crate::ops::{act_quant::ActScale, fp4_act_quant::ScaleFormat};

/// `[.., k]` bf16 → the same shape: the values that the codes and scales of `act_quant` stand for.
///
/// # Errors
/// `k` is not a multiple of 32, or a failed launch.
pub fn act_quant_values(xs: &Tensor) -> Result<Tensor> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let out = Out::<bf16>::new(dev, xs.elem_count())?;
    quantise(dev, &xs, Ptr::NULL, Ptr::NULL, out.ptr())?;
    out.into_tensor(xs.shape())
}

/// `[.., k]` bf16 → e4m3 codes `[.., k]` and e8m0 scales `[.., k/32]`.
///
/// # Errors
/// `k` is not a multiple of 32, or a failed launch.
pub fn act_quant_codes(xs: &Tensor) -> Result<(Tensor, Tensor)> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let codes = Out::<u8>::new(dev, xs.elem_count())?;
    let scales = Out::<u8>::new(dev, xs.elem_count() / 32)?;
    quantise(dev, &xs, codes.ptr(), scales.ptr(), Ptr::NULL)?;
    Ok((
        codes.into_tensor(xs.shape())?,
        scales.into_tensor(groups_of(&xs, 32))?,
    ))
}

pub(super) fn groups_of(xs: &Tensor, group: usize) -> Vec<usize> {
    let mut dims = xs.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= group;
    }
    dims
}

pub(super) fn quantise(
    dev: &CudaDevice,
    xs: &Tensor,
    codes: Ptr<'_>,
    scales: Ptr<'_>,
    fake: Ptr<'_>,
) -> Result<()> {
    const OP: &str = "act_quant";
    let k = xs.dim(D::Minus1)?;
    supported(k.is_multiple_of(32), OP, k, "widths of multiples of 32")?;
    let units = xs.elem_count() / 8;
    let launch = Launch::new(dev, kernels::ACT_QUANT, "act_quant")
        .ptr(Held::new(xs, OP).ptr::<bf16>()?)
        .ptr(codes)
        .ptr(scales)
        .ptr(fake)
        .long(units);
    // SAFETY: outputs have an element (a scale: 32) for each input; a thread takes eight of `units`.
    unsafe { launch.launch((units.div_ceil(256), 1, 1), 256, 0) }
}

/// [`act_quant_with`](crate::act_quant_with) in groups of any size.
///
/// # Errors
/// A failed launch.
pub fn act_quant_any(xs: &Tensor, group: usize, format: ActScale) -> Result<(Tensor, Tensor)> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let (n, shape) = (xs.elem_count(), groups_of(&xs, group));
    let codes = Out::<u8>::new(dev, n)?;
    let scales = match format {
        ActScale::E8M0 => {
            let scales = Out::<u8>::new(dev, n / group)?;
            any_group(
                &xs,
                group,
                format,
                [codes.ptr(), scales.ptr(), Ptr::NULL, Ptr::NULL],
            )?;
            scales.into_tensor(shape)?
        }
        ActScale::F32 => {
            let scales = Out::<f32>::new(dev, n / group)?;
            any_group(
                &xs,
                group,
                format,
                [codes.ptr(), Ptr::NULL, scales.ptr(), Ptr::NULL],
            )?;
            scales.into_tensor(shape)?
        }
    };
    Ok((codes.into_tensor(xs.shape())?, scales))
}

/// [`fake_quant_fp8_with`](crate::fake_quant_fp8_with) in groups of any size.
///
/// # Errors
/// A failed launch.
pub fn fake_quant_any(xs: &Tensor, group: usize, format: ActScale) -> Result<Tensor> {
    let xs = xs.contiguous()?;
    let out = Out::<bf16>::new(device(&xs)?, xs.elem_count())?;
    any_group(
        &xs,
        group,
        format,
        [Ptr::NULL, Ptr::NULL, Ptr::NULL, out.ptr()],
    )?;
    out.into_tensor(xs.shape())
}

/// `out`: codes, scales as bytes and as f32, values; null for what is not wanted.
fn any_group(xs: &Tensor, group: usize, format: ActScale, out: [Ptr<'_>; 4]) -> Result<()> {
    let groups = xs.elem_count() / group.max(1);
    let [codes, scales, scales_f32, fake] = out;
    let launch = Launch::new(device(xs)?, kernels::ACT_QUANT_ANY, "act_quant_any")
        .ptr(Held::new(xs, "act_quant").ptr::<bf16>()?)
        .ptr(codes)
        .ptr(scales)
        .ptr(scales_f32)
        .ptr(fake)
        .long(groups)
        .int(group)
        .int(usize::from(format == ActScale::E8M0));
    // SAFETY: outputs have an element (a scale: a group) for each input; a warp a group, four to a block.
    unsafe { launch.launch((groups.div_ceil(4), 1, 1), 128, 0) }
}

/// Rounds to e2m1 and back.
///
/// # Errors
/// A group size other than the two that caches use, or a failed launch.
pub fn fake_quant_fp4(xs: &Tensor, group: usize, format: ScaleFormat) -> Result<Tensor> {
    let xs = xs.contiguous()?;
    let out = Out::<bf16>::new(device(&xs)?, xs.elem_count())?;
    fp4(&xs, group, format, out.ptr(), Ptr::NULL, Ptr::NULL)?;
    out.into_tensor(xs.shape())
}

/// Packed codes `[.., k/2]` and scales `[.., k/group]`.
///
/// # Errors
/// As [`fake_quant_fp4`].
pub fn fp4_codes(xs: &Tensor, group: usize, format: ScaleFormat) -> Result<(Tensor, Tensor)> {
    let xs = xs.contiguous()?;
    let dev = device(&xs)?;
    let codes = Out::<u8>::new(dev, xs.elem_count() / 2)?;
    let scales = Out::<u8>::new(dev, xs.elem_count() / group)?;
    fp4(&xs, group, format, Ptr::NULL, codes.ptr(), scales.ptr())?;
    Ok((
        codes.into_tensor(groups_of(&xs, 2))?,
        scales.into_tensor(groups_of(&xs, group))?,
    ))
}

fn fp4(
    xs: &Tensor,
    group: usize,
    format: ScaleFormat,
    out: Ptr<'_>,
    codes: Ptr<'_>,
    scales: Ptr<'_>,
) -> Result<()> {
    const OP: &str = "fake_quant_fp4";
    let known = matches!(
        (group, format),
        (32, ScaleFormat::E8M0) | (16, ScaleFormat::E4M3)
    );
    supported(
        known,
        OP,
        group,
        "groups of 32 with e8m0 scales, or of 16 with e4m3 scales",
    )?;
    let n = xs.elem_count();
    let launch = Launch::new(device(xs)?, kernels::FAKE_QUANT_FP4, "fake_quant_fp4")
        .ptr(Held::new(xs, OP).ptr::<bf16>()?)
        .ptr(out)
        .ptr(codes)
        .ptr(scales)
        .long(n)
        .int(group);
    // SAFETY: outputs have an element (two codes a byte, a scale a group) for each input; a thread an
    // element.
    unsafe { launch.launch((n.div_ceil(256), 1, 1), 256, 0) }
}
