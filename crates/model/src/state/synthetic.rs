//! Long sequences without running them.

use candle_core::{DType, Tensor};
use deepseek_v41_core::Result;

use super::layout::{self, Facts, Part};
use crate::{Config, ModelState, SequenceId, state::Sequence};

impl ModelState {
    /// A sequence of `len` made-up tokens whose cached rows are noise, so that the speed at a long
    /// context can be measured without running one. What a model says after it means nothing.
    ///
    /// # Errors
    /// As [`ModelState::create`]; [`Capacity`](deepseek_v41_core::Error::Capacity) for a length the
    /// state has no room for.
    pub fn create_synthetic(&mut self, cfg: &Config, len: usize) -> Result<SequenceId> {
        let facts = Facts {
            len,
            pending: 0,
            drafted: len,
            prefill: len,
            masked: false,
        };
        self.check_fits(&facts)?;
        let parts = self.parts(&facts);
        let seq = self.create()?;
        if let Err(err) = self.import_noise(seq, &facts, &parts) {
            self.release(seq)?;
            return Err(err);
        }
        let ids = (0..len).map(|i| (i % cfg.vocab_size) as u32).collect();
        *self.sequence_mut(seq)? = Sequence {
            ids,
            drafted: len,
            prefill: len as u32,
            high_water: len,
            whole_from: len,
            ..Sequence::default()
        };
        Ok(seq)
    }

    fn import_noise(&mut self, seq: SequenceId, facts: &Facts, parts: &[Part]) -> Result<()> {
        let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
        let (slot, len) = (seq.slot, facts.len as u32);
        let named = |name: String| parts.iter().filter(move |part| part.name == name);
        for (i, cache) in self.window.iter_mut().enumerate() {
            for part in named(layout::window_name(i)) {
                let rows = noise.rows(part, cache.kv().device())?;
                cache.import_slot(slot, len, &[("window".into(), rows)])?;
            }
        }
        for (i, cache) in self.compressed.iter_mut().enumerate() {
            let mut rows = Vec::new();
            for name in ["kv", "index_k", "pending"] {
                for part in named(layout::compressed_name(i, name)) {
                    let device = cache.kv().device();
                    rows.push((name.to_owned(), noise.rows(part, device)?));
                }
            }
            cache.import_slot(slot, len, &rows)?;
        }
        for (i, cache) in self.draft.iter_mut().enumerate() {
            for part in named(layout::draft_name(i)) {
                let rows = noise.rows(part, cache.kv().device())?;
                cache.import_slot(slot, facts.drafted as u32, &[("window".into(), rows)])?;
            }
        }
        Ok(())
    }
}

/// xorshift64.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn rows(&mut self, part: &Part, device: &candle_core::Device) -> Result<Tensor> {
        let n = part.shape.iter().product::<usize>();
        let shape = part.shape.as_slice();
        match part.dtype {
            DType::F32 => {
                let values = (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5);
                Ok(Tensor::from_vec(values.collect::<Vec<_>>(), shape, device)?)
            }
            // 0x68..0x78 is a finite code and a finite scale in every packed format.
            _ => {
                let mut bytes = Vec::with_capacity(n + 8);
                while bytes.len() < n {
                    let word = self.next().to_le_bytes();
                    bytes.extend(word.map(|b| 0x68 + (b & 15)));
                }
                bytes.truncate(n);
                Ok(Tensor::from_vec(bytes, shape, device)?)
            }
        }
    }
}
