use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::SlicePlan;
use super::plan::{Origin, Part};
use crate::{Error, Model, Result};

/// Bytes read and written at once.
const CHUNK: u64 = 4 << 20;
/// Bytes of a stream that are rather thrown away than another one opened.
const GAP: u64 = 64 << 10;

/// A package as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Length of the file.
    pub bytes: u64,
    /// Hex BLAKE3 of its contents.
    pub blake3: String,
}

/// How far a package is written.
pub(crate) struct Done<'a> {
    /// Bytes.
    pub(crate) bytes: u64,
    /// Of how many.
    pub(crate) total: u64,
    /// Hash of the bytes so far.
    pub(crate) hash: &'a blake3::Hasher,
}

/// Hears of every piece that was written; its error ends the writing.
pub(crate) type OnDone<'a> = &'a mut dyn FnMut(Done<'_>) -> io::Result<()>;

/// Counts and hashes what goes through.
struct Sink<'a> {
    out: &'a mut dyn Write,
    hash: blake3::Hasher,
    done: u64,
    total: u64,
    on_done: OnDone<'a>,
}

impl Sink<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.hash.update(bytes);
        self.done += bytes.len() as u64;
        (self.on_done)(Done { bytes: self.done, total: self.total, hash: &self.hash })
    }

    /// Zeros up to byte `end` of the file.
    fn zeros(&mut self, end: u64) -> io::Result<()> {
        let zeros = [0; 4096];
        while self.done < end {
            let now = (end - self.done).min(zeros.len() as u64);
            self.put(zeros.get(..now as usize).unwrap_or_default())?;
        }
        Ok(())
    }
}

/// The model's bytes in the order of the parts: as one stream wherever they lie one after the other.
struct Feed<'a> {
    model: &'a Model,
    parts: &'a [Part],
    open: Option<Open<'a>>,
    /// Whether the sources have no streams.
    plain: bool,
}

struct Open<'a> {
    shard: usize,
    at: u64,
    end: u64,
    stream: Box<dyn Read + 'a>,
}

impl<'a> Feed<'a> {
    /// Where the bytes that begin at `offset` in part `index` stop lying one after the other.
    fn run_end(&self, index: usize, shard: usize) -> u64 {
        let mut end = 0;
        for part in self.parts.iter().skip(index) {
            match part.origin {
                Origin::Copy { shard: s, offset }
                    if s == shard && (end == 0 || (end..=end + GAP).contains(&offset)) =>
                {
                    end = offset + part.bytes;
                }
                Origin::Zeros => {}
                Origin::Copy { .. } => break,
            }
        }
        end
    }

    /// Some bytes at `offset` of the shard, from part `index`; at least one.
    fn read(&mut self, index: usize, shard: usize, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let fits = |o: &Open<'_>| o.shard == shard && (o.at..=o.at + GAP).contains(&offset) && offset < o.end;
        if !self.plain && !self.open.as_ref().is_some_and(fits) {
            self.open = None;
            let end = self.run_end(index, shard);
            let stream = self.model.stream(shard, offset, end.saturating_sub(offset))?;
            self.open = stream.map(|stream| Open { shard, at: offset, end, stream });
            self.plain = self.open.is_none();
        }
        let Some(open) = &mut self.open else {
            self.model.read_at(shard, offset, buf)?;
            return Ok(buf.len());
        };
        let mut read = || {
            let gap = offset - open.at;
            if io::copy(&mut Read::by_ref(&mut open.stream).take(gap), &mut io::sink())? < gap {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match open.stream.read(buf)? {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                n => Ok(n),
            }
        };
        let n = read().map_err(|e| self.model.read_error(shard, e))?;
        open.at = offset + n as u64;
        Ok(n)
    }
}

impl SlicePlan<'_> {
    /// Writes the package into `out`, calling `progress` with the bytes done and the bytes in total. `file` names the
    /// target in errors.
    ///
    /// # Errors
    /// [`Error::Io`] when the model cannot be read or `out` written, [`Error::DiskFull`] when there is no room.
    pub fn write_to(&self, file: &str, out: &mut dyn Write, progress: &mut dyn FnMut(u64, u64)) -> Result<Written> {
        let mut on_done = |done: Done<'_>| {
            progress(done.bytes, done.total);
            Ok(())
        };
        self.write_from(file, out, (0, blake3::Hasher::new()), &mut on_done)
    }

    /// As [`SlicePlan::write_to`], where `out` stands behind the first bytes: their number and hash.
    pub(crate) fn write_from(
        &self,
        file: &str,
        out: &mut dyn Write,
        (done, hash): (u64, blake3::Hasher),
        on_done: OnDone<'_>,
    ) -> Result<Written> {
        let total = self.total_bytes();
        let failed = |e: io::Error| disk_error(file, total, e);
        let mut sink = Sink { out, hash, done, total, on_done };
        let header = usize::try_from(done).ok().and_then(|done| self.encoded.header.get(done..));
        sink.put(header.unwrap_or_default()).map_err(failed)?;
        let mut buf = Vec::new();
        let mut feed = Feed { model: self.model, parts: &self.parts, open: None, plain: false };
        for (index, part) in self.parts.iter().enumerate() {
            let end = part.at + part.bytes;
            sink.zeros(part.at).map_err(failed)?;
            let Origin::Copy { shard, offset } = part.origin else {
                sink.zeros(end).map_err(failed)?;
                continue;
            };
            while sink.done < end {
                buf.resize((end - sink.done).min(CHUNK) as usize, 0);
                let n = feed.read(index, shard, offset + (sink.done - part.at), &mut buf)?;
                sink.put(buf.get(..n).unwrap_or_default()).map_err(failed)?;
            }
        }
        sink.zeros(total).map_err(failed)?;
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
