//! How far from the golden values a result may be, as the manifest says for each kind of case.

/// `|got - want| <= atol + rtol * |want|` for every element.
#[derive(Clone, Copy)]
pub(crate) struct Close {
    pub(crate) atol: f32,
    pub(crate) rtol: f32,
}

/// Casts, indices, hashes, ids, scales.
pub(crate) const EXACT: f64 = 0.0;
/// One rounding to bf16 of a sum whose additions may come in another order.
pub(crate) const ONE_ULP: f64 = 1.0;
/// Attention's softmax weights are rounded to bf16 relative to a running maximum that depends on the tiles.
pub(crate) const SPARSE_ATTN: Close = Close {
    atol: 2e-3,
    rtol: 1e-2,
};
/// Twenty rounds of divisions in f32.
pub(crate) const SINKHORN: Close = Close {
    atol: 0.0,
    rtol: 1e-5,
};
/// The same behind a projection, whose f32 sum has an order of its own.
pub(crate) const HC_MIXES: Close = Close {
    atol: 0.0,
    rtol: 1e-4,
};
/// The sine of an f32 angle, by another library.
pub(crate) const ROPE: Close = Close {
    atol: 1e-6,
    rtol: 0.0,
};
/// Routing weights, f32 throughout.
pub(crate) const ROUTE_WEIGHTS: Close = Close {
    atol: 0.0,
    rtol: 1e-5,
};
/// An expert quantises its activations twice: a last bit can move a code. Relative rms.
pub(crate) const EXPERT: f64 = 0.02;
/// Several quantised layers and a softmax. Relative rms.
pub(crate) const ATTENTION: f64 = 0.03;
/// The share of cache entries that may lie a quantisation step away.
pub(crate) const CACHE_FLIPS: f64 = 0.01;
/// The share of selected rows that may differ: scores are bf16, so near ties are common, and a case
/// selects a few hundred rows in all.
pub(crate) const SELECTION_FLIPS: f64 = 0.02;
/// A quantised projection and a gate. Relative rms.
pub(crate) const ENGRAM: f64 = 0.01;
