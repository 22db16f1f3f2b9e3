//! Two processes over loopback: what a stage sees when its neighbour is stopped or killed.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{frame, options, setup};
use splitmodel_link::setup::{Role, Setup};
use splitmodel_link::{
    Acceptor, Answer, ClosedReason, Connection, Dialer, Event, Inbound, Message, SendError, accept, dial,
};
use tokio::net::TcpListener;

const CREDITS: u32 = 16;

fn stage(n: u16) -> Setup {
    Setup { credits: CREDITS, ..setup(Role::Data, n) }
}

/// The second process: stage 1, which answers each frame with an empty one of the same number.
#[tokio::test]
#[ignore = "runs as the second process of the tests below"]
async fn neighbour() {
    if std::env::var_os("LINK_TEST_NEIGHBOUR").is_none() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("\nport {}", listener.local_addr().unwrap().port());
    let acceptor = Acceptor {
        tls: None,
        decide: Arc::new(|theirs: &Setup| Ok(Answer::new(stage(1), theirs))),
        options: options(Duration::from_secs(60)),
        deadline: Duration::from_secs(60),
    };
    let (connection, _) = accept(listener.accept().await.unwrap().0, &acceptor).await.unwrap();
    let (sender, mut receiver) = connection.split();
    while let Some(Event::Message(inbound)) = receiver.next().await {
        let Message::Frame(f) = inbound.message else { panic!("a frame") };
        drop(inbound.permit);
        if sender.send(frame(f.seq, 0)).await.is_err() {
            break;
        }
    }
}

struct Neighbour(Child);

impl Neighbour {
    /// Starts the process and connects to it.
    async fn start(deadline: Duration) -> (Self, Connection) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "neighbour", "--ignored", "--nocapture"])
            .env("LINK_TEST_NEIGHBOUR", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port: u16 = lines
            .find_map(|line| line.unwrap().strip_prefix("port ").map(|p| p.parse().unwrap()))
            .expect("the neighbour says its port");
        // Nobody reads on; what the harness prints at the end must not block it.
        std::thread::spawn(move || lines.for_each(drop));
        let me = Self(child);
        let dialer =
            Dialer { tls: None, setup: stage(0), options: options(deadline), deadline: Duration::from_secs(60) };
        (me, dial(("127.0.0.1", port), &dialer).await.unwrap().0)
    }

    fn signal(&self, name: &str) {
        let done = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.0.id())]).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Number of the next frame that came back.
async fn answer(c: &mut Connection) -> u64 {
    match c.receiver.next().await {
        Some(Event::Message(Inbound { message: Message::Frame(f), .. })) => f.seq,
        other => panic!("{other:?}"),
    }
}

/// Sends frame `n` and waits until it came back.
async fn there_and_back(c: &mut Connection, n: u64) {
    c.sender.send(frame(n, 64)).await.unwrap();
    assert_eq!(answer(c).await, n);
}

/// Sends until the connection ends, from an OS thread as the engine does.
async fn send_until_the_end(c: &Connection) -> SendError {
    let sender = c.sender.clone();
    tokio::task::spawn_blocking(move || {
        (0..).find_map(|n| sender.send_blocking(frame(n, 64)).err()).expect("the connection ends")
    })
    .await
    .unwrap()
}

async fn end(c: &mut Connection) -> ClosedReason {
    loop {
        match c.receiver.next().await {
            Some(Event::Message(_)) => {}
            Some(Event::Closed(reason)) => return reason,
            None => panic!("no reason"),
        }
    }
}

#[tokio::test]
async fn a_stopped_neighbour_times_out() {
    let (neighbour, mut c) = Neighbour::start(Duration::from_secs(2)).await;
    there_and_back(&mut c, 1).await;
    neighbour.signal("STOP");
    let e = send_until_the_end(&c).await;
    assert!(matches!(e, SendError::Closed(ClosedReason::Timeout)), "{e}");
    assert!(matches!(end(&mut c).await, ClosedReason::Timeout));
}

#[tokio::test]
async fn a_killed_neighbour_is_lost() {
    let (neighbour, mut c) = Neighbour::start(Duration::from_secs(60)).await;
    there_and_back(&mut c, 1).await;
    neighbour.signal("KILL");
    let reason = end(&mut c).await;
    assert!(matches!(reason, ClosedReason::PeerLost(_)), "{reason}");
    assert!(matches!(c.sender.send(frame(2, 1)).await, Err(SendError::Closed(ClosedReason::PeerLost(_)))));
}

#[tokio::test]
async fn a_neighbour_killed_under_load_is_lost() {
    let (neighbour, mut c) = Neighbour::start(Duration::from_secs(60)).await;
    there_and_back(&mut c, 1).await;
    let sender = c.sender.clone();
    let load = tokio::spawn(async move {
        let mut n = 0;
        while sender.send(frame(n, 64)).await.is_ok() {
            n += 1;
        }
    });
    for _ in 0..100 {
        assert!(matches!(c.receiver.next().await, Some(Event::Message(_))));
    }
    neighbour.signal("KILL");
    let reason = end(&mut c).await;
    assert!(matches!(reason, ClosedReason::PeerLost(_)), "{reason}");
    load.await.unwrap();
}

#[tokio::test]
async fn a_neighbour_that_goes_on_has_missed_nothing() {
    let (neighbour, mut c) = Neighbour::start(Duration::from_secs(60)).await;
    neighbour.signal("STOP");
    let sender = c.sender.clone();
    let load = tokio::spawn(async move {
        for n in 0..200 {
            sender.send(frame(n, 64)).await.unwrap();
        }
    });
    // The peer's credits are used up while it stands.
    while c.sender.credits() > 0 {
        tokio::task::yield_now().await;
    }
    neighbour.signal("CONT");
    for n in 0..200 {
        assert_eq!(answer(&mut c).await, n);
    }
    load.await.unwrap();
}
