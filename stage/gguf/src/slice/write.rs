use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::SlicePlan;
use super::plan::Origin;
use crate::{Error, Result};

/// Bytes read and written at once.
const CHUNK: u64 = 4 << 20;

/// A package as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Length of the file.
    pub bytes: u64,
    /// Hex BLAKE3 of its contents.
    pub blake3: String,
}

/// Counts and hashes what goes through.
struct Sink<'a> {
    out: &'a mut dyn Write,
    hash: blake3::Hasher,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Sink<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.hash.update(bytes);
        self.done += bytes.len() as u64;
        (self.progress)(self.done, self.total);
        Ok(())
    }

    fn zeros(&mut self, mut n: u64) -> io::Result<()> {
        let zeros = [0; 4096];
        while n > 0 {
            let now = n.min(zeros.len() as u64);
            self.put(zeros.get(..now as usize).unwrap_or_default())?;
            n -= now;
        }
        Ok(())
    }
}

impl SlicePlan<'_> {
    /// Writes the package into `out`, calling `progress` with the bytes done and the bytes in total. `file` names the
    /// target in errors.
    ///
    /// # Errors
    /// [`Error::Io`] when the model cannot be read or `out` written, [`Error::DiskFull`] when there is no room.
    pub fn write_to(&self, file: &str, out: &mut dyn Write, progress: &mut dyn FnMut(u64, u64)) -> Result<Written> {
        let total = self.total_bytes();
        let failed = |e: io::Error| disk_error(file, total, e);
        let mut sink = Sink { out, hash: blake3::Hasher::new(), done: 0, total, progress };
        sink.put(&self.encoded.header).map_err(failed)?;
        let mut buf = Vec::new();
        for part in &self.parts {
            sink.zeros(part.at.saturating_sub(sink.done)).map_err(failed)?;
            let Origin::Copy { shard, offset } = part.origin else {
                sink.zeros(part.bytes).map_err(failed)?;
                continue;
            };
            let mut copied = 0;
            while copied < part.bytes {
                buf.resize((part.bytes - copied).min(CHUNK) as usize, 0);
                self.model.read_at(shard, offset + copied, &mut buf)?;
                sink.put(&buf).map_err(failed)?;
                copied += buf.len() as u64;
            }
        }
        sink.zeros(total.saturating_sub(sink.done)).map_err(failed)?;
        sink.out.flush().map_err(failed)?;
        Ok(Written { bytes: sink.done, blake3: sink.hash.finalize().to_hex().to_string() })
    }

    /// Writes the package to `path`: whole and on disk, or not at all.
    ///
    /// # Errors
    /// As [`SlicePlan::write_to`].
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Written> {
        let name = path.display().to_string();
        let total = self.total_bytes();
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let mut temp = tempfile::Builder::new()
            .prefix(".partial-")
            // As any file of this user: the umask decides who may read it.
            .permissions(std::fs::Permissions::from_mode(0o666))
            .tempfile_in(dir)
            .map_err(|e| Error::io(dir.display().to_string(), "create a file in the directory", e))?;
        let written = self.write_to(&name, temp.as_file_mut(), progress)?;
        temp.as_file().sync_all().map_err(|e| disk_error(&name, total, e))?;
        temp.persist(path).map_err(|e| Error::io(&name, "rename the finished file", e.error))?;
        sync_dir(dir)?;
        Ok(written)
    }
}

/// A failed write, told apart by whether the disk is full.
pub(crate) fn disk_error(file: &str, needed: u64, e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::DiskFull { file: file.to_owned(), needed },
        _ => Error::io(file, "write", e),
    }
}

/// Makes renames in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    let sync = || File::open(dir)?.sync_all();
    sync().map_err(|e| Error::io(dir.display().to_string(), "make the directory durable", e))
}
