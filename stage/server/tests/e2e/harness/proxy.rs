//! A cable between two stages that can be pulled.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinHandle};

/// Hands TCP connections on to one address. Dropping it ends them all.
pub struct Proxy {
    /// Where to dial instead.
    pub address: SocketAddr,
    cables: Arc<Mutex<Vec<AbortHandle>>>,
    silence: Arc<Notify>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a loopback address of its own, so that it takes no port of a stage that has not started yet.
    pub fn start(to: SocketAddr) -> Self {
        let IpAddr::V4(ip) = to.ip() else { panic!("{to} is no address of a chain here") };
        let [a, b, c, d] = ip.octets();
        let listener = std::net::TcpListener::bind((Ipv4Addr::new(a, b | 128, c, d), 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let address = listener.local_addr().unwrap();
        let (cables, silence) = (Arc::<Mutex<Vec<AbortHandle>>>::default(), Arc::<Notify>::default());
        let (laid, silenced) = (Arc::clone(&cables), Arc::clone(&silence));
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let cable = tokio::spawn(cable(stream, to, Arc::clone(&silenced)));
                laid.lock().unwrap().push(cable.abort_handle());
            }
        });
        Self { address, cables, silence, accepting }
    }

    /// Ends every connection, on both sides at once. Says how many there were.
    pub fn cut(&self) -> usize {
        let cables = std::mem::take(&mut *self.cables.lock().unwrap());
        let live: Vec<_> = cables.into_iter().filter(|c| !c.is_finished()).collect();
        live.iter().for_each(AbortHandle::abort);
        live.len()
    }

    /// Carries nothing more on the connections there are, and ends none: what a dead cable looks like.
    pub fn fall_silent(&self) {
        self.silence.notify_waiters();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn cable(mut near: TcpStream, to: SocketAddr, silence: Arc<Notify>) {
    // Where nobody listens, whoever dialled sees an end.
    let Ok(mut far) = TcpStream::connect(to).await else { return };
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let silent = tokio::select! {
        _ = copy_bidirectional(&mut near, &mut far) => false,
        () = silence.notified() => true,
    };
    if silent {
        std::future::pending::<()>().await; // holding both ends
    }
}
