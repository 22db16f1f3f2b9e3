//! Where the bytes of a model come from.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Something that can be read in ranges: a file or a remote object.
pub trait Source: Send + Sync {
    /// Length in bytes.
    ///
    /// # Errors
    /// When the length cannot be learned.
    fn len(&self) -> io::Result<u64>;

    /// Whether there is nothing in it.
    ///
    /// # Errors
    /// As [`Source::len`].
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `buf` with the bytes at `offset`.
    ///
    /// # Errors
    /// When the bytes cannot be read, or there are fewer (`UnexpectedEof`).
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Fills every buffer with the bytes at its offset: many small reads, which a remote source does at once.
    ///
    /// # Errors
    /// As [`Source::read_at`].
    fn read_many(&self, reads: &mut [(u64, Vec<u8>)]) -> io::Result<()> {
        reads.iter_mut().try_for_each(|(offset, buf)| self.read_at(*offset, buf))
    }

    /// The `len` bytes at `offset` as a stream, where that is faster than many reads; `None`: it is not.
    ///
    /// # Errors
    /// As [`Source::read_at`].
    fn stream(&self, _offset: u64, _len: u64) -> io::Result<Option<Box<dyn Read + '_>>> {
        Ok(None)
    }

    /// What tells this version of the object from every other, so that an interrupted copy may go on later; `None` where that
    /// is not known or not worth it.
    fn version(&self) -> Option<String> {
        None
    }

    /// Name for error messages: a path or an address.
    fn describe(&self) -> String;
}

/// A local file, read by `pread`: any number of threads may share it.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    path: PathBuf,
}

impl FileSource {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened or is not a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let err = |e| Error::io(path.display().to_string(), "open the file", e);
        // Before it is opened: a pipe without a writer would never be.
        if !std::fs::metadata(path).map_err(err)?.is_file() {
            return Err(err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        let file = File::open(path).map_err(err)?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Source for FileSource {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }
}

/// Bytes in memory.
impl Source for Vec<u8> {
    fn len(&self) -> io::Result<u64> {
        Ok(self.as_slice().len() as u64)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..)?.get(..buf.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(from);
        Ok(())
    }

    fn describe(&self) -> String {
        "<memory>".to_owned()
    }
}
