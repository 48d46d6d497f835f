//! A small model with every part of the architecture, and what a fresh run of it says.
#![allow(dead_code)]

use std::{collections::HashMap, sync::Mutex};

use candle_core::{Device, Tensor};
use deepseek_v41_attention::KvFormat;
use deepseek_v41_core::{LoadPolicy, Result, Weights};
use deepseek_v41_engram::TokenMap;
use deepseek_v41_model::{
    Chunk, Config, DSpark, Draft, DraftRequest, ForwardBatch, IndexKeys, Limits, LogitRows,
    ModelState, SequenceId, Transformer,
};
use deepseek_v41_testing::golden_dir;

pub(crate) const FORMATS: [KvFormat; 2] = [KvFormat::Bf16, KvFormat::Packed];

pub(crate) struct Small {
    pub(crate) model: Transformer,
    pub(crate) head: Option<DSpark>,
    fresh: Mutex<HashMap<Vec<u32>, Vec<Vec<u32>>>>,
}

/// Bits of a tensor's rows.
pub(crate) fn bits(logits: &Tensor) -> Vec<Vec<u32>> {
    let rows = logits.to_vec2::<f32>().expect("logits");
    rows.iter()
        .map(|row| row.iter().map(|v| v.to_bits()).collect())
        .collect()
}

pub(crate) fn text(ids: &[u32], seq: SequenceId) -> ForwardBatch {
    ForwardBatch {
        chunks: vec![Chunk::text(seq, ids)],
        logits: LogitRows::All,
        target_hidden: true,
        best: false,
    }
}

impl Small {
    /// A golden checkpoint. What the token map says does not matter here.
    pub(crate) fn load(name: &str, index_keys: IndexKeys) -> Self {
        let dir = golden_dir().join(name);
        let mut cfg = Config::from_file(dir.join("config.json")).expect("config");
        cfg.index_keys = index_keys;
        let weights = Weights::open(&dir, LoadPolicy::Read).expect("weights");
        Self::new(&cfg, &weights)
    }

    pub(crate) fn new(cfg: &Config, weights: &Weights) -> Self {
        let map = cfg.engram().map(|engram| {
            let n = engram.compressed_vocab_size as u32;
            let ids = (0..cfg.vocab_size as u32).map(|id| id % n).collect();
            TokenMap::new(ids, engram.compressed_vocab_size, engram.pad_id).expect("map")
        });
        let vb = weights.var_builder(&Device::Cpu);
        let model = Transformer::new(cfg, map, vb.clone()).expect("transformer");
        let head =
            (cfg.dspark_block_size > 0).then(|| DSpark::new(&model, vb).expect("draft head"));
        Self {
            model,
            head,
            fresh: Mutex::default(),
        }
    }

    pub(crate) fn full() -> Self {
        Self::load("model_full", IndexKeys::Owner)
    }

    pub(crate) fn cfg(&self) -> &Config {
        self.model.config()
    }

    pub(crate) fn state(&self, limits: Limits) -> ModelState {
        ModelState::new(self.cfg(), limits, &Device::Cpu).expect("state")
    }

    /// Logits after each of `ids`, from a run of its own.
    pub(crate) fn fresh(&self, ids: &[u32]) -> Vec<Vec<u32>> {
        if let Some(known) = self.fresh.lock().expect("fresh runs").get(ids) {
            return known.clone();
        }
        let mut state = self.state(Limits {
            max_len: ids.len().max(1),
            ..Limits::default()
        });
        let seq = state.create().expect("a slot");
        let out = self
            .model
            .forward(&text(ids, seq), &mut state)
            .expect("a fresh run");
        let rows = bits(&out.logits);
        self.fresh
            .lock()
            .expect("fresh runs")
            .insert(ids.to_vec(), rows.clone());
        rows
    }

    /// Drafts after `ids` and `next`, from a run of its own.
    pub(crate) fn fresh_draft(&self, ids: &[u32], next: u32) -> Draft {
        let mut state = self.state(Limits {
            max_len: ids.len().max(1),
            ..Limits::default()
        });
        let seq = state.create().expect("a slot");
        let out = self
            .model
            .forward(&text(ids, seq), &mut state)
            .expect("a fresh run");
        let hidden = out.target_hidden.expect("hidden states");
        self.draft(&mut state, seq, ids.len(), next, &hidden)
            .expect("a draft")
    }

    pub(crate) fn draft(
        &self,
        state: &mut ModelState,
        seq: SequenceId,
        committed: usize,
        next: u32,
        hidden: &Tensor,
    ) -> Result<Draft> {
        let request = DraftRequest {
            seq,
            committed,
            next: Some(next),
        };
        let head = self.head.as_ref().expect("a draft head");
        let drafts = head.draft(&[request], hidden, state, &mut |_, _, row| Ok(argmax(row)))?;
        Ok(drafts
            .into_iter()
            .next()
            .flatten()
            .expect("a draft for the request"))
    }
}

pub(crate) fn argmax(row: &[f32]) -> u32 {
    let best = row
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map_or(0, |(i, _)| i as u32)
}
