//! Which layer reads what from which other layer, resolved once.

use deepseek_v41_attention::{CandidateRole, IndexRole, LayerRole};
use deepseek_v41_core::{Error, Result};

use crate::Config;

/// The roles of the backbone's layers. Leaf crates never compare layer numbers: what they need to
/// know about other layers is decided here.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    layers: Vec<PlannedLayer>,
    sources: Vec<KvSource>,
}

/// One backbone layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedLayer {
    /// What its attention does.
    pub role: LayerRole,
    /// The compressed cache it reads, as an index into [`LayerPlan::sources`].
    pub source: Option<usize>,
    /// Its place among the Engram layers.
    pub engram: Option<usize>,
    /// Whether its input is part of what the draft head sees.
    pub draft_target: bool,
}

/// A layer that compresses its own KV and index keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSource {
    /// The layer's number.
    pub layer: usize,
    /// Tokens a row stands for.
    pub ratio: usize,
}

impl LayerPlan {
    /// Resolves the roles.
    ///
    /// # Errors
    /// [`Error::Config`]: a reader before its source, a reader whose ratio differs from its
    /// source's, lists that are too short or name layers that do not exist.
    pub fn new(cfg: &Config) -> Result<Self> {
        let (n, total) = (cfg.n_layers, cfg.n_layers + cfg.n_mtp_layers);
        // Shorter lists occur in configs without draft layers.
        if cfg.compress_ratios.len() < n || cfg.compress_ratios.len() > total.max(n) {
            let found = cfg.compress_ratios.len();
            return Err(Error::config(
                "compress_ratios",
                format!("expected {n} to {total} entries, found {found}"),
            ));
        }
        if let Some(i) = (n..cfg.compress_ratios.len()).find(|&i| cfg.compress_ratios[i] != 0) {
            let ratio = cfg.compress_ratios[i];
            return Err(Error::config(
                "compress_ratios",
                format!("expected 0 for draft layer {i}, found {ratio}"),
            ));
        }
        for (field, list) in [
            ("kv_source_layers", &cfg.kv_source_layers),
            ("index_source_layers", &cfg.index_source_layers),
        ] {
            for &layer in list {
                let compressed = layer < n && cfg.compress_ratios[layer] > 0;
                if !compressed {
                    return Err(Error::config(
                        field,
                        format!("layer {layer} is not a layer with a compress ratio"),
                    ));
                }
            }
        }
        if let Some(layer) = cfg.candidate_source_layer {
            if !cfg.index_source_layers.contains(&layer) {
                return Err(Error::config(
                    "candidate_source_layer",
                    format!("layer {layer} is not in index_source_layers"),
                ));
            }
            for (field, value) in [
                ("candidate_topk_blocks", cfg.candidate_topk_blocks),
                ("candidate_block_size", cfg.candidate_block_size),
            ] {
                if value == 0 {
                    return Err(Error::config(field, "expected at least 1, found 0"));
                }
            }
        }
        Resolver::default().run(cfg)
    }

    /// The backbone's layers in order.
    pub fn layers(&self) -> &[PlannedLayer] {
        &self.layers
    }

    /// The layers that own a compressed cache, in order.
    pub fn sources(&self) -> &[KvSource] {
        &self.sources
    }

    /// The distinct compress ratios, ascending.
    pub fn ratios(&self) -> Vec<usize> {
        let mut ratios: Vec<usize> = self.sources.iter().map(|s| s.ratio).collect();
        ratios.sort_unstable();
        ratios.dedup();
        ratios
    }
}

/// What the layers so far have published.
#[derive(Default)]
struct Resolver {
    plan: Vec<PlannedLayer>,
    sources: Vec<KvSource>,
    /// Source whose rows the last published selection indexes.
    selection: Option<usize>,
    /// Source whose rows the candidate blocks cover.
    candidates: Option<usize>,
}

impl Resolver {
    fn run(mut self, cfg: &Config) -> Result<LayerPlan> {
        for layer in 0..cfg.n_layers {
            let (role, source) = match cfg.compress_ratios[layer] {
                0 => (LayerRole::Window, None),
                ratio => self.compressed(cfg, layer, ratio)?,
            };
            self.plan.push(PlannedLayer {
                role,
                source,
                engram: cfg.engram_layer_ids.iter().position(|&l| l == layer),
                draft_target: cfg.dspark_target_layer_ids.contains(&layer),
            });
        }
        Ok(LayerPlan {
            layers: self.plan,
            sources: self.sources,
        })
    }

    fn compressed(
        &mut self,
        cfg: &Config,
        layer: usize,
        ratio: usize,
    ) -> Result<(LayerRole, Option<usize>)> {
        let owns_kv = cfg.kv_source_layers.contains(&layer);
        let runs_index = cfg.index_source_layers.contains(&layer);
        if owns_kv && !runs_index {
            // Its rows would have no index keys, so nobody could select them.
            return Err(Error::config(
                "index_source_layers",
                format!("layer {layer} is in kv_source_layers and must run an indexer too"),
            ));
        }
        if owns_kv {
            self.sources.push(KvSource { layer, ratio });
        }
        let Some(source) = self.sources.len().checked_sub(1) else {
            return Err(Error::config(
                "kv_source_layers",
                format!("layer {layer} reads compressed KV, but no source comes before it"),
            ));
        };
        let of = self.sources[source];
        if of.ratio != ratio {
            return Err(Error::config(
                "compress_ratios",
                format!(
                    "layer {layer} has ratio {ratio}, but reads layer {} of ratio {}",
                    of.layer, of.ratio
                ),
            ));
        }
        let index = if runs_index {
            self.selection = Some(source);
            IndexRole::Run(self.candidate_role(cfg, layer, source)?)
        } else if self.selection == Some(source) {
            IndexRole::Reuse
        } else {
            return Err(Error::config(
                "index_source_layers",
                format!(
                    "layer {layer} has no selection of layer {}'s rows to reuse",
                    of.layer
                ),
            ));
        };
        Ok((
            LayerRole::Compressed {
                ratio,
                owns_kv,
                index,
            },
            Some(source),
        ))
    }

    fn candidate_role(
        &mut self,
        cfg: &Config,
        layer: usize,
        source: usize,
    ) -> Result<CandidateRole> {
        match cfg.candidate_source_layer {
            Some(publisher) if layer == publisher => {
                self.candidates = Some(source);
                Ok(CandidateRole::Publish)
            }
            Some(publisher) if layer > publisher => {
                if self.candidates != Some(source) {
                    return Err(Error::config(
                        "candidate_source_layer",
                        format!("layer {layer} reads other compressed KV than layer {publisher}"),
                    ));
                }
                Ok(CandidateRole::Use)
            }
            _ => Ok(CandidateRole::None),
        }
    }
}
