//! One case of a manifest: its data, its description, and comparisons with what was saved.

use std::{path::Path, str::FromStr};

use candle_core::{DType, Device, Tensor};
use deepseek_v41::{Error, Result, Weights, core::VarBuilder};
use deepseek_v41_examples::expected::Expected;
use half::bf16;
use serde_json::Value;

use crate::{
    report::Check,
    tolerance::{Close, EXACT, ONE_ULP},
};

/// One case, and what has been compared of it so far.
pub(crate) struct Case<'a> {
    /// Its name in the manifest, which is the prefix of its tensors.
    pub(crate) name: &'a str,
    /// Its entry in the manifest: a note, or an object with one.
    pub(crate) spec: &'a Value,
    /// The file of its group.
    pub(crate) data: &'a Expected,
    /// Where the golden directory is, for side files.
    pub(crate) dir: &'a Path,
    /// Where to compute.
    pub(crate) device: &'a Device,
    /// What was compared.
    pub(crate) checks: Vec<Check>,
}

impl Case<'_> {
    pub(crate) fn key(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }

    pub(crate) fn has(&self, part: &str) -> bool {
        self.data.contains(&self.key(part))
    }

    pub(crate) fn tensor(&self, part: &str) -> Result<Tensor> {
        self.data.tensor(&self.key(part), self.device)
    }

    pub(crate) fn shape(&self, part: &str) -> Result<&[usize]> {
        self.data.shape(&self.key(part))
    }

    pub(crate) fn f32s(&self, part: &str) -> Result<Vec<f32>> {
        self.data.floats(&self.key(part))
    }

    pub(crate) fn ints(&self, part: &str) -> Result<Vec<i64>> {
        self.data.integers(&self.key(part))
    }

    /// Integers that are ids or positions.
    pub(crate) fn ids(&self, part: &str) -> Result<Vec<u32>> {
        let id = |v: i64| u32::try_from(v).map_err(|_| self.bad(format!("{part}: {v} is no id")));
        self.ints(part)?.into_iter().map(id).collect()
    }

    pub(crate) fn bf16s(&self, part: &str) -> Result<Vec<bf16>> {
        bf16s(&self.data.tensor(&self.key(part), &Device::Cpu)?)
    }

    pub(crate) fn bytes(&self, part: &str) -> Result<Vec<u8>> {
        flat(&self.data.tensor(&self.key(part), &Device::Cpu)?)
    }

    /// The case's own tensors as a checkpoint.
    pub(crate) fn weights(&self) -> VarBuilder {
        let strip = |key: &str| Some(key.strip_prefix(self.name)?.strip_prefix('.')?.to_owned());
        self.builder(&self.data.select(strip))
    }

    /// Tensors of the case under names of their own: `(part, name)`.
    pub(crate) fn weights_named(&self, names: &[(&str, &str)]) -> VarBuilder {
        let weights = self.data.select(|key| {
            let part = key.strip_prefix(self.name)?.strip_prefix('.')?;
            names
                .iter()
                .find(|(from, _)| *from == part)
                .map(|(_, to)| (*to).to_owned())
        });
        self.builder(&weights)
    }

    fn builder(&self, weights: &Weights) -> VarBuilder {
        weights.var_builder(self.device)
    }

    /// The sentence that describes the case.
    pub(crate) fn note(&self) -> &str {
        self.spec
            .as_str()
            .or_else(|| self.spec["note"].as_str())
            .unwrap_or("")
    }

    /// The number that follows `word` in the note: 20 after `iters` in "hc 4, iters 20, eps 1e-06".
    pub(crate) fn noted<T: FromStr>(&self, word: &str) -> Result<T> {
        let mut words = self.note().split([' ', ',', ';']).filter(|w| !w.is_empty());
        words
            .by_ref()
            .find(|w| *w == word)
            .and_then(|_| words.next()?.parse().ok())
            .ok_or_else(|| self.bad(format!("its note gives no number for `{word}`")))
    }

    /// A number among the case's `args`, or beside them.
    pub(crate) fn arg<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T> {
        let value = self.spec["args"].get(name).or_else(|| self.spec.get(name));
        value
            .and_then(|v| serde_json::from_value(v.clone()).ok())
            .ok_or_else(|| self.bad(format!("the manifest gives no fitting `{name}`")))
    }

    /// The manifest's description of this case cannot be used.
    pub(crate) fn bad(&self, reason: impl Into<String>) -> Error {
        Error::value(format!("golden case `{}`", self.name), reason)
    }

    fn push(
        &mut self,
        what: &str,
        values: usize,
        error: f64,
        allowed: f64,
        unit: impl Into<String>,
    ) {
        self.checks.push(Check {
            what: what.into(),
            values,
            error,
            allowed,
            unit: unit.into(),
        });
    }

    /// Equal lengths, or an error that says how they differ.
    fn paired<'v, A, B>(
        &self,
        what: &str,
        got: &'v [A],
        want: &'v [B],
    ) -> Result<impl Iterator<Item = (&'v A, &'v B)>> {
        if got.len() != want.len() {
            return Err(self.bad(format!(
                "{what}: {} values, expected {}",
                got.len(),
                want.len()
            )));
        }
        Ok(got.iter().zip(want))
    }

    /// Every value equal.
    pub(crate) fn exact<T: PartialEq>(&mut self, what: &str, got: &[T], want: &[T]) -> Result<()> {
        let differing = self
            .paired(what, got, want)?
            .filter(|(a, b)| a != b)
            .count();
        self.push(what, got.len(), differing as f64, EXACT, "differing");
        Ok(())
    }

    /// Every bit equal: zeros keep their sign.
    pub(crate) fn exact_f32(&mut self, what: &str, got: &[f32], want: &[f32]) -> Result<()> {
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        self.exact(what, &bits(got), &bits(want))
    }

    /// Integers, bytes or bf16 of a tensor equal to those saved as `part`, bit for bit.
    pub(crate) fn exact_tensor(&mut self, got: &Tensor, part: &str) -> Result<()> {
        match got.dtype() {
            DType::BF16 => {
                let bits = |v: Vec<bf16>| v.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
                let (got, want) = (bits(bf16s(got)?), bits(self.bf16s(part)?));
                self.exact(part, &got, &want)
            }
            DType::U8 => {
                let want = self.bytes(part)?;
                self.exact(part, &flat::<u8>(got)?, &want)
            }
            _ => self.exact_f32(part, &f32s(got)?, &self.f32s(part)?),
        }
    }

    /// Within one bf16 step of what was saved as `part`.
    pub(crate) fn one_ulp(&mut self, got: &Tensor, part: &str) -> Result<()> {
        let want = self.bf16s(part)?;
        self.one_ulp_of(part, &bf16s(got)?, &want)
    }

    /// Within one bf16 step of `want`.
    pub(crate) fn one_ulp_of(&mut self, what: &str, got: &[bf16], want: &[bf16]) -> Result<()> {
        let pairs = self.paired(what, got, want)?;
        let worst = pairs
            .map(|(got, want)| ulps(*got, *want))
            .max()
            .unwrap_or(0);
        self.push(what, got.len(), f64::from(worst), ONE_ULP, "bf16 ulp");
        Ok(())
    }

    /// Every element within `limit`; the error is the share of the allowance that the worst one uses.
    pub(crate) fn close(
        &mut self,
        what: &str,
        got: &[f32],
        want: &[f32],
        limit: Close,
    ) -> Result<()> {
        let mut worst = 0f64;
        for (got, want) in self.paired(what, got, want)? {
            if got == want {
                continue;
            }
            let allowed = f64::from(limit.atol) + f64::from(limit.rtol) * f64::from(want.abs());
            let share = (f64::from(*got) - f64::from(*want)).abs() / allowed;
            // `max` would drop a NaN.
            worst = if share.is_nan() {
                f64::NAN
            } else {
                worst.max(share)
            };
            if worst.is_nan() {
                break;
            }
        }
        let unit = match limit {
            Close { atol, rtol: 0.0 } => format!("x {atol:e}"),
            Close { atol: 0.0, rtol } => format!("x {rtol:e} |want|"),
            Close { atol, rtol } => format!("x ({atol:e} + {rtol:e} |want|)"),
        };
        self.push(what, got.len(), worst, 1.0, unit);
        Ok(())
    }

    /// [`Case::close`] of a tensor and what was saved as `part`.
    pub(crate) fn close_tensor(&mut self, got: &Tensor, part: &str, limit: Close) -> Result<()> {
        let want = self.f32s(part)?;
        self.close(part, &f32s(got)?, &want, limit)
    }

    /// `rms(got - want) / rms(want)` of a tensor and what was saved as `part`.
    pub(crate) fn rms(&mut self, what: &str, got: &[f32], want: &[f32], limit: f64) -> Result<()> {
        drop(self.paired(what, got, want)?);
        let error = relative_rms(got, want);
        self.push(what, got.len(), error, limit, "relative rms");
        Ok(())
    }

    /// A share of differing things, counted by the caller.
    pub(crate) fn share(&mut self, what: &str, differing: usize, of: usize, limit: f64) {
        self.push(
            what,
            of,
            differing as f64 / of.max(1) as f64,
            limit,
            "share differing",
        );
    }
}

/// `rms(got - want) / rms(want)` of equally many values.
pub(crate) fn relative_rms(got: &[f32], want: &[f32]) -> f64 {
    let (mut diff, mut norm) = (0f64, 0f64);
    for (got, want) in got.iter().zip(want) {
        diff += (f64::from(*got) - f64::from(*want)).powi(2);
        norm += f64::from(*want).powi(2);
    }
    if diff == 0.0 {
        0.0
    } else {
        (diff / norm).sqrt()
    }
}

/// Distance in bf16 steps; NaN is far from anything but NaN.
fn ulps(a: bf16, b: bf16) -> u32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() && b.is_nan() {
            0
        } else {
            u32::MAX
        };
    }
    let line = |v: bf16| {
        let bits = i32::from(v.to_bits());
        if bits & 0x8000 != 0 {
            -(bits & 0x7fff)
        } else {
            bits
        }
    };
    line(a).abs_diff(line(b))
}

/// The elements of a tensor of exactly this type.
pub(crate) fn flat<T: candle_core::WithDType>(t: &Tensor) -> Result<Vec<T>> {
    Ok(t.flatten_all()?.to_vec1()?)
}

pub(crate) fn bf16s(t: &Tensor) -> Result<Vec<bf16>> {
    flat(t)
}

/// The elements of a BF16 or F32 tensor, widened.
pub(crate) fn f32s(t: &Tensor) -> Result<Vec<f32>> {
    Ok(match t.dtype() {
        DType::BF16 => bf16s(t)?.into_iter().map(bf16::to_f32).collect(),
        _ => flat(t)?,
    })
}
