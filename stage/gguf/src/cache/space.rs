use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::entry::remove;
use super::{Cache, Record};
use crate::{Error, Result};

/// How long an unfinished file waits to be gone on with.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// An entry and what it occupies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryUsage {
    /// Name in the cache.
    pub key: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// When it was last handed out.
    pub last_used: SystemTime,
    /// Whether some process uses it now.
    pub in_use: bool,
    /// What it is; `None` when its record cannot be read.
    pub record: Option<Record>,
}

/// What the cache occupies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Most bytes it may hold.
    pub limit: u64,
    /// Bytes of everything in it, unfinished and quarantined files included.
    pub bytes: u64,
    /// Bytes of files being written (their planned length) or left unfinished.
    pub partial_bytes: u64,
    /// Bytes of quarantined files.
    pub quarantine_bytes: u64,
    /// The entries, the one unused for longest first.
    pub entries: Vec<EntryUsage>,
}

/// A file of the cache.
struct Listed {
    key: String,
    bytes: u64,
    modified: SystemTime,
}

impl Cache {
    /// Files with `extension` in `sub`, oldest first. Files that vanish meanwhile are left out.
    fn list(&self, sub: &str, extension: &str) -> Result<Vec<Listed>> {
        let dir = self.dir.join(sub);
        let err = |e| Error::io(dir.display().to_string(), "list the directory", e);
        let mut files = Vec::new();
        for item in fs::read_dir(&dir).map_err(err)? {
            let path = item.map_err(err)?.path();
            let key = path.file_stem().and_then(|s| s.to_str()).map(str::to_owned);
            let (Some(key), true) = (key, path.extension().is_some_and(|e| e == extension)) else {
                continue;
            };
            let Ok(meta) = fs::metadata(&path) else {
                continue;
            };
            // the record is touched at each use, the entry never
            let touched = fs::metadata(self.entry_path(&key, "json")).and_then(|m| m.modified());
            let modified = touched.or_else(|_| meta.modified()).map_err(err)?;
            files.push(Listed { key, bytes: meta.len(), modified });
        }
        files.sort_by_key(|f| f.modified);
        Ok(files)
    }

    /// What is in the cache.
    ///
    /// # Errors
    /// [`Error::Io`] when the directory cannot be read.
    pub fn usage(&self) -> Result<Usage> {
        let sum = |files: &[Listed]| files.iter().map(|f| f.bytes).sum::<u64>();
        let mut partial = self.list("entries", "partial")?;
        let quarantine_bytes = sum(&self.list("quarantine", "gguf")?);
        let mut entries = Vec::<EntryUsage>::new();
        for f in self.list("entries", "gguf")? {
            let in_use = self.try_lock(&f.key, "use")?.is_none();
            let record = self.record(&f.key).ok().flatten();
            entries.push(EntryUsage { key: f.key, bytes: f.bytes, last_used: f.modified, in_use, record });
        }
        // Finished since it was listed: it counts once.
        partial.retain(|p| entries.iter().all(|e| e.key != p.key));
        let partial_bytes = sum(&partial);
        let bytes = entries.iter().map(|e| e.bytes).sum::<u64>() + partial_bytes + quarantine_bytes;
        Ok(Usage { limit: self.limit, bytes, partial_bytes, quarantine_bytes, entries })
    }

    fn lock_space(&self) -> Result<File> {
        let file = self.lock_file("space", "lock")?;
        file.lock().map_err(|e| self.lock_error("space", e))?;
        Ok(file)
    }

    /// Makes room for an entry of `needed` bytes and creates its unfinished file with that length, so that other writers count
    /// it; `kept`: opens the one that is there. The caller holds the entry's write lock.
    pub(super) fn reserve(&self, key: &str, needed: u64, kept: bool) -> Result<File> {
        let _space = self.lock_space()?;
        if !kept {
            self.remove_partial(key)?;
        }
        self.make_room(if kept { 0 } else { needed })?;
        let path = self.entry_path(key, "partial");
        let name = path.display().to_string();
        let file = File::options().create(true).write(true).truncate(!kept).open(&path);
        let file = file.map_err(|e| Error::io(&name, "create the file", e))?;
        file.set_len(needed).map_err(|e| crate::slice::disk_error(&name, needed, e))?;
        Ok(file)
    }

    /// Removes quarantined files, then unfinished files whose writers are gone, then entries nobody uses, longest unused
    /// first, until `needed` more bytes fit.
    fn make_room(&self, needed: u64) -> Result<()> {
        self.remove_leftovers()?;
        let [partial, quarantined, entries] =
            [self.list("entries", "partial")?, self.list("quarantine", "gguf")?, self.list("entries", "gguf")?];
        let mut used: u64 = [&partial, &quarantined, &entries].into_iter().flatten().map(|f| f.bytes).sum();
        let fits = |used: u64| used.checked_add(needed).is_some_and(|all| all <= self.limit);
        for f in &quarantined {
            if fits(used) {
                return Ok(());
            }
            remove(&self.dir.join("quarantine").join(format!("{}.gguf", f.key)))?;
            used = used.saturating_sub(f.bytes);
        }
        for f in &partial {
            if fits(used) {
                return Ok(());
            }
            if let Some(_write) = self.try_lock(&f.key, "write")? {
                self.remove_partial(&f.key)?;
                used = used.saturating_sub(f.bytes);
            }
        }
        for f in &entries {
            if fits(used) {
                return Ok(());
            }
            if self.evict(&f.key)? {
                used = used.saturating_sub(f.bytes);
            }
        }
        if fits(used) {
            return Ok(());
        }
        Err(Error::CacheFull { dir: self.dir.display().to_string(), limit: self.limit, in_use: used, needed })
    }

    /// Removes an entry unless somebody uses or writes it.
    fn evict(&self, key: &str) -> Result<bool> {
        let (Some(_write), Some(_use)) = (self.try_lock(key, "write")?, self.try_lock(key, "use")?) else {
            return Ok(false);
        };
        remove(&self.entry_path(key, "gguf"))?;
        remove(&self.entry_path(key, "json"))?;
        Ok(true)
    }

    /// Removes the unfinished files of writers that are gone, unless somebody may soon go on with them.
    pub(super) fn remove_leftovers(&self) -> Result<()> {
        for f in self.list("entries", "partial")? {
            let journal = fs::metadata(self.entry_path(&f.key, "journal")).and_then(|m| m.modified());
            if journal.is_ok_and(|when| when.elapsed().is_ok_and(|age| age < KEPT)) {
                continue;
            }
            if let Some(_write) = self.try_lock(&f.key, "write")? {
                self.remove_partial(&f.key)?;
            }
        }
        Ok(())
    }
}
