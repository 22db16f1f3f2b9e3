//! From TCP to an established connection, with and without TLS.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::meet::{acceptor, dialer, meet, refusal, stage_1, tls, tls_error, works};
use common::pki::{Ca, load};
use common::setup;
use splitmodel_link::setup::{Refusal, RefusalCode, Role, Setup, read_hello, write_setup};
use splitmodel_link::tls::{TlsError, stage_name};
use splitmodel_link::{Acceptor, Answer, Dialer, Event, LinkError, Message, TlsConfig, accept, dial};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[tokio::test]
async fn plain_tcp() {
    let (there, back) = works(meet(&dialer(None), &acceptor(None, stage_1)).await).await;
    assert_eq!((there.ours.stage, there.theirs.stage), (0, 1));
    assert_eq!((there.ours, there.theirs), (back.theirs, back.ours));
}

#[tokio::test]
async fn both_ends_learn_of_a_difference() {
    let other = |theirs: &Setup| {
        let ours = Setup { n_ctx: 4096, ..setup(Role::Data, 1) };
        Ok(Answer::new(ours, theirs))
    };
    let (a, b) = meet(&dialer(None), &acceptor(None, other)).await;
    let (told, found) = (refusal(a), refusal(b));
    assert_eq!(told, found);
    assert_eq!((told.code, told.ours.as_str(), told.theirs.as_str()), (RefusalCode::Shape, "4096", "1024"));
}

#[tokio::test]
async fn the_acceptor_may_be_busy() {
    let busy = |_: &Setup| Err(Refusal::new(RefusalCode::Busy, "a formation is being built"));
    let (a, b) = meet(&dialer(None), &acceptor(None, busy)).await;
    assert_eq!(refusal(a), refusal(b));
}

#[tokio::test]
async fn another_major_version_is_told_so() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let mut wire = Vec::new();
    write_setup(&mut wire, &setup(Role::Data, 0)).await.unwrap();
    wire[8] = 2;
    peer.write_all(&wire).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let acceptor = acceptor(None, stage_1);
    let (b, answer) = tokio::join!(accept(stream, &acceptor), async {
        let answer = read_hello(&mut peer).await;
        drop(peer);
        answer
    });
    assert_eq!(refusal(b).code, RefusalCode::Version);
    match answer.unwrap() {
        splitmodel_link::setup::Hello::Refusal(r) => assert_eq!(r.code, RefusalCode::Version),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn garbage_is_answered_and_left() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let acceptor = acceptor(None, stage_1);
    for garbage in [&b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"[..], &[0; 5000], &[0xff; 100]] {
        let mut peer = TcpStream::connect(addr).await.unwrap();
        peer.write_all(garbage).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let (b, answer) = tokio::join!(accept(stream, &acceptor), async {
            let mut answer = Vec::new();
            peer.read_to_end(&mut answer).await.unwrap();
            drop(peer);
            answer
        });
        assert_eq!(refusal(b).code, RefusalCode::Malformed);
        assert!(answer.starts_with(b"SPLTMDL\x01"));
    }
    // And the next one is served as ever.
    works(meet(&dialer(None), &acceptor).await).await;
}

#[tokio::test]
async fn silence_has_a_deadline_on_both_sides() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let short = Duration::from_millis(50);
    let silent = TcpStream::connect(addr).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let acceptor = Acceptor { deadline: short, ..acceptor(None, stage_1) };
    assert!(matches!(accept(stream, &acceptor).await, Err(LinkError::Deadline { .. })));
    drop(silent);
    let dialer = Dialer { deadline: short, ..dialer(None) };
    assert!(matches!(dial(addr, &dialer).await, Err(LinkError::Deadline { .. })));
    drop(listener);
    assert!(matches!(dial(addr, &dialer).await, Err(LinkError::Io { what: "connecting", .. })));
}

#[tokio::test]
async fn certificates_of_one_ca_and_the_right_names() {
    let ca = Ca::new("chain");
    let (dialer, acceptor) = tls(&ca);
    works(meet(&dialer, &acceptor).await).await;
}

#[tokio::test]
async fn a_dialler_of_another_ca_is_rejected() {
    let (ca, other) = (Ca::new("chain"), Ca::new("chain"));
    let (mut dialer, acceptor) = tls(&ca);
    // It trusts our CA, but its own certificate is of another.
    let [_, cert, key] = other.files(&stage_name("smol", 0), |_| {});
    let [trusted, ..] = ca.files("trusted", |_| {});
    dialer.tls = Some((load(&[trusted, cert, key]).unwrap().into(), stage_name("smol", 1)));
    let (a, b) = meet(&dialer, &acceptor).await;
    assert_eq!(tls_error(b), TlsError::UnknownCa);
    assert!(matches!(tls_error(a), TlsError::Rejected(_)));
}

#[tokio::test]
async fn an_acceptor_of_another_ca_is_rejected() {
    let (ca, other) = (Ca::new("chain"), Ca::new("chain"));
    let (dialer, mut acceptor) = tls(&ca);
    acceptor.tls = Some(other.config(&stage_name("smol", 1)).into());
    let (a, b) = meet(&dialer, &acceptor).await;
    assert_eq!(tls_error(a), TlsError::UnknownCa);
    assert!(matches!(tls_error(b), TlsError::Rejected(_)));
}

#[tokio::test]
async fn the_wrong_stage_at_the_address_is_noticed() {
    let ca = Ca::new("chain");
    let (dialer, mut acceptor) = tls(&ca);
    acceptor.tls = Some(ca.config(&stage_name("smol", 2)).into());
    let (a, b) = meet(&dialer, &acceptor).await;
    assert_eq!(tls_error(a), TlsError::WrongName { expected: "stage-1.smol".into() });
    assert!(matches!(tls_error(b), TlsError::Rejected(_)));
}

#[tokio::test]
async fn a_dialler_with_the_certificate_of_another_stage_is_refused() {
    let ca = Ca::new("chain");
    let (mut dialer, acceptor) = tls(&ca);
    for wrong in [stage_name("smol", 2), stage_name("other", 0)] {
        dialer.tls = Some((ca.config(&wrong).into(), stage_name("smol", 1)));
        let (a, b) = meet(&dialer, &acceptor).await;
        let (told, found) = (refusal(a), refusal(b));
        assert_eq!(told, found);
        assert_eq!(told.code, RefusalCode::Identity);
        assert!(told.message.contains("stage-0.smol"), "{told}");
    }
}

#[tokio::test]
async fn no_certificate_is_not_enough() {
    let ca = Ca::new("chain");
    let (mut dialer, acceptor) = tls(&ca);
    let config = ca.config(&stage_name("smol", 0));
    let mut roots = rustls::RootCertStore::empty();
    let pem = std::fs::read(&ca.files("x", |_| {})[0]).unwrap();
    roots.add(rustls::pki_types::pem::PemObject::from_pem_slice(&pem).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let nameless = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    dialer.tls = Some((TlsConfig { client: Arc::new(nameless), ..config }.into(), stage_name("smol", 1)));
    let (a, b) = meet(&dialer, &acceptor).await;
    assert_eq!(tls_error(b), TlsError::NoCertificate);
    assert!(matches!(tls_error(a), TlsError::Rejected(_)));
}

#[tokio::test]
async fn expired_certificates_are_rejected() {
    let ca = Ca::new("chain");
    let (mut dialer, acceptor_good) = tls(&ca);
    let acceptor = Acceptor { tls: Some(ca.expired(&stage_name("smol", 1)).into()), ..acceptor_good.clone() };
    let (a, b) = meet(&dialer, &acceptor).await;
    assert_eq!(tls_error(a), TlsError::Expired);
    assert!(matches!(tls_error(b), TlsError::Rejected(_)));
    dialer.tls = Some((ca.expired(&stage_name("smol", 0)).into(), stage_name("smol", 1)));
    let (a, b) = meet(&dialer, &acceptor_good).await;
    assert_eq!(tls_error(b), TlsError::Expired);
    assert!(matches!(tls_error(a), TlsError::Rejected(_)));
}

#[tokio::test]
async fn tls_on_one_end_only_is_said() {
    let ca = Ca::new("chain");
    let (with_tls, accepts_tls) = tls(&ca);
    let (_, b) = meet(&dialer(None), &accepts_tls).await;
    assert!(tls_error(b).to_string().contains("TLS on at both ends"));
    let (a, b) = meet(&with_tls, &acceptor(None, stage_1)).await;
    assert!(tls_error(a).to_string().contains("TLS on at both ends"));
    assert_eq!(refusal(b).code, RefusalCode::Malformed);
}

#[tokio::test]
async fn a_goodbye_crosses_tls() {
    let ca = Ca::new("chain");
    let (dialer, acceptor) = tls(&ca);
    let (a, b) = meet(&dialer, &acceptor).await;
    let ((a, _), (mut b, _)) = (a.unwrap(), b.unwrap());
    a.sender.goodbye().await;
    match b.receiver.next().await {
        Some(Event::Closed(splitmodel_link::ClosedReason::Goodbye)) => {}
        other => panic!("{other:?}"),
    }
    assert!(b.sender.send(Message::Ping(1)).await.is_err());
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let ca = Ca::new("chain");
    let good = ca.files("stage-0.smol", |_| {});
    let other = ca.files("stage-1.smol", |_| {});
    let text = ca.folder.path().join("text.pem");
    std::fs::write(&text, "no PEM").unwrap();
    for at in 0..3 {
        for bad in [&text, &ca.folder.path().join("missing.pem")] {
            let mut files = good.clone();
            files[at].clone_from(bad);
            match load(&files) {
                Err(TlsError::File { path, .. }) => assert_eq!(&path, bad),
                other => panic!("{other:?}"),
            }
        }
    }
    let [ca, cert, _] = good;
    let [_, _, key] = other;
    match load(&[ca, cert.clone(), key.clone()]) {
        Err(TlsError::File { path, why }) => {
            assert_eq!(path, key, "the key is of another certificate");
            assert!(why.contains(cert.to_str().unwrap()), "{why}");
        }
        other => panic!("{other:?}"),
    }
}
