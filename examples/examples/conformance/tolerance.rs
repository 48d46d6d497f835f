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
/// Whole models, text and vision: how many times the distance between two valid runs of the official code.
/// Relative rms.
pub(crate) const MODEL_NOISE: f64 = 2.0;
/// That distance may be 0 where two runs agreed to the last bit; a third need not.
pub(crate) const MODEL_FLOOR: f64 = 0.005;
/// The same for drafted blocks, of which a flipped code costs one 0.02 to 0.03: about one block of ten.
pub(crate) const DRAFT_FLOOR: f64 = 0.01;
/// And of the tokens of drafted blocks, as a share: one block of eighty, where two runs differ in one token.
pub(crate) const DRAFTS_FLOOR: f64 = 0.0125;
/// A model's own index selections must differ from the recorded ones of its key mode at most this many
/// times as often as from those of the other mode.
pub(crate) const OTHER_MODE: f64 = 0.75;
/// A step of the tiny model whose two largest logits are at least this far apart may not flip: two valid
/// runs of the official code agree on every such step.
pub(crate) const CLEAR_MARGIN: f32 = 0.15;
/// Saved logits of the tiny model, over the steps of a prompt. Relative rms; two valid runs are within
/// 0.15 at worst.
pub(crate) const TINY_LOGITS_MEDIAN: f64 = 0.03;
/// And each of them.
pub(crate) const TINY_LOGITS_EACH: f64 = 0.3;
/// Products of f32 weights whose sums may run in another order.
pub(crate) const DRAFT_HEADS: Close = Close {
    atol: 1e-6,
    rtol: 1e-5,
};
/// A softmax and a difference of two.
pub(crate) const NEXT_DIST: Close = Close {
    atol: 1e-5,
    rtol: 1e-4,
};
/// Rounds of drafts of the tiny model that may differ from the recorded ones: two valid runs of the
/// official code have 92 to 95 % of their drafts in equal prefixes.
pub(crate) const TINY_DRAFT_ROUNDS: f64 = 11.0 / 63.0;
/// The share of its drafts that may lie behind the first different one of their round.
pub(crate) const TINY_DRAFTS: f64 = 0.12;
/// The median distance of its confidences, which are logits.
pub(crate) const TINY_CONFIDENCE: f64 = 0.3;
