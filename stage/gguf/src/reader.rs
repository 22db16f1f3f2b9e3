//! Reads a header piece by piece, never more than the file holds or the limit allows.

use crate::{Error, Result, Source};

const FIRST_READ: usize = 64 << 10;
const LARGEST_READ: usize = 4 << 20;

pub(crate) struct Reader<'a> {
    source: &'a dyn Source,
    file: String,
    len: u64,
    limit: u64,
    buf: Vec<u8>,
    pos: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(source: &'a dyn Source, limit: u64) -> Result<Self> {
        let file = source.describe();
        let len = source.len().map_err(|e| Error::io(&file, "learn the length", e))?;
        Ok(Self { source, file, len, limit, buf: Vec::new(), pos: 0 })
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn file_len(&self) -> u64 {
        self.len
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    /// What was read up to the current position.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        self.buf.truncate(self.pos);
        self.buf.shrink_to_fit();
        self.buf
    }

    pub(crate) fn slice(&self, range: std::ops::Range<usize>) -> &[u8] {
        self.buf.get(range).unwrap_or_default()
    }

    pub(crate) fn err(&self, offset: usize, what: impl Into<String>) -> Error {
        Error::Header { file: self.file.clone(), offset: offset as u64, what: what.into() }
    }

    /// Refuses a count whose items, of at least `min` bytes each, cannot all be in the file.
    pub(crate) fn check_count(&self, count: u64, min: u64, what: &str) -> Result<()> {
        let left = self.len.saturating_sub(self.pos as u64);
        match count.checked_mul(min) {
            Some(bytes) if bytes <= left => Ok(()),
            _ => Err(self.err(self.pos, format!("{count} {what} cannot fit into the {left} bytes left of the file"))),
        }
    }

    /// Takes `n` bytes; gives where they lie in the buffer.
    pub(crate) fn take(&mut self, n: u64, what: &str) -> Result<std::ops::Range<usize>> {
        let start = self.pos;
        let end = (start as u64).checked_add(n).filter(|&end| end <= self.len).ok_or_else(|| {
            let len = self.len;
            self.err(
                start,
                format!("{what} needs {n} bytes, but the file ends after {len}: it is truncated or corrupt"),
            )
        })?;
        if end > self.limit {
            return Err(self.err(start, format!("{what}: the header is larger than the limit of {} bytes", self.limit)));
        }
        let end = usize::try_from(end).map_err(|_| self.err(start, format!("{what} does not fit into memory")))?;
        if end > self.buf.len() {
            self.fill(end)?;
        }
        self.pos = end;
        Ok(start..end)
    }

    fn fill(&mut self, end: usize) -> Result<()> {
        let had = self.buf.len();
        let ahead = had.saturating_add(had.clamp(FIRST_READ, LARGEST_READ)) as u64;
        let to = ahead.min(self.len).min(self.limit).max(end as u64) as usize;
        self.buf.try_reserve_exact(to - had).map_err(|_| self.err(self.pos, "the header does not fit into memory"))?;
        self.buf.resize(to, 0);
        let new = self.buf.get_mut(had..).unwrap_or_default();
        self.source.read_at(had as u64, new).map_err(|e| Error::io(&self.file, "read the header", e))
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32> {
        let at = self.take(4, what)?;
        Ok(self.slice(at).try_into().map(u32::from_le_bytes).unwrap_or_default())
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64> {
        let at = self.take(8, what)?;
        Ok(self.slice(at).try_into().map(u64::from_le_bytes).unwrap_or_default())
    }

    /// A string's bytes, of at most `max`.
    pub(crate) fn string(&mut self, max: u64, what: &str) -> Result<std::ops::Range<usize>> {
        let at = self.pos;
        let len = self.u64(what)?;
        if len > max {
            return Err(self.err(at, format!("{what} is {len} bytes long; at most {max} are accepted")));
        }
        self.take(len, what)
    }
}
