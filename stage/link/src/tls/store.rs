//! Certificates that may be replaced while the stage runs.
//!
//! Nothing watches the files: whoever begins a handshake looks whether they changed, which costs three calls of `stat`.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{TlsConfig, TlsError};

/// Most bytes of a PEM file; a system's bundle of authorities has a quarter of it.
const MAX_FILE: u64 = 1 << 20;
/// A file that was written this short a time ago may change again without its time or length showing it.
const SETTLED: Duration = Duration::from_secs(2);
/// Readings of files that change meanwhile, before the old certificates are used once more.
const READINGS: u32 = 3;

/// Where handshakes get their certificates. Clones share what was read.
#[derive(Clone, Debug)]
pub struct TlsStore(Source);

#[derive(Clone, Debug)]
enum Source {
    Fixed(TlsConfig),
    Files(Arc<Files>),
}

impl From<TlsConfig> for TlsStore {
    /// Certificates that stay as they are.
    fn from(config: TlsConfig) -> Self {
        Self(Source::Fixed(config))
    }
}

impl TlsStore {
    /// Reads CA certificates, our certificate chain (leaf first) and its key, all PEM, and uses what is in the files from
    /// then on: when they were replaced, handshakes that begin later use the new ones. Files that cannot be used then
    /// leave the old ones in use, which one warning says.
    ///
    /// # Errors
    /// [`TlsError::File`] when they cannot be used now.
    pub fn from_pem_files(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let paths = [ca, cert, key].map(Path::to_path_buf);
        let looked = look(&paths);
        let content = read(&paths)?;
        let config = TlsConfig::from_pem(&paths, &content)?;
        let looked = settled(&looked).then_some(looked);
        let state = State { config, content, looked, complained: None };
        Ok(Self(Source::Files(Arc::new(Files { paths, state: Mutex::new(state) }))))
    }

    /// The certificates for a handshake that begins now.
    pub async fn current(&self) -> TlsConfig {
        match &self.0 {
            Source::Fixed(config) => config.clone(),
            Source::Files(files) => {
                // A file system may hang; the caller's deadline then does its work.
                let fresh = tokio::task::spawn_blocking({
                    let files = Arc::clone(files);
                    move || files.current()
                });
                fresh.await.unwrap_or_else(|_| files.lock().config.clone())
            }
        }
    }
}

#[derive(Debug)]
struct Files {
    /// CA, certificate, key.
    paths: [PathBuf; 3],
    state: Mutex<State>,
}

struct State {
    config: TlsConfig,
    /// What `config` was made from.
    content: Content,
    /// The files as they were read last; `None` when they may have changed since without a trace.
    looked: Option<Looks>,
    /// The last warning, and the files it was about.
    complained: Option<(Looks, TlsError)>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // `content` holds the key.
        f.debug_struct("State").field("looked", &self.looked).field("complained", &self.complained).finish()
    }
}

/// Bytes of CA, certificate and key.
pub(super) type Content = [Vec<u8>; 3];
type Looks = [Option<Look>; 3];

/// What `stat` says of a file, links followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

fn look(paths: &[PathBuf; 3]) -> Looks {
    paths.each_ref().map(|path| {
        let m = std::fs::metadata(path).ok()?;
        Some(Look {
            device: m.dev(),
            inode: m.ino(),
            len: m.len(),
            modified: (m.mtime(), m.mtime_nsec()),
            changed: (m.ctime(), m.ctime_nsec()),
        })
    })
}

/// Whether the files last changed so long ago that another change will show.
fn settled(looks: &Looks) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let limit = i64::try_from(now.saturating_sub(SETTLED).as_secs()).unwrap_or(i64::MAX);
    looks.iter().flatten().all(|l| l.modified.0 < limit && l.changed.0 < limit)
}

pub(super) fn read(paths: &[PathBuf; 3]) -> Result<Content, TlsError> {
    let one = |path: &Path| {
        let bad = |why: String| TlsError::File { path: path.into(), why };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(|e| bad(e.to_string()))?;
        match file.take(MAX_FILE + 1).read_to_end(&mut bytes) {
            Ok(n) if n as u64 > MAX_FILE => Err(bad(format!("more than {MAX_FILE} bytes are no certificates"))),
            Ok(_) => Ok(bytes),
            Err(e) => Err(bad(e.to_string())),
        }
    };
    let [ca, cert, key] = paths;
    Ok([one(ca)?, one(cert)?, one(key)?])
}

impl Files {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> TlsConfig {
        let mut state = self.lock();
        let mut looks = look(&self.paths);
        if state.looked == Some(looks) {
            return state.config.clone();
        }
        for _ in 0..READINGS {
            let content = read(&self.paths);
            let after = look(&self.paths);
            if after == looks {
                state.looked = settled(&looks).then_some(looks);
                state.take(content, &self.paths, looks);
                return state.config.clone();
            }
            // They are being replaced this moment: parts of old and new do not go together.
            looks = after;
        }
        state.config.clone()
    }
}

impl State {
    fn take(&mut self, content: Result<Content, TlsError>, paths: &[PathBuf; 3], looks: Looks) {
        let made = content.and_then(|content| {
            if content == self.content {
                return Ok(None);
            }
            TlsConfig::from_pem(paths, &content).map(|config| Some((config, content)))
        });
        match made {
            Ok(None) => self.complained = None,
            Ok(Some((config, content))) => {
                tracing::info!(cert = %paths[1].display(), "certificates were replaced: handshakes use them from now on");
                (self.config, self.content, self.complained) = (config, content, None);
            }
            Err(error) => {
                let complaint = Some((looks, error));
                if self.complained != complaint {
                    if let Some((_, error)) = &complaint {
                        tracing::warn!(%error, "certificates cannot be used; those read before stay in use");
                    }
                    self.complained = complaint;
                }
            }
        }
    }
}
