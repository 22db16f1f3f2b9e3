//! What can go wrong, in words for the user.
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What ended a command. Every message names the field, flag or file, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A file or directory could not be used.
    #[error("{}: cannot {action}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The manifest is wrong.
    #[error("{}: {message}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The field and the remedy.
        message: String,
    },
    /// The model cannot be read.
    #[error("spec.model.source {model}: {message}")]
    Model {
        /// The source, as written.
        model: String,
        /// What is wrong with it.
        message: String,
    },
    /// The model does not go onto the stages.
    #[error("the model cannot be split: {0}")]
    Plan(String),
    /// A flag has a value that cannot be meant.
    #[error("--{flag}: {message}")]
    Flag {
        /// The flag's name.
        flag: &'static str,
        /// What is wrong, and what would be right.
        message: String,
    },
    /// The API's port is taken.
    #[error("{address} is in use by another program; stop that, or choose another port with --port")]
    PortInUse {
        /// Where the API should listen.
        address: SocketAddr,
    },
    /// The API's address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another with --host and --port")]
    Listen {
        /// Where the API should listen.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// No free ports for the stages' links.
    #[error("free ports on 127.0.0.1 were taken by others {0} times; end programs that use many ports and try again")]
    Ports(u32),
    /// The stage program is not there.
    #[error("the stage program is missing: looked for {tried}; build it, or name it with --stage-binary")]
    NoStageBinary {
        /// Places that were looked at.
        tried: String,
    },
    /// The stage program does not start.
    #[error("{}: cannot be started: {source}; name the right program with --stage-binary", binary.display())]
    Spawn {
        /// The program.
        binary: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A stage failed too often.
    #[error("stage {stage} failed {tries} times in a row, lastly with {exit}:\n{lines}\nits whole log: {}", log.display())]
    StageFailed {
        /// Index of the stage.
        stage: u32,
        /// Starts that failed.
        tries: u32,
        /// How the last one ended.
        exit: String,
        /// First fatal lines of the last one.
        lines: String,
        /// Its log, which is kept.
        log: PathBuf,
    },
    /// The stage configuration that was made is wrong.
    #[error(transparent)]
    Config(#[from] splitmodel_control::ConfigError),
    /// A control service cannot be asked.
    #[error(transparent)]
    Control(#[from] splitmodel_control::ClientError),
    /// The API cannot be asked.
    #[error("{url}: {message}")]
    Api {
        /// What was asked.
        url: String,
        /// What went wrong, and the remedy.
        message: String,
    },
    /// The cluster was no help.
    #[error(transparent)]
    Cluster(#[from] Box<crate::cluster::ClusterError>),
    /// Standard output takes no more.
    #[error("cannot write the output: {0}")]
    Output(std::io::Error),
    /// Something of the operating system failed.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

impl From<crate::cluster::ClusterError> for CliError {
    fn from(error: crate::cluster::ClusterError) -> Self {
        Self::Cluster(Box::new(error))
    }
}

impl CliError {
    /// Whether nobody reads the output any more, as after `| head`: an end, not a failure.
    #[must_use]
    pub fn is_closed_output(&self) -> bool {
        matches!(self, Self::Output(source) if source.kind() == std::io::ErrorKind::BrokenPipe)
    }

    /// For `map_err`: a failure to do `action` with `path`.
    pub fn file(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}
