//! Certificates on both sides: TLS 1.3 by rustls, and the name that a stage's certificate must carry.

mod store;

pub use store::TlsStore;

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::{Resumption, verify_server_name};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};

/// Error of certificates or of the TLS protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A PEM file cannot be used.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The expected name of a peer is no DNS name.
    #[error("{0:?} is no DNS name: name the chain with letters, digits and dashes")]
    Name(String),
    /// The peer showed no certificate.
    #[error("the peer shows no certificate: TLS is on here, give it one of the chain's CA")]
    NoCertificate,
    /// The peer's certificate is of another CA.
    #[error("the peer's certificate is not signed by our CA: all stages need certificates of one CA")]
    UnknownCa,
    /// The peer's certificate is for another name.
    #[error(
        "the peer's certificate is not for {expected:?}: the address leads to another stage, or the certificate is wrong"
    )]
    WrongName {
        /// DNS name that was expected.
        expected: String,
    },
    /// The peer's certificate is over or not yet valid.
    #[error("the peer's certificate is expired or not yet valid: renew it, and check the clocks")]
    Expired,
    /// The peer did not accept our certificate.
    #[error("the peer does not accept our certificate ({0}): check CA, name and dates of ours")]
    Rejected(String),
    /// Something else in the protocol, such as a peer that does not speak TLS.
    #[error("TLS: {0}; is TLS on at both ends?")]
    Protocol(String),
}

impl TlsError {
    /// The TLS error inside a transport error.
    pub(crate) fn inside(e: &io::Error) -> Option<Self> {
        e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()).map(Self::from)
    }
}

impl From<&rustls::Error> for TlsError {
    fn from(e: &rustls::Error) -> Self {
        use rustls::Error;
        match e {
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::InvalidCertificate(e) => match e {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownCa,
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. } => Self::Expired,
                CertificateError::NotValidForNameContext { expected, .. } => {
                    Self::WrongName { expected: expected.to_str().into_owned() }
                }
                other => Self::Protocol(other.to_string()),
            },
            Error::AlertReceived(
                alert @ (AlertDescription::CertificateRequired
                | AlertDescription::BadCertificate
                | AlertDescription::UnknownCA
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateUnknown
                | AlertDescription::AccessDenied
                | AlertDescription::DecryptError),
            ) => Self::Rejected(format!("{alert:?}")),
            other => Self::Protocol(other.to_string()),
        }
    }
}

/// Both ends' TLS of one stage.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// For dialling.
    pub client: Arc<ClientConfig>,
    /// For accepting; clients must show a certificate.
    pub server: Arc<ServerConfig>,
}

impl TlsConfig {
    /// Reads CA certificates, our certificate chain (leaf first) and its key, all PEM. [`TlsStore`] reads them again when
    /// they were replaced.
    ///
    /// # Errors
    /// [`TlsError::File`] with the file.
    pub fn from_pem_files(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let paths = [ca, cert, key].map(Path::to_path_buf);
        Self::from_pem(&paths, &store::read(&paths)?)
    }

    /// The same from what is in the files.
    fn from_pem(
        [ca, cert, key]: &[PathBuf; 3],
        [ca_pem, cert_pem, key_pem]: &store::Content,
    ) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(ca, ca_pem)? {
            roots.add(authority).map_err(|e| bad(ca, e))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(cert, cert_pem)?;
        let key_der = PrivateKeyDer::from_pem_slice(key_pem).map_err(|e| bad(key, e))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let only = &[&rustls::version::TLS13];
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|e| bad(ca, e))?;
        // Of what can go wrong here, the key is the most likely: it was replaced before or after its certificate.
        let pair = |e: rustls::Error| bad(key, format!("with the certificate in {}: {e}", cert.display()));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(only)
            .map_err(pair)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key_der.clone_key())
            .map_err(pair)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(only)
            .map_err(pair)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key_der)
            .map_err(pair)?;
        // Every handshake shows certificates of now: a resumed session would live by those of the past.
        server.send_tls13_tickets = 0;
        client.resumption = Resumption::disabled();
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn bad(path: &Path, why: impl Display) -> TlsError {
    TlsError::File { path: path.into(), why: why.to_string() }
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let list: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match list {
        Ok(list) if list.is_empty() => Err(bad(path, "no certificate in it; PEM is expected")),
        Ok(list) => Ok(list),
        Err(e) => Err(bad(path, e)),
    }
}

/// The DNS name that the certificate of a stage carries: `stage-<index>.<chain>`.
#[must_use]
pub fn stage_name(chain: &str, stage: u16) -> String {
    format!("stage-{stage}.{chain}")
}

/// `name` as rustls wants it.
pub(crate) fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    match ServerName::try_from(name.to_owned()) {
        Ok(n @ ServerName::DnsName(_)) => Ok(n),
        _ => Err(TlsError::Name(name.to_owned())),
    }
}

/// Whether the leaf certificate carries `name` as a DNS name.
pub(crate) fn check_name(leaf: &CertificateDer<'_>, name: &str) -> Result<(), TlsError> {
    let parsed = ParsedCertificate::try_from(leaf).map_err(|e| TlsError::from(&e))?;
    verify_server_name(&parsed, &server_name(name)?).map_err(|_| TlsError::WrongName { expected: name.to_owned() })
}
