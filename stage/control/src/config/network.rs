use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Connections to the other stages. A chain of one has none and ignores this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkConfig {
    /// Where this stage listens: for its upstream, or, on stage 0, for the last stage.
    pub bind: SocketAddr,
    /// `host:port` of the next stage. On every stage but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downstream: Option<String>,
    /// `host:port` of stage 0's link, where predictions go. On the last stage only.
    #[serde(rename = "return", skip_serializing_if = "Option::is_none")]
    pub return_to: Option<String>,
    /// Certificates. Absent: plain TCP, which only loopback addresses or `insecure` allow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Allows plain TCP on addresses that are not loopback.
    pub insecure: bool,
    /// Milliseconds without a word after which a peer is taken for dead.
    pub peer_deadline_ms: u32,
    /// Messages accepted before more credit is granted. Absent: twice the frames in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credits: Option<u32>,
    /// Largest message accepted, in bytes.
    pub max_message_bytes: u32,
    /// Type of activations on the wire. Equal on all stages.
    pub activations: Activations,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            bind: loopback(7101),
            downstream: None,
            return_to: None,
            tls: None,
            insecure: false,
            peer_deadline_ms: 10_000,
            credits: None,
            max_message_bytes: 64 << 20,
            activations: Activations::F32,
        }
    }
}

/// Certificates of this stage, PEM files. They serve the links and the control service alike, and are read again when they
/// were replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// Authorities that sign the chain's certificates; several while they are rotated.
    pub ca: PathBuf,
    /// Certificate chain of this stage.
    pub cert: PathBuf,
    /// Private key of `cert`.
    pub key: PathBuf,
    /// DNS name in the certificate of each stage, by index: one per stage.
    pub names: Vec<String>,
}

/// Type of activations on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// Bit-exact.
    #[default]
    F32,
    /// Half the bytes, with a scale per row; changes text now and then.
    F16,
}

impl Activations {
    /// The name, as in the file and on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }
}

/// Where a service listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindConfig {
    /// `ip:port`; port 0 takes a free one.
    pub bind: SocketAddr,
}

impl BindConfig {
    /// Default of the control service: 127.0.0.1:7102.
    #[must_use]
    pub const fn control() -> Self {
        Self { bind: loopback(7102) }
    }

    /// Default of the health service: 127.0.0.1:7103.
    #[must_use]
    pub const fn health() -> Self {
        Self { bind: loopback(7103) }
    }
}

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// The OpenAI API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiConfig {
    /// `ip:port` of the HTTP server.
    pub bind: SocketAddr,
    /// Name of the model in `/v1/models` and in answers.
    pub model: String,
    /// Other names that requests may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Keys that clients must present. With none here and no file, the API is open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub api_keys: Vec<Secret>,
    /// File with more keys, one per line; empty lines and lines with `#` are skipped. A directory stands for all files in it,
    /// as a mounted Secret is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
    /// Origins that browsers may call from; `*` for any; empty for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cors: Vec<String>,
    /// Pause in milliseconds after which a silent stream gets a comment.
    #[serde(default = "default_keep_alive")]
    pub keep_alive_ms: u32,
    /// Longest time in milliseconds for the head of a request, and for an idle connection until its next one.
    #[serde(default = "default_header_timeout")]
    pub header_timeout_ms: u32,
    /// Connections at once; more wait to be accepted.
    #[serde(default = "default_max_connections")]
    pub max_connections: u32,
}

const fn default_keep_alive() -> u32 {
    10_000
}

const fn default_header_timeout() -> u32 {
    30_000
}

const fn default_max_connections() -> u32 {
    4096
}

impl ApiConfig {
    /// The API of `model` at `bind`, open to everyone, with defaults for the rest.
    #[must_use]
    pub const fn new(bind: SocketAddr, model: String) -> Self {
        Self {
            bind,
            model,
            aliases: Vec::new(),
            api_keys: Vec::new(),
            api_key_file: None,
            cors: Vec::new(),
            keep_alive_ms: default_keep_alive(),
            header_timeout_ms: default_header_timeout(),
            max_connections: default_max_connections(),
        }
    }
}

/// Text that never appears in logs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    #[must_use]
    pub const fn new(text: String) -> Self {
        Self(text)
    }

    /// The text itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}
