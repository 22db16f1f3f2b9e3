//! The replay tool: a schedule log of any chain through one unsplit process.

use std::io::Write;
use std::path::{Path, PathBuf};

use splitmodel_chain::replay::{ReplayError, Replayed, replay};
use splitmodel_chain::schedule::{LogError, read};
use splitmodel_chain::shadow::{self, Difference};
use splitmodel_engine::{EngineConfig, EngineError, Slice};
use splitmodel_gguf::Model;

use crate::load::{LoadError, vocabulary_of};

/// Why a log cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayFailure {
    /// The file.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The engine settings in it.
    #[error("the log's engine settings: {0}")]
    Settings(serde_json::Error),
    /// Another model.
    #[error("the log is of model {log}, the file is model {file}")]
    Model {
        /// Digest in the log.
        log: String,
        /// Digest of the file.
        file: String,
    },
    /// A lane held something else than its session's history.
    #[error("the shadow of the lanes differs: {0}")]
    Shadow(#[from] Difference),
    /// The model.
    #[error(transparent)]
    Gguf(#[from] splitmodel_gguf::Error),
    /// The vocabulary.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// llama.cpp.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The replay itself.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// Standard output.
    #[error("standard output: {0}")]
    Print(#[from] std::io::Error),
}

/// Replays `log` through the unsplit model in `model` with the settings in the log.
///
/// # Errors
/// [`ReplayFailure`]; differences of logits are in the result.
pub fn run(log: &Path, model: &Path) -> Result<Replayed, ReplayFailure> {
    let file = std::fs::File::open(log).map_err(|source| ReplayFailure::Open { path: log.to_owned(), source })?;
    let (head, ops) = read(std::io::BufReader::new(file))?;
    let digest = Model::open(model)?.digest().to_owned();
    if digest != head.model {
        return Err(ReplayFailure::Model { log: head.model, file: digest });
    }
    let settings: EngineConfig = serde_json::from_value(head.engine).map_err(ReplayFailure::Settings)?;
    shadow::check(&ops, None)?;
    let vocabulary = vocabulary_of(model)?;
    let mut whole = Slice::load_whole(model, &settings, &mut |_| true)?;
    Ok(replay(&ops, &mut whole, Some(&vocabulary.grammars))?)
}

/// The `replay` command. `false`: the logits differ.
///
/// # Errors
/// [`ReplayFailure`].
pub fn main(log: &Path, model: &Path) -> Result<bool, ReplayFailure> {
    let result = run(log, model)?;
    let mut out = std::io::stdout().lock();
    for m in &result.mismatches {
        writeln!(out, "operation {}: session {}, position {}: {}", m.op, m.session, m.position, m.what)?;
    }
    writeln!(
        out,
        "{} batches, {} rows; {} rows of logits compared, {} tokens sampled again: {}",
        result.batches,
        result.rows,
        result.compared,
        result.sampled,
        match result.mismatches.len() {
            0 if result.compared == 0 => "nothing to compare; replay the log of the last stage".to_owned(),
            0 => "bit-identical".to_owned(),
            n => format!("{n} differ"),
        }
    )?;
    if result.dropped {
        writeln!(
            out,
            "rows were dropped in this run: stages may have held other cells, so a difference proves nothing"
        )?;
    }
    Ok(result.mismatches.is_empty())
}
