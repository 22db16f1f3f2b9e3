//! The control service under mutual TLS: right certificates pass, everything else does not.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use splitmodel_control::config::TlsConfig;
use splitmodel_control::{
    ClientError, Conditioning, ControlClient, ControlHandler, ControlService, HandlerError, StageStatus, StatusHub,
    serve,
};
use splitmodel_link::TlsStore;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

const WAIT: Duration = Duration::from_secs(20);

struct Nothing;

impl ControlHandler for Nothing {
    async fn drain(&self, _: Option<Duration>) -> Result<(), HandlerError> {
        Ok(())
    }
    async fn probe(&self) -> Result<Duration, HandlerError> {
        Err(HandlerError::Unavailable("no chain".into()))
    }
    async fn form_again(&self, _: u64, _: String) -> Result<bool, HandlerError> {
        Ok(false)
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

async fn start(tls: &TlsConfig) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let hub = StatusHub::new(StageStatus { chain: "tls".into(), ..StageStatus::default() });
    let service = ControlService::new(hub, Arc::new(Nothing));
    let store = TlsStore::from_pem_files(&tls.ca, &tls.cert, &tls.key).unwrap();
    tokio::spawn(serve(listener, service, Some(store), std::future::pending()));
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
    let address = start(&server).await;

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
    let server = files(&dir.path().join("server"), "a.test", &ca, &ca);
    let mut client = files(&dir.path().join("client"), "cli.test", &ca, &ca);
    client.key = dir.path().join("gone.pem");
    let address = start(&server).await;
    let error = ControlClient::connect_tls(&address, "a.test", &client, WAIT).await.unwrap_err();
    assert!(matches!(error, ClientError::Tls(_)), "{error:?}");
    assert!(error.to_string().contains("link.tls.key") && error.to_string().contains("gone.pem"), "{error}");
}

#[tokio::test]
async fn replaced_certificates_count_from_the_next_connection_on() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (authority(), authority());
    let [server, client] = ["server", "client"].map(|n| dir.path().join(n));
    let tls = files(&server, "a.test", &old, &old);
    let before = files(&client, "cli.test", &old, &old);
    let address = start(&tls).await;
    let mut running = ControlClient::connect_tls(&address, "a.test", &before, WAIT).await.unwrap();
    running.status().await.unwrap();

    files(&server, "a.test", &new, &new);
    ask(ControlClient::connect_tls(&address, "a.test", &before, WAIT).await).await.expect_err("the old authority");
    let trusting = files(&dir.path().join("trusting"), "cli.test", &old, &new);
    ask(ControlClient::connect_tls(&address, "a.test", &trusting, WAIT).await).await.expect_err("the old certificate");
    running.status().await.expect("a running connection stays");
    let after = files(&client, "cli.test", &new, &new);
    ask(ControlClient::connect_tls(&address, "a.test", &after, WAIT).await).await.unwrap();

    std::fs::write(&tls.cert, "no PEM").unwrap();
    ask(ControlClient::connect_tls(&address, "a.test", &after, WAIT).await).await.expect("the last good one");
}

#[tokio::test]
async fn silent_strangers_keep_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let ca = authority();
    let address = start(&files(&dir.path().join("server"), "a.test", &ca, &ca)).await;
    let client = files(&dir.path().join("client"), "cli.test", &ca, &ca);
    let mut strangers = Vec::new();
    for _ in 0..65 {
        strangers.push(TcpStream::connect(&address).await.unwrap());
    }
    ask(ControlClient::connect_tls(&address, "a.test", &client, WAIT).await).await.unwrap();
    let read = tokio::time::timeout(Duration::from_secs(5), strangers[0].read(&mut [0])).await.expect("it had to go");
    assert!(matches!(read, Ok(0) | Err(_)));
}
