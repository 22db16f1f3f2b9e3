//! The embedding table, read row by row.

use std::path::Path;
use std::sync::Arc;

use crate::types::TensorType;
use crate::{Error, Model, Result};

/// Rows of `token_embd.weight`, as they lie in a file: an embedding package, or the model itself.
#[derive(Debug, Clone)]
pub struct EmbeddingFile {
    model: Arc<Model>,
    shard: usize,
    offset: u64,
    ty: TensorType,
    n_embd: u32,
    rows: u32,
    row_bytes: usize,
}

impl EmbeddingFile {
    /// Opens the embedding package (or model) at `path`.
    ///
    /// # Errors
    /// As [`Model::open`], and [`Error::Tensor`] when it has no table.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_model(Arc::new(Model::open(path)?))
    }

    /// The table of `model`.
    ///
    /// # Errors
    /// [`Error::Tensor`] when it has none of two dimensions.
    pub fn from_model(model: Arc<Model>) -> Result<Self> {
        let bad = |what: &str| Error::tensor(model.file(), "token_embd.weight", what);
        let t = model.tensor("token_embd.weight").ok_or_else(|| bad("is missing"))?;
        let &[n_embd, rows] = t.info.dims.as_slice() else {
            return Err(bad("must have two dimensions"));
        };
        let row_bytes = t.info.ty.row_bytes(n_embd).and_then(|n| usize::try_from(n).ok());
        let (Ok(n_embd), Ok(rows), Some(row_bytes)) = (u32::try_from(n_embd), u32::try_from(rows), row_bytes) else {
            return Err(bad("is too large"));
        };
        let (shard, offset, ty) = (t.shard, t.info.offset, t.info.ty);
        Ok(Self { model, shard, offset, ty, n_embd, rows, row_bytes })
    }

    /// Type of the rows.
    #[must_use]
    pub fn tensor_type(&self) -> TensorType {
        self.ty
    }

    /// Elements of a row.
    #[must_use]
    pub fn n_embd(&self) -> u32 {
        self.n_embd
    }

    /// Rows: tokens of the vocabulary.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Appends the raw rows of `tokens` to `out`: `tokens.len() × row_bytes` bytes, in order.
    ///
    /// # Errors
    /// [`Error::Token`] for an id outside the table (nothing is appended then), [`Error::Io`] when the file cannot be read.
    pub fn read_rows(&self, tokens: &[i32], out: &mut Vec<u8>) -> Result<()> {
        let outside = tokens.iter().find(|&&t| u32::try_from(t).map_or(true, |t| t >= self.rows));
        if let Some(&token) = outside {
            let (file, rows) = (self.model.file().to_owned(), self.rows.into());
            return Err(Error::Token { file, token: token.into(), rows });
        }
        for &token in tokens {
            let start = out.len();
            out.resize(start + self.row_bytes, 0);
            let at = self.offset + token.unsigned_abs() as u64 * self.row_bytes as u64;
            self.model.read_at(self.shard, at, out.get_mut(start..).unwrap_or_default())?;
        }
        Ok(())
    }
}
