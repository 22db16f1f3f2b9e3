use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use crate::config::TlsConfig;

/// A certificate file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("link.tls.{field}: {} cannot be read: {source}", path.display())]
pub struct TlsError {
    /// `ca`, `cert` or `key`.
    pub field: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: std::io::Error,
}

/// Why a service ended, other than by being told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A certificate file cannot be read.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The transport failed, or refused the certificates.
    #[error("the control service failed: {}", crate::client::with_causes(.0))]
    Transport(#[source] tonic::transport::Error),
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError { field, path: path.to_owned(), source })
}

fn identity(tls: &TlsConfig) -> Result<Identity, TlsError> {
    Ok(Identity::from_pem(read("cert", &tls.cert)?, read("key", &tls.key)?))
}

/// Requires a client certificate of the same authority.
pub(crate) fn server_tls(tls: &TlsConfig) -> Result<ServerTlsConfig, TlsError> {
    let ca = Certificate::from_pem(read("ca", &tls.ca)?);
    Ok(ServerTlsConfig::new().identity(identity(tls)?).client_ca_root(ca))
}

/// Expects `name` in the certificate of the server.
pub(crate) fn client_tls(tls: &TlsConfig, name: &str) -> Result<ClientTlsConfig, TlsError> {
    let ca = Certificate::from_pem(read("ca", &tls.ca)?);
    Ok(ClientTlsConfig::new().identity(identity(tls)?).ca_certificate(ca).domain_name(name))
}
