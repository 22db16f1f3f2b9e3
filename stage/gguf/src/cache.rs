//! A directory of packages, addressed by content, bounded in bytes, safe for several processes at once.
//!
//! ```text
//! entries/KEY.gguf      a package            entries/KEY.json     what it is, its length and checksum
//! entries/KEY.partial   being written        entries/KEY.journal  how far, where that may be gone on with later
//! quarantine/KEY.gguf   an entry that was not what its checksum says
//! locks/KEY.write       held by the writer   locks/KEY.use        shared by users, exclusive to evict
//! locks/space           held while room is made
//! ```
//! What comes from far away is gone on with after the writer has ended, also when it was killed; see [`crate::Source::version`].
//! Locks are advisory locks of the operating system: they end with the process that holds them, however it ends.

mod entry;
mod journal;
mod space;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use entry::Record;
pub use space::{EntryUsage, Usage};

use crate::slice::{FORMAT_VERSION, Package, SlicePlan};
use crate::{Error, Model, Result};

/// Called while entries are read and checked, which takes minutes for large ones.
pub type Alive = Arc<dyn Fn() + Send + Sync>;

/// A cache directory.
#[derive(Clone)]
pub struct Cache {
    dir: PathBuf,
    limit: u64,
    alive: Alive,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("dir", &self.dir).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// A package that is on disk, whole, and stays there while this lives.
#[derive(Debug)]
pub struct Entry {
    path: PathBuf,
    record: Record,
    _in_use: File,
}

impl Entry {
    /// Path of the GGUF file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }
}

/// Name of an entry: hex BLAKE3 of what it is made from and how.
#[must_use]
pub fn key(digest: &str, package: Package) -> String {
    let (first, end) = match package {
        Package::Stage { first, end } => (first, end),
        Package::Tokenizer | Package::Embedding => (0, 0),
    };
    let mut hash = blake3::Hasher::new();
    hash.update(&FORMAT_VERSION.to_le_bytes());
    hash.update(package.kind().as_bytes());
    hash.update(&[0]);
    hash.update(&first.to_le_bytes());
    hash.update(&end.to_le_bytes());
    hash.update(digest.as_bytes());
    hash.finalize().to_hex().to_string()
}

impl Cache {
    /// Opens the cache in `dir`, made if missing, bounded to `limit` bytes. What crashed writers left is removed.
    ///
    /// # Errors
    /// [`Error::Io`] when the directory cannot be made or read.
    pub fn open(dir: impl Into<PathBuf>, limit: u64) -> Result<Self> {
        let cache = Self { dir: dir.into(), limit, alive: Arc::new(|| {}) };
        for sub in ["entries", "locks", "quarantine"] {
            let path = cache.dir.join(sub);
            fs::create_dir_all(&path).map_err(|e| Error::io(path.display().to_string(), "create the directory", e))?;
        }
        cache.remove_leftovers()?;
        Ok(cache)
    }

    /// Has `alive` called while entries are read and checked.
    #[must_use]
    pub fn with_alive(mut self, alive: Alive) -> Self {
        self.alive = alive;
        self
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Most bytes it may hold.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// `package` of `model`: from disk where it is whole, else written now. A second caller, in this process or another, waits
    /// for the first. `progress` gets the bytes done and in total, while writing; what an earlier writer has left of the same
    /// remote files is done already.
    ///
    /// # Errors
    /// As [`SlicePlan::new`] and [`SlicePlan::write_to`]; [`Error::CacheFull`] when entries in use leave no room.
    pub fn get(&self, model: &Model, package: Package, progress: &mut dyn FnMut(u64, u64)) -> Result<Entry> {
        let key = key(model.digest(), package);
        // Held from before the entry is looked at: it cannot be evicted between that and the return.
        let in_use = self.lock_file(&key, "use")?;
        in_use.lock_shared().map_err(|e| self.lock_error(&key, e))?;
        if let Ok(Some(record)) = self.validate(&key, model.digest(), package) {
            return self.hand_out(key, record, in_use);
        }
        let writing = self.lock_file(&key, "write")?;
        writing.lock().map_err(|e| self.lock_error(&key, e))?;
        match self.validate(&key, model.digest(), package) {
            Ok(Some(record)) => return self.hand_out(key, record, in_use),
            Ok(None) => {}
            Err(_) => self.quarantine(&key)?,
        }
        let plan = SlicePlan::new(model, package)?;
        let record = self.write(&key, &plan, progress)?;
        self.hand_out(key, record, in_use)
    }

    /// `package` of the model with `digest`, if it is there and whole.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is not what was stored, [`Error::Io`] when it cannot be read.
    pub fn find(&self, digest: &str, package: Package) -> Result<Option<Entry>> {
        let key = key(digest, package);
        let in_use = self.lock_file(&key, "use")?;
        in_use.lock_shared().map_err(|e| self.lock_error(&key, e))?;
        match self.validate(&key, digest, package)? {
            Some(record) => self.hand_out(key, record, in_use).map(Some),
            None => Ok(None),
        }
    }

    fn hand_out(&self, key: String, record: Record, in_use: File) -> Result<Entry> {
        self.touch(&key)?;
        Ok(Entry { path: self.entry_path(&key, "gguf"), record, _in_use: in_use })
    }

    fn entry_path(&self, key: &str, extension: &str) -> PathBuf {
        self.dir.join("entries").join(format!("{key}.{extension}"))
    }

    fn lock_file(&self, key: &str, kind: &str) -> Result<File> {
        let path = self.dir.join("locks").join(format!("{key}.{kind}"));
        let open = File::options().create(true).write(true).truncate(false).open(&path);
        open.map_err(|e| Error::io(path.display().to_string(), "open the lock file", e))
    }

    fn lock_error(&self, key: &str, e: io::Error) -> Error {
        Error::io(self.dir.join("locks").join(key).display().to_string(), "lock", e)
    }

    /// Takes a lock that nobody holds; `None` when somebody does.
    fn try_lock(&self, key: &str, kind: &str) -> Result<Option<File>> {
        let file = self.lock_file(key, kind)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(self.lock_error(key, e)),
        }
    }
}
