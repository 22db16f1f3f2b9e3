//! Certificates for tests, made on the spot.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use splitmodel_link::TlsConfig;
use splitmodel_link::tls::TlsError;
use tempfile::TempDir;

/// A certificate authority with a folder for its files.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    pub folder: TempDir,
}

/// Paths of CA, certificate and key.
pub type Files = [PathBuf; 3];

impl Ca {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem, folder: TempDir::new().unwrap() }
    }

    /// Files of a certificate for `name`, changed by `change`.
    pub fn files(&self, name: &str, change: impl Fn(&mut CertificateParams)) -> Files {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let write = |file: &str, text: &str| {
            let path = self.folder.path().join(format!("{name}-{file}"));
            std::fs::write(&path, text).unwrap();
            path
        };
        [write("ca.pem", &self.pem), write("cert.pem", &cert.pem()), write("key.pem", &key.serialize_pem())]
    }

    pub fn config(&self, name: &str) -> TlsConfig {
        load(&self.files(name, |_| {})).unwrap()
    }

    pub fn expired(&self, name: &str) -> TlsConfig {
        let files = self.files(name, |p| {
            p.not_before = date_time_ymd(2020, 1, 1);
            p.not_after = date_time_ymd(2021, 1, 1);
        });
        load(&files).unwrap()
    }
}

pub fn load([ca, cert, key]: &Files) -> Result<TlsConfig, TlsError> {
    TlsConfig::from_pem_files(ca, cert, key)
}
