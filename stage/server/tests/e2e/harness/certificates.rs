//! Certificates for stages.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use splitmodel_control::config::TlsConfig;

/// An authority with a folder for its files.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
}

/// DNS name of a stage.
pub fn name(stage: usize) -> String {
    format!("stage-{stage}.e2e")
}

impl Authority {
    pub fn new(dir: &Path, name: &str) -> Self {
        let dir = dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    /// Certificate of `stage` in a chain of `stages`.
    pub fn stage(&self, stage: usize, stages: usize) -> TlsConfig {
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![name(stage)]).unwrap().signed_by(&key, &self.issuer).unwrap();
        let file = |kind: &str| self.dir.join(format!("stage-{stage}.{kind}.pem"));
        std::fs::write(file("cert"), leaf.pem()).unwrap();
        std::fs::write(file("key"), key.serialize_pem()).unwrap();
        let names = (0..stages).map(name).collect();
        TlsConfig { ca: self.dir.join("ca.pem"), cert: file("cert"), key: file("key"), names }
    }

    /// Certificates of all stages of a chain.
    pub fn chain(&self, stages: usize) -> Vec<TlsConfig> {
        (0..stages).map(|i| self.stage(i, stages)).collect()
    }
}

/// A folder of certificates as Kubernetes mounts a Secret: the files are links into `..data`, itself a link that a new
/// generation replaces in one step.
pub struct Secret {
    dir: PathBuf,
    generation: u32,
}

const FILES: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];

impl Secret {
    pub fn new(dir: PathBuf, files: &TlsConfig) -> Self {
        std::fs::create_dir(&dir).unwrap();
        let mut secret = Self { dir, generation: 0 };
        secret.put(files);
        for name in FILES {
            symlink(Path::new("..data").join(name), secret.dir.join(name)).unwrap();
        }
        secret
    }

    /// Replaces all files at once.
    pub fn put(&mut self, files: &TlsConfig) {
        self.generation += 1;
        let name = format!("..{}", self.generation);
        std::fs::create_dir(self.dir.join(&name)).unwrap();
        for (from, to) in [&files.ca, &files.cert, &files.key].into_iter().zip(FILES) {
            std::fs::copy(from, self.dir.join(&name).join(to)).unwrap();
        }
        let [new, data] = ["..new", "..data"].map(|n| self.dir.join(n));
        symlink(name, &new).unwrap();
        std::fs::rename(new, data).unwrap();
    }

    /// What the configuration of a stage names, in a chain of `stages`.
    pub fn config(&self, stages: usize) -> TlsConfig {
        let [ca, cert, key] = FILES.map(|name| self.dir.join(name));
        TlsConfig { ca, cert, key, names: (0..stages).map(name).collect() }
    }
}
