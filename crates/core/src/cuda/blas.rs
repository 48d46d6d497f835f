//! bf16 products of many rows by cuBLAS, with a bias and one rounding.

use std::{ffi::c_int, fmt, ptr::from_ref};

use candle_core::{
    CudaDevice, DType, Tensor,
    cuda_backend::cudarc::cublas::{CudaBlas, result, sys},
};
use half::bf16;

use super::{Held, Launch, Out, Ptr, driver, kernels, ops::device};
use crate::{DeviceError, Error, Result};

/// A cuBLAS handle on a device's stream.
///
/// Its products add in f32 to the end and may be left in f32. candle's own handle leaves cuBLAS free to add
/// parts of a long sum in bf16, and has no way to a bias before the rounding.
pub struct Blas(CudaBlas);

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Blas")
    }
}

fn refused(e: result::CublasError) -> Error {
    Error::device("cuBLAS", DeviceError::from_text(&format!("{e:?}")))
}

impl Blas {
    /// A handle of `dev`. It takes some tens of megabytes: make one for all layers of a module.
    ///
    /// # Errors
    /// [`Error::Device`]: cuBLAS or the device refuses.
    pub fn new(dev: &CudaDevice) -> Result<Self> {
        let blas = CudaBlas::new(dev.cuda_stream()).map_err(refused)?;
        let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: a handle just made.
        unsafe { sys::cublasSetMathMode(*blas.handle(), mode) }
            .result()
            .map_err(refused)?;
        Ok(Self(blas))
    }

    /// `bf16(x · Wᵀ + b)`: `xs: [m, k]`, `weight: [n, k]`, `bias: [n]`, all bf16 → `[m, n]` bf16.
    ///
    /// # Errors
    /// Another dtype or shape, sizes past an `int`, a tensor elsewhere, or a refused product.
    pub fn linear(&self, xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        const OP: &str = "linear";
        let dev = device(xs)?;
        let ((m, k), (n, in_dim)) = (xs.dims2()?, weight.dims2()?);
        let bf16s = [Some(xs), Some(weight), bias]
            .into_iter()
            .flatten()
            .all(|t| t.dtype() == DType::BF16);
        if k == 0 || in_dim != k || !bf16s || bias.is_some_and(|b| b.dims() != [n]) {
            return Err(Error::shape(
                OP,
                format!(
                    "expected [m, {in_dim}] and a bias of [{n}], all bf16, found {:?} {:?} and {:?}",
                    xs.shape(),
                    xs.dtype(),
                    bias.map(Tensor::shape)
                ),
            ));
        }
        let int = |size: usize| {
            c_int::try_from(size).map_err(|_| Error::Capacity {
                what: OP,
                needed: size,
                available: c_int::MAX as usize,
            })
        };
        let (rows, cols, inner) = (int(m)?, int(n)?, int(k)?);
        if m == 0 || n == 0 {
            return Out::<bf16>::new(dev, 0)?.into_tensor((m, n));
        }
        let xs = xs.contiguous()?;
        let (x, w) = (Held::new(&xs, OP), Held::new(weight, OP));
        let product = |y: Ptr<'_>, dtype: sys::cudaDataType_t| -> Result<()> {
            let (one, zero) = (1f32, 0f32);
            // SAFETY: x has m rows of k, W n rows of k and y room for m rows of n of its dtype; column by
            // column, as cuBLAS counts, that is Y = Wᵀ · X. The factors are read before the call returns.
            unsafe {
                result::gemm_ex(
                    *self.0.handle(),
                    sys::cublasOperation_t::CUBLAS_OP_T,
                    sys::cublasOperation_t::CUBLAS_OP_N,
                    cols,
                    rows,
                    inner,
                    from_ref(&one).cast(),
                    w.ptr::<bf16>()?.address() as *const _,
                    sys::cudaDataType_t::CUDA_R_16BF,
                    inner,
                    x.ptr::<bf16>()?.address() as *const _,
                    sys::cudaDataType_t::CUDA_R_16BF,
                    inner,
                    from_ref(&zero).cast(),
                    y.address() as *mut _,
                    dtype,
                    cols,
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            }
            .map_err(refused)
        };
        dev.cuda_stream()
            .context()
            .bind_to_thread()
            .map_err(|e| driver(OP, e))?;
        let out = Out::<bf16>::new(dev, m * n)?;
        match bias {
            None => product(out.ptr(), sys::cudaDataType_t::CUDA_R_16BF)?,
            // Asked to add to its output, cuBLAS rounds the product first in some of its kernels.
            Some(bias) => {
                let sums = Out::<f32>::new(dev, m * n)?;
                product(sums.ptr(), sys::cudaDataType_t::CUDA_R_32F)?;
                bias_round(dev, &sums, bias, &out, m)?;
            }
        }
        out.into_tensor((m, n))
    }
}

/// `out[m][j] = bf16(sums[m][j] + bias[j])`, `bias: [n]` and `rows` rows.
fn bias_round(
    dev: &CudaDevice,
    sums: &Out<f32>,
    bias: &Tensor,
    out: &Out<bf16>,
    rows: usize,
) -> Result<()> {
    let n = bias.elem_count();
    let b = Held::new(bias, "bias_round");
    let launch = Launch::new(dev, kernels::BIAS_ROUND, "bias_round")
        .ptr(sums.ptr())
        .ptr(b.ptr::<bf16>()?)
        .ptr(out.ptr())
        .long(rows * n)
        .int(n);
    // SAFETY: rows * n sums in and values out, n of the bias; a thread has eight of them.
    unsafe { launch.launch(((rows * n).div_ceil(8 * 256), 1, 1), 256, 0) }
}
