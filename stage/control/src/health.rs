//! The standard gRPC health service, on a port of its own: the kubelet cannot present a client certificate.
use std::future::Future;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Server};
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

use crate::client::{ClientError, endpoint, finish};
use crate::tls::ServeError;

pub use tonic_health::pb;

/// What a probe asks, by the service name in its request. The empty name answers as [`Probe::Readiness`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Probe {
    /// `startup`: the process answers.
    Startup,
    /// `liveness`: progress while fetching or loading, the engine's heartbeat after.
    Liveness,
    /// `readiness`: loaded and linked; on stage 0, a token crossed the chain lately.
    Readiness,
}

impl Probe {
    /// The service name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::Liveness => "liveness",
            Self::Readiness => "readiness",
        }
    }
}

/// Sets what the health service answers. Clones set the same service.
#[derive(Clone, Debug)]
pub struct HealthHub {
    reporter: HealthReporter,
}

impl HealthHub {
    /// The hub and its service: started and alive, not ready.
    pub async fn new() -> (Self, HealthServer<impl Health>) {
        let (reporter, service) = tonic_health::server::health_reporter();
        let hub = Self { reporter };
        hub.set(Probe::Startup, true).await;
        hub.set(Probe::Liveness, true).await;
        hub.set(Probe::Readiness, false).await;
        (hub, service)
    }

    /// Sets the answer to one probe.
    pub async fn set(&self, probe: Probe, ok: bool) {
        let status = if ok { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.reporter.set_service_status(probe.name(), status).await;
        if probe == Probe::Readiness {
            self.reporter.set_service_status("", status).await;
        }
    }
}

/// Serves `service` on `listener`, without TLS, until `shutdown` resolves.
///
/// # Errors
/// [`ServeError::Transport`].
pub async fn serve<S: Health>(
    listener: TcpListener,
    service: HealthServer<S>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), shutdown)
        .await
        .map_err(ServeError::Transport)
}

/// Asks a health service. The connection is made when it is first needed, and again after it was lost.
#[derive(Debug)]
pub struct HealthChecker {
    address: String,
    timeout: Duration,
    client: HealthClient<Channel>,
}

impl HealthChecker {
    /// A checker of the service at `address` (`host:port`); `timeout` bounds each check. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ClientError::Address`].
    pub fn new(address: &str, timeout: Duration) -> Result<Self, ClientError> {
        let client = HealthClient::new(endpoint(address, "http")?.connect_lazy());
        Ok(Self { address: address.to_owned(), timeout, client })
    }

    /// Whether `probe` is answered with "serving".
    ///
    /// # Errors
    /// [`ClientError`] when it is not answered at all.
    pub async fn check(&mut self, probe: Probe) -> Result<bool, ClientError> {
        let call = self.client.check(HealthCheckRequest { service: probe.name().to_owned() });
        let answer = finish(&self.address, probe.name(), self.timeout, call).await?;
        Ok(answer.status() == pb::health_check_response::ServingStatus::Serving)
    }
}
