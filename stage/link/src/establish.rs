//! How a connection comes to be: TCP, TLS, preface, setup.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::connection::{Connection, Options};
use crate::error::LinkError;
use crate::setup::{
    Agreed, Hello, MINOR, Refusal, RefusalCode, Setup, Side, check, read_hello, write_refusal, write_setup,
};
use crate::tls::{TlsError, TlsStore, check_name, server_name, stage_name};

/// How to dial a peer.
#[derive(Clone, Debug)]
pub struct Dialer {
    /// TLS, and the DNS name that the peer's certificate must carry (see [`stage_name`]); `None` for plain TCP.
    pub tls: Option<(TlsStore, String)>,
    /// What we say of us.
    pub setup: Setup,
    /// Of the connection.
    pub options: Options,
    /// For everything up to the established connection.
    pub deadline: Duration,
}

/// The local answer to a peer's setup.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What we say of us.
    pub setup: Setup,
    /// DNS name that the peer's certificate must carry when TLS is on.
    pub peer_name: String,
}

impl Answer {
    /// Answers `theirs` with `setup`; the peer must be the stage it says it is, of the chain that we are.
    #[must_use]
    pub fn new(setup: Setup, theirs: &Setup) -> Self {
        let peer_name = stage_name(&setup.chain, theirs.stage);
        Self { setup, peer_name }
    }
}

/// Decides what to answer to a peer that dialled us.
pub trait Decide: Send + Sync {
    /// Our setup for this peer; it is compared with the peer's afterwards.
    ///
    /// # Errors
    /// A refusal, for example because of an old formation or because there is a connection already.
    fn decide(&self, theirs: &Setup) -> Result<Answer, Refusal>;
}

impl<F: Fn(&Setup) -> Result<Answer, Refusal> + Send + Sync> Decide for F {
    fn decide(&self, theirs: &Setup) -> Result<Answer, Refusal> {
        self(theirs)
    }
}

/// How to accept peers.
#[derive(Clone)]
pub struct Acceptor {
    /// TLS; `None` for plain TCP.
    pub tls: Option<TlsStore>,
    /// Answers setups.
    pub decide: Arc<dyn Decide>,
    /// Of the connections.
    pub options: Options,
    /// For everything up to an established connection.
    pub deadline: Duration,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").field("tls", &self.tls.is_some()).field("deadline", &self.deadline).finish()
    }
}

/// Longest wait for a TCP connection. Nobody answers at the old address of a peer that has moved, and the name has a new one
/// soon: the next attempt finds it.
const CONNECT: Duration = Duration::from_secs(2);

/// Dials a peer and agrees with it. Dropping the future drops the attempt.
///
/// # Errors
/// [`LinkError`]; [`LinkError::Refused`] with the peer's reason.
pub async fn dial(addr: impl ToSocketAddrs, dialer: &Dialer) -> Result<(Connection, Agreed), LinkError> {
    let connect = async {
        let after = CONNECT.min(dialer.deadline);
        let connecting = timeout(after, TcpStream::connect(addr)).await.map_err(|_| LinkError::Deadline { after })?;
        let stream = connecting.map_err(|e| LinkError::io("connecting", e))?;
        stream.set_nodelay(true).map_err(|e| LinkError::io("setting TCP_NODELAY", e))?;
        let Some((tls, name)) = &dialer.tls else { return Ok(Transport::Plain(stream)) };
        let connector = TlsConnector::from(tls.current().await.client);
        let stream =
            connector.connect(server_name(name)?, stream).await.map_err(|e| LinkError::io("the TLS handshake", e))?;
        Ok(Transport::Tls(Box::new(stream.into())))
    };
    let until = Instant::now() + dialer.deadline;
    let late = || LinkError::Deadline { after: dialer.deadline };
    let mut stream: Transport = timeout_at(until, connect).await.unwrap_or_else(|_| Err(late()))?;
    match timeout_at(until, greet(&mut stream, &dialer.setup)).await.unwrap_or_else(|_| Err(late())) {
        Ok(agreed) => Ok((stream.start(&agreed, dialer.options.clone()), agreed)),
        Err(e) => Err(stream.part(e).await),
    }
}

async fn greet(stream: &mut Transport, ours: &Setup) -> Result<Agreed, LinkError> {
    write_setup(stream, ours).await?;
    match read_hello(stream).await? {
        Hello::Refusal(refusal) => Err(LinkError::Refused(*refusal)),
        Hello::Setup(theirs, minor) => agree(ours, &theirs, minor, Side::Dialler),
    }
}

fn agree(ours: &Setup, theirs: &Setup, minor: u16, side: Side) -> Result<Agreed, LinkError> {
    let agreed = check(ours, theirs, side).map_err(LinkError::Refusing)?;
    Ok(Agreed { minor: std::cmp::min(minor, MINOR), ..agreed })
}

/// Agrees with a peer that dialled us.
///
/// # Errors
/// [`LinkError`]; [`LinkError::Refusing`] with what the peer was told.
pub async fn accept(stream: TcpStream, acceptor: &Acceptor) -> Result<(Connection, Agreed), LinkError> {
    let ((), connection, agreed) = accept_with(stream, acceptor, || Ok(())).await?;
    Ok((connection, agreed))
}

/// Agrees with a peer that dialled us and puts the connection into `inbox`. A peer that finds no place there is refused as
/// busy before [`Decide`] hears of it, and may come again.
///
/// # Errors
/// As [`accept`].
pub async fn accept_into(
    stream: TcpStream,
    acceptor: &Acceptor,
    inbox: &mpsc::Sender<(Connection, Agreed)>,
) -> Result<(), LinkError> {
    let place = || inbox.try_reserve().map_err(|_| Refusal::new(RefusalCode::Busy, FULL));
    let (place, connection, agreed) = accept_with(stream, acceptor, place).await?;
    place.send((connection, agreed));
    Ok(())
}

const FULL: &str = "this stage has no place for another connection now; another attempt may find one";

/// Agrees with a peer for whom `place` has something.
async fn accept_with<P>(
    stream: TcpStream,
    acceptor: &Acceptor,
    place: impl FnOnce() -> Result<P, Refusal>,
) -> Result<(P, Connection, Agreed), LinkError> {
    let until = Instant::now() + acceptor.deadline;
    let late = LinkError::Deadline { after: acceptor.deadline };
    stream.set_nodelay(true).map_err(|e| LinkError::io("setting TCP_NODELAY", e))?;
    let mut stream = match &acceptor.tls {
        None => Transport::Plain(stream),
        Some(tls) => {
            let handshake =
                async { TlsAcceptor::from(tls.current().await.server).accept(stream).into_fallible().await };
            match timeout_at(until, handshake).await {
                Err(_) => return Err(late),
                Ok(Ok(stream)) => Transport::Tls(Box::new(stream.into())),
                Ok(Err((e, mut stream))) => {
                    linger(&mut stream).await;
                    return Err(LinkError::io("the TLS handshake", e));
                }
            }
        }
    };
    match timeout_at(until, answer(&mut stream, acceptor, place)).await.unwrap_or(Err(late)) {
        Ok((place, agreed)) => Ok((place, stream.start(&agreed, acceptor.options.clone()), agreed)),
        Err(e) => Err(stream.part(e).await),
    }
}

async fn answer<P>(
    stream: &mut Transport,
    acceptor: &Acceptor,
    place: impl FnOnce() -> Result<P, Refusal>,
) -> Result<(P, Agreed), LinkError> {
    let (theirs, minor) = match read_hello(stream).await? {
        Hello::Setup(theirs, minor) => (theirs, minor),
        Hello::Refusal(refusal) => return Err(LinkError::Refused(*refusal)),
    };
    // First: a decision may be for once only.
    let place = place().map_err(LinkError::Refusing)?;
    let answer = acceptor.decide.decide(&theirs).map_err(LinkError::Refusing)?;
    stream.check_peer(&answer.peer_name).map_err(|e| {
        LinkError::Refusing(Refusal::new(RefusalCode::Identity, format!("as stage {}: {e}", theirs.stage)))
    })?;
    let agreed = agree(&answer.setup, &theirs, minor, Side::Acceptor)?;
    write_setup(stream, &answer.setup).await?;
    Ok((place, agreed))
}

/// TCP, with or without TLS.
enum Transport {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Transport {
    fn start(self, agreed: &Agreed, options: Options) -> Connection {
        match self {
            Self::Plain(stream) => {
                let (r, w) = stream.into_split();
                Connection::start(r, w, agreed, options)
            }
            Self::Tls(stream) => {
                let (r, w) = tokio::io::split(*stream);
                Connection::start(r, w, agreed, options)
            }
        }
    }

    /// Whether the peer's certificate carries `name`; plain TCP has no identity to check.
    fn check_peer(&self, name: &str) -> Result<(), TlsError> {
        let Self::Tls(stream) = self else { return Ok(()) };
        let leaf: Option<&CertificateDer<'_>> = stream.get_ref().1.peer_certificates().and_then(|c| c.first());
        check_name(leaf.ok_or(TlsError::NoCertificate)?, name)
    }

    /// Tells the peer when it is refused, then leaves.
    async fn part(mut self, e: LinkError) -> LinkError {
        if let LinkError::Refusing(refusal) = &e {
            let said = timeout(LINGER, write_refusal(&mut self, refusal)).await;
            if matches!(said, Ok(Ok(()))) {
                linger(&mut self).await;
            }
        }
        e
    }
}

/// For a peer to take our last words.
const LINGER: Duration = Duration::from_secs(1);

/// Ends our side and reads on until the peer ends its own: closing with unread bytes would reset the connection, and the
/// peer would lose what it was told.
async fn linger<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) {
    let rest = async {
        let _ = stream.shutdown().await;
        let mut sink = [0; 1024];
        while matches!(stream.read(&mut sink).await, Ok(n) if n > 0) {}
    };
    let _ = timeout(LINGER, rest).await;
}

impl AsyncRead for Transport {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_read(cx, buf),
            Self::Tls(s) => Pin::new(s).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_write(cx, buf),
            Self::Tls(s) => Pin::new(s).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_flush(cx),
            Self::Tls(s) => Pin::new(s).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_shutdown(cx),
            Self::Tls(s) => Pin::new(s).poll_shutdown(cx),
        }
    }
}
