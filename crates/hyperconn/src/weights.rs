use deepseek_v41_core::cpu::{F32Rows, WeightRows};
use deepseek_v41_core::{Result, StoredDtype, VarBuilder, WeightError};

use crate::{HyperConnConfig, Site};

/// The three f32 weights behind one site's mixes, as stored.
///
/// The projection stays the checkpoint's bytes (a mapped file when that is where they come from):
/// at release shapes it is 2 MB a site and 80 sites.
#[derive(Debug, Clone)]
pub struct MixWeights {
    /// `[(2+C)C, C*dim]`, rows in the order pre | post | comb.
    pub(crate) func: F32Rows,
    /// `[(2+C)C]`
    pub(crate) base: Vec<f32>,
    /// One factor each for pre, post and comb.
    pub(crate) scale: [f32; 3],
    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) device: Option<crate::cuda::DeviceMix>,
}

impl MixWeights {
    /// Reads `hc_<site>_{fn,base,scale}` under `vb`.
    ///
    /// # Errors
    /// A weight is missing or of another shape or dtype (all are f32), or `base` or `scale` holds a
    /// NaN.
    pub fn load(cfg: &HyperConnConfig, site: Site, vb: &VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let width = cfg.sinkhorn().width();
        let cols = cfg.hc_mult * cfg.dim;
        let name = |part: &str| format!("{}_{part}", site.prefix());
        let raw = vb.raw(&name("fn"), &[StoredDtype::F32], &[width, cols])?;
        let func = F32Rows::new(raw.bytes.clone(), width, cols)
            .ok_or_else(|| raw.error(WeightError::Content("data shorter than its shape".into())))?;
        let base = small(vb, &name("base"), width)?;
        let scale = small(vb, &name("scale"), 3)?;
        let weights = Self {
            func,
            base,
            scale: [scale[0], scale[1], scale[2]],
            #[cfg(feature = "cuda")]
            device: None,
        };
        #[cfg(feature = "cuda")]
        let weights = Self {
            device: crate::cuda::DeviceMix::new(&weights, vb.device())?,
            ..weights
        };
        Ok(weights)
    }

    /// `(2+C)C`, the number of coefficients a token gets.
    pub fn width(&self) -> usize {
        self.func.rows()
    }

    /// `C * dim`, the flattened stream.
    pub fn cols(&self) -> usize {
        self.func.cols()
    }

    /// Bytes of the projection, for bandwidth figures.
    pub fn weight_bytes(&self) -> usize {
        self.func.bytes().len()
    }
}

fn small(vb: &VarBuilder, name: &str, len: usize) -> Result<Vec<f32>> {
    let raw = vb.raw(name, &[StoredDtype::F32], &[len])?;
    let values = raw.to_f32()?;
    match values.iter().position(|v| v.is_nan()) {
        Some(i) => Err(raw.error(WeightError::Content(format!("element {i} is NaN")))),
        None => Ok(values),
    }
}
