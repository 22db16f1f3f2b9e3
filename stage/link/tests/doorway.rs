//! Who waits at the door: a bound on connections that nobody took yet, and on handshakes that do not end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::meet::{DEADLINE, acceptor, dialer, refusal, stage_1};
use splitmodel_link::setup::{RefusalCode, Setup};
use splitmodel_link::{Agreed, Connection, Handshakes, LinkError, accept_into, dial};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

#[tokio::test]
async fn a_full_house_is_said_and_the_next_attempt_gets_in() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let decide = move |theirs: &Setup| {
        count.fetch_add(1, Ordering::Relaxed);
        stage_1(theirs)
    };
    let (dialer, acceptor) = (dialer(None), acceptor(None, decide));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (inbox, mut accepted) = mpsc::channel::<(Connection, Agreed)>(1);
    let attempt = async || {
        tokio::join!(dial(address, &dialer), async {
            let (stream, _) = listener.accept().await.unwrap();
            accept_into(stream, &acceptor, &inbox).await
        })
    };
    let (first, taken) = attempt().await;
    taken.unwrap();
    let (second, refused) = attempt().await;
    let told = refusal(second);
    assert_eq!(told.code, RefusalCode::Busy);
    assert!(matches!(refused, Err(LinkError::Refusing(found)) if found == told));
    // A formation may be let in once only, so a peer who comes again must not have used it up.
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    let (mut connection, _) = accepted.recv().await.unwrap();
    let (third, taken) = attempt().await;
    taken.unwrap();
    third.unwrap();
    // And the first was never disturbed.
    first.unwrap().0.sender.send(common::frame(1, 1)).await.unwrap();
    assert!(connection.receiver.next().await.is_some());
    drop(accepted);
    let (late, refused) = attempt().await;
    assert_eq!(refusal(late).code, RefusalCode::Busy);
    refused.unwrap_err();
}

#[tokio::test]
async fn silent_strangers_do_not_keep_a_peer_out() {
    const LIMIT: usize = 5;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (inbox, mut accepted) = mpsc::channel(1);
    let acceptor = acceptor(None, stage_1);
    let gone = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&gone);
    let door = tokio::spawn(async move {
        let mut handshakes = Handshakes::new(LIMIT);
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, inbox) = (acceptor.clone(), inbox.clone());
            let full = handshakes.spawn(async move {
                let _ = accept_into(stream, &acceptor, &inbox).await; // strangers
            });
            counted.fetch_add(usize::from(full), Ordering::Relaxed);
        }
    });
    let mut strangers = Vec::new();
    for _ in 0..3 * LIMIT {
        strangers.push(TcpStream::connect(address).await.unwrap());
    }
    let (connection, _) = tokio::time::timeout(DEADLINE, dial(address, &dialer(None))).await.unwrap().unwrap();
    accepted.recv().await.unwrap();
    assert_eq!(gone.load(Ordering::Relaxed), 2 * LIMIT + 1);
    // The oldest were let go at once, not by a deadline; the latest still hold their connection.
    let mut byte = [0];
    for stranger in &mut strangers[..2 * LIMIT + 1] {
        let read = tokio::time::timeout(DEADLINE, stranger.read(&mut byte)).await.unwrap();
        assert!(matches!(read, Ok(0) | Err(_)));
    }
    for stranger in &mut strangers[2 * LIMIT + 1..] {
        assert!(tokio::time::timeout(Duration::from_millis(20), stranger.read(&mut byte)).await.is_err());
    }
    // With the door they go too.
    door.abort();
    for stranger in &mut strangers[2 * LIMIT + 1..] {
        let read = tokio::time::timeout(DEADLINE, stranger.read(&mut byte)).await.unwrap();
        assert!(matches!(read, Ok(0) | Err(_)));
    }
    drop(connection);
}
