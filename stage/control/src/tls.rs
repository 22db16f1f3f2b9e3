//! Certificates of the control service: those of the links, read anew when they were replaced.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use splitmodel_link::{Handshakes, TlsStore};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::TlsConfig;

/// Longest TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at once.
const HANDSHAKES: usize = 64;
/// Pause after a connection could not be accepted, most likely for want of descriptors.
const PAUSE: Duration = Duration::from_secs(1);

/// A certificate file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("link.tls.{field}: {} cannot be read: {source}", path.display())]
pub struct TlsError {
    /// `ca`, `cert` or `key`.
    pub field: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: std::io::Error,
}

/// Why a service ended, other than by being told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("the control service failed: {}", crate::client::with_causes(.0))]
    Transport(#[source] tonic::transport::Error),
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError { field, path: path.to_owned(), source })
}

fn identity(tls: &TlsConfig) -> Result<Identity, TlsError> {
    Ok(Identity::from_pem(read("cert", &tls.cert)?, read("key", &tls.key)?))
}

/// Connections whose clients have shown a certificate of the chain's authority. Ends with its receiver.
pub(crate) fn incoming(listener: TcpListener, tls: TlsStore) -> ReceiverStream<io::Result<TlsStream<TcpStream>>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut handshakes = Handshakes::new(HANDSHAKES);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = sender.closed() => return,
            };
            let Ok((stream, _)) = accepted else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let (tls, sender) = (tls.clone(), sender.clone());
            handshakes.spawn(async move {
                if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, handshake(stream, &tls)).await {
                    let _ = sender.send(Ok(stream)).await; // the service may be ending
                }
            });
        }
    });
    ReceiverStream::new(receiver)
}

async fn handshake(stream: TcpStream, tls: &TlsStore) -> io::Result<TlsStream<TcpStream>> {
    stream.set_nodelay(true)?;
    let mut config = ServerConfig::clone(&tls.current().await.server);
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(config)).accept(stream).await
}

/// Expects `name` in the certificate of the server.
pub(crate) fn client_tls(tls: &TlsConfig, name: &str) -> Result<ClientTlsConfig, TlsError> {
    let ca = Certificate::from_pem(read("ca", &tls.ca)?);
    Ok(ClientTlsConfig::new().identity(identity(tls)?).ca_certificate(ca).domain_name(name))
}
