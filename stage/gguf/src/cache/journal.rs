//! How far an interrupted copy came: beside KEY.partial lies KEY.journal, what it is a copy of and then a line for every
//! stretch of it, the bytes so far and their hash. Only bytes that still have that hash are built upon.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Alive;
use crate::Result;
use crate::slice::{Done, FORMAT_VERSION, Package, SlicePlan, disk_error};

/// Least bytes between two lines; of large packages a 4096th.
const STRIDE: u64 = 256 << 10;
/// Longest time between two lines while bytes come in.
const PERIOD: Duration = Duration::from_secs(5);
/// Longest journal that is read.
const MAX_JOURNAL: u64 = 64 << 20;

/// What a partial file is a copy of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Origin {
    format: u32,
    model: String,
    package: Package,
    bytes: u64,
    /// [`crate::Model::version`].
    version: String,
}

impl Origin {
    /// Of a package whose model can be told from every other; others are not gone on with.
    pub(super) fn of(plan: &SlicePlan<'_>) -> Option<Self> {
        Some(Self {
            format: FORMAT_VERSION,
            model: plan.model().digest().to_owned(),
            package: plan.package(),
            bytes: plan.total_bytes(),
            version: plan.model().version()?,
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    bytes: u64,
    blake3: String,
}

/// The journal of a copy under way.
pub(super) struct Journal {
    name: String,
    file: File,
    stride: u64,
    last: u64,
    when: Instant,
}

impl Journal {
    /// Begins the journal at `path` anew.
    pub(super) fn begin(path: &Path, origin: &Origin) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |e: io::Error| disk_error(&name, STRIDE, e);
        let mut file = File::create(path).map_err(failed)?;
        let mut text = serde_json::to_vec(origin).map_err(|e| failed(e.into()))?;
        text.push(b'\n');
        file.write_all(&text).map_err(failed)?;
        Ok(Self { name, file, stride: STRIDE.max(origin.bytes / 4096), last: 0, when: Instant::now() })
    }

    /// Goes on with the journal at `path` behind the line that says `bytes`.
    pub(super) fn resume(path: &Path, origin: &Origin, (end, bytes): (u64, u64)) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |e: io::Error| disk_error(&name, STRIDE, e);
        let mut file = File::options().write(true).open(path).map_err(failed)?;
        // What stands behind it counted on bytes that were not as they should be.
        file.set_len(end).map_err(failed)?;
        io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(failed)?;
        Ok(Self { name, file, stride: STRIDE.max(origin.bytes / 4096), last: bytes, when: Instant::now() })
    }

    /// Notes how far the copy is, unless that was done just now.
    pub(super) fn note(&mut self, done: &Done<'_>) -> io::Result<()> {
        let new = done.bytes - self.last;
        if new == 0 || (new < self.stride && self.when.elapsed() < PERIOD) {
            return Ok(());
        }
        (self.last, self.when) = (done.bytes, Instant::now());
        let mut text =
            serde_json::to_vec(&Line { bytes: done.bytes, blake3: done.hash.finalize().to_hex().to_string() })?;
        text.push(b'\n');
        // One call, at the end of the file: a crash leaves a torn last line at worst, which is not read.
        let written = self.file.write_all(&text);
        written.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", self.name)))
    }
}

/// A beginning that can be built upon.
pub(super) struct Kept {
    /// Bytes of the copy, and their hash.
    pub(super) done: (u64, blake3::Hasher),
    /// Where its line ends in the journal.
    pub(super) line_end: u64,
}

/// How much of `partial` is as its journal says; `None`: nothing, or it is of something else.
pub(super) fn check(journal: &Path, partial: &Path, origin: &Origin, alive: &Alive) -> Option<Kept> {
    let mut journal = BufReader::new(File::open(journal).ok()?.take(MAX_JOURNAL));
    let mut text = String::new();
    let mut line_end = journal.read_line(&mut text).ok()? as u64;
    if !text.ends_with('\n') || serde_json::from_str::<Origin>(&text).ok()? != *origin {
        return None;
    }
    let partial = File::open(partial).ok()?;
    if partial.metadata().ok()?.len() != origin.bytes {
        return None;
    }
    let (mut partial, mut hash, mut done) = (BufReader::with_capacity(1 << 20, partial), blake3::Hasher::new(), 0);
    let mut kept = None;
    loop {
        text.clear();
        let length = journal.read_line(&mut text).unwrap_or(0) as u64;
        let line = serde_json::from_str::<Line>(&text).ok();
        let Some(line) = line.filter(|l| text.ends_with('\n') && (done..=origin.bytes).contains(&l.bytes)) else {
            return kept;
        };
        let piece = &mut Read::by_ref(&mut partial).take(line.bytes - done);
        if !feed(&mut hash, piece, alive).is_ok_and(|n| n == line.bytes - done)
            || hash.finalize().to_hex().as_str() != line.blake3
        {
            return kept;
        }
        done = line.bytes;
        line_end += length;
        kept = Some(Kept { done: (done, hash.clone()), line_end });
    }
}

/// Hashes all of `from`; gives its bytes.
pub(super) fn feed(hash: &mut blake3::Hasher, from: &mut impl Read, alive: &Alive) -> io::Result<u64> {
    let mut buf = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        match from.read(&mut buf)? {
            0 => return Ok(bytes),
            n => {
                hash.update(buf.get(..n).unwrap_or_default());
                bytes += n as u64;
                alive();
            }
        }
    }
}
