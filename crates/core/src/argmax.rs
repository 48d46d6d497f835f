//! The most likely token of each row of logits, or why there is none.

use candle_core::{DType, Device, Tensor};

use crate::{Error, Result, upload};

/// Set in a code that is no token.
const NO_TOKEN: u32 = 1 << 31;

/// What the code of a row says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Best {
    /// The index of the largest logit, the lowest among equals.
    Token(u32),
    /// The first index whose logit is NaN or +inf: nothing can be chosen beside it.
    Unusable(u32),
    /// Nothing but -inf, or no columns at all.
    Impossible,
}

impl Best {
    /// What a code of [`argmax`] stands for.
    pub fn of(code: u32) -> Self {
        match code {
            u32::MAX => Self::Impossible,
            code if code & NO_TOKEN != 0 => Self::Unusable(code & !NO_TOKEN),
            token => Self::Token(token),
        }
    }

    /// The code; an index must be below `2^31 - 1`.
    pub fn code(self) -> u32 {
        match self {
            Self::Token(token) => token,
            Self::Unusable(index) => index | NO_TOKEN,
            Self::Impossible => u32::MAX,
        }
    }
}

/// The largest of each row: `logits: [R, vocab]` f32 → `[R]` u32, codes that [`Best::of`] reads.
///
/// On a GPU nothing comes back to the host; a code that is no token is past every vocabulary.
///
/// # Errors
/// Another dtype or rank; a vocabulary that codes cannot count.
pub fn argmax(logits: &Tensor) -> Result<Tensor> {
    let work = ArgmaxWork::new(logits.dims().first().copied().unwrap_or(0), logits.device())?;
    largest_of(logits, None, &work)
}

/// The largest of each row of `logits + bias`, `[R, vocab]` f32 each → as [`argmax`].
///
/// # Errors
/// As [`argmax`], and operands or a `work` of different rows.
pub fn argmax_sum(logits: &Tensor, bias: &Tensor, work: &ArgmaxWork) -> Result<Tensor> {
    if bias.dims() != logits.dims() || bias.dtype() != DType::F32 {
        return Err(Error::shape(
            "argmax",
            format!("a bias {:?} {:?}", bias.shape(), bias.dtype()),
        ));
    }
    largest_of(logits, Some(bias), work)
}

/// What [`argmax_sum`] works with on a GPU, for as many calls as need be.
#[derive(Debug)]
pub struct ArgmaxWork {
    rows: usize,
    /// `[R, 2]` i64, zero between calls; `None` on the CPU.
    #[cfg(feature = "cuda")]
    on_gpu: Option<Tensor>,
}

impl ArgmaxWork {
    /// For so many rows on `device`.
    ///
    /// # Errors
    /// [`Error::Device`]: the memory is full.
    pub fn new(rows: usize, device: &Device) -> Result<Self> {
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_gpu: device
                .is_cuda()
                .then(|| Tensor::zeros((rows.max(1), 2), DType::I64, device))
                .transpose()?,
            rows,
        })
    }
}

fn largest_of(logits: &Tensor, bias: Option<&Tensor>, work: &ArgmaxWork) -> Result<Tensor> {
    let fits = match *logits.dims() {
        [rows, vocab] => {
            logits.dtype() == DType::F32 && vocab < (NO_TOKEN - 1) as usize && rows == work.rows
        }
        _ => false,
    };
    if !fits {
        return Err(Error::shape(
            "argmax",
            format!(
                "expected [R, vocab] f32, found {:?} {:?} for {} rows",
                logits.shape(),
                logits.dtype(),
                work.rows
            ),
        ));
    }
    let (rows, vocab) = logits.dims2()?;
    if rows == 0 || vocab == 0 {
        return upload(vec![Best::Impossible.code(); rows], rows, logits.device());
    }
    #[cfg(feature = "cuda")]
    if let Some(work) = &work.on_gpu {
        return crate::cuda::ops::argmax(logits, bias, work);
    }
    let values = match bias {
        Some(bias) => (logits + bias)?,
        None => logits.clone(),
    };
    let values = values.flatten_all()?.to_vec1::<f32>()?;
    let codes = values.chunks_exact(vocab).map(|row| best(row).code());
    upload(codes.collect(), rows, logits.device())
}

/// One row on the CPU: [`argmax_ref`] with comparisons side by side, as a vocabulary is long and chosen from
/// once a token.
pub fn best(row: &[f32]) -> Best {
    let max = match largest(row) {
        Some(max) if max < f32::INFINITY => max,
        _ => {
            let bad = |v: &f32| v.is_nan() || *v == f32::INFINITY;
            return Best::Unusable(row.iter().position(bad).unwrap_or_default() as u32);
        }
    };
    let at = match max > f32::NEG_INFINITY {
        true => row.iter().position(|v| *v == max),
        false => None,
    };
    at.map_or(Best::Impossible, |i| Best::Token(i as u32))
}

/// The largest of `logits`, -inf for none; `None` if one of them is NaN.
fn largest(logits: &[f32]) -> Option<f32> {
    const LANES: usize = 16;
    let (mut max, mut nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut tail = [f32::NEG_INFINITY; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    for chunk in chunks.iter().chain([&tail]) {
        for (v, (max, nan)) in chunk.iter().zip(max.iter_mut().zip(&mut nan)) {
            // No comparison finds a NaN, and without this it would be skipped over.
            *nan |= v.is_nan();
            *max = if *v > *max { *v } else { *max };
        }
    }
    let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    (!nan.contains(&true)).then_some(max)
}

/// One row in a straight loop.
pub fn argmax_ref(row: &[f32]) -> Best {
    let mut best: Option<(usize, f32)> = None;
    for (i, v) in row.iter().enumerate() {
        if v.is_nan() || *v == f32::INFINITY {
            return Best::Unusable(i as u32);
        }
        if best.map_or(*v > f32::NEG_INFINITY, |(_, top)| *v > top) {
            best = Some((i, *v));
        }
    }
    best.map_or(Best::Impossible, |(i, _)| Best::Token(i as u32))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn codes(rows: &[&[f32]]) -> Vec<Best> {
        let (n, vocab) = (rows.len(), rows.first().map_or(0, |r| r.len()));
        let logits = Tensor::from_vec(rows.concat(), (n, vocab), &Device::Cpu).expect("a tensor");
        let codes = argmax(&logits).expect("rows").to_vec1::<u32>();
        codes.expect("codes").into_iter().map(Best::of).collect()
    }

    #[test]
    fn what_is_chosen_and_what_cannot_be() {
        const INF: f32 = f32::INFINITY;
        let cases: [(&[f32; 3], Best); 8] = [
            (&[1.0, 3.0, 3.0], Best::Token(1)),
            (&[-0.0, 0.0, -1.0], Best::Token(0)),
            (&[0.0, -0.0, -1.0], Best::Token(0)),
            (&[-INF, -INF, -5.0], Best::Token(2)),
            (&[-INF, -INF, -INF], Best::Impossible),
            (&[9.0, f32::NAN, INF], Best::Unusable(1)),
            (&[9.0, INF, f32::NAN], Best::Unusable(1)),
            (&[-INF, 0.0, f32::NAN], Best::Unusable(2)),
        ];
        for (row, best) in cases {
            assert_eq!(codes(&[row]), [best], "{row:?}");
        }
        assert_eq!(codes(&[&[], &[]]), [Best::Impossible; 2]);
    }

    #[test]
    fn other_shapes_are_refused() {
        for shape in [vec![3], vec![1, 2, 3]] {
            let logits = Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("a tensor");
            assert!(matches!(
                argmax(&logits),
                Err(Error::Shape { op: "argmax", .. })
            ));
        }
        let logits = Tensor::zeros((1, 2), DType::BF16, &Device::Cpu).expect("a tensor");
        assert!(argmax(&logits).is_err());
        let zeros = |shape| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("a tensor");
        let work = ArgmaxWork::new(2, &Device::Cpu).expect("work");
        assert!(argmax_sum(&zeros((2, 3)), &zeros((2, 3)), &work).is_ok());
        for (logits, bias) in [((2, 3), (2, 4)), ((3, 3), (3, 3)), ((1, 3), (1, 3))] {
            assert!(argmax_sum(&zeros(logits), &zeros(bias), &work).is_err());
        }
    }

    #[test]
    fn a_bias_is_added_before_the_choice() {
        // One position of blocks of two: rows further apart than they are long.
        let all = [
            [[0.0f32, 1.0, 2.0], [3.0, 1.0, 2.5]],
            [[9.0; 3], [f32::NEG_INFINITY, 0.0, -1.0]],
        ];
        let all = Tensor::new(&all, &Device::Cpu).expect("a tensor");
        let logits = all
            .narrow(1, 1, 1)
            .and_then(|t| t.squeeze(1))
            .expect("a view");
        let bias = [[-1.0f32, 0.0, 0.0], [f32::INFINITY, 0.5, f32::NAN]];
        let bias = Tensor::new(&bias, &Device::Cpu).expect("a tensor");
        let work = ArgmaxWork::new(2, &Device::Cpu).expect("work");
        for _ in 0..2 {
            let codes = argmax_sum(&logits, &bias, &work).expect("rows");
            let codes = codes.to_vec1::<u32>().expect("codes");
            let chosen: Vec<_> = codes.into_iter().map(Best::of).collect();
            assert_eq!(chosen, [Best::Token(2), Best::Unusable(0)]);
        }
    }

    proptest! {
        #[test]
        fn codes_come_back(index in 0u32..(NO_TOKEN - 1)) {
            for best in [Best::Token(index), Best::Unusable(index), Best::Impossible] {
                prop_assert_eq!(Best::of(best.code()), best);
            }
        }

        #[test]
        fn as_in_a_straight_loop(row in prop::collection::vec(-4i8..6, 1..70)) {
            // The ends of the range stand for what is no number.
            let value = |v: i8| match v {
                -4 => f32::NEG_INFINITY,
                4 if row.len() % 3 == 0 => f32::INFINITY,
                5 if row.len() % 5 == 0 => f32::NAN,
                v => f32::from(v),
            };
            let row: Vec<f32> = row.iter().copied().map(value).collect();
            prop_assert_eq!(codes(&[&row]), [argmax_ref(&row)]);
        }
    }
}
