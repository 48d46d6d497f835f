use candle_core::{DType, Device, Tensor};
use deepseek_v41_core::cpu::{self, Bf16Rows};
use deepseek_v41_core::{Error, Result, StoredDtype, VarBuilder, WeightError};
use half::bf16;
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use crate::cuda::DeviceGate;
use crate::ops::{at_token, with_slice};
use crate::{GateParams, MoeConfig, route_weights_ref, scores_ref, topk_gate_ref};

/// Where each token goes.
#[derive(Debug, Clone)]
pub struct Routing {
    /// `[T, k]` f32: what each expert's activation is multiplied by.
    pub weights: Tensor,
    /// `[T, k]` u32, in order of selection: best first, the lower index among equals.
    pub experts: Tensor,
}

impl Routing {
    pub(crate) fn new(t: usize, k: usize, experts: Vec<u32>, weights: Vec<f32>) -> Result<Self> {
        Ok(Self {
            weights: Tensor::from_vec(weights, (t, k), &Device::Cpu)?,
            experts: Tensor::from_vec(experts, (t, k), &Device::Cpu)?,
        })
    }
}

/// [`Routing`] on slices: `[T, k]` each.
pub(crate) struct Routes {
    pub(crate) experts: Vec<u32>,
    pub(crate) weights: Vec<f32>,
    pub(crate) k: usize,
}

impl Routes {
    fn new(t: usize, k: usize) -> Self {
        Self {
            experts: vec![0; t * k],
            weights: vec![0.0; t * k],
            k,
        }
    }
}

/// Scores every expert for a token and picks the best.
///
/// The bias takes part in the selection alone; weights come from the unbiased scores. Tokens inside
/// an image span have a bias of their own.
#[derive(Debug, Clone)]
pub struct Gate {
    /// `[E, dim]`, widened in the product.
    weight: Bf16Rows,
    bias: Vec<f32>,
    bias_vl: Option<Vec<f32>>,
    params: GateParams,
    dim: usize,
    #[cfg(feature = "cuda")]
    device: Option<DeviceGate>,
}

/// Tokens whose input is widened at once: enough that widening the weights is shared by many, 1.3 MB at
/// release shapes.
const TOKENS_AT_ONCE: usize = 64;

impl Gate {
    /// Reads `weight: [E, dim]` bf16, `bias: [E]` f32 and, if the settings say so, `bias_vl: [E]` f32
    /// under `vb`.
    ///
    /// # Errors
    /// Settings without meaning, a weight that is missing or of another shape or dtype, NaN in a
    /// bias, or a device without kernels in this build.
    pub fn new(cfg: &MoeConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        if !vb.device().is_cpu() && !cfg!(feature = "cuda") {
            return Err(Error::Unsupported {
                what: format!(
                    "mixture of experts on {:?}: build with `--features cuda`",
                    vb.device().location()
                ),
            });
        }
        let (e, dim) = (cfg.n_routed, cfg.dim);
        let raw = vb.raw("weight", &[StoredDtype::BF16], &[e, dim])?;
        let weight = Bf16Rows::new(raw.bytes.clone(), e, dim)
            .ok_or_else(|| raw.error(WeightError::Content("data shorter than its shape".into())))?;
        let bias = |name| {
            let raw = vb.raw(name, &[StoredDtype::F32], &[e])?;
            let bias = raw.to_f32()?;
            match bias.iter().position(|b| b.is_nan()) {
                Some(i) => Err(raw.error(WeightError::Content(format!("element {i} is NaN")))),
                None => Ok(bias),
            }
        };
        let own = bias("bias")?;
        let bias_vl = cfg.bias_vl.then(|| bias("bias_vl")).transpose()?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            device: DeviceGate::new(weight.bytes(), dim, &own, bias_vl.as_deref(), vb.device())?,
            weight,
            bias: own,
            bias_vl,
            params: cfg.gate(),
            dim,
        })
    }

    /// `xs: [T, dim]` bf16; `image_mask: [T]` u8, not 0 inside an image span → where to.
    ///
    /// The mask is ignored when there is no `bias_vl`.
    ///
    /// # Errors
    /// Shapes or dtypes that do not fit, or a token whose logits have no answer (NaN, `+inf`).
    ///
    /// Reference: `Gate.forward`.
    pub fn forward(&self, xs: &Tensor, image_mask: Option<&Tensor>) -> Result<Routing> {
        let t = self.tokens("gate", xs)?;
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            if let Some(mask) = image_mask.filter(|mask| mask.dims() != [t]) {
                return Err(Error::shape(
                    "gate",
                    format!("image mask: expected [{t}], found {:?}", mask.dims()),
                ));
            }
            return device.route(xs, image_mask, None, self.params);
        }
        let routes = with_slice("gate", xs, |xs: &[bf16]| {
            self.route_tensor(xs, t, image_mask)
        })?;
        Routing::new(t, self.params.n_activated, routes.experts, routes.weights)
    }

    /// Replays a selection: the given `experts: [T, k]` u32 with this gate's own weights for them.
    /// Where the weights are normalised their sum runs in the order given.
    ///
    /// # Errors
    /// As [`Gate::forward`], or an expert that does not exist.
    pub fn forward_chosen(&self, xs: &Tensor, experts: &Tensor) -> Result<Routing> {
        let t = self.tokens("gate", xs)?;
        let k = match (experts.dims(), experts.dtype()) {
            (&[rows, k], DType::U32) if rows == t => k,
            (dims, dtype) => {
                let found = format!("found {dims:?} {dtype:?}");
                return Err(Error::shape(
                    "gate",
                    format!("experts: expected [{t}, k] u32, {found}"),
                ));
            }
        };
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return device.route(xs, None, Some(experts), self.params);
        }
        let chosen = with_slice("gate", experts, |e: &[u32]| Ok(e.to_vec()))?;
        check_experts(&chosen, self.bias.len())?;
        let mut routes = Routes {
            weights: vec![0.0; chosen.len()],
            experts: chosen,
            k,
        };
        with_slice("gate", xs, |xs: &[bf16]| {
            self.each_token(xs, &mut routes, |_, scores, experts, weights| {
                scores_ref(scores, self.params)?;
                route_weights_ref(scores, experts, self.params, weights);
                Ok(())
            })
        })?;
        Routing::new(t, k, routes.experts, routes.weights)
    }

    /// Bytes of the projection, for bandwidth figures.
    pub fn weight_bytes(&self) -> usize {
        self.weight.bytes().len()
    }

    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// `T` of an input that fits.
    pub(crate) fn tokens(&self, op: &'static str, xs: &Tensor) -> Result<usize> {
        match (xs.dims(), xs.dtype()) {
            (&[t, dim], DType::BF16) if dim == self.dim => Ok(t),
            (dims, dtype) => {
                let expected = format!("expected [T, {}] bf16", self.dim);
                Err(Error::shape(
                    op,
                    format!("{expected}, found {dims:?} {dtype:?}"),
                ))
            }
        }
    }

    /// [`Gate::forward`] on a slice `[T, dim]`.
    pub(crate) fn route_tensor(
        &self,
        xs: &[bf16],
        t: usize,
        image_mask: Option<&Tensor>,
    ) -> Result<Routes> {
        match image_mask {
            Some(mask) if self.bias_vl.is_some() => {
                if mask.dims() != [t] {
                    let found = format!("{:?}", mask.dims());
                    return Err(Error::shape(
                        "gate",
                        format!("image mask: expected [{t}], found {found}"),
                    ));
                }
                with_slice("gate", mask, |mask: &[u8]| self.route(xs, t, Some(mask)))
            }
            _ => self.route(xs, t, None),
        }
    }

    fn route(&self, xs: &[bf16], t: usize, mask: Option<&[u8]>) -> Result<Routes> {
        let mut routes = Routes::new(t, self.params.n_activated);
        self.each_token(xs, &mut routes, |token, logits, experts, weights| {
            let bias = match (&self.bias_vl, mask) {
                (Some(bias_vl), Some(mask)) if mask[token] != 0 => bias_vl,
                _ => &self.bias,
            };
            topk_gate_ref(logits, bias, self.params, experts, weights)
        })?;
        Ok(routes)
    }

    /// Projects every token and calls `f(token, logits, experts, weights)` on it.
    fn each_token(
        &self,
        xs: &[bf16],
        routes: &mut Routes,
        f: impl Fn(usize, &mut [f32], &mut [u32], &mut [f32]) -> Result<()> + Sync,
    ) -> Result<()> {
        let (e, dim) = (self.bias.len(), self.dim);
        let Routes {
            experts,
            weights,
            k,
        } = routes;
        let k = *k;
        if k == 0 {
            return Ok(());
        }
        let block = |i: usize, xs: &[bf16], experts: &mut [u32], weights: &mut [f32]| {
            let m = xs.len() / dim;
            cpu::with_scratch(m * (dim + e), |scratch| {
                let (values, logits) = scratch.split_at_mut(m * dim);
                cpu::widen_slice(xs, values);
                cpu::matmul(&self.weight, values, m, logits);
                let outs = experts.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
                for (j, (logits, (experts, weights))) in
                    logits.chunks_exact_mut(e).zip(outs).enumerate()
                {
                    let token = i * TOKENS_AT_ONCE + j;
                    f(token, logits, experts, weights).map_err(|err| at_token(err, token))?;
                }
                Ok(())
            })
        };
        let (inputs, outputs) = (TOKENS_AT_ONCE * dim, TOKENS_AT_ONCE * k);
        if xs.len() > inputs && cpu::should_parallelise(2 * xs.len() * e) {
            xs.par_chunks(inputs)
                .zip(experts.par_chunks_mut(outputs))
                .zip(weights.par_chunks_mut(outputs))
                .enumerate()
                .try_for_each(|(i, ((xs, experts), weights))| block(i, xs, experts, weights))
        } else {
            let outs = experts.chunks_mut(outputs).zip(weights.chunks_mut(outputs));
            xs.chunks(inputs)
                .zip(outs)
                .enumerate()
                .try_for_each(|(i, (xs, (experts, weights)))| block(i, xs, experts, weights))
        }
    }
}

/// Every expert exists.
pub(crate) fn check_experts(experts: &[u32], n_routed: usize) -> Result<()> {
    match experts.iter().find(|e| **e as usize >= n_routed) {
        Some(e) => Err(Error::value("routed expert", format!("{e} of {n_routed}"))),
        None => Ok(()),
    }
}
