//! Established connections: credits, deadlines, ends, and hostile peers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::{agreed, bytes, frame, limits, options, report, samples};
use splitmodel_link::connection::{ClosedReason, Connection, Event, Inbound, Receiver, SendError};
use splitmodel_link::frame::{ErrorClass, Report, Section};
use splitmodel_link::setup::Setup;
use splitmodel_link::{Message, read_message};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split};
use tokio::time::Instant;

const DEADLINE: Duration = Duration::from_secs(9);

/// Two connected stages; `buffer` bytes fit between them.
fn pair(buffer: usize, change: impl Fn(&mut Setup)) -> (Connection, Connection) {
    let (a, b) = agreed(change);
    let (left, right) = duplex(buffer);
    let start = |stream, agreed| {
        let (r, w) = split(stream);
        Connection::start(r, w, agreed, options(DEADLINE))
    };
    (start(left, &a), start(right, &b))
}

/// A connection and the bare stream of its peer.
fn bare(change: impl Fn(&mut Setup)) -> (Connection, DuplexStream) {
    let (left, right) = duplex(1 << 20);
    let (r, w) = split(left);
    (Connection::start(r, w, &agreed(change).0, options(DEADLINE)), right)
}

async fn message(receiver: &mut Receiver) -> Inbound {
    match receiver.next().await {
        Some(Event::Message(inbound)) => inbound,
        other => panic!("{other:?}"),
    }
}

/// The end, which comes once.
async fn end(receiver: &mut Receiver) -> ClosedReason {
    loop {
        match receiver.next().await {
            Some(Event::Message(_)) => {}
            Some(Event::Closed(reason)) => {
                assert!(receiver.next().await.is_none(), "the end came twice");
                return reason;
            }
            None => panic!("no reason"),
        }
    }
}

fn seq(inbound: &Inbound) -> u64 {
    match &inbound.message {
        Message::Frame(f) => f.seq,
        other => panic!("{other:?}"),
    }
}

/// Lets every task run until nothing moves; the clock stands still.
async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn messages_arrive_as_they_were_sent() {
    let (a, mut b) = pair(1000, |s| s.n_embd = 2);
    let (frame, predictions, error) = (samples()[0].1.clone(), samples()[1].1.clone(), samples()[5].1.clone());
    for sent in [frame, predictions, error] {
        a.sender.send(sent.clone()).await.unwrap();
        assert_eq!(bytes(&message(&mut b.receiver).await.message), bytes(&sent));
    }
    let traffic = a.sender.traffic();
    assert_eq!((traffic.sent, traffic.sent_bytes), (3, b.sender.traffic().received_bytes));
}

#[tokio::test(start_paused = true)]
async fn a_slow_receiver_bounds_the_sender() {
    let (a, mut b) = pair(64 << 10, |_| {});
    // Four credits, a queue of two, one message in the hands of the writer.
    let mut sent = 0;
    loop {
        settle().await;
        match tokio::time::timeout(Duration::from_millis(1), a.sender.send(frame(sent, 1))).await {
            Ok(outcome) => outcome.unwrap(),
            Err(_) => break,
        }
        sent += 1;
    }
    assert_eq!(sent, 7);
    assert_eq!(a.sender.credits(), 0);

    // Taking messages grants nothing; letting go of their permits does.
    let mut held = Vec::new();
    for n in 0..4 {
        let inbound = message(&mut b.receiver).await;
        assert_eq!(seq(&inbound), n);
        held.push(inbound.permit);
    }
    settle().await;
    assert_eq!(a.sender.traffic().sent, 4);
    held.pop();
    settle().await;
    assert_eq!(a.sender.traffic().sent, 5, "one permit, one message");
    drop(held);
    for n in 4..7 {
        assert_eq!(seq(&message(&mut b.receiver).await), n);
    }
}

#[tokio::test(start_paused = true)]
async fn one_credit_is_enough() {
    let (a, mut b) = pair(100, |s| s.credits = 1);
    let send = async {
        for n in 0..50 {
            a.sender.send(frame(n, 3)).await.unwrap();
        }
    };
    let receive = async {
        for n in 0..50 {
            assert_eq!(seq(&message(&mut b.receiver).await), n);
        }
    };
    tokio::join!(send, receive);
}

#[tokio::test]
async fn an_os_thread_sends() {
    let (a, mut b) = pair(4096, |_| {});
    let thread = std::thread::spawn(move || {
        for n in 0..100 {
            a.sender.send_blocking(frame(n, 2)).unwrap();
        }
        // Blocked without credits until the connection ends.
        let mut n = 0;
        loop {
            n += 1;
            if let Err(e) = a.sender.send_blocking(frame(n, 1)) {
                return e;
            }
        }
    });
    let mut held = Vec::new();
    for n in 0..100 {
        assert_eq!(seq(&message(&mut b.receiver).await), n);
    }
    for _ in 0..4 {
        held.push(message(&mut b.receiver).await);
    }
    b.sender.close();
    let e = tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
    assert!(matches!(e, SendError::Closed(ClosedReason::PeerLost(_))), "{e}");
}

#[tokio::test(start_paused = true)]
async fn goodbye_lets_the_queue_out_first() {
    let (a, mut b) = pair(64, |_| {});
    a.sender.send(frame(0, 1)).await.unwrap();
    a.sender.send(frame(1, 1)).await.unwrap();
    let (mut a_receiver, sender) = (a.receiver, a.sender);
    tokio::join!(sender.goodbye(), async {
        assert_eq!(seq(&message(&mut b.receiver).await), 0);
        assert_eq!(seq(&message(&mut b.receiver).await), 1);
        assert!(matches!(end(&mut b.receiver).await, ClosedReason::Goodbye));
    });
    assert!(matches!(end(&mut a_receiver).await, ClosedReason::Local));
    assert!(matches!(sender.send(frame(2, 1)).await, Err(SendError::Closed(ClosedReason::Local))));
}

#[tokio::test(start_paused = true)]
async fn a_failure_reaches_the_peer() {
    let (a, mut b) = pair(4096, |_| {});
    a.sender.fail(report("stage 2 is lost"));
    let Message::Error(got) = message(&mut b.receiver).await.message else { panic!("an error") };
    assert_eq!(got, report("stage 2 is lost"));
    match end(&mut b.receiver).await {
        ClosedReason::Refused(why) => assert_eq!(why, report("stage 2 is lost")),
        other => panic!("{other}"),
    }
    assert!(matches!(a.sender.closed().await, ClosedReason::Local));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_receiver_ends_it() {
    let (a, mut b) = pair(4096, |_| {});
    drop(a.receiver);
    assert!(matches!(end(&mut b.receiver).await, ClosedReason::PeerLost(_)));
    assert!(matches!(a.sender.closed().await, ClosedReason::Local));
}

#[tokio::test(start_paused = true)]
async fn idle_connections_live_by_pings() {
    let (a, mut b) = pair(4096, |_| {});
    tokio::time::sleep(DEADLINE * 20).await;
    a.sender.send(frame(0, 1)).await.unwrap();
    let pings = b.sender.traffic();
    assert!(pings.sent >= 20 && pings.sent < 200, "{pings:?}");
    assert_eq!(seq(&message(&mut b.receiver).await), 0);
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_pinged_and_then_dead() {
    let (mut a, mut peer) = bare(|_| {});
    let start = Instant::now();
    assert!(matches!(read_message(&mut peer, &limits()).await.unwrap(), Message::Ping(1)));
    assert_eq!(start.elapsed().as_secs(), 3);
    assert!(matches!(read_message(&mut peer, &limits()).await.unwrap(), Message::Ping(2)));
    assert!(matches!(end(&mut a.receiver).await, ClosedReason::Timeout));
    assert_eq!(start.elapsed().as_secs(), 9);
}

#[tokio::test(start_paused = true)]
async fn any_byte_is_a_sign_of_life() {
    let (mut a, mut peer) = bare(|_| {});
    let wire = bytes(&frame(3, 1));
    for byte in &wire {
        tokio::time::sleep(DEADLINE - Duration::from_secs(1)).await;
        peer.write_all(&[*byte]).await.unwrap();
    }
    assert_eq!(seq(&message(&mut a.receiver).await), 3);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_takes_nothing_is_dead() {
    let (agreed, _) = agreed(|s| s.credits = 1000);
    let (left, right) = duplex(256);
    let (r, w) = split(left);
    let mut a = Connection::start(r, w, &agreed, options(DEADLINE));
    // The peer talks all the time and reads nothing.
    let (_unread, mut voice) = split(right);
    let talk = tokio::spawn(async move {
        while voice.write_all(&bytes(&Message::Pong(0))).await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let sender = a.sender.clone();
    let start = Instant::now();
    let send = async {
        loop {
            if let Err(e) = sender.send(frame(0, 64)).await {
                return e;
            }
        }
    };
    let e = tokio::time::timeout(DEADLINE * 3, send).await.expect("writes do not hang");
    assert!(matches!(e, SendError::Closed(ClosedReason::Timeout)), "{e}");
    assert_eq!(start.elapsed().as_secs(), DEADLINE.as_secs());
    assert!(matches!(end(&mut a.receiver).await, ClosedReason::Timeout));
    talk.abort();
}

/// What the peer is told before the connection ends, after any pings and grants.
async fn told(peer: &mut DuplexStream) -> Report {
    loop {
        match read_message(peer, &limits()).await.unwrap() {
            Message::Error(report) => {
                let mut rest = Vec::new();
                peer.read_to_end(&mut rest).await.unwrap();
                assert!(rest.is_empty(), "nothing follows the error");
                return report;
            }
            Message::Ping(_) | Message::Pong(_) | Message::Credit(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn broken_protocol_is_answered_and_ends_the_connection() {
    let later = Section::Unknown { kind: 1000, flags: 0, body: vec![] };
    let mut unsupported =
        bytes(&Message::Frame(splitmodel_link::frame::Frame { sections: vec![later], ..Default::default() }));
    unsupported[32..34].copy_from_slice(&6u16.to_le_bytes());
    let mut long = bytes(&frame(0, 1));
    long[24..28].copy_from_slice(&(20u32 << 20).to_le_bytes());
    let five: Vec<u8> = (0..5).flat_map(|n| bytes(&frame(n, 1))).collect();
    let errors: Vec<u8> = (0..100).flat_map(|_| bytes(&Message::Error(report("again")))).collect();
    let errors_and_frame = [&errors[..errors.len() / 100 * 68], &bytes(&frame(0, 1))].concat();
    let cases: [(&str, Vec<u8>, ErrorClass, &str); 8] = [
        ("garbage", b"GET / HTTP/1.1\r\nHost: example\r\n\r\n".to_vec(), ErrorClass::Protocol, "SMF1"),
        ("an overrun", five, ErrorClass::Protocol, "without a credit"),
        ("too many credits", bytes(&Message::Credit(1)), ErrorClass::Protocol, "credits"),
        ("a section of later", unsupported, ErrorClass::Unsupported, "section type 6"),
        ("an oversized message", long, ErrorClass::Protocol, "limit"),
        ("another width", bytes(&samples()[0].1), ErrorClass::Protocol, "agreed"),
        ("endless errors", errors, ErrorClass::Protocol, "errors"),
        ("errors in the place of frames", errors_and_frame, ErrorClass::Protocol, "errors"),
    ];
    for (what, wire, class, word) in cases {
        let (mut a, mut peer) = bare(|_| {});
        peer.write_all(&wire).await.unwrap();
        let report = told(&mut peer).await;
        assert_eq!((report.class, report.stage), (class, 0), "{what}");
        assert!(report.message.contains(word), "{what}: {}", report.message);
        match end(&mut a.receiver).await {
            ClosedReason::Protocol(why) => assert_eq!(why, report.message, "{what}"),
            other => panic!("{what}: {other}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_owner_can_refuse_a_message_too() {
    let (mut a, mut peer) = bare(|_| {});
    a.sender.protocol_error("predictions on a data connection");
    assert_eq!(told(&mut peer).await.class, ErrorClass::Protocol);
    assert!(matches!(end(&mut a.receiver).await, ClosedReason::Protocol(_)));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_vanishes_in_mid_message_is_lost() {
    for cut in [0, 1, 31, 32, 40, 70] {
        let (mut a, mut peer) = bare(|_| {});
        peer.write_all(&bytes(&frame(0, 1))[..cut]).await.unwrap();
        drop(peer);
        match end(&mut a.receiver).await {
            ClosedReason::PeerLost(e) => assert_eq!(e.kind(), std::io::ErrorKind::UnexpectedEof, "cut at {cut}"),
            other => panic!("cut at {cut}: {other}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn pings_are_answered_and_a_flood_of_them_does_not_grow() {
    let (a, mut peer) = bare(|_| {});
    peer.write_all(&bytes(&Message::Ping(7))).await.unwrap();
    assert_eq!(read_message(&mut peer, &limits()).await.unwrap(), Message::Pong(7));
    // One answer at a time is owed, however many pings came before it was written.
    let flood: Vec<u8> = (0..10_000).flat_map(|n| bytes(&Message::Ping(n))).collect();
    peer.write_all(&flood).await.unwrap();
    let mut last = 0;
    while last < 9_999 {
        match read_message(&mut peer, &limits()).await.unwrap() {
            Message::Pong(n) => last = n,
            other => panic!("{other:?}"),
        }
    }
    assert!(a.sender.traffic().sent <= 10_001);
}

/// A frame of `rows` rows with as many sections as a message may have.
fn full(rows: u32) -> Message {
    let Message::Frame(mut frame) = frame(9, rows) else { panic!("a frame") };
    frame.sections = vec![Section::Unknown { kind: 1000, flags: 0, body: vec![7; (4 << 20) - 8] }];
    Message::Frame(frame)
}

#[tokio::test(start_paused = true)]
async fn messages_that_cannot_be_sent_are_refused_at_once() {
    let (a, mut b) = pair(4096, |s| {
        s.max_message_bytes = 32 + (4 << 20) + 48;
        s.n_ubatch = 1;
    });
    for bad in [full(2), samples()[0].1.clone()] {
        assert!(matches!(a.sender.send(bad).await, Err(SendError::Invalid(_))));
    }
    // The largest frame of these stages goes over.
    a.sender.send(full(1)).await.unwrap();
    assert_eq!(message(&mut b.receiver).await.message, full(1));
}

#[tokio::test(start_paused = true)]
async fn injected_delay_is_shared_by_messages_under_way() {
    let (agreed_a, agreed_b) = agreed(|s| s.credits = 100);
    let (left, right) = duplex(1 << 20);
    let options_a = options(Duration::from_secs(60));
    let wire = options_a.conditioning.clone();
    let (r, w) = split(left);
    let a = Connection::start(r, w, &agreed_a, options_a);
    let (r, w) = split(right);
    let mut b = Connection::start(r, w, &agreed_b, options(Duration::from_secs(60)));

    wire.set(50_000.0, None).unwrap();
    let start = Instant::now();
    for n in 0..10 {
        a.sender.send(frame(n, 1)).await.unwrap();
    }
    for n in 0..10 {
        assert_eq!(seq(&message(&mut b.receiver).await), n);
    }
    assert_eq!(start.elapsed().as_millis(), 50, "one delay for all of them");

    // 80 bytes each at 8,000 bytes/s: 10 ms apart.
    wire.set(50_000.0, Some(8_000.0)).unwrap();
    let start = Instant::now();
    for n in 0..10 {
        a.sender.send(frame(n, 1)).await.unwrap();
    }
    for n in 0..10 {
        assert_eq!(seq(&message(&mut b.receiver).await), n);
        let late = start.elapsed().as_millis() as u64;
        assert!((60 + 10 * n..=61 + 10 * n).contains(&late), "message {n} after {late} ms");
    }

    wire.set(0.0, None).unwrap();
    let start = Instant::now();
    a.sender.send(frame(10, 1)).await.unwrap();
    message(&mut b.receiver).await;
    assert_eq!(start.elapsed().as_millis(), 0);
}
