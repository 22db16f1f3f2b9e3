use std::path::{Path, PathBuf};

use splitmodel_gguf::EmbeddingFile;
use splitmodel_link::frame::Token;

use crate::EngineError;
use crate::llama::rows::Decoder;

/// The embedding table of stage 0: rows are read from the file and dequantised as llama.cpp would.
pub struct EmbeddingTable {
    path: PathBuf,
    file: EmbeddingFile,
    decoder: Decoder,
    scale: f32,
    /// Raw rows of the running call.
    raw: Vec<u8>,
}

impl EmbeddingTable {
    /// Opens an embedding package, or the model itself. Rows are multiplied with `scale`.
    ///
    /// # Errors
    /// [`EngineError::File`] when the file has no table, or one of a type that ggml cannot turn into floats.
    pub fn open(path: &Path, scale: f32) -> Result<Self, EngineError> {
        let file = EmbeddingFile::open(path).map_err(|e| EngineError::file(path, e))?;
        let decoder =
            Decoder::new(file.tensor_type().id(), file.n_embd() as usize).map_err(|e| EngineError::file(path, e))?;
        if decoder.row_bytes() != file.row_bytes() {
            let reason = format!("a row has {} bytes, ggml wants {}", file.row_bytes(), decoder.row_bytes());
            return Err(EngineError::file(path, reason));
        }
        Ok(Self { path: path.to_owned(), file, decoder, scale, raw: Vec::new() })
    }

    /// Floats of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.file.n_embd() as usize
    }

    /// Rows: tokens of the vocabulary.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.file.rows() as usize
    }

    /// Appends the rows of `tokens`, `tokens.len() × width` floats. On an error `out` is as before.
    ///
    /// # Errors
    /// [`EngineError::File`] for a token outside the table or an unreadable file.
    pub fn lookup(&mut self, tokens: &[Token], out: &mut Vec<f32>) -> Result<(), EngineError> {
        self.raw.clear();
        self.file.read_rows(tokens, &mut self.raw).map_err(|e| EngineError::file(&self.path, e))?;
        let start = out.len();
        for row in self.raw.chunks_exact(self.decoder.row_bytes()) {
            self.decoder.append(row, out);
        }
        if self.scale != 1.0 {
            for x in &mut out[start..] {
                *x *= self.scale;
            }
        }
        Ok(())
    }
}
