//! What can go wrong, and where.

use std::io;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error that names the file and the byte, key, tensor or layer it is about.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("{file}: cannot {action}: {source}")]
    Io {
        /// File, directory or remote object.
        file: String,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The disk has no room for what is to be written.
    #[error("{file}: the disk is full: {needed} bytes are needed; free some space or lower the cache's limit")]
    DiskFull {
        /// File that could not be written.
        file: String,
        /// Bytes the whole file needs.
        needed: u64,
    },
    /// The header breaks the format or a limit.
    #[error("{file}: at byte {offset}: {what}")]
    Header {
        /// File.
        file: String,
        /// Byte offset of the offending field.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// A metadata key is missing or has a value that cannot be used.
    #[error("{file}: metadata key '{key}': {what}")]
    Key {
        /// File.
        file: String,
        /// Key.
        key: String,
        /// What is wrong.
        what: String,
    },
    /// A tensor is missing or contradicts the file or the metadata.
    #[error("{file}: tensor '{tensor}': {what}")]
    Tensor {
        /// File.
        file: String,
        /// Tensor.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// The shards of a model do not belong together.
    #[error("{file}: shards: {what}")]
    Shards {
        /// File.
        file: String,
        /// What is wrong.
        what: String,
    },
    /// The architecture, or this model of it, cannot be cut.
    #[error("architecture '{arch}' cannot be split: {reason}")]
    Unsupported {
        /// `general.architecture` of the model.
        arch: String,
        /// Why not.
        reason: String,
    },
    /// The layer range is not one a stage can hold.
    #[error("layers {first}..{end}: {reason}")]
    Range {
        /// First layer.
        first: u32,
        /// One past the last layer.
        end: u32,
        /// Why not.
        reason: String,
    },
    /// A token id outside the embedding table.
    #[error("{file}: token {token} is outside the embedding table of {rows} rows")]
    Token {
        /// File.
        file: String,
        /// Token id asked for.
        token: i64,
        /// Rows in the table.
        rows: u64,
    },
    /// The cache cannot make room without evicting what is in use.
    #[error(
        "{dir}: the slice cache is limited to {limit} bytes, {in_use} of them are in use, and {needed} more are \
         needed; raise the limit"
    )]
    CacheFull {
        /// Directory of the cache.
        dir: String,
        /// Its limit in bytes.
        limit: u64,
        /// Bytes that running stages hold.
        in_use: u64,
        /// Bytes of the new entry.
        needed: u64,
    },
    /// An entry of the cache is not what was stored.
    #[error("{file}: corrupt cache entry: {what}")]
    Corrupt {
        /// File.
        file: String,
        /// What differs.
        what: String,
    },
}

impl Error {
    pub(crate) fn io(file: impl Into<String>, action: &'static str, source: io::Error) -> Self {
        Self::Io { file: file.into(), action, source }
    }

    pub(crate) fn key(file: impl Into<String>, key: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Key { file: file.into(), key: key.into(), what: what.into() }
    }

    pub(crate) fn tensor(file: impl Into<String>, tensor: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Tensor { file: file.into(), tensor: tensor.into(), what: what.into() }
    }
}
