//! Looking into a forward pass, and replaying its choices.

use candle_core::Tensor;
use deepseek_v41_attention::ops::TopkIdxs;
use deepseek_v41_core::{Result, upload};
use deepseek_v41_moe::Routing;

/// Which intermediate value a [`Probe`] is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbePoint {
    /// `[T, C, dim]` stream after the layer's Engram.
    Engram,
    /// `[T, dim]` output of attention.
    Attn,
    /// `[T, dim]` output of the experts.
    Ffn,
    /// `[T, C, dim]` stream after the layer.
    Stream,
    /// `[T, C]` f32 mix the layer hands to the next.
    PreMix,
}

/// An observer of a forward pass. Every method has a default that changes nothing.
///
/// fp4 rounding and top-k turn differences of one ulp into different selections, so a comparison of
/// whole models replays the recorded selections of the other side: the two `replay_*` methods.
pub trait Probe {
    /// Shown an intermediate value of `layer`.
    ///
    /// # Errors
    /// Ends the pass.
    fn value(&mut self, layer: usize, point: ProbePoint, value: &Tensor) -> Result<()> {
        let _ = (layer, point, value);
        Ok(())
    }

    /// Whether [`Probe::value`] is to be called with [`ProbePoint::Stream`] and
    /// [`ProbePoint::PreMix`]: on a GPU the stream between layers is an extra pass.
    fn wants_streams(&self) -> bool {
        true
    }

    /// `[T, k]` u32 experts to use in `layer` instead of the gate's choice.
    fn replay_experts(&mut self, layer: usize) -> Option<Tensor> {
        let _ = layer;
        None
    }

    /// Shown the gate's own choice.
    fn routed(&mut self, layer: usize, own: &Routing) {
        let _ = (layer, own);
    }

    /// `[T, K]` i32 compressed *positions* (−1 = none) to use in `layer` instead of its indexer's
    /// choice.
    fn replay_selection(&mut self, layer: usize) -> Option<Tensor> {
        let _ = layer;
        None
    }

    /// Whether [`Probe::selected`] is to be called: turning rows into positions costs a copy.
    fn wants_selections(&self) -> bool {
        false
    }

    /// Shown the indexer's own choice: positions as in [`Probe::replay_selection`].
    fn selected(&mut self, layer: usize, own: &Tensor) {
        let _ = (layer, own);
    }
}

/// The probe of an ordinary pass.
pub(crate) struct NoProbe;

impl Probe for NoProbe {
    fn wants_streams(&self) -> bool {
        false
    }
}

/// Physical rows of a selection as positions of each token's sequence, or the other way round.
///
/// `base: [T]` row of each token's position 0; `sign` is `-1` for rows → positions.
pub(crate) fn shift_selection(idxs: &Tensor, base: &[u32], sign: i64) -> Result<TopkIdxs> {
    let (t, k) = idxs.dims2()?;
    let device = idxs.device();
    let mut flat = idxs.flatten_all()?.to_vec1::<i32>()?;
    for (row, base) in flat.chunks_exact_mut(k.max(1)).zip(base) {
        for v in row.iter_mut().filter(|v| **v >= 0) {
            *v = (i64::from(*v) + sign * i64::from(*base)) as i32;
        }
    }
    Ok(TopkIdxs(upload(flat, (t, k), device)?))
}
