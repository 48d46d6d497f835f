use candle_core::Tensor;
use deepseek_v41_core::{Error, Result, RmsNorm, VarBuilder};

use crate::ops::{HcMixes, Next, Open, Step, hc_step};
use crate::{HyperConnConfig, Mix, MixWeights, PreMix, Site, hc_mixes, hc_pre};

/// The hyper-connections around one sublayer.
#[derive(Debug, Clone)]
pub struct HyperConn {
    cfg: HyperConnConfig,
    weights: MixWeights,
}

impl HyperConn {
    /// Loads `hc_<site>_{fn,base,scale}` under `vb` (a block's own prefix).
    ///
    /// # Errors
    /// A configuration without meaning, weights that are missing or misshapen, or a device that has
    /// no kernels in this build.
    pub fn new(cfg: &HyperConnConfig, site: Site, vb: VarBuilder) -> Result<Self> {
        if !vb.device().is_cpu() && !cfg!(feature = "cuda") {
            return Err(Error::Unsupported {
                what: format!(
                    "hyper-connections on {:?}: build with `--features cuda`",
                    vb.device().location()
                ),
            });
        }
        Ok(Self {
            cfg: cfg.clone(),
            weights: MixWeights::load(cfg, site, &vb)?,
        })
    }

    /// The coefficients for every token of `stream: [T, C, dim]` bf16.
    ///
    /// # Errors
    /// Another shape or dtype.
    ///
    /// Reference: `Block.hc_mixes`.
    pub fn mixes(&self, stream: &Tensor) -> Result<Mix> {
        hc_mixes(
            stream,
            &self.weights,
            self.cfg.sinkhorn(),
            self.cfg.norm_eps,
        )
    }

    /// One whole sublayer: collapses `stream: [T, C, dim]` with the mix carried from the sublayer
    /// before, runs `sublayer` (`[T, dim]` → `[T, dim]`, norm included) and spreads its output over
    /// the copies. Returns the new stream and the mix for the sublayer after.
    ///
    /// The closure never sees this sublayer's own `pre`, so it cannot be used a sublayer too early.
    ///
    /// # Errors
    /// What `sublayer` returns, or shapes that do not fit.
    ///
    /// Reference: one half of `Block.forward`.
    pub fn around(
        &self,
        stream: &Tensor,
        carried: PreMix,
        sublayer: impl FnOnce(Tensor) -> Result<Tensor>,
    ) -> Result<(Tensor, PreMix)> {
        let mix = self.mixes(stream)?;
        let y = sublayer(hc_pre(stream, &carried)?)?;
        mix.finish(&y, stream)
    }

    /// Ends the sublayer before, if it is `open`, and begins this one, on the CPU.
    pub(crate) fn step_cpu(
        &self,
        stream: &Tensor,
        open: Option<Open<'_>>,
        carried: &PreMix,
        norm: &RmsNorm,
    ) -> Result<Step> {
        let mixes = HcMixes {
            weights: &self.weights,
            p: self.cfg.sinkhorn(),
            norm_eps: self.cfg.norm_eps,
        };
        let pre = carried.tensor();
        hc_step(stream, open, Some(Next { mixes, pre, norm }))
    }

    /// Whether one kernel does all of a step of `stream`.
    #[cfg(feature = "cuda")]
    pub(crate) fn fuses(&self, stream: &Tensor) -> bool {
        stream.device().is_cuda() && crate::cuda::fuses(self.cfg.hc_mult, self.cfg.dim)
    }

    /// Ends the sublayer before, if it is `open`, and begins this one.
    #[cfg(feature = "cuda")]
    pub(crate) fn step(
        &self,
        stream: &Tensor,
        open: Option<crate::cuda::Open<'_>>,
        collapse: (&Tensor, &Tensor),
        norm_eps: f32,
    ) -> Result<crate::cuda::Step> {
        let HyperConnConfig {
            hc_mult,
            dim,
            norm_eps: own,
            ..
        } = self.cfg;
        // One constant serves the stream's norm and the sublayer's.
        if own != norm_eps || stream.dims()[1..] != [hc_mult, dim] {
            return Err(Error::shape(
                "flow",
                format!("stream {:?}, norms of {own} and {norm_eps}", stream.dims()),
            ));
        }
        crate::cuda::step(
            stream,
            open,
            Some(collapse),
            &self.weights,
            self.cfg.sinkhorn(),
            own,
        )
    }

    /// The settings it was built with.
    pub fn config(&self) -> &HyperConnConfig {
        &self.cfg
    }

    /// The weights as stored.
    pub fn weights(&self) -> &MixWeights {
        &self.weights
    }
}
