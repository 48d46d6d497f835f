//! The caches that a layer borrows from a state.

use candle_core::Tensor;
use deepseek_v41_attention::{CompressedCache, IndexKeySource, LayerCache, WindowCache};
use deepseek_v41_core::Result;

use crate::{ModelState, PlannedLayer, block::Attend};

/// Whoever has the caches of all layers.
pub(crate) trait Caches {
    /// Calls `attend` with those of `layer`, whose tokens score the keys of `published`, or the owner's.
    fn lend(
        &mut self,
        layer: usize,
        role: &PlannedLayer,
        published: Option<&[Option<usize>]>,
        attend: &mut Attend<'_>,
    ) -> Result<Tensor>;
}

impl Caches for ModelState {
    fn lend(
        &mut self,
        layer: usize,
        role: &PlannedLayer,
        published: Option<&[Option<usize>]>,
        attend: &mut Attend<'_>,
    ) -> Result<Tensor> {
        let Self {
            window, compressed, ..
        } = self;
        let owns = role.role.owns_kv();
        let lent = Lent::new(&mut window[layer], compressed, role.source, owns);
        let keys = published.map(|tokens| lent.keys(tokens));
        attend(LayerCache {
            window: lent.window,
            source: lent.source,
            kv: lent.kv,
            index_k: keys
                .as_deref()
                .map_or(IndexKeySource::Owner, IndexKeySource::PerToken),
        })
    }
}

/// `[layer][token]` → the source whose keys are scored.
#[derive(Clone)]
pub(crate) struct PublishedKeys(pub(crate) Vec<Vec<Option<usize>>>);

impl PublishedKeys {
    pub(crate) fn of_layer(&self, layer: usize) -> &[Option<usize>] {
        &self.0[layer]
    }
}

/// A layer's caches, split so that its own is mutable and all others can be read.
struct Lent<'a> {
    window: &'a mut WindowCache,
    source: Option<&'a mut CompressedCache>,
    kv: Option<&'a CompressedCache>,
    before: &'a [CompressedCache],
    after: &'a [CompressedCache],
}

impl<'a> Lent<'a> {
    fn new(
        window: &'a mut WindowCache,
        caches: &'a mut [CompressedCache],
        reads: Option<usize>,
        owns: bool,
    ) -> Self {
        match reads {
            Some(own) if owns => {
                let (before, rest) = caches.split_at_mut(own);
                let (source, after) = match rest.split_first_mut() {
                    Some((source, after)) => (Some(source), &*after),
                    None => (None, &[][..]),
                };
                Self {
                    window,
                    source,
                    kv: None,
                    before,
                    after,
                }
            }
            reads => {
                let caches = &*caches;
                let kv = reads.and_then(|r| caches.get(r));
                Self {
                    window,
                    source: None,
                    kv,
                    before: caches,
                    after: &[],
                }
            }
        }
    }

    /// The caches named by `sources`; `None` for the layer's own.
    fn keys(&self, sources: &[Option<usize>]) -> Vec<Option<&'a CompressedCache>> {
        let own = self.source.is_some().then_some(self.before.len());
        let cache = |i: usize| match own {
            Some(own) if i == own => None,
            Some(own) if i > own => self.after.get(i - own - 1),
            _ => self.before.get(i),
        };
        sources
            .iter()
            .map(|source| source.and_then(cache))
            .collect()
    }
}
