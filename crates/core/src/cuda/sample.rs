//! Tokens drawn where the logits are, with the numbers of each sequence's own generator.

use candle_core::{CudaDevice, DType, Tensor};

use super::{Held, Launch, Out, Ptr, kernels, ops::device};
use crate::{Error, Result};

/// Columns of a block.
const PART: usize = 2048;
/// Bins of a row's histogram.
const BINS: usize = 2048;
/// A block's threads: as many parts a row may have.
const THREADS: usize = 256;
/// Words of a row's parameters.
const WORDS: usize = 12;

/// How the token of one row is drawn.
///
/// The order is temperature, `top_k`, `top_p`, `min_p`, then `argmax(p / Exp(1))` with one number of the
/// generator for each token left, in token order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawRow {
    /// State of a PCG64 (XSL-RR 128/64) before its next number.
    pub state: u128,
    /// Its increment.
    pub inc: u128,
    /// Above 0.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: usize,
    /// In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// In [0, 1].
    pub min_p: f32,
}

impl DrawRow {
    /// As the kernels' `SampleRow`.
    fn words(&self) -> [u32; WORDS] {
        let mut out = [0; WORDS];
        for (i, long) in [self.state, self.inc].into_iter().enumerate() {
            for (j, word) in out[4 * i..4 * i + 4].iter_mut().enumerate() {
                *word = (long >> (32 * j)) as u32;
            }
        }
        out[8] = self.temperature.to_bits();
        out[9] = self.top_p.to_bits();
        out[10] = self.min_p.to_bits();
        out[11] = u32::try_from(self.top_k).unwrap_or(u32::MAX);
        out
    }

    fn cuts(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0
    }
}

/// A drawn row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drawn {
    /// The token; `None` where the host has to choose: logits from which nothing can be, too many near equals
    /// at a limit, or a vocabulary that is too large.
    pub token: Option<u32>,
    /// Numbers of the generator that were used.
    pub numbers: u64,
}

impl Drawn {
    /// What was not drawn.
    const LEFT: Self = Self {
        token: None,
        numbers: 0,
    };
}

/// `logits: [R, vocab]` f32, `codes: [R]` u32 as [`argmax`](crate::argmax()) gives them, on one GPU. Of a
/// vocabulary past 2^19 nothing is drawn: the host has to choose.
///
/// # Errors
/// Shapes that do not fit, or a failed launch.
pub fn sample(logits: &Tensor, codes: &Tensor, rows: &[DrawRow]) -> Result<Vec<Drawn>> {
    const OP: &str = "sample";
    let dev = device(logits)?;
    let (n, vocab) = logits.dims2()?;
    let dtypes = (logits.dtype(), codes.dtype()) == (DType::F32, DType::U32);
    if !dtypes || codes.dims() != [n] || rows.len() != n {
        return Err(Error::shape(
            OP,
            format!(
                "expected [{n}, vocab] f32, [{n}] u32 and {n} rows, found {:?}, {:?} and {}",
                logits.shape(),
                codes.shape(),
                rows.len()
            ),
        ));
    }
    if n == 0 || vocab > PART * THREADS {
        return Ok(vec![Drawn::LEFT; n]);
    }
    let (logits, codes) = (logits.contiguous()?, codes.contiguous()?);
    let words: Vec<u32> = rows.iter().flat_map(DrawRow::words).collect();
    let words = Tensor::from_vec(words, (n, WORDS), logits.device())?;
    let operands = Operands {
        dev,
        logits: Held::new(&logits, OP),
        codes: Held::new(&codes, OP),
        words: Held::new(&words, OP),
        rows: n,
        vocab,
    };
    let limits = match rows.iter().any(DrawRow::cuts) {
        true => Some(operands.limits()?),
        false => None,
    };
    let out = operands.draw(limits.as_ref())?.into_tensor((n, 2))?;
    let drawn = out.to_vec2::<u32>()?;
    Ok(drawn
        .into_iter()
        .map(|row| Drawn {
            token: (row[0] as usize).lt(&vocab).then_some(row[0]),
            numbers: u64::from(row[1]),
        })
        .collect())
}

/// What all kernels read.
struct Operands<'a> {
    dev: &'a CudaDevice,
    logits: Held<'a>,
    codes: Held<'a>,
    words: Held<'a>,
    rows: usize,
    vocab: usize,
}

impl Operands<'_> {
    fn parts(&self) -> usize {
        self.vocab.div_ceil(PART)
    }

    /// The last token that `top_k` and `top_p` keep of each row.
    fn limits(&self) -> Result<Out<u32>> {
        let counts = Out::<u32>::zeros(self.dev, self.rows * BINS)?;
        let mass = Out::<i64>::zeros(self.dev, self.rows * BINS)?;
        let limits = Out::<u32>::new(self.dev, 2 * self.rows)?;
        let bins = Launch::new(self.dev, kernels::SAMPLE, "sample_bins")
            .ptr(self.logits.ptr::<f32>()?)
            .ptr(self.codes.ptr::<u32>()?)
            .ptr(self.words.ptr::<u32>()?)
            .ptr(counts.ptr())
            .ptr(mass.ptr())
            .int(self.vocab);
        let limit = Launch::new(self.dev, kernels::SAMPLE, "sample_limit")
            .ptr(self.logits.ptr::<f32>()?)
            .ptr(self.codes.ptr::<u32>()?)
            .ptr(self.words.ptr::<u32>()?)
            .ptr(counts.ptr())
            .ptr(mass.ptr())
            .ptr(limits.ptr())
            .int(self.vocab);
        // SAFETY: R rows of the vocabulary, R codes and R rows of 12 words in; R zeroed rows of bins, which
        // the first kernel fills and the second reads; two words a row out.
        unsafe {
            bins.launch((self.parts(), self.rows, 1), THREADS, 0)?;
            limit.launch((self.rows, 1, 1), 1024, 0)?;
        }
        Ok(limits)
    }

    /// Codes and how many numbers were used, `[R, 2]`.
    fn draw(&self, limits: Option<&Out<u32>>) -> Result<Out<u32>> {
        let parts = self.parts();
        let (places, limits) = (self.rows * parts, limits.map_or(Ptr::NULL, Out::ptr));
        let part_n = Out::<u32>::new(self.dev, places)?;
        let part_p = Out::<f64>::new(self.dev, places)?;
        let part_at = Out::<i64>::new(self.dev, 2 * places)?;
        let ticket = Out::<u32>::zeros(self.dev, self.rows)?;
        let out = Out::<u32>::new(self.dev, 2 * self.rows)?;
        let count = Launch::new(self.dev, kernels::SAMPLE, "sample_count")
            .ptr(self.logits.ptr::<f32>()?)
            .ptr(self.codes.ptr::<u32>()?)
            .ptr(self.words.ptr::<u32>()?)
            .ptr(limits)
            .ptr(part_n.ptr())
            .ptr(part_p.ptr())
            .int(self.vocab);
        let draw = Launch::new(self.dev, kernels::SAMPLE, "sample_draw")
            .ptr(self.logits.ptr::<f32>()?)
            .ptr(self.codes.ptr::<u32>()?)
            .ptr(self.words.ptr::<u32>()?)
            .ptr(limits)
            .ptr(part_n.ptr())
            .ptr(part_p.ptr())
            .ptr(part_at.ptr())
            .ptr(ticket.ptr())
            .ptr(out.ptr())
            .int(self.vocab);
        // SAFETY: as above; a count, a sum and two words for each block, and a zeroed ticket a row, by which
        // its last block knows itself.
        unsafe {
            count.launch((parts, self.rows, 1), THREADS, 0)?;
            draw.launch((parts, self.rows, 1), THREADS, 0)?;
        }
        Ok(out)
    }
}
