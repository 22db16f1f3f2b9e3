//! Prefixes of one stage as files, so that a stage that starts again finds them. Nothing here fails a request: what cannot be
//! written is not kept, and what cannot be read or is not what was written is put aside.
//!
//! A file is a head of 64 bytes and the state: magic, version, slot, page, length in tokens, bytes of the state, its BLAKE3 (first
//! 24 bytes), and eight bytes of the BLAKE3 of all that; integers are little-endian.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

const MAGIC: &[u8; 4] = b"SMPX";
const VERSION: u16 = 1;
const HEAD: usize = 64;
/// Bytes of states that may wait to be written, but for a single one; more are not kept.
const WAITING: u64 = 128 << 20;
/// Longest identity.
const MAX_IDENTITY: u64 = 64 << 10;
/// Files put aside that are left for somebody to look at.
const ASIDE: usize = 8;
const EXTENSION: &str = "prefix";

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another process uses the directory.
    #[error("{} is used by another process; stages of one chain that share a volume must differ in `chain` or `stage`", .0.display())]
    Used(PathBuf),
    /// The system refuses.
    #[error("{action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// What became of states since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounts {
    /// States that were read.
    pub read: u64,
    /// States that were written.
    pub written: u64,
    /// States not written, because others still waited.
    pub dropped: u64,
    /// Files that could not be written or read.
    pub errors: u64,
    /// Files that were not what was written.
    pub quarantined: u64,
    /// States given up for others.
    pub evictions: u64,
}

#[derive(Debug, Default)]
struct Counters {
    /// Bytes of states that wait to be written.
    waiting: AtomicU64,
    written: AtomicU64,
    errors: AtomicU64,
}

/// What a file's head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    slot: u16,
    page: u64,
    length: u32,
    bytes: u64,
    digest: [u8; 24],
}

#[derive(Debug)]
enum Job {
    Write(PathBuf, (u16, u64, u32), Vec<u8>),
    Remove(PathBuf),
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    slot: u16,
    length: u32,
    bytes: u64,
    /// Larger is later.
    used: u64,
}

/// See the module.
#[derive(Debug)]
pub struct DiskStore {
    dir: PathBuf,
    max_bytes: u64,
    pages: HashMap<u64, Kept>,
    bytes: u64,
    clock: u64,
    counts: DiskCounts,
    counters: Arc<Counters>,
    jobs: Option<Sender<Job>>,
    writer: Option<JoinHandle<()>>,
    /// Held as long as this is.
    _lock: File,
}

impl DiskStore {
    /// The store in `dir`, which is made if it is missing, of at most `max_bytes` bytes. What was written for another `identity`
    /// is removed.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(dir: &Path, identity: &str, max_bytes: u64) -> Result<Self, DiskError> {
        let fail = |action, path: &Path| {
            let path = path.to_owned();
            move |source| DiskError::Io { action, path, source }
        };
        // Prefixes are what somebody asked.
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(fail("cannot make", dir))?;
        let path = dir.join("lock");
        let lock = Self::create(&path).map_err(fail("cannot make", &path))?;
        lock.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => DiskError::Used(dir.to_owned()),
            TryLockError::Error(source) => fail("cannot lock", &path)(source),
        })?;
        let path = dir.join("identity");
        let short = fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= MAX_IDENTITY);
        let same = short && fs::read_to_string(&path).is_ok_and(|text| text == identity);
        let mut found = Vec::new();
        let mut aside = Vec::new();
        let mut errors = 0;
        for entry in fs::read_dir(dir).map_err(fail("cannot list", dir))? {
            let file = entry.map_err(fail("cannot list", dir))?.path();
            match file.extension().and_then(|e| e.to_str()) {
                Some(EXTENSION) if same => match head(&file) {
                    Ok(Some(head)) if file == self::file(dir, head.page) => found.push(head),
                    Ok(_) => aside.push(file),
                    Err(error) => {
                        tracing::warn!(path = %file.display(), %error, "a kept prefix cannot be read");
                        errors += 1;
                    }
                },
                Some("bad") if same => {}
                // Of another identity, or half written.
                Some(EXTENSION | "part" | "bad") => fs::remove_file(&file).map_err(fail("cannot remove", &file))?,
                _ => {}
            }
        }
        if !same {
            let directory = Self::directory(dir);
            match fs::remove_file(&directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(fail("cannot remove", &directory)(error));
                }
                _ => {}
            }
            let written = Self::create(&path).and_then(|mut file| file.write_all(identity.as_bytes()));
            written.map_err(fail("cannot write", &path))?;
        }
        let counters = Arc::<Counters>::default();
        let (jobs, queue) = channel();
        let told = counters.clone();
        let writer = std::thread::Builder::new()
            .name("prefixes".to_owned())
            .spawn(move || write(&queue, &told))
            .map_err(fail("no thread to write", dir))?;
        let mut store = Self {
            dir: dir.to_owned(),
            max_bytes,
            pages: HashMap::new(),
            bytes: 0,
            clock: 0,
            counts: DiskCounts { errors, ..DiskCounts::default() },
            counters,
            jobs: Some(jobs),
            writer: Some(writer),
            _lock: lock,
        };
        aside.iter().for_each(|file| store.quarantine(file));
        // Pages are numbered in the order in which they were made.
        found.sort_by_key(|h| h.page);
        for Head { slot, page, length, bytes, .. } in found {
            store.note(page, Kept { slot, length, bytes, used: 0 });
        }
        store.shrink(0);
        Ok(store)
    }

    /// An empty file that only this user can read.
    ///
    /// # Errors
    /// As the system says.
    pub fn create(path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
    }

    /// Where stage 0 leaves its [directory](crate::Directory::snapshot) beside the states in `dir`.
    #[must_use]
    pub fn directory(dir: &Path) -> PathBuf {
        dir.join("directory")
    }

    /// Slot, page and length in tokens of each state that is there, the ones made first first.
    #[must_use]
    pub fn list(&self) -> Vec<(u16, u64, u32)> {
        let mut list: Vec<_> = self.pages.iter().map(|(page, k)| (k.slot, *page, k.length)).collect();
        list.sort_by_key(|(_, page, _)| *page);
        list
    }

    /// Whether the state of a page is there, or about to be.
    #[must_use]
    pub fn holds(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// Bytes of all states.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts since the start.
    #[must_use]
    pub fn counts(&self) -> DiskCounts {
        DiskCounts {
            written: self.counters.written.load(Ordering::Relaxed),
            errors: self.counts.errors + self.counters.errors.load(Ordering::Relaxed),
            ..self.counts
        }
    }

    /// Keeps `state`, written by another thread; this one does not wait. Where others still wait, or where it is larger
    /// than all may be together, it is not kept.
    pub fn insert(&mut self, (slot, page, length): (u16, u64, u32), state: Vec<u8>) {
        self.remove(page);
        let bytes = state.len() as u64;
        let waiting = self.counters.waiting.load(Ordering::Relaxed);
        if bytes > self.max_bytes || (waiting > 0 && waiting + bytes > WAITING) {
            self.counts.dropped += 1;
            return;
        }
        self.shrink(bytes);
        self.counters.waiting.fetch_add(bytes, Ordering::Relaxed);
        self.tell(Job::Write(file(&self.dir, page), (slot, page, length), state));
        self.note(page, Kept { slot, length, bytes, used: 0 });
    }

    fn note(&mut self, page: u64, kept: Kept) {
        self.clock += 1;
        self.bytes += kept.bytes;
        self.pages.insert(page, Kept { used: self.clock, ..kept });
    }

    /// Makes room for `more` bytes.
    fn shrink(&mut self, more: u64) {
        while self.bytes + more > self.max_bytes {
            let Some(oldest) = self.pages.iter().min_by_key(|(_, k)| k.used).map(|(page, _)| *page) else { break };
            self.remove(oldest);
            self.counts.evictions += 1;
        }
    }

    /// Puts the state of a page into `out`, in place of what was there. `false`: it is not there, or no more, and `out` is empty.
    pub fn get(&mut self, page: u64, out: &mut Vec<u8>) -> bool {
        out.clear();
        let Some(kept) = self.pages.get_mut(&page) else { return false };
        self.clock += 1;
        kept.used = self.clock;
        let path = file(&self.dir, page);
        match read(&path, out) {
            Ok(true) => {
                self.counts.read += 1;
                return true;
            }
            Ok(false) => self.quarantine(&path),
            // It may still wait to be written.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return false,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a kept prefix cannot be read");
                self.counts.errors += 1;
            }
        }
        out.clear();
        if let Some(kept) = self.pages.remove(&page) {
            self.bytes -= kept.bytes;
        }
        false
    }

    /// Forgets a state.
    pub fn remove(&mut self, page: u64) {
        let Some(kept) = self.pages.remove(&page) else { return };
        self.bytes -= kept.bytes;
        self.tell(Job::Remove(file(&self.dir, page)));
    }

    /// Gives the writer a job; jobs are done in order.
    fn tell(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job); // the writer ends with this only
        }
    }

    /// Puts a file aside, for somebody to look at; only the last few are left.
    fn quarantine(&mut self, file: &Path) {
        self.counts.quarantined += 1;
        let mut aside: Vec<_> = fs::read_dir(&self.dir)
            .into_iter()
            .flatten()
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.extension().is_some_and(|e| e == "bad"))
            .collect();
        aside.sort();
        for old in aside.iter().take((aside.len() + 1).saturating_sub(ASIDE)) {
            let _ = fs::remove_file(old); // one more is left
        }
        let to = file.with_extension("bad");
        if fs::rename(file, &to).is_err() {
            let _ = fs::remove_file(file); // it is not read again in this process either way
        }
        tracing::warn!(file = %to.display(), "a kept prefix is not what was written; it is put aside");
    }
}

impl Drop for DiskStore {
    /// Waits until what was taken on is written.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join(); // it panicked: nothing is left to do
        }
    }
}

fn file(dir: &Path, page: u64) -> PathBuf {
    dir.join(format!("{page:016x}.{EXTENSION}"))
}

/// The writer: does one job after the other until the store is gone.
fn write(jobs: &Receiver<Job>, counters: &Counters) {
    while let Ok(job) = jobs.recv() {
        let (path, done) = match job {
            Job::Write(path, (slot, page, length), state) => {
                let part = path.with_extension("part");
                let write = || {
                    let head = Head { slot, page, length, bytes: state.len() as u64, digest: digest(&state) };
                    let mut file = DiskStore::create(&part)?;
                    file.write_all(&encode(&head))?;
                    file.write_all(&state)?;
                    fs::rename(&part, &path)
                };
                let done = write();
                counters.waiting.fetch_sub(state.len() as u64, Ordering::Relaxed);
                match done {
                    Ok(()) => counters.written.fetch_add(1, Ordering::Relaxed),
                    // What a full disk left.
                    Err(_) => u64::from(fs::remove_file(&part).is_ok()),
                };
                (path, done)
            }
            Job::Remove(path) => {
                let done = fs::remove_file(&path);
                // One that could not be written is not there.
                (path, done.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) }))
            }
        };
        if let Err(error) = done {
            counters.errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(path = %path.display(), %error, "a prefix cannot be kept on disk; requests are not affected");
        }
    }
}

fn encode(head: &Head) -> [u8; HEAD] {
    let mut out = [0; HEAD];
    out[..4].copy_from_slice(MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[6..8].copy_from_slice(&head.slot.to_le_bytes());
    out[8..16].copy_from_slice(&head.page.to_le_bytes());
    out[16..20].copy_from_slice(&head.length.to_le_bytes());
    out[24..32].copy_from_slice(&head.bytes.to_le_bytes());
    out[32..56].copy_from_slice(&head.digest);
    let check = blake3::hash(&out[..56]);
    out[56..].copy_from_slice(&check.as_bytes()[..8]);
    out
}

fn decode(raw: &[u8; HEAD]) -> Option<Head> {
    let (slot, page, length, bytes, digest) = (&raw[6..8], &raw[8..16], &raw[16..20], &raw[24..32], &raw[32..56]);
    let head = Head {
        slot: u16::from_le_bytes(slot.try_into().ok()?),
        page: u64::from_le_bytes(page.try_into().ok()?),
        length: u32::from_le_bytes(length.try_into().ok()?),
        bytes: u64::from_le_bytes(bytes.try_into().ok()?),
        digest: digest.try_into().ok()?,
    };
    (encode(&head) == *raw).then_some(head)
}

/// The head of a file that is as long as it says; `None` when it is not what was written.
fn head(path: &Path) -> io::Result<Option<Head>> {
    Ok(opened(path)?.map(|(head, _)| head))
}

/// A file behind its head.
fn opened(path: &Path) -> io::Result<Option<(Head, File)>> {
    let about = fs::symlink_metadata(path)?;
    if !about.is_file() || about.len() < HEAD as u64 {
        return Ok(None);
    }
    let mut file = File::open(path)?;
    let mut raw = [0; HEAD];
    file.read_exact(&mut raw)?;
    Ok(decode(&raw).filter(|h| about.len() - HEAD as u64 == h.bytes).map(|head| (head, file)))
}

/// Reads a state; `false` when it is not what was written.
fn read(path: &Path, out: &mut Vec<u8>) -> io::Result<bool> {
    let Some((head, file)) = opened(path)? else { return Ok(false) };
    file.take(head.bytes).read_to_end(out)?;
    Ok(digest(out) == head.digest)
}

fn digest(state: &[u8]) -> [u8; 24] {
    let mut out = [0; 24];
    out.copy_from_slice(&blake3::hash(state).as_bytes()[..24]);
    out
}
