//! The control service under mutual TLS: right certificates pass, everything else does not.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use splitmodel_control::config::TlsConfig;
use splitmodel_control::{
    ClientError, Conditioning, ControlClient, ControlHandler, ControlService, HandlerError, ServeError, StageStatus,
    StatusHub, serve,
};
use tokio::net::TcpListener;

const WAIT: Duration = Duration::from_secs(20);

struct Nothing;

impl ControlHandler for Nothing {
    async fn drain(&self, _: Option<Duration>) -> Result<(), HandlerError> {
        Ok(())
    }
    async fn probe(&self) -> Result<Duration, HandlerError> {
        Err(HandlerError::Unavailable("no chain".into()))
    }
    async fn set_conditioning(&self, _: Conditioning) -> Result<(), HandlerError> {
        Ok(())
    }
}

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Writes a leaf for `name`, signed by `signer`, and the `trusted` authority, into `dir`.
fn files(dir: &Path, name: &str, signer: &Authority, trusted: &Authority) -> TlsConfig {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, signer).unwrap();
    std::fs::create_dir_all(dir).unwrap();
    let config = TlsConfig {
        ca: dir.join("ca.pem"),
        cert: dir.join("cert.pem"),
        key: dir.join("key.pem"),
        names: vec![name.to_owned()],
    };
    std::fs::write(&config.ca, trusted.pem()).unwrap();
    std::fs::write(&config.cert, cert.pem()).unwrap();
    std::fs::write(&config.key, key.serialize_pem()).unwrap();
    config
}

async fn start(tls: TlsConfig) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let hub = StatusHub::new(StageStatus { chain: "tls".into(), ..StageStatus::default() });
    let service = ControlService::new(hub, Arc::new(Nothing));
    tokio::spawn(async move { serve(listener, service, Some(&tls), std::future::pending()).await });
    address
}

async fn ask(client: Result<ControlClient, ClientError>) -> Result<StageStatus, ClientError> {
    client?.status().await
}

#[tokio::test]
async fn only_the_right_certificates_pass() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (authority(), authority());
    let server = files(&dir.path().join("server"), "stage-0.test", &ours, &ours);
    let good = files(&dir.path().join("good"), "cli.test", &ours, &ours);
    let strange_leaf = files(&dir.path().join("leaf"), "cli.test", &theirs, &ours);
    let strange_ca = files(&dir.path().join("ca"), "cli.test", &ours, &theirs);
    let address = start(server).await;

    let status = ask(ControlClient::connect_tls(&address, "stage-0.test", &good, WAIT).await).await.unwrap();
    assert_eq!(status.chain, "tls");

    ask(ControlClient::connect_tls(&address, "stage-1.test", &good, WAIT).await).await.expect_err("another name");
    ask(ControlClient::connect_tls(&address, "stage-0.test", &strange_leaf, WAIT).await)
        .await
        .expect_err("another signer");
    ask(ControlClient::connect_tls(&address, "stage-0.test", &strange_ca, WAIT).await)
        .await
        .expect_err("another authority");
    ask(ControlClient::connect(&address, WAIT).await).await.expect_err("plain text");
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let ca = authority();
    let mut tls = files(dir.path(), "a.test", &ca, &ca);
    tls.key = dir.path().join("gone.pem");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = ControlService::new(StatusHub::new(StageStatus::default()), Arc::new(Nothing));
    let error = serve(listener, service, Some(&tls), std::future::pending()).await.unwrap_err();
    assert!(matches!(error, ServeError::Tls(_)), "{error:?}");
    assert!(error.to_string().contains("link.tls.key") && error.to_string().contains("gone.pem"), "{error}");
}
