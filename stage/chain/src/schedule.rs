//! The schedule: what a stage ran, operation by operation, so that any run can be repeated through an unsplit process.
//!
//! A log is JSON lines: a [`Head`], then [`Op`]s in the order they were run.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};
use splitmodel_link::frame::{Epoch, Lane, Position, SessionId, Token};

/// Version of the log format.
pub const VERSION: u32 = 1;

/// First line of a log: what must be equal for a replay to be bit-exact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// [`VERSION`].
    pub version: u32,
    /// Digest of the model's header.
    pub model: String,
    /// Layers of the stage that logged, `[first, end)`.
    pub layers: (u32, u32),
    /// Engine settings as the stage ran them (opaque here; the replay loads the unsplit model with them).
    pub engine: serde_json::Value,
}

/// A row of a batch as it was computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedRow(
    /// Session.
    pub SessionId,
    /// Epoch.
    pub Epoch,
    /// Lane.
    pub Lane,
    /// Position.
    pub Position,
    /// Token.
    pub Token,
    /// Whether logits were wanted.
    pub bool,
);

/// Logits of one wanted row, as a digest, and what was sampled from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoggedLogits {
    /// Index of the row in the batch.
    pub row: usize,
    /// Hex BLAKE3 of the logits' little-endian bytes.
    pub digest: String,
    /// Whether any logit was NaN (always a failure).
    pub nan: bool,
    /// The sampled token, −1 when sampling failed.
    pub token: Token,
    /// The logits themselves, where full logging was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<Vec<f32>>,
}

/// One operation on a slice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// The cache was emptied.
    Clear,
    /// Cells were removed, see [`crate::runtime::Runtime::seq_rm`].
    SeqRm {
        /// Lane.
        lane: Lane,
        /// First position.
        from: Position,
        /// End, negative for all.
        to: Position,
    },
    /// Cells were shared.
    SeqCp {
        /// Source lane.
        from: Lane,
        /// Target lane.
        to: Lane,
        /// First position.
        begin: Position,
        /// End.
        end: Position,
    },
    /// The state of a lane was kept.
    SaveState {
        /// Lane.
        lane: Lane,
        /// What it is kept as.
        page: u64,
    },
    /// A kept state was put into a lane.
    LoadState {
        /// What it was kept as.
        page: u64,
        /// Lane.
        lane: Lane,
    },
    /// A kept state was forgotten.
    DropState {
        /// What it was kept as.
        page: u64,
    },
    /// A sampler was set up.
    Config {
        /// Session.
        session: SessionId,
        /// Lane.
        lane: Lane,
        /// The generation config.
        config: serde_json::Value,
    },
    /// A batch was computed.
    Decode {
        /// Frame number.
        seq: u64,
        /// Rows of the batch.
        rows: Vec<LoggedRow>,
        /// Logits of the wanted rows; empty on stages before the last.
        logits: Vec<LoggedLogits>,
    },
    /// Rows were dropped: stages may differ from here on, so a replay of this log proves nothing about these sessions.
    Dropped {
        /// Frame number.
        seq: u64,
        /// Sessions concerned.
        sessions: Vec<SessionId>,
    },
}

/// Receives operations as they are run.
pub trait Sink: Send {
    /// Takes one operation. Failures to store it are the sink's to report; they never fail a frame.
    fn record(&mut self, op: Op);
    /// Whether whole logits are wanted, not only digests.
    fn full_logits(&self) -> bool {
        false
    }
}

impl Sink for Vec<Op> {
    fn record(&mut self, op: Op) {
        self.push(op);
    }
}

/// A log on a writer. After the first failed write it stops and keeps the error.
pub struct Log<W: Write + Send> {
    out: W,
    full: bool,
    error: Option<std::io::Error>,
}

impl<W: Write + Send> Log<W> {
    /// Starts a log with its head.
    ///
    /// # Errors
    /// When the head cannot be written.
    pub fn create(mut out: W, head: &Head, full: bool) -> std::io::Result<Self> {
        serde_json::to_writer(&mut out, head)?;
        out.write_all(b"\n")?;
        out.flush()?;
        Ok(Self { out, full, error: None })
    }

    /// The error that ended the log, if one did.
    pub fn error(&self) -> Option<&std::io::Error> {
        self.error.as_ref()
    }
}

impl<W: Write + Send> Sink for Log<W> {
    fn record(&mut self, op: Op) {
        if self.error.is_some() {
            return;
        }
        let line = serde_json::to_vec(&op).map_err(std::io::Error::from);
        let written = line.and_then(|mut l| {
            l.push(b'\n');
            self.out.write_all(&l)?;
            self.out.flush()
        });
        self.error = written.err();
    }

    fn full_logits(&self) -> bool {
        self.full
    }
}

/// Why a log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file cannot be read.
    #[error("the schedule log cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// A line is not what it should be.
    #[error("line {line} of the schedule log: {source}")]
    Line {
        /// Line number from 1.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// Another format.
    #[error("the schedule log has format version {0}, this program reads version {VERSION}")]
    Version(u32),
    /// Nothing in it.
    #[error("the schedule log is empty")]
    Empty,
}

/// Reads a log; a cut last line (the stage was killed) ends it quietly.
///
/// # Errors
/// [`LogError`].
pub fn read(input: impl BufRead) -> Result<(Head, Vec<Op>), LogError> {
    let mut lines = input.split(b'\n').enumerate();
    let (_, first) = lines.next().ok_or(LogError::Empty)?;
    let head: Head = serde_json::from_slice(&first?).map_err(|source| LogError::Line { line: 1, source })?;
    if head.version != VERSION {
        return Err(LogError::Version(head.version));
    }
    let mut ops = Vec::new();
    for (i, line) in lines {
        let line = line?;
        match serde_json::from_slice(&line) {
            Ok(op) => ops.push(op),
            Err(_) if line.is_empty() => {}
            Err(source) if source.is_eof() => break,
            Err(source) => return Err(LogError::Line { line: i + 1, source }),
        }
    }
    Ok((head, ops))
}
