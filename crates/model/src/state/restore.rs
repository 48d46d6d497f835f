//! A sequence out of a file. Nothing the file says is believed: see [`super::layout`].

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, Read},
    path::Path,
};

use candle_core::{DType, Device, Tensor};
use deepseek_v41_attention::SlotRows;
use deepseek_v41_core::{Error, Fingerprint, Result, SavedStateError};
use serde_json::Value;

use super::layout::{self, CHECKSUM_BYTES, Entry, Facts, MAX_HEADER, Part};
use crate::{Config, ModelState, SequenceId, Transformer, state::Sequence};

/// What [`ModelState::restore`] brings back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// The sequence, new in this state.
    pub seq: SequenceId,
    /// The tokens that were saved beside it and have not been run.
    pub pending: Vec<u32>,
}

impl ModelState {
    /// Brings back a sequence that [`ModelState::save`] wrote. It goes on as if it had never been
    /// away, bit for bit, but cannot lose the tokens it was saved with: the rings' slack is not saved.
    ///
    /// # Errors
    /// [`Error::SavedState`] with the reason: not such a file, another version of the format, saved
    /// with another model, damaged, or rows of other shapes; [`Error::Capacity`] when the sequence is
    /// longer than this state's, or every slot is taken; [`Error::Io`]. Whatever it is, the state is
    /// as before. No memory is set aside on the word of the file.
    pub fn restore(&mut self, model: &Transformer, path: impl AsRef<Path>) -> Result<Restored> {
        let path = path.as_ref();
        let refuse = |reason| Error::saved_state(path, reason);
        let mut file = Reader::open(path)?;
        let header = file.header()?;
        let facts = header.facts(model.fingerprint()).map_err(refuse)?;
        self.check_fits(&facts)?;
        let parts = self.parts(&facts);
        header.check(&parts).map_err(refuse)?;
        let data = file.data(parts.iter().map(Part::bytes).sum())?;
        let saved = Saved::new(&parts, &data, facts.masked, model.config()).map_err(refuse)?;

        let seq = self.create()?;
        if let Err(err) = self.import(seq, &facts, &saved, model.device()) {
            self.release(seq)?;
            return Err(match err {
                // Shapes are right by now: it is a value that no row can have.
                Error::Value { what, reason } => {
                    refuse(SavedStateError::Damaged(format!("{what}: {reason}")))
                }
                err => err,
            });
        }
        *self.sequence_mut(seq)? = Sequence {
            ids: saved.ids,
            image_mask: saved.image_mask,
            drafted: facts.drafted,
            prefill: facts.prefill as u32,
            high_water: facts.len,
            whole_from: facts.len,
            broken: false,
        };
        Ok(Restored {
            seq,
            pending: saved.pending,
        })
    }

    pub(super) fn check_fits(&self, facts: &Facts) -> Result<()> {
        let (needed, available) = (
            facts.len.saturating_add(facts.pending),
            self.geometry.max_len,
        );
        match needed <= available {
            true => Ok(()),
            false => Err(Error::Capacity {
                what: "context length in tokens",
                needed,
                available,
            }),
        }
    }

    fn import(
        &mut self,
        seq: SequenceId,
        facts: &Facts,
        saved: &Saved<'_>,
        device: &Device,
    ) -> Result<()> {
        let (slot, len) = (seq.slot, facts.len as u32);
        let one = |name: &str, part: String| -> Result<(String, Tensor)> {
            Ok((name.to_owned(), saved.rows(&part, device)?))
        };
        for (i, cache) in self.window.iter_mut().enumerate() {
            cache.import_slot(slot, len, &[one("window", layout::window_name(i))?])?;
        }
        for (i, cache) in self.compressed.iter_mut().enumerate() {
            let names = ["kv", "index_k", "pending"].into_iter();
            let present = names.filter(|n| saved.has(&layout::compressed_name(i, n)));
            let rows: SlotRows = present
                .map(|n| one(n, layout::compressed_name(i, n)))
                .collect::<Result<_>>()?;
            cache.import_slot(slot, len, &rows)?;
        }
        for (i, cache) in self.draft.iter_mut().enumerate() {
            let rows = [one("window", layout::draft_name(i))?];
            cache.import_slot(slot, facts.drafted as u32, &rows)?;
        }
        Ok(())
    }
}

fn damaged(reason: impl Into<String>) -> SavedStateError {
    SavedStateError::Damaged(reason.into())
}

/// The file, read in two steps so that the header is checked before the rows take memory.
struct Reader<'p> {
    file: File,
    path: &'p Path,
    hash: Fingerprint,
    left: u64,
}

impl<'p> Reader<'p> {
    fn open(path: &'p Path) -> Result<Self> {
        let io = |e: io::Error| Error::io(path, e);
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(Error::saved_state(path, SavedStateError::NotAState));
        }
        Ok(Self {
            file,
            path,
            hash: Fingerprint::new(),
            left: meta.len(),
        })
    }

    /// The next `n` bytes, which are hashed; `n` is bounded by the caller.
    fn take(&mut self, n: usize) -> Result<Vec<u8>> {
        let cut_off = || Error::saved_state(self.path, damaged("the file was cut off"));
        self.left = self.left.checked_sub(n as u64).ok_or_else(cut_off)?;
        let mut bytes = vec![0; n];
        self.file
            .read_exact(&mut bytes)
            .map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => cut_off(),
                _ => Error::io(self.path, e),
            })?;
        self.hash.update(&bytes);
        Ok(bytes)
    }

    fn header(&mut self) -> Result<Header> {
        let path = self.path;
        let not_a_state = || Error::saved_state(path, SavedStateError::NotAState);
        let len = self
            .take(8)?
            .try_into()
            .map_or(u64::MAX, u64::from_le_bytes);
        if len > MAX_HEADER {
            return Err(not_a_state());
        }
        let text = self.take(len as usize)?;
        Header::parse(&text).ok_or_else(not_a_state)
    }

    /// The rest of the file, which must be `len` bytes of data that end with their checksum.
    fn data(mut self, len: usize) -> Result<Vec<u8>> {
        let refuse = |reason: &str| Error::saved_state(self.path, damaged(reason));
        match self.left.cmp(&(len as u64)) {
            std::cmp::Ordering::Less => return Err(refuse("the file was cut off")),
            std::cmp::Ordering::Greater => return Err(refuse("something follows the data")),
            std::cmp::Ordering::Equal => {}
        }
        let data = self.take(len - CHECKSUM_BYTES)?;
        let expected = self.hash.finish().to_le_bytes();
        match self.take(CHECKSUM_BYTES)? == expected {
            true => Ok(data),
            false => Err(Error::saved_state(
                self.path,
                damaged("the checksum differs from the data's"),
            )),
        }
    }
}

struct Header {
    metadata: HashMap<String, String>,
    entries: BTreeMap<String, Entry>,
}

impl Header {
    /// `None` for what is not a header of this format, in whatever version.
    fn parse(text: &[u8]) -> Option<Self> {
        let Value::Object(mut map) = serde_json::from_slice(text).ok()? else {
            return None;
        };
        let metadata: HashMap<String, String> =
            serde_json::from_value(map.remove("__metadata__")?).ok()?;
        (metadata.get("format")? == layout::FORMAT).then_some(())?;
        let entries = map
            .into_iter()
            .map(|(k, v)| Some((k, serde_json::from_value(v).ok()?)));
        Some(Self {
            entries: entries.collect::<Option<_>>()?,
            metadata,
        })
    }

    fn facts(&self, fingerprint: u64) -> Result<Facts, SavedStateError> {
        let field = |name: &str| {
            self.metadata
                .get(name)
                .ok_or_else(|| damaged(format!("metadata without `{name}`")))
        };
        let number = |name: &str| {
            let text = field(name)?;
            let number = text
                .parse::<u32>()
                .map_err(|_| damaged(format!("`{name}` is {text}")))?;
            Ok(number as usize)
        };
        let found = field("version")?;
        if *found != layout::VERSION.to_string() {
            let (found, expected) = (found.clone(), layout::VERSION);
            return Err(SavedStateError::Version { found, expected });
        }
        let text = field("fingerprint")?;
        let found = u64::from_str_radix(text, 16)
            .map_err(|_| damaged(format!("`fingerprint` is {text}")))?;
        if found != fingerprint {
            return Err(SavedStateError::Fingerprint {
                found,
                expected: fingerprint,
            });
        }
        let facts = Facts {
            len: number("tokens")?,
            pending: number("pending")?,
            drafted: number("drafted")?,
            prefill: number("prefill")?,
            masked: self.entries.contains_key("image_mask"),
        };
        match facts.drafted <= facts.len && facts.prefill <= facts.len {
            true => Ok(facts),
            false => Err(damaged(format!("impossible metadata {facts:?}"))),
        }
    }

    /// Whether the file has exactly these parts.
    fn check(&self, parts: &[Part]) -> Result<(), SavedStateError> {
        for (part, expected) in layout::entries(parts) {
            let name = &part.name;
            let Some(found) = self.entries.get(name) else {
                return Err(damaged(format!("rows `{name}` are missing")));
            };
            let text = |e: &Entry| format!("{} {:?}", e.dtype, e.shape);
            if (&found.dtype, &found.shape) != (&expected.dtype, &expected.shape) {
                let (expected, found) = (text(&expected), text(found));
                return Err(SavedStateError::Rows {
                    name: name.clone(),
                    expected,
                    found,
                });
            }
            if found.data_offsets != expected.data_offsets {
                return Err(damaged(format!("rows `{name}` are not in their place")));
            }
        }
        match self.entries.len() == parts.len() {
            true => Ok(()),
            false => Err(damaged("there are rows that do not belong to the sequence")),
        }
    }
}

/// The checked content of a file.
struct Saved<'d> {
    parts: HashMap<&'d str, (&'d Part, &'d [u8])>,
    ids: Vec<u32>,
    pending: Vec<u32>,
    image_mask: Vec<u8>,
}

impl<'d> Saved<'d> {
    fn new(
        parts: &'d [Part],
        data: &'d [u8],
        masked: bool,
        cfg: &Config,
    ) -> Result<Self, SavedStateError> {
        let slice = |(part, entry): (&'d Part, Entry)| {
            let (from, to) = entry.data_offsets;
            // All but the checksum, which is not part of `data`.
            Some((part.name.as_str(), (part, data.get(from..to)?)))
        };
        let parts: HashMap<_, _> = layout::entries(parts).filter_map(slice).collect();
        let bytes = |name: &str| parts.get(name).map_or(&[][..], |(_, bytes)| bytes);
        let tokens = |name: &str| -> Result<Vec<u32>, SavedStateError> {
            let ids: Vec<u32> = bytes(name)
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| u32::from_le_bytes(*b))
                .collect();
            match ids.iter().find(|id| **id as usize >= cfg.vocab_size) {
                Some(id) => Err(damaged(format!("token {id} is outside of the vocabulary"))),
                None => Ok(ids),
            }
        };
        let image_mask = if masked {
            bytes("image_mask").to_vec()
        } else {
            Vec::new()
        };
        if image_mask.iter().any(|m| *m > 1) {
            return Err(damaged("an image mask of other values than 0 and 1"));
        }
        Ok(Self {
            ids: tokens("ids")?,
            pending: tokens("pending")?,
            image_mask,
            parts,
        })
    }

    fn has(&self, name: &str) -> bool {
        self.parts.contains_key(name)
    }

    fn rows(&self, name: &str, device: &Device) -> Result<Tensor> {
        let Some((part, bytes)) = self.parts.get(name) else {
            return Err(Error::MissingSource {
                what: "rows of a saved sequence",
            });
        };
        let shape = part.shape.as_slice();
        match part.dtype {
            DType::F32 => {
                let values = bytes
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| f32::from_le_bytes(*b));
                Ok(Tensor::from_vec(values.collect::<Vec<_>>(), shape, device)?)
            }
            _ => Ok(Tensor::from_slice(bytes, shape, device)?),
        }
    }
}
