//! Two ends that establish a connection over loopback.

use std::sync::Arc;
use std::time::Duration;

use splitmodel_link::setup::{Refusal, Role, Setup};
use splitmodel_link::tls::{TlsError, stage_name};
use splitmodel_link::{Acceptor, Agreed, Answer, Connection, Dialer, Event, LinkError, TlsConfig, accept, dial};
use tokio::net::TcpListener;

use super::pki::Ca;
use super::{frame, options, setup};

pub const DEADLINE: Duration = Duration::from_secs(20);

pub type Outcome = Result<(Connection, Agreed), LinkError>;

pub fn dialer(tls: Option<(TlsConfig, String)>) -> Dialer {
    let tls = tls.map(|(config, name)| (config.into(), name));
    Dialer { tls, setup: setup(Role::Data, 0), options: options(DEADLINE), deadline: DEADLINE }
}

pub fn acceptor(
    tls: Option<TlsConfig>,
    decide: impl Fn(&Setup) -> Result<Answer, Refusal> + Send + Sync + 'static,
) -> Acceptor {
    Acceptor { tls: tls.map(Into::into), decide: Arc::new(decide), options: options(DEADLINE), deadline: DEADLINE }
}

/// Answers as stage 1.
pub fn stage_1(theirs: &Setup) -> Result<Answer, Refusal> {
    Ok(Answer::new(setup(Role::Data, 1), theirs))
}

/// Dials an acceptor over loopback; the outcome at both ends.
pub async fn meet(dialer: &Dialer, acceptor: &Acceptor) -> (Outcome, Outcome) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::join!(dial(addr, dialer), async {
        let (stream, _) = listener.accept().await.unwrap();
        accept(stream, acceptor).await
    })
}

/// A frame goes over and is understood.
pub async fn works((a, b): (Outcome, Outcome)) -> (Agreed, Agreed) {
    let ((a, there), (mut b, back)) = (a.unwrap(), b.unwrap());
    a.sender.send(frame(5, 64)).await.unwrap();
    match b.receiver.next().await {
        Some(Event::Message(inbound)) => assert_eq!(inbound.message, frame(5, 64)),
        other => panic!("{other:?}"),
    }
    (there, back)
}

#[track_caller]
pub fn refusal(outcome: Outcome) -> Refusal {
    match outcome {
        Err(LinkError::Refused(r) | LinkError::Refusing(r)) => r,
        other => panic!("{other:?}"),
    }
}

/// The usual parties of a TLS test: stage 0 dials stage 1.
pub fn tls(ca: &Ca) -> (Dialer, Acceptor) {
    let dialer = dialer(Some((ca.config(&stage_name("smol", 0)), stage_name("smol", 1))));
    (dialer, acceptor(Some(ca.config(&stage_name("smol", 1))), stage_1))
}

pub fn tls_error(outcome: Outcome) -> TlsError {
    match outcome {
        Err(LinkError::Tls(e)) => e,
        other => panic!("{other:?}"),
    }
}
