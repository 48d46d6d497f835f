//! A sequence into a file.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use candle_core::{DType, Tensor};
use deepseek_v41_core::{Error, Fingerprint, Result};

use super::layout::{self, Facts};
use crate::{ModelState, SequenceId, Transformer};

impl ModelState {
    /// Writes a sequence to a file, from which [`ModelState::restore`] brings it back: another day, in
    /// another state, with another [`KvFormat`](deepseek_v41_attention::KvFormat).
    ///
    /// `pending` are tokens of the text that have not been run yet, such as the one sampled last; they
    /// are kept beside the sequence. The file appears under its name once it is complete. It takes
    /// [`ModelState::saved_bytes`]; memory for one layer's rows is needed meanwhile.
    ///
    /// # Errors
    /// [`Error::Value`] for an id that is not live or a sequence whose last step failed half-way;
    /// [`Error::Io`].
    pub fn save(
        &self,
        id: SequenceId,
        pending: &[u32],
        model: &Transformer,
        path: impl AsRef<Path>,
    ) -> Result<()> {
        let path = path.as_ref();
        self.sequence(id)?.check_whole()?;
        let partial = partial_name(path);
        let written = File::create(&partial)
            .map_err(|e| Error::io(&partial, e))
            .and_then(|file| self.write_file(id, pending, model, file, &partial))
            .and_then(|()| std::fs::rename(&partial, path).map_err(|e| Error::io(path, e)));
        if written.is_err() {
            // What counts is the first error; a file that is left over does no harm.
            std::fs::remove_file(&partial).ok();
        }
        written
    }

    fn write_file(
        &self,
        id: SequenceId,
        pending: &[u32],
        model: &Transformer,
        file: File,
        path: &Path,
    ) -> Result<()> {
        let sequence = self.sequence(id)?;
        let (slot, len) = (id.slot, sequence.ids.len() as u32);
        let facts = Facts {
            len: sequence.ids.len(),
            pending: pending.len(),
            drafted: sequence.drafted,
            prefill: sequence.prefill as usize,
            masked: !sequence.image_mask.is_empty(),
        };
        let parts = self.parts(&facts);
        let mut out = Hashing {
            out: BufWriter::new(file),
            hash: Fingerprint::new(),
            path,
        };
        out.bytes(&layout::header(&parts, &facts, model.fingerprint()))?;
        out.u32s(&sequence.ids)?;
        out.u32s(pending)?;
        out.bytes(&sequence.image_mask)?;
        for cache in &self.window {
            out.rows(cache.export_slot(slot, len)?)?;
        }
        for cache in &self.compressed {
            out.rows(cache.export_slot(slot, len)?)?;
        }
        for cache in &self.draft {
            out.rows(cache.export_slot(slot, facts.drafted as u32)?)?;
        }
        let checksum = out.hash.finish();
        out.bytes(&checksum.to_le_bytes())?;
        let file = out
            .out
            .into_inner()
            .map_err(|e| Error::io(path, e.into_error()))?;
        file.sync_all().map_err(|e| Error::io(path, e))
    }
}

/// `path` with `.partial` at its end.
fn partial_name(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".partial");
    name.into()
}

/// A file that hashes what goes into it.
struct Hashing<'p> {
    out: BufWriter<File>,
    hash: Fingerprint,
    path: &'p Path,
}

impl Hashing<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.out
            .write_all(bytes)
            .map_err(|e: io::Error| Error::io(self.path, e))
    }

    fn u32s(&mut self, values: &[u32]) -> Result<()> {
        values.iter().try_for_each(|v| self.bytes(&v.to_le_bytes()))
    }

    fn rows(&mut self, rows: Vec<(String, Tensor)>) -> Result<()> {
        for (_, rows) in rows {
            let rows = rows.flatten_all()?;
            match rows.dtype() {
                DType::F32 => {
                    let values = rows.to_vec1::<f32>()?;
                    values
                        .iter()
                        .try_for_each(|v| self.bytes(&v.to_le_bytes()))?;
                }
                _ => self.bytes(&rows.to_vec1::<u8>()?)?,
            }
        }
        Ok(())
    }
}
