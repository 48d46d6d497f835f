use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::{Error, Result, upload};

use crate::hc_post;

/// How the *next* sublayer collapses the stream: `[T, C]` f32, one weight a copy.
///
/// The coefficients a sublayer derives from the stream are two kinds. `post` and `comb` belong to
/// itself; `pre` belongs to the sublayer after it, while its own input was collapsed with what the
/// one before handed on. A plain tensor would let the two be confused, so `pre` is a type: it is
/// not `Clone`, [`HyperConn::around`](crate::HyperConn::around) takes the carried one by value and
/// gives back the next.
#[derive(Debug)]
pub struct PreMix(Tensor);

impl PreMix {
    /// What the first block starts from: all weight on copy 0.
    ///
    /// # Errors
    /// `c == 0`, or the device refuses the allocation.
    ///
    /// Reference: `make_identity_pre_mix`.
    pub fn one_hot(t: usize, c: usize, device: &Device) -> Result<Self> {
        if c == 0 {
            return Err(Error::shape("one_hot", "expected at least 1 copy, found 0"));
        }
        let mut data = vec![0f32; t * c];
        data.iter_mut().step_by(c).for_each(|v| *v = 1.0);
        Ok(Self(Tensor::from_vec(data, (t, c), device)?))
    }

    /// Wraps saved coefficients `[T, C]` f32, to replay a recorded run.
    ///
    /// # Errors
    /// Another rank or dtype.
    pub fn from_tensor(pre: Tensor) -> Result<Self> {
        if pre.rank() != 2 || pre.dtype() != DType::F32 {
            let found = format!("{:?} {:?}", pre.shape(), pre.dtype());
            return Err(Error::shape(
                "pre_mix",
                format!("expected [T, C] f32, found {found}"),
            ));
        }
        Ok(Self(pre.contiguous()?))
    }

    /// The first part of packed coefficients `[T, (2+C)C]`, not copied.
    pub(crate) fn of_packed(coef: &Tensor, c: usize) -> Result<Self> {
        Ok(Self(coef.narrow(1, 0, c)?))
    }

    /// The same with rows end to end, as the operations on the CPU take it.
    pub(crate) fn contiguous(self) -> Result<Self> {
        match self.0.device().is_cpu() {
            true => Ok(Self(self.0.contiguous()?)),
            false => Ok(self),
        }
    }

    /// `[T, C]` f32; it may be a view with longer rows.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

/// All coefficients one sublayer derives from the stream.
#[derive(Debug)]
pub struct Mix {
    /// For the next sublayer.
    pub pre: PreMix,
    /// How much of this sublayer's output each copy receives: `[T, C]` f32.
    pub post: Tensor,
    /// How the copies mix: `[T, C, C]` f32, `comb[t][j][k]` from copy `j` to copy `k`.
    pub comb: Tensor,
}

impl Mix {
    /// Splits packed rows `[T, (2+C)C]` f32 (pre | post | comb).
    ///
    /// # Errors
    /// Another shape or dtype.
    pub fn unpack(packed: &Tensor, c: usize) -> Result<Self> {
        let (t, width) = packed.dims2()?;
        if width != (2 + c) * c || packed.dtype() != DType::F32 {
            return Err(Error::shape(
                "mix",
                format!(
                    "expected [T, {}] f32, found {:?} {:?}",
                    (2 + c) * c,
                    packed.shape(),
                    packed.dtype()
                ),
            ));
        }
        let part = |start, len| {
            if t == 0 {
                // A view without elements past the end of its storage is one candle cannot read.
                return Ok(upload(Vec::<f32>::new(), (0, len), packed.device())?);
            }
            packed.narrow(1, start, len)?.contiguous()
        };
        Ok(Self {
            pre: PreMix(part(0, c)?),
            post: part(c, c)?,
            comb: part(2 * c, c * c)?.reshape((t, c, c))?,
        })
    }

    /// Ends the sublayer: adds its output `y: [T, dim]` to the stream `residual: [T, C, dim]` it
    /// started from, and hands on what the next sublayer collapses with.
    ///
    /// # Errors
    /// Shapes or dtypes that do not fit; see [`hc_post`].
    pub fn finish(self, y: &Tensor, residual: &Tensor) -> Result<(Tensor, PreMix)> {
        Ok((hc_post(y, residual, &self.post, &self.comb)?, self.pre))
    }
}
