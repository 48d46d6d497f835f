//! The stream on its way through sublayers.

use candle_core::Tensor;
use deepseek_v41_core::{Error, Result, RmsNorm};

use crate::ops::{Open, hc_step};
use crate::{HyperConn, Mix, PreMix, hc_pre};

/// The residual stream and the mix carried to the next sublayer.
///
/// [`Flow::enter`] gives a sublayer its input and [`Flow::leave`] takes its output, with the values of
/// [`HyperConn::around`]. The output is added only when the next sublayer enters, in the one pass over
/// the stream that also makes that sublayer's coefficients and normed input; whoever asks for the stream
/// in between gets it added at once.
#[derive(Debug)]
pub struct Flow {
    stream: Tensor,
    carried: Option<PreMix>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Between sublayers.
    Whole,
    /// Inside of one.
    Inside(Mix),
    /// Inside of one, its coefficients packed.
    InsidePacked(Tensor),
    /// Between sublayers, the last one's output `y` not added yet.
    Open { y: Tensor, coef: Tensor },
}

impl Flow {
    /// Starts from `stream: [T, C, dim]` bf16 and the mix its first sublayer collapses with.
    pub fn new(stream: Tensor, carried: PreMix) -> Self {
        Self {
            stream,
            carried: Some(carried),
            state: State::Whole,
        }
    }

    /// The input `[T, dim]` of the sublayer with these connections, normed.
    ///
    /// # Errors
    /// Shapes that do not fit, or a sublayer that was entered and not left.
    pub fn enter(&mut self, hc: &HyperConn, norm: &RmsNorm) -> Result<Tensor> {
        let Some(carried) = self.carried.take() else {
            return Err(not_left());
        };
        #[cfg(feature = "cuda")]
        if let Some(weight) = norm.weight_bf16().filter(|_| hc.fuses(&self.stream)) {
            let collapse = (carried.tensor(), weight);
            let open = match &self.state {
                State::Open { y, coef } => Some(crate::cuda::Open { y, coef }),
                _ => None,
            };
            let step = hc.step(&self.stream, open, collapse, norm.eps())?;
            if let Some(stream) = step.stream {
                self.stream = stream;
            }
            self.state = State::InsidePacked(step.coef);
            return step.normed.ok_or_else(not_left);
        }
        if self.stream.device().is_cpu() {
            let open = match &self.state {
                State::Open { y, coef } => Some(Open { y, coef }),
                _ => None,
            };
            let step = hc.step_cpu(&self.stream, open, &carried, norm)?;
            if let Some(stream) = step.stream {
                self.stream = stream;
            }
            let (coef, x) = step.begun.ok_or_else(not_left)?;
            self.state = State::InsidePacked(coef);
            return Ok(x);
        }
        self.settle()?;
        let mix = hc.mixes(&self.stream)?;
        let x = norm.forward(&hc_pre(&self.stream, &carried)?)?;
        self.state = State::Inside(mix);
        Ok(x)
    }

    /// Ends the sublayer entered last with its output `y: [T, dim]` bf16.
    ///
    /// # Errors
    /// Shapes that do not fit, or no sublayer that was entered.
    pub fn leave(&mut self, y: Tensor) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Whole) {
            State::Inside(mix) => {
                let (stream, carried) = mix.finish(&y, &self.stream)?;
                (self.stream, self.carried) = (stream, Some(carried));
                Ok(())
            }
            State::InsidePacked(coef) => {
                self.carried = Some(PreMix::of_packed(&coef, self.stream.dims()[1])?);
                self.state = State::Open {
                    y: y.contiguous()?,
                    coef,
                };
                Ok(())
            }
            _ => Err(Error::shape("flow", "no sublayer to leave")),
        }
    }

    /// The stream `[T, C, dim]`, all sublayers so far added.
    ///
    /// # Errors
    /// The launch that adds the last one failed.
    pub fn stream(&mut self) -> Result<&Tensor> {
        self.settle()?;
        Ok(&self.stream)
    }

    /// The mix carried to the next sublayer; `None` inside of one.
    pub fn carried(&self) -> Option<&PreMix> {
        self.carried.as_ref()
    }

    /// Replaces the stream by what `f` makes of it.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(&mut self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<()> {
        self.settle()?;
        self.stream = f(&self.stream)?;
        Ok(())
    }

    /// The stream and the mix for what comes after.
    ///
    /// # Errors
    /// A sublayer that was entered and not left.
    pub fn finish(mut self) -> Result<(Tensor, PreMix)> {
        self.settle()?;
        let carried = self.carried.ok_or_else(not_left)?;
        Ok((self.stream, carried.contiguous()?))
    }

    /// Adds what is open.
    fn settle(&mut self) -> Result<()> {
        if let State::Open { y, coef } = &self.state {
            self.stream = if self.stream.device().is_cpu() {
                let step = hc_step(&self.stream, Some(Open { y, coef }), None)?;
                step.stream.ok_or_else(not_left)?
            } else {
                settle_device(y, &self.stream, coef)?
            };
            self.state = State::Whole;
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
fn settle_device(y: &Tensor, stream: &Tensor, coef: &Tensor) -> Result<Tensor> {
    crate::cuda::hc_post_packed(y, stream, coef)
}

#[cfg(not(feature = "cuda"))]
fn settle_device(y: &Tensor, stream: &Tensor, coef: &Tensor) -> Result<Tensor> {
    let mix = Mix::unpack(coef, stream.dims()[1])?;
    crate::hc_post(y, stream, &mix.post, &mix.comb)
}

fn not_left() -> Error {
    Error::shape("flow", "a sublayer was entered and not left")
}
