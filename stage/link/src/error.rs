//! What can go wrong on a link.

use std::io;
use std::time::Duration;

use crate::codec::CodecError;
use crate::setup::Refusal;
use crate::tls::TlsError;

/// Error of establishing a connection or of a single read or write on it.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The transport failed or ended.
    #[error("{what}: {source}")]
    Io {
        /// What was going on.
        what: &'static str,
        /// The transport's error.
        source: io::Error,
    },
    /// The bytes are no message, or the message cannot be sent.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The peer answered our setup with a refusal.
    #[error("the peer refused the connection: {0}")]
    Refused(Refusal),
    /// We refused the peer; it was told so.
    #[error("the peer was refused: {0}")]
    Refusing(Refusal),
    /// Certificates or the TLS protocol.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The peer did not get as far as the setup in time.
    #[error(
        "no established connection within {after:?}: the peer does not answer, or a firewall swallows the connection"
    )]
    Deadline {
        /// The deadline.
        after: Duration,
    },
}

impl LinkError {
    /// Wraps a transport error; one that TLS caused becomes [`LinkError::Tls`].
    #[must_use]
    pub fn io(what: &'static str, source: io::Error) -> Self {
        match TlsError::inside(&source) {
            Some(e) => Self::Tls(e),
            None => Self::Io { what, source },
        }
    }
}
