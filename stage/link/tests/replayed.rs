//! A handshake that was overheard and is said again by somebody else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::meet::{DEADLINE, Outcome, acceptor, dialer, refusal, stage_1, tls};
use common::pki::Ca;
use common::{ROOT, frame, setup};
use splitmodel_link::setup::{Formations, Hello, InstanceId, Refusal, RefusalCode, Role, Setup, read_hello};
use splitmodel_link::tls::TlsError;
use splitmodel_link::{Acceptor, Answer, Dialer, Event, LinkError, accept, dial};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A stage 1 that lets each formation in once, as stages do, and how often it was asked.
fn fenced() -> (impl Fn(&Setup) -> Result<Answer, Refusal> + Send + Sync + 'static, Arc<AtomicUsize>) {
    let (seen, asked) = (Mutex::new(Formations::default()), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&asked);
    let decide = move |theirs: &Setup| {
        count.fetch_add(1, Ordering::Relaxed);
        seen.lock().unwrap().admit(theirs.root, theirs.formation)?;
        let ours = Setup { formation: theirs.formation, root: theirs.root, ..setup(Role::Data, 1) };
        Ok(Answer::new(ours, theirs))
    };
    (decide, asked)
}

/// Between dialler and acceptor: passes on one connection and keeps what the dialler says.
async fn tap(to: SocketAddr) -> (SocketAddr, tokio::task::JoinHandle<Vec<u8>>) {
    let ear = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = ear.local_addr().unwrap();
    let heard = tokio::spawn(async move {
        let (near, _) = ear.accept().await.unwrap();
        let (mut from_near, mut to_near) = near.into_split();
        let (mut from_far, mut to_far) = TcpStream::connect(to).await.unwrap().into_split();
        let back = tokio::spawn(async move { tokio::io::copy(&mut from_far, &mut to_near).await });
        let (mut heard, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = from_near.read(&mut bytes).await {
            heard.extend_from_slice(&bytes[..n]);
            if to_far.write_all(&bytes[..n]).await.is_err() {
                break;
            }
        }
        drop(to_far);
        back.abort();
        heard
    });
    (address, heard)
}

/// Everything a genuine dialler says: the handshake, a frame, and a goodbye.
async fn overheard(dialer: &Dialer, acceptor: &Acceptor, listener: &TcpListener) -> Vec<u8> {
    let (address, heard) = tap(listener.local_addr().unwrap()).await;
    let (there, here) = tokio::join!(dial(address, dialer), async {
        let (stream, _) = listener.accept().await.unwrap();
        accept(stream, acceptor).await
    });
    let ((there, _), (mut here, _)) = (there.unwrap(), here.unwrap());
    there.sender.send(frame(0, 3)).await.unwrap();
    assert!(matches!(here.receiver.next().await, Some(Event::Message(m)) if m.message == frame(0, 3)));
    there.sender.goodbye().await;
    drop((there, here));
    tokio::time::timeout(DEADLINE, heard).await.unwrap().unwrap()
}

/// Says `speech` to the acceptor: how it ends there, and what comes back.
async fn say(speech: &[u8], acceptor: &Acceptor, listener: &TcpListener) -> (Outcome, Vec<u8>) {
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    peer.write_all(speech).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    tokio::join!(accept(stream, acceptor), async move {
        let mut answer = Vec::new();
        let _ = peer.read_to_end(&mut answer).await; // it may be reset
        answer
    })
}

#[tokio::test]
async fn a_replayed_setup_is_fenced_by_its_formation() {
    let (decide, _) = fenced();
    let (acceptor, listener) = (acceptor(None, decide), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let first = overheard(&dialer(None), &acceptor, &listener).await;
    // The same stage 0 goes on to a newer formation, and later another stage 0 takes its place.
    let mut next = dialer(None);
    next.setup.formation += 2;
    let second = overheard(&next, &acceptor, &listener).await;
    (next.setup.root, next.setup.formation) = (InstanceId(99), 1);
    let third = overheard(&next, &acceptor, &listener).await;
    for (speech, highest, formation) in [(first, "9", "7"), (second, "9", "9"), (third, "1", "1")] {
        let (outcome, answer) = say(&speech, &acceptor, &listener).await;
        let found = refusal(outcome);
        assert_eq!(found.code, RefusalCode::Formation);
        assert_eq!((found.ours.as_str(), found.theirs.as_str()), (highest, formation));
        // And whoever said it is told so, and nothing else.
        assert_eq!(read_hello(&mut &answer[..]).await.unwrap(), Hello::Refusal(Box::new(found)));
    }
    // A ghost does not use up what the living need.
    (next.setup.root, next.setup.formation) = (ROOT, 10);
    overheard(&next, &acceptor, &listener).await;
}

#[tokio::test]
async fn a_replayed_tls_handshake_is_refused_before_anybody_decides() {
    let ca = Ca::new("chain");
    let (genuine, template) = tls(&ca);
    let (decide, asked) = fenced();
    let acceptor = Acceptor { decide: Arc::new(decide), ..template };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let speech = overheard(&genuine, &acceptor, &listener).await;
    assert!(!speech.windows(7).any(|w| w == b"SPLTMDL"), "nothing is readable");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    let (outcome, _) = say(&speech, &acceptor, &listener).await;
    match outcome {
        // The keys are new, so the second flight of the old handshake makes no sense.
        Err(LinkError::Tls(TlsError::Protocol(why))) => assert!(why.contains("decrypt"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(asked.load(Ordering::Relaxed), 1, "the setup in it was never read");
    // The stage 0 it was heard from is served as ever.
    let mut next = genuine;
    next.setup.formation += 1;
    overheard(&next, &acceptor, &listener).await;
}

#[tokio::test]
async fn sessions_are_not_resumed() {
    // A resumed session would let a peer in on the strength of certificates that have expired or were replaced.
    let ca = Ca::new("chain");
    let (dialer, acceptor) = tls(&ca);
    let (listener, acceptor) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), Acceptor { decide: Arc::new(stage_1), ..acceptor });
    let first = overheard(&dialer, &acceptor, &listener).await;
    let second = overheard(&dialer, &acceptor, &listener).await;
    // The client hello with a ticket would be longer by hundreds of bytes, and the certificate would be missing.
    assert!(first.len().abs_diff(second.len()) < 32, "{} and {} bytes", first.len(), second.len());
}
