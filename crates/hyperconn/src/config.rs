use deepseek_v41_core::{Error, Result};

use crate::SinkhornParams;

/// Settings of the hyper-connections of one block.
#[derive(Debug, Clone, PartialEq)]
pub struct HyperConnConfig {
    /// Copies of the residual stream, `C`.
    pub hc_mult: usize,
    /// Width of one copy.
    pub dim: usize,
    /// Rounds of row and column normalisation of `comb`.
    pub sinkhorn_iters: usize,
    /// Added to `pre` and to every Sinkhorn denominator.
    pub hc_eps: f32,
    /// Under the root of the stream's norm.
    pub norm_eps: f32,
}

impl HyperConnConfig {
    /// Refuses settings the maths has no meaning for.
    ///
    /// # Errors
    /// Zero copies or width, a flattened width that overflows, epsilons that are negative or not
    /// finite.
    pub fn validate(&self) -> Result<()> {
        if self.hc_mult == 0 {
            return Err(Error::config(
                "hc_mult",
                "expected at least 1 copy, found 0",
            ));
        }
        if self.dim == 0 {
            return Err(Error::config("dim", "expected at least 1, found 0"));
        }
        let fits = |n: usize| n.checked_add(2).and_then(|c| c.checked_mul(n));
        if self.dim.checked_mul(self.hc_mult).is_none() || fits(self.hc_mult).is_none() {
            return Err(Error::config(
                "hc_mult",
                format!("{} copies overflow", self.hc_mult),
            ));
        }
        for (field, eps) in [("hc_eps", self.hc_eps), ("norm_eps", self.norm_eps)] {
            if !eps.is_finite() || eps < 0.0 {
                return Err(Error::config(
                    field,
                    format!("expected a finite eps >= 0, found {eps}"),
                ));
            }
        }
        Ok(())
    }

    /// The part of the settings that [`split_sinkhorn`](crate::split_sinkhorn) needs.
    pub fn sinkhorn(&self) -> SinkhornParams {
        SinkhornParams {
            hc_mult: self.hc_mult,
            iters: self.sinkhorn_iters,
            eps: self.hc_eps,
        }
    }
}

/// Which sublayer of a block the connections wrap; each has weights of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// Attention: `hc_attn_fn`, `hc_attn_base`, `hc_attn_scale`.
    Attn,
    /// Feed-forward: `hc_ffn_fn`, `hc_ffn_base`, `hc_ffn_scale`.
    Ffn,
}

impl Site {
    /// The stem of this site's weight names.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Attn => "hc_attn",
            Self::Ffn => "hc_ffn",
        }
    }
}
