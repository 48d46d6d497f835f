//! The caches that a layer borrows from a state.

use deepseek_v41_attention::{CompressedCache, WindowCache};

/// `[layer][token]` → the source whose keys are scored.
#[derive(Clone)]
pub(crate) struct PublishedKeys(pub(crate) Vec<Vec<Option<usize>>>);

impl PublishedKeys {
    pub(crate) fn of_layer(&self, layer: usize) -> &[Option<usize>] {
        &self.0[layer]
    }
}

/// A layer's caches, split so that its own is mutable and all others can be read.
pub(crate) struct Lent<'a> {
    pub(crate) window: &'a mut WindowCache,
    pub(crate) source: Option<&'a mut CompressedCache>,
    pub(crate) kv: Option<&'a CompressedCache>,
    before: &'a [CompressedCache],
    after: &'a [CompressedCache],
}

impl<'a> Lent<'a> {
    pub(crate) fn new(
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
    pub(crate) fn keys(&self, sources: &[Option<usize>]) -> Vec<Option<&'a CompressedCache>> {
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
