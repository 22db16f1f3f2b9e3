//! Certificates on both sides: TLS 1.3 by rustls, and the name that a stage's certificate must carry.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_name;
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
    /// Certificate, key and CA do not make a configuration.
    #[error("certificate, key and CA do not go together: {0}")]
    Config(String),
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
    /// Reads CA certificates, our certificate chain (leaf first) and its key, all PEM.
    ///
    /// # Errors
    /// [`TlsError::File`] with the file, or [`TlsError::Config`].
    pub fn from_pem_files(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let bad = |path: &Path, why: &dyn std::fmt::Display| TlsError::File { path: path.into(), why: why.to_string() };
        let read = |path: &Path| std::fs::read(path).map_err(|e| bad(path, &e));
        let certificates = |path: &Path| -> Result<Vec<_>, TlsError> {
            let list: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
            match list {
                Ok(list) if list.is_empty() => Err(bad(path, &"no certificate in it; PEM is expected")),
                Ok(list) => Ok(list),
                Err(e) => Err(bad(path, &e)),
            }
        };
        let key_der = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|e| bad(key, &e))?;
        Self::from_der(certificates(ca)?, certificates(cert)?, key_der)
    }

    /// The same from DER.
    ///
    /// # Errors
    /// [`TlsError::Config`] when the parts do not go together.
    pub fn from_der(
        ca: Vec<CertificateDer<'static>>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, TlsError> {
        fn config(e: impl std::fmt::Display) -> TlsError {
            TlsError::Config(e.to_string())
        }
        let mut roots = RootCertStore::empty();
        for certificate in ca {
            roots.add(certificate).map_err(config)?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let only = &[&rustls::version::TLS13];
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(config)?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(only)
            .map_err(config)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(config)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(only)
            .map_err(config)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(config)?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
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
