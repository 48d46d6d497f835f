//! Comparing as a pass goes along, and replaying recorded selections.

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{
    Error, Result,
    model::{Probe, ProbePoint},
    moe::Routing,
};

use super::{Distance, GoldenModel, Mode, rel_rms};

/// Compares with the recording as the pass goes along, and feeds its selections back.
pub(super) struct Recorder<'a> {
    pub(super) golden: &'a GoldenModel,
    pub(super) rows: &'a [usize],
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) step: usize,
    pub(super) replay: bool,
    pub(super) distance: &'a mut Distance,
    pub(super) error: Option<Error>,
}

impl Recorder<'_> {
    /// The recorded name of a selection in this step.
    fn key(&self, mode: Mode, what: &str, layer: usize) -> String {
        match self.step {
            0 => format!("prefill.{what}{layer}"),
            step => format!("{}step{step}.{what}{layer}", mode.prefix()),
        }
    }

    /// A recorded selection `[rows * tokens, k]`, `None` where the recording has none.
    fn recorded(&self, mode: Mode, what: &str, layer: usize) -> Option<Vec<Vec<i64>>> {
        let key = self.key(mode, what, layer);
        let expected = &self.golden.expected;
        let all = expected
            .contains(&key)
            .then(|| expected.integers(&key).ok())??;
        let k = all.len() / (self.batch * self.tokens);
        let per_row = self.tokens * k;
        let rows = self
            .rows
            .iter()
            .flat_map(|row| all[row * per_row..(row + 1) * per_row].chunks(k));
        Some(rows.map(<[i64]>::to_vec).collect())
    }

    /// Recorded index selections as compressed positions: the reference counts them from the end of
    /// the window part of its keys.
    fn positions(&self, mode: Mode, layer: usize) -> Option<Vec<Vec<i64>>> {
        let window = self.golden.transformer.config().window_size;
        let offset = if self.step == 0 { self.tokens } else { window } as i64;
        let mut rows = self.recorded(mode, "idx", layer)?;
        rows.iter_mut()
            .flatten()
            .filter(|v| **v >= 0)
            .for_each(|v| *v -= offset);
        Some(rows)
    }

    fn keep<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|e| self.error = Some(e)).ok()
    }
}

/// How many of `own` select the same set as `wanted`.
fn equal_sets(own: &[Vec<i64>], wanted: &[Vec<i64>]) -> (usize, usize) {
    let set = |row: &[i64]| {
        let mut row: Vec<i64> = row.iter().copied().filter(|v| *v >= 0).collect();
        row.sort_unstable();
        row
    };
    let equal = own
        .iter()
        .zip(wanted)
        .filter(|(a, b)| set(a) == set(b))
        .count();
    (equal, wanted.len())
}

fn add(total: &mut (usize, usize), part: (usize, usize)) {
    total.0 += part.0;
    total.1 += part.1;
}

impl Probe for Recorder<'_> {
    fn value(&mut self, layer: usize, point: ProbePoint, value: &Tensor) -> Result<()> {
        let what = match point {
            ProbePoint::Engram => "engram",
            ProbePoint::Attn => "attn",
            ProbePoint::Ffn => "ffn",
            ProbePoint::Stream => "layer",
            ProbePoint::PreMix => "premix",
        };
        let name = format!("{what}{layer}");
        let key = format!("prefill.{name}");
        if self.step == 0 && self.golden.expected.contains(&key) {
            let wanted = self.golden.expected.rows(&key, &[], self.rows)?;
            self.distance.prefill.push((name, rel_rms(value, &wanted)?));
        }
        Ok(())
    }

    fn routed(&mut self, layer: usize, own: &Routing) {
        let Some(wanted) = self.recorded(self.golden.mode, "route", layer) else {
            return;
        };
        let Some(own) = self.keep(integers(&own.experts)) else {
            return;
        };
        add(&mut self.distance.routes, equal_sets(&own, &wanted));
    }

    fn replay_experts(&mut self, layer: usize) -> Option<Tensor> {
        let rows = self
            .replay
            .then(|| self.recorded(self.golden.mode, "route", layer))??;
        let (t, k) = (rows.len(), rows[0].len());
        let flat: Vec<u32> = rows.into_iter().flatten().map(|v| v as u32).collect();
        let tensor = Tensor::from_vec(flat, (t, k), self.golden.transformer.device());
        self.keep(tensor.map_err(Error::from))
    }

    fn wants_selections(&self) -> bool {
        true
    }

    fn selected(&mut self, layer: usize, own: &Tensor) {
        let Some(own) = self.keep(integers(own)) else {
            return;
        };
        let (mode, other) = match self.golden.mode {
            Mode::Reference => (Mode::Reference, Mode::OwnKeys),
            Mode::OwnKeys => (Mode::OwnKeys, Mode::Reference),
        };
        if let Some(wanted) = self.positions(mode, layer) {
            let equal = equal_sets(&own, &wanted);
            add(&mut self.distance.selections, equal);
            if self.step > 0 {
                add(&mut self.distance.decode_selections, equal);
            }
        }
        if self.step > 0
            && let Some(wanted) = self.positions(other, layer)
        {
            add(
                &mut self.distance.other_selections,
                equal_sets(&own, &wanted),
            );
        }
    }

    fn replay_selection(&mut self, layer: usize) -> Option<Tensor> {
        let rows = self
            .replay
            .then(|| self.positions(self.golden.mode, layer))??;
        let (t, k) = (rows.len(), rows[0].len());
        let flat: Vec<i32> = rows.into_iter().flatten().map(|v| v as i32).collect();
        let tensor = Tensor::from_vec(flat, (t, k), self.golden.transformer.device());
        self.keep(tensor.map_err(Error::from))
    }
}

/// A 2D integer tensor on the host.
fn integers(t: &Tensor) -> Result<Vec<Vec<i64>>> {
    Ok(t.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2()?)
}
