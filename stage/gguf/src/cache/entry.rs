use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::Path;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::Cache;
use super::journal::{self, Journal};
use crate::slice::{Done, FORMAT_VERSION, Package, SlicePlan, keys};
use crate::{Error, FileSource, Header, Result};

/// Records are a few hundred bytes; more is not one.
const MAX_RECORD: u64 = 16 << 10;

/// What an entry is; lies beside it as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of the way packages are written.
    pub format: u32,
    /// Digest of the model.
    pub model: String,
    /// File the model was read from, for people.
    pub source: String,
    /// What is in it.
    pub package: Package,
    /// Length of the file.
    pub bytes: u64,
    /// Hex BLAKE3 of the file.
    pub blake3: String,
    /// The model's facts ([`crate::ModelFacts::to_compact`]), so that it need not be read for them again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<String>,
}

impl Cache {
    /// The record of an entry, without looking at the entry; `None` where there is none.
    pub(super) fn record(&self, key: &str) -> Result<Option<Record>> {
        let path = self.entry_path(key, "json");
        let corrupt = |what: String| Error::Corrupt { file: path.display().to_string(), what };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(path.display().to_string(), "open the record", e)),
        };
        let mut text = Vec::new();
        let read = file.take(MAX_RECORD).read_to_end(&mut text);
        read.map_err(|e| Error::io(path.display().to_string(), "read the record", e))?;
        serde_json::from_slice(&text).map(Some).map_err(|e| corrupt(format!("unreadable record: {e}")))
    }

    /// Checks all of an entry: record, length, header, checksum. `None` where there is none.
    pub(super) fn validate(&self, key: &str, digest: &str, package: Package) -> Result<Option<Record>> {
        let path = self.entry_path(key, "gguf");
        let bytes = match fs::metadata(&path) {
            Ok(meta) => meta.len(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(path.display().to_string(), "look at the entry", e)),
        };
        let corrupt = |what: &str| Err(Error::Corrupt { file: path.display().to_string(), what: what.to_owned() });
        let Some(record) = self.record(key)? else {
            return corrupt("its record is missing");
        };
        if (record.format, record.model.as_str(), record.package) != (FORMAT_VERSION, digest, package) {
            return corrupt("its record belongs to something else");
        }
        if record.bytes != bytes {
            return corrupt("its length is not the recorded one");
        }
        let header = Header::read(&FileSource::open(&path)?)?;
        if header.str(keys::MODEL)? != Some(digest) || header.str(keys::KIND)? != Some(package.kind()) {
            return corrupt("its header belongs to something else");
        }
        if self.hash_file(&path)? != record.blake3 {
            return corrupt("its checksum is not the recorded one");
        }
        Ok(Some(record))
    }

    /// Moves a corrupt entry aside, over one that was moved before.
    pub(super) fn quarantine(&self, key: &str) -> Result<()> {
        let from = self.entry_path(key, "gguf");
        let to = self.dir.join("quarantine").join(format!("{key}.gguf"));
        fs::rename(&from, to).map_err(|e| Error::io(from.display().to_string(), "quarantine the corrupt entry", e))?;
        remove(&self.entry_path(key, "json"))
    }

    /// Writes an entry. The caller holds its write lock.
    pub(super) fn write(&self, key: &str, plan: &SlicePlan<'_>, progress: &mut dyn FnMut(u64, u64)) -> Result<Record> {
        let origin = journal::Origin::of(plan);
        let result = self.write_partial(key, plan, origin.as_ref(), progress);
        // What was copied from far away stays, to be gone on with, unless it fills the disk.
        if result.is_err() && (origin.is_none() || matches!(result, Err(Error::DiskFull { .. }))) {
            // The error that is returned says more than a failure to clean up after it.
            let _ = self.remove_partial(key);
        }
        result
    }

    /// Removes what an unfinished entry has left.
    pub(super) fn remove_partial(&self, key: &str) -> Result<()> {
        ["partial", "journal", "record"].iter().try_for_each(|extension| remove(&self.entry_path(key, extension)))
    }

    fn write_partial(
        &self,
        key: &str,
        plan: &SlicePlan<'_>,
        origin: Option<&journal::Origin>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Record> {
        let partial = self.entry_path(key, "partial");
        let name = partial.display().to_string();
        let journal_path = self.entry_path(key, "journal");
        let kept = origin.and_then(|origin| journal::check(&journal_path, &partial, origin, &self.alive));
        let mut file = self.reserve(key, plan.total_bytes(), kept.is_some())?;
        let (done, mut journal) = match (kept, origin) {
            (Some(kept), Some(origin)) => {
                let seek = file.seek(io::SeekFrom::Start(kept.done.0));
                seek.map_err(|e| Error::io(&name, "go on with the unfinished file", e))?;
                let journal = Journal::resume(&journal_path, origin, (kept.line_end, kept.done.0))?;
                (kept.done, Some(journal))
            }
            (_, origin) => {
                let journal = origin.map(|origin| Journal::begin(&journal_path, origin)).transpose()?;
                ((0, blake3::Hasher::new()), journal)
            }
        };
        let mut on_done = |done: Done<'_>| {
            progress(done.bytes, done.total);
            journal.as_mut().map_or(Ok(()), |journal| journal.note(&done))
        };
        let written = plan.write_from(&name, &mut file, done, &mut on_done)?;
        file.sync_all().map_err(|e| crate::slice::disk_error(&name, written.bytes, e))?;
        let record = Record {
            format: FORMAT_VERSION,
            model: plan.model().digest().to_owned(),
            source: plan.model().file().to_owned(),
            package: plan.package(),
            bytes: written.bytes,
            blake3: written.blake3,
            facts: plan.model().facts().ok().and_then(|facts| facts.to_compact().ok()),
        };
        self.write_record(key, &record)?;
        fs::rename(&partial, self.entry_path(key, "gguf"))
            .map_err(|e| Error::io(&name, "rename the finished file", e))?;
        remove(&journal_path)?;
        crate::slice::sync_dir(&self.dir.join("entries"))?;
        Ok(record)
    }

    fn write_record(&self, key: &str, record: &Record) -> Result<()> {
        let path = self.entry_path(key, "json");
        let name = path.display().to_string();
        let failed = |e: io::Error| crate::slice::disk_error(&name, MAX_RECORD, e);
        let text = serde_json::to_vec_pretty(record).map_err(|e| failed(e.into()))?;
        // One name for all tries: what a crash leaves is overwritten by the next writer.
        let unfinished = self.entry_path(key, "record");
        let mut file = File::create(&unfinished).map_err(failed)?;
        io::Write::write_all(&mut file, &text).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        fs::rename(&unfinished, &path).map_err(failed)
    }

    fn hash_file(&self, path: &Path) -> Result<String> {
        let mut hash = blake3::Hasher::new();
        let read = File::open(path).and_then(|mut file| journal::feed(&mut hash, &mut file, &self.alive));
        read.map_err(|e| Error::io(path.display().to_string(), "read the entry", e))?;
        Ok(hash.finalize().to_hex().to_string())
    }

    /// Marks an entry as just used.
    pub(super) fn touch(&self, key: &str) -> Result<()> {
        let path = self.entry_path(key, "json");
        let touched = File::options().write(true).open(&path).and_then(|f| f.set_modified(SystemTime::now()));
        touched.map_err(|e| Error::io(path.display().to_string(), "note the use", e))
    }
}

/// Removes a file that may be gone already.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(path.display().to_string(), "remove", e)),
        _ => Ok(()),
    }
}
