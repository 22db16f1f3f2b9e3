//! The state directory: slices, and one private directory per running `up`.
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::CliError;

const STATE: &str = "state.json";
const LOCK: &str = "lock";
/// A state file larger than this is not one of ours.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// The state directory: `given`, or `$XDG_STATE_HOME/splitmodel`, or `~/.local/state/splitmodel`.
///
/// # Errors
/// [`CliError::Flag`] when none of them is known.
pub fn state_dir(given: Option<&Path>) -> Result<PathBuf, CliError> {
    if let Some(dir) = given {
        return std::path::absolute(dir).map_err(CliError::file("find", dir));
    }
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("XDG_STATE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".local/state")))
        .map(|dir| dir.join("splitmodel"))
        .ok_or_else(|| CliError::Flag {
            flag: "state-dir",
            message: "neither XDG_STATE_HOME nor HOME is set; name a directory".into(),
        })
}

/// What `status` needs to know of a running `up`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// Name of the model.
    pub name: String,
    /// Process id of `up`.
    pub pid: u32,
    /// Address of the API.
    pub url: String,
    /// Control services, `host:port`, by stage.
    pub control: Vec<String>,
}

/// The directory of one running `up`, removed at the end unless kept.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Locked as long as the process lives, however it ends.
    _lock: File,
    keep: bool,
}

impl RunDir {
    /// Makes a directory for `name` under `state`, after removing those of runs that are no more.
    ///
    /// # Errors
    /// [`CliError::File`].
    pub fn create(state: &Path, name: &str) -> Result<Self, CliError> {
        let runs = state.join("run");
        private_dir(&runs)?;
        remove_dead(&runs);
        let path = runs.join(format!("{name}-{}", std::process::id()));
        // Ours by its process id: whatever is there was left by a process of the same number.
        let _ = fs::remove_dir_all(&path);
        private_dir(&path)?;
        // Locked before it has its name: an `up` that starts now would take an unlocked one for dead.
        let (new, lock_path) = (path.join("lock.new"), path.join(LOCK));
        let lock = private_file(&new).map_err(CliError::file("create", &new))?;
        lock.lock().map_err(CliError::file("lock", &new))?;
        fs::rename(&new, &lock_path).map_err(CliError::file("create", &lock_path))?;
        Ok(Self { path, _lock: lock, keep: false })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the directory behind, until the next `up` tidies.
    pub const fn keep(&mut self) {
        self.keep = true;
    }

    /// Writes a file that only this user can read.
    ///
    /// # Errors
    /// [`CliError::File`].
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf, CliError> {
        let path = self.path.join(name);
        let _ = fs::remove_file(&path);
        private_file(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(CliError::file("write", &path))?;
        Ok(path)
    }

    /// Publishes `state` for `splitmodel status`, in one step.
    ///
    /// # Errors
    /// [`CliError::File`].
    pub fn publish(&self, state: &RunState) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(state).unwrap_or_default();
        let new = self.write("state.json.new", &text)?;
        let path = self.path.join(STATE);
        fs::rename(&new, &path).map_err(CliError::file("write", &path))
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
            // Gone only if no other run is there.
            if let Some(runs) = self.path.parent() {
                let _ = fs::remove_dir(runs);
            }
        }
    }
}

/// The runs under `state` whose `up` is alive, by name.
///
/// # Errors
/// [`CliError::File`] when the directory is there and cannot be read.
pub fn running(state: &Path) -> Result<Vec<RunState>, CliError> {
    let runs = state.join("run");
    let entries = match fs::read_dir(&runs) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(CliError::file("read", &runs)(e)),
    };
    let mut found: Vec<RunState> =
        entries.flatten().filter(|e| !is_dead(&e.path())).filter_map(|e| read_state(&e.path().join(STATE))).collect();
    found.sort_by(|a, b| (&a.name, a.pid).cmp(&(&b.name, b.pid)));
    Ok(found)
}

fn read_state(path: &Path) -> Option<RunState> {
    if fs::metadata(path).ok()?.len() > MAX_STATE_BYTES {
        return None;
    }
    serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
}

/// Whether the run's process has ended. A directory without a lock file is being made or is not ours.
fn is_dead(run: &Path) -> bool {
    File::open(run.join(LOCK)).is_ok_and(|file| file.try_lock().is_ok())
}

fn remove_dead(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        if is_dead(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn private_dir(path: &Path) -> Result<(), CliError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(CliError::file("create", path))
}

fn private_file(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn state(name: &str) -> RunState {
        RunState { name: name.into(), pid: 7, url: "http://h".into(), control: vec!["127.0.0.1:1".into()] }
    }

    #[test]
    fn a_run_is_listed_while_it_lives_and_gone_after() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(running(dir.path()).unwrap(), []);
        let run = RunDir::create(dir.path(), "m").unwrap();
        run.publish(&state("m")).unwrap();
        assert_eq!(running(dir.path()).unwrap(), [state("m")]);
        let file = run.write("secret", "x").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o077, 0);
        assert_eq!(fs::metadata(run.path()).unwrap().permissions().mode() & 0o077, 0);
        drop(run);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_dead_run_left_is_not_listed_and_goes_with_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let mut kept = RunDir::create(dir.path(), "old").unwrap();
        kept.publish(&state("old")).unwrap();
        kept.keep();
        let path = kept.path().to_owned();
        drop(kept);
        assert!(path.exists());
        assert_eq!(running(dir.path()).unwrap(), []);
        let next = RunDir::create(dir.path(), "new").unwrap();
        assert!(!path.exists() && next.path().exists());
    }

    #[test]
    fn garbage_is_not_a_run() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::create(dir.path(), "m").unwrap();
        fs::write(run.path().join(STATE), "{").unwrap();
        assert_eq!(running(dir.path()).unwrap(), []);
    }
}
