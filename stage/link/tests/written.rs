//! What a connection remembers of the messages it wrote. The clock stands still but for what the tests wait for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{agreed, bytes, frame, options, report, samples};
use splitmodel_link::Message;
use splitmodel_link::connection::{Conditioning, Connection, Event, Permit, Receiver, Sender, Written};
use tokio::io::{duplex, split};

const DEADLINE: Duration = Duration::from_secs(600);

/// Two connected stages that grant four credits each, and the wire of the first.
fn pair() -> (Connection, Connection, Arc<Conditioning>) {
    let (a, b) = agreed(|_| {});
    let (left, right) = duplex(1 << 20);
    let options_a = options(DEADLINE);
    let wire = options_a.conditioning.clone();
    let (r, w) = split(left);
    let near = Connection::start(r, w, &a, options_a);
    let (r, w) = split(right);
    (near, Connection::start(r, w, &b, options(DEADLINE)), wire)
}

async fn take(receiver: &mut Receiver) -> Permit {
    match receiver.next().await {
        Some(Event::Message(inbound)) => inbound.permit,
        other => panic!("{other:?}"),
    }
}

/// A note once it is there: the peer may have the message before the writer goes on.
async fn written(sender: &Sender, seq: u64) -> Written {
    for _ in 0..100 {
        if let Some(written) = sender.written(seq) {
            return written;
        }
        tokio::task::yield_now().await;
    }
    panic!("message {seq} was not noted");
}

#[tokio::test(start_paused = true)]
async fn sizes_are_those_of_the_messages_and_other_kinds_leave_no_note() {
    let (a, mut b, _) = pair();
    a.sender.send(frame(7, 20)).await.unwrap();
    a.sender.send(Message::Error(report("no frame"))).await.unwrap();
    let predictions = samples()[1].1.clone();
    a.sender.send(predictions.clone()).await.unwrap();
    for _ in 0..3 {
        drop(take(&mut b.receiver).await);
    }
    let seven = written(&a.sender, 7).await;
    assert_eq!((seven.seq, seven.bytes), (7, bytes(&frame(7, 20)).len() as u64));
    let eight = written(&a.sender, 8).await;
    assert_eq!((eight.seq, eight.bytes), (8, bytes(&predictions).len() as u64));
    assert_eq!((a.sender.written(0), a.sender.written(9), b.sender.written(7)), (None, None, None));
    let traffic = a.sender.traffic();
    assert_eq!((traffic.sent, traffic.sent_bytes), (3, b.sender.traffic().received_bytes));
}

#[tokio::test(start_paused = true)]
async fn injected_delay_is_waiting() {
    let (a, mut b, wire) = pair();
    wire.set(50_000.0, None).unwrap();
    a.sender.send(frame(0, 1)).await.unwrap();
    assert_eq!(a.sender.written(0), None, "it is on the imagined wire");
    drop(take(&mut b.receiver).await);
    let note = written(&a.sender, 0).await;
    assert!((50_000..=51_000).contains(&note.waited_us), "{note:?}");
    assert_eq!((note.credit_us, note.wrote_us), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_missing_credit_is_told_from_the_queue_behind_it() {
    let (a, mut b, _) = pair();
    let mut held = Vec::new();
    for seq in 0..4 {
        a.sender.send(frame(seq, 1)).await.unwrap();
        held.push(take(&mut b.receiver).await);
    }
    // Both wait from now on, the second behind the first.
    a.sender.send(frame(4, 1)).await.unwrap();
    a.sender.send(frame(5, 1)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    held.pop();
    held.push(take(&mut b.receiver).await);
    tokio::time::sleep(Duration::from_secs(2)).await;
    held.pop();
    drop(take(&mut b.receiver).await);
    let (first, second) = (written(&a.sender, 4).await, written(&a.sender, 5).await);
    assert_eq!((first.waited_us, first.credit_us), (3_000_000, 3_000_000));
    assert_eq!((second.waited_us, second.credit_us), (5_000_000, 2_000_000));
    let traffic = a.sender.traffic();
    assert_eq!((traffic.wait, traffic.credit_wait), (Duration::from_secs(8), Duration::from_secs(5)));
}

#[tokio::test(start_paused = true)]
async fn a_transport_that_takes_no_bytes_shows_in_the_writing() {
    let (agreed, _) = agreed(|_| {});
    let (left, right) = duplex(100);
    let (r, w) = split(left);
    let a = Connection::start(r, w, &agreed, options(DEADLINE));
    a.sender.send(frame(0, 10)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(a.sender.written(0), None);
    let (mut unread, _voice) = split(right);
    let mut all = vec![0; bytes(&frame(0, 10)).len()];
    tokio::io::AsyncReadExt::read_exact(&mut unread, &mut all).await.unwrap();
    let note = written(&a.sender, 0).await;
    assert_eq!((note.waited_us, note.wrote_us), (0, 4_000_000));
    assert_eq!(a.sender.traffic().write, Duration::from_secs(4));
}
