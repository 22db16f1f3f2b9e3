//! Prefixes that outlive the process of a stage: their files, and stage 0's directory of them.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use splitmodel_cache::{DiskStore, Payload, Settings};
use splitmodel_control::StageConfig;
use splitmodel_engine::EngineConfig;
use tokio_util::sync::CancellationToken;

use crate::coordinator::Coordinator;
use crate::load::Packages;

/// The directory is written this long after it changed, at most.
const DELAY: Duration = Duration::from_secs(1);
/// Bytes of a directory: 127 prefixes of half a million tokens.
const MAX_DIRECTORY: u64 = 256 << 20;

fn folder(config: &StageConfig) -> PathBuf {
    config.cache.dir.join("prefixes").join(format!("{}-{}", config.chain, config.stage))
}

/// The files of this stage's prefixes, where the configuration asks for them; residents have none. What cannot be used costs later
/// requests time only, so it is said and the stage goes on without.
#[must_use]
pub fn open(config: &StageConfig, packages: &Packages, engine: &EngineConfig, kept: &Settings) -> Option<DiskStore> {
    let max_bytes = config.kv_cache.disk_bytes;
    if max_bytes == 0 || kept.max_entries == 0 || kept.payload == Payload::Resident {
        return None;
    }
    // Numbers of threads change no state.
    let engine = EngineConfig { threads: 0, threads_batch: 0, ..engine.clone() };
    let identity = format!(
        "{} layers {:?} stage {} of {} llama.cpp {} {engine:?} {:?}",
        packages.digest,
        config.layers,
        config.stage,
        config.stages,
        splitmodel_engine::llama_version(),
        kept.payload,
    );
    match DiskStore::open(&folder(config), &identity, max_bytes) {
        Ok(store) => {
            tracing::info!(prefixes = store.list().len(), bytes = store.bytes(), "prefixes are kept on disk");
            Some(store)
        }
        Err(error) => {
            tracing::warn!(%error, "prefixes are not kept on disk");
            None
        }
    }
}

/// Begins with the directory that an earlier stage 0 left, and writes it from now on until `stop`.
pub async fn follow(coordinator: Arc<Coordinator>, config: StageConfig, stop: CancellationToken) {
    let path = DiskStore::directory(&folder(&config));
    let (mut written, mut told) = (0, false);
    loop {
        let ends = stop.run_until_cancelled(tokio::time::sleep(DELAY)).await.is_none();
        if let Some((changes, snapshot)) = coordinator.directory(written) {
            let file = path.clone();
            match tokio::task::spawn_blocking(move || save(&file, &snapshot)).await {
                Ok(Err(error)) if !std::mem::replace(&mut told, true) => {
                    tracing::warn!(path = %path.display(), %error, "the directory of prefixes is not kept");
                }
                Ok(Ok(())) => (written, told) = (changes, false),
                _ => {} // it is tried again
            }
        }
        if ends {
            return;
        }
    }
}

/// What an earlier stage 0 left.
pub fn remember(coordinator: &Coordinator, config: &StageConfig) {
    let path = DiskStore::directory(&folder(config));
    let remembered = match read(&path) {
        Ok(snapshot) => coordinator.remember(&snapshot).map_err(|e| e.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = remembered {
        tracing::warn!(path = %path.display(), error, "kept prefixes are not found again");
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let about = std::fs::metadata(path)?;
    if !about.is_file() || about.len() > MAX_DIRECTORY {
        return Err(io::Error::other(format!("no file, or longer than {MAX_DIRECTORY} bytes")));
    }
    std::fs::read(path)
}

fn save(path: &Path, snapshot: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    DiskStore::create(&part)?.write_all(snapshot)?;
    std::fs::rename(part, path)
}
