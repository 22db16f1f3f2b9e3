//! Writing of GGUF headers, version 3.

use crate::header::{DEFAULT_ALIGNMENT, MAGIC, MAX_TENSOR_NAME};
use crate::types::TensorType;
use crate::value::OwnedValue;
use crate::{Error, Result};

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name, of at most 63 bytes.
    pub name: String,
    /// Elements per dimension, fastest first; 1 to 4 of them.
    pub dims: Vec<u64>,
    /// Type.
    pub ty: TensorType,
}

impl TensorSpec {
    /// Bytes of the data; `None` for impossible shapes.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let (row, rest) = self.dims.split_first()?;
        rest.iter().try_fold(self.ty.row_bytes(*row)?, |bytes, &n| bytes.checked_mul(n))
    }
}

/// Metadata and tensors of a file to be written; order is kept.
#[derive(Debug, Clone)]
pub struct Layout {
    entries: Vec<(String, OwnedValue)>,
    tensors: Vec<TensorSpec>,
    alignment: u64,
}

/// A header ready to be written, and where the data go.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// Bytes of the header, padded up to the data.
    pub header: Vec<u8>,
    /// Offset of each tensor from the start of the file, in the layout's order.
    pub offsets: Vec<u64>,
    /// Length of the whole file; every tensor is padded to the alignment.
    pub total_bytes: u64,
}

impl Default for Layout {
    fn default() -> Self {
        Self { entries: Vec::new(), tensors: Vec::new(), alignment: DEFAULT_ALIGNMENT }
    }
}

impl Layout {
    /// An empty layout with `alignment` of tensor data (a power of two).
    #[must_use]
    pub fn with_alignment(alignment: u64) -> Self {
        Self { alignment, ..Self::default() }
    }

    /// Sets a metadata value, in place of an earlier one.
    pub fn set(&mut self, key: impl Into<String>, value: OwnedValue) {
        let key = key.into();
        match self.entries.iter_mut().find(|(k, _)| *k == key) {
            Some((_, old)) => *old = value,
            None => self.entries.push((key, value)),
        }
    }

    /// Adds a tensor.
    pub fn push(&mut self, tensor: TensorSpec) {
        self.tensors.push(tensor);
    }

    /// The tensors so far.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The header's bytes, and the place of every tensor.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a name or shape that GGUF cannot hold, naming `file`.
    pub fn encode(&self, file: &str) -> Result<Encoded> {
        let mut out = MAGIC.to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            string(&mut out, key);
            out.extend((value.ty as u32).to_le_bytes());
            out.extend_from_slice(&value.raw);
        }
        let mut end = 0u64;
        let mut offsets = Vec::with_capacity(self.tensors.len());
        for t in &self.tensors {
            let bad = |what: &str| Error::tensor(file, &t.name, what);
            let bytes = t.bytes().ok_or_else(|| bad("impossible shape"))?;
            if t.name.len() as u64 > MAX_TENSOR_NAME || t.dims.len() > 4 {
                return Err(bad("the name or the shape is longer than GGUF allows"));
            }
            string(&mut out, &t.name);
            out.extend((t.dims.len() as u32).to_le_bytes());
            for n in &t.dims {
                out.extend(n.to_le_bytes());
            }
            out.extend(t.ty.id().to_le_bytes());
            out.extend(end.to_le_bytes());
            offsets.push(end);
            end = end
                .checked_add(bytes)
                .and_then(|end| end.checked_next_multiple_of(self.alignment))
                .ok_or_else(|| bad("the file would be larger than 2^64 bytes"))?;
        }
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        let data = out.len() as u64;
        for offset in &mut offsets {
            *offset += data;
        }
        Ok(Encoded { header: out, offsets, total_bytes: data.saturating_add(end) })
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}
