use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The source is none, or of a kind that is not read here.
    #[error("model.source: {0}")]
    Source(String),
    /// The credentials cannot be used.
    #[error("model.credentials: {}: {what}", dir.display())]
    Credentials {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// HTTP or TLS cannot be set up.
    #[error("downloads cannot be set up: {0}")]
    Setup(String),
    /// The files, or the way to them (see [`http_error`]).
    #[error(transparent)]
    Gguf(#[from] splitmodel_gguf::Error),
}

/// Why a remote file cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// No connection, or it broke.
    #[error("{0}")]
    Connection(String),
    /// A connection without a word.
    #[error("no byte came for {} s", .0.as_secs_f32())]
    Stalled(Duration),
    /// The server cannot just now.
    #[error("the server answers HTTP {status}")]
    Busy {
        /// Status.
        status: u16,
        /// Pause it asks for.
        retry_after: Option<Duration>,
    },
    /// Tried again and again.
    #[error(
        "{last}; gave up after {tries} tries that brought no byte; check the address, the network policy and the proxy"
    )]
    GaveUp {
        /// Tries.
        tries: u32,
        /// What came of the last.
        last: Box<HttpError>,
    },
    /// The server is not who it should be.
    #[error("the server's certificate is refused: {0}; for a private authority name its bundle in SSL_CERT_FILE")]
    Certificate(String),
    /// The server sends whole files only.
    #[error(
        "the server sends no ranges (HTTP {0} to a range request); use one that does, or bring the file to a volume"
    )]
    NoRanges(u16),
    /// It does not let us.
    #[error(
        "the server answers HTTP {status}{words}; {}",
        if *credentials { "the credentials were sent and may not read it" }
        else { "if it needs a token, give credentials (model.credentialsSecret)" }
    )]
    Denied {
        /// 401, 403 or 407.
        status: u16,
        /// Whether credentials were sent.
        credentials: bool,
        /// The server's words, with a colon before them, or nothing.
        words: String,
    },
    /// It has no such file.
    #[error(
        "the server answers HTTP {status}{words}: there is no such file; check owner, repository, revision and path"
    )]
    Missing {
        /// 404 or 410.
        status: u16,
        /// The server's words, with a colon before them, or nothing.
        words: String,
    },
    /// Any other refusal.
    #[error("the server answers HTTP {status}{words}")]
    Refused {
        /// Status.
        status: u16,
        /// The server's words, with a colon before them, or nothing.
        words: String,
    },
    /// Redirected to where this does not go.
    #[error("the server redirects {0}")]
    Redirect(&'static str),
    /// The file is another than before.
    #[error(
        "the file changed while it was read: {what} was {before} and is {now}; start again, and name a fixed revision"
    )]
    Changed {
        /// `size`, `ETag` or `Last-Modified`.
        what: &'static str,
        /// Before.
        before: String,
        /// Now.
        now: String,
    },
    /// An answer that makes no sense.
    #[error("the server's answer makes no sense: {0}")]
    Answer(String),
    /// Nothing is in the file.
    #[error("the file is empty")]
    Empty,
}

impl HttpError {
    /// Whether another try may help.
    pub(crate) fn passes(&self) -> bool {
        matches!(self, Self::Connection(_) | Self::Stalled(_) | Self::Busy { .. })
    }

    /// Whether starting again is pointless as long as neither the source nor the configuration is changed.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        !self.passes() && !matches!(self, Self::GaveUp { .. } | Self::Changed { .. })
    }

    pub(crate) fn into_io(self) -> io::Error {
        let kind = match &self {
            Self::Connection(_) | Self::Busy { .. } | Self::GaveUp { .. } => io::ErrorKind::HostUnreachable,
            Self::Stalled(_) => io::ErrorKind::TimedOut,
            Self::Denied { .. } => io::ErrorKind::PermissionDenied,
            Self::Missing { .. } => io::ErrorKind::NotFound,
            _ => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, self)
    }

    pub(crate) fn into_gguf(self, file: String, action: &'static str) -> splitmodel_gguf::Error {
        splitmodel_gguf::Error::Io { file, action, source: self.into_io() }
    }
}

/// The HTTP side of an error of a model, if it has one.
#[must_use]
pub fn http_error(error: &splitmodel_gguf::Error) -> Option<&HttpError> {
    match error {
        splitmodel_gguf::Error::Io { source, .. } => source.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// Whether starting again is pointless as long as neither the model, its source nor the configuration is changed.
#[must_use]
pub fn is_permanent(error: &splitmodel_gguf::Error) -> bool {
    use splitmodel_gguf::Error;
    match error {
        Error::Io { source, .. } => http_error(error).map_or_else(
            || {
                matches!(
                    source.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput
                )
            },
            HttpError::is_permanent,
        ),
        Error::CacheFull { limit, needed, .. } => needed > limit,
        Error::DiskFull { .. } | Error::Corrupt { .. } => false,
        _ => true,
    }
}

impl FetchError {
    /// As [`is_permanent`].
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Source(_) | Self::Credentials { .. } => true,
            Self::Setup(_) => false,
            Self::Gguf(e) => is_permanent(e),
        }
    }
}
