//! The end of one sublayer and the beginning of the next in one pass over the stream.
//!
//! ```text
//! stream = hc_post(y, stream, post, comb)      where a sublayer's output waits to be added
//! coef   = hc_mixes(stream)                    the next sublayer's own coefficients
//! x      = norm(hc_pre(stream, pre))           its input, by the pre that was carried to it
//! ```
//!
//! Token by token the bits of those operations on their own. Together a token is fetched once, five
//! small operations are one, and the tokens of a small step are enough work to share among threads.

use candle_core::{Device, Layout, Storage, Tensor, WithDType};
use deepseek_v41_core::{
    Error, Result, RmsNorm,
    cpu::{self, Isa},
    rms_norm_row,
};
use half::bf16;

use super::hc_mixes::{HcMixes, TOKENS_AT_ONCE};
use super::{hc_post, hc_pre, stream_dims};

const OP: &str = "hc_step";

/// A sublayer's output `y: [T, dim]` bf16, and its packed coefficients `[T, (2+C)C]` f32.
pub(crate) struct Open<'a> {
    pub(crate) y: &'a Tensor,
    pub(crate) coef: &'a Tensor,
}

/// What the next sublayer begins with.
pub(crate) struct Next<'a> {
    pub(crate) mixes: HcMixes<'a>,
    /// `[T, C]` f32, the carried mix.
    pub(crate) pre: &'a Tensor,
    pub(crate) norm: &'a RmsNorm,
}

/// What came out; `None` for what was not asked for.
pub(crate) struct Step {
    /// `[T, C, dim]` bf16, the output added.
    pub(crate) stream: Option<Tensor>,
    /// `[T, (2+C)C]` f32 and `[T, dim]` bf16: the next sublayer's coefficients and input.
    pub(crate) begun: Option<(Tensor, Tensor)>,
}

/// `stream: [T, C, dim]` bf16 on the CPU.
///
/// # Errors
/// Shapes or dtypes that do not fit each other.
pub(crate) fn hc_step(
    stream: &Tensor,
    open: Option<Open<'_>>,
    next: Option<Next<'_>>,
) -> Result<Step> {
    let (t, c, dim) = stream_dims(OP, stream)?;
    let width = (2 + c) * c;
    let fits = open
        .as_ref()
        .is_none_or(|o| o.y.dims() == [t, dim] && o.coef.dims() == [t, width])
        && next.as_ref().is_none_or(|n| {
            let weights = n.mixes.weights;
            let site = weights.width() == width && weights.cols() == c * dim;
            site && n.pre.dims() == [t, c] && n.norm.weight().dims() == [dim]
        });
    if !fits {
        let reason = format!("stream {:?} and a sublayer of other sizes", stream.dims());
        return Err(Error::shape(OP, reason));
    }
    let stream = stream.contiguous()?;
    let (held, layout) = stream.storage_and_layout();
    let mut pass = Pass {
        stream: slice(&held, layout)?,
        c,
        dim,
        open: None,
        next: None,
    };
    let opened = match &open {
        Some(o) => Some((o.y.contiguous()?, o.coef.contiguous()?)),
        None => None,
    };
    let opened = opened
        .as_ref()
        .map(|(y, coef)| (y.storage_and_layout(), coef.storage_and_layout()));
    if let Some(((y, y_layout), (coef, coef_layout))) = &opened {
        pass.open = Some((slice(y, y_layout)?, slice(coef, coef_layout)?));
    }
    // The carried mix is the first part of packed rows: small, and copied rather than strided over.
    let begun = match &next {
        Some(n) => Some((n.pre.contiguous()?, n.norm.weight().contiguous()?)),
        None => None,
    };
    let begun = begun
        .as_ref()
        .map(|(pre, w)| (pre.storage_and_layout(), w.storage_and_layout()));
    if let (Some(((pre, pre_layout), (weight, weight_layout))), Some(n)) = (&begun, &next) {
        pass.next = Some(Begin {
            mixes: n.mixes,
            pre: slice(pre, pre_layout)?,
            weight: slice(weight, weight_layout)?,
            eps: n.norm.eps(),
        });
    }
    let (stream, coef, x) = pass.run(t);
    let cpu = &Device::Cpu;
    Ok(Step {
        stream: match open {
            Some(_) => Some(Tensor::from_vec(stream, (t, c, dim), cpu)?),
            None => None,
        },
        begun: match next {
            Some(_) => {
                let coef = Tensor::from_vec(coef, (t, width), cpu)?;
                Some((coef, Tensor::from_vec(x, (t, dim), cpu)?))
            }
            None => None,
        },
    })
}

fn slice<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    match storage {
        Storage::Cpu(storage) => Ok(cpu::contiguous(storage, layout, OP)?),
        _ => Err(Error::shape(OP, "a tensor that is not on the CPU")),
    }
}

/// The slices of one call.
struct Pass<'a> {
    stream: &'a [bf16],
    c: usize,
    dim: usize,
    /// `y` and packed coefficients.
    open: Option<(&'a [bf16], &'a [f32])>,
    next: Option<Begin<'a>>,
}

struct Begin<'a> {
    mixes: HcMixes<'a>,
    pre: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

/// Some tokens and where their results go; empty where nothing is asked for.
struct Block<'a> {
    first: usize,
    tokens: usize,
    stream: &'a mut [bf16],
    coef: &'a mut [f32],
    x: &'a mut [bf16],
}

impl Pass<'_> {
    /// → the new stream, coefficients, inputs.
    fn run(&self, t: usize) -> (Vec<bf16>, Vec<f32>, Vec<bf16>) {
        let (row, width) = (self.c * self.dim, (2 + self.c) * self.c);
        let mut stream = vec![bf16::ZERO; if self.open.is_some() { t * row } else { 0 }];
        let (mut coef, mut x) = match self.next {
            Some(_) => (vec![0f32; t * width], vec![bf16::ZERO; t * self.dim]),
            None => (Vec::new(), Vec::new()),
        };
        // The products of the coefficients are in f64, half as many at a time.
        let work = t * row * if self.next.is_some() { 4 * width } else { 12 };
        let (parallel, threads) = (cpu::should_parallelise(work), rayon::current_num_threads());
        // Fewer tokens than threads: the rows of the coefficients' weights are shared instead.
        let spread = parallel && t < threads;
        let size = match parallel && !spread {
            true => t.div_ceil(threads).min(TOKENS_AT_ONCE),
            false => TOKENS_AT_ONCE,
        };
        let isa = Isa::detect();
        if t <= size {
            let (stream, coef, x) = (&mut stream[..], &mut coef[..], &mut x[..]);
            self.block(
                isa,
                spread,
                Block {
                    first: 0,
                    tokens: t,
                    stream,
                    coef,
                    x,
                },
            );
        } else {
            let blocks = self.blocks(t, size, &mut stream, &mut coef, &mut x);
            if parallel && !spread {
                let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
                cpu::for_each_piece(work, &mut blocks, 1, |_, block| {
                    if let Some(block) = block[0].take() {
                        self.block(isa, false, block);
                    }
                });
            } else {
                blocks
                    .into_iter()
                    .for_each(|block| self.block(isa, spread, block));
            }
        }
        (stream, coef, x)
    }

    fn blocks<'b>(
        &self,
        t: usize,
        size: usize,
        mut stream: &'b mut [bf16],
        mut coef: &'b mut [f32],
        mut x: &'b mut [bf16],
    ) -> Vec<Block<'b>> {
        let width = (2 + self.c) * self.c;
        let firsts = (0..t).step_by(size);
        let blocks = firsts.map(|first| {
            let tokens = size.min(t - first);
            let of = |asked: bool, len: usize| if asked { tokens * len } else { 0 };
            let (begun, ended) = (self.next.is_some(), self.open.is_some());
            Block {
                first,
                tokens,
                stream: take(&mut stream, of(ended, self.c * self.dim)),
                coef: take(&mut coef, of(begun, width)),
                x: take(&mut x, of(begun, self.dim)),
            }
        });
        blocks.collect()
    }

    fn block(&self, isa: Isa, spread: bool, block: Block<'_>) {
        let Block {
            first,
            tokens,
            stream,
            coef,
            x,
        } = block;
        let (c, dim) = (self.c, self.dim);
        let (row, width) = (c * dim, (2 + c) * c);
        let before = &self.stream[first * row..][..tokens * row];
        if let Some((y, coef)) = self.open {
            for (i, (out, residual)) in stream
                .chunks_exact_mut(row)
                .zip(before.chunks_exact(row))
                .enumerate()
            {
                let coef = &coef[(first + i) * width..][..width];
                let (post, comb) = coef[c..].split_at(c);
                hc_post::row(
                    isa,
                    &y[(first + i) * dim..][..dim],
                    residual,
                    post,
                    comb,
                    out,
                );
            }
        }
        let Some(begin) = &self.next else { return };
        let stream = if self.open.is_some() {
            &*stream
        } else {
            before
        };
        begin.mixes.tokens(isa, spread, stream, coef);
        let mut collapsed = vec![bf16::ZERO; dim];
        for (i, (x, stream)) in x
            .chunks_exact_mut(dim)
            .zip(stream.chunks_exact(row))
            .enumerate()
        {
            hc_pre::row(
                isa,
                stream,
                &begin.pre[(first + i) * c..][..c],
                &mut collapsed,
            );
            rms_norm_row(&collapsed, begin.weight, begin.eps, x);
        }
    }
}

/// The first `n` elements of what is left.
fn take<'a, T>(left: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (part, rest) = std::mem::take(left).split_at_mut(n);
    *left = rest;
    part
}
