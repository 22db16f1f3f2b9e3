use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use splitmodel_link::TlsStore;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::proto::stage_control_server::{StageControl, StageControlServer};
use crate::proto::{
    DrainRequest, DrainResponse, FormAgainRequest, FormAgainResponse, GetStatusRequest, ProbeChainRequest,
    ProbeChainResponse, SetWireConditioningRequest, SetWireConditioningResponse, StageStatus, WatchStatusRequest,
};
use crate::status::StatusHub;
use crate::tls::{ServeError, incoming};

/// Least time between two messages of a status stream when the client names none.
const DEFAULT_INTERVAL_MS: u32 = 200;

/// Delay and bandwidth injected into what a stage sends downstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditioning {
    /// Delay of every message.
    pub delay: Duration,
    /// Bytes per second; 0 means unlimited.
    pub bytes_per_second: u64,
}

/// Why a stage does not do what it was told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandlerError {
    /// This stage never can, for instance a probe on a stage other than 0.
    #[error("not possible on this stage: {0}")]
    Unsupported(String),
    /// Not now, for instance while the chain is broken.
    #[error("not possible now: {0}")]
    Unavailable(String),
    /// An argument is out of range.
    #[error("bad argument: {0}")]
    Invalid(String),
    /// It took too long.
    #[error("no answer in time: {0}")]
    Timeout(String),
}

impl From<HandlerError> for Status {
    fn from(error: HandlerError) -> Self {
        let text = error.to_string();
        match error {
            HandlerError::Unsupported(_) => Self::unimplemented(text),
            HandlerError::Unavailable(_) => Self::unavailable(text),
            HandlerError::Invalid(_) => Self::invalid_argument(text),
            HandlerError::Timeout(_) => Self::deadline_exceeded(text),
        }
    }
}

/// What the control service asks of the stage.
pub trait ControlHandler: Send + Sync + 'static {
    /// Begins to drain and returns at once; `None` means the configured grace.
    fn drain(&self, grace: Option<Duration>) -> impl Future<Output = Result<(), HandlerError>> + Send;

    /// Sends a probe through the chain and returns its round trip.
    fn probe(&self) -> impl Future<Output = Result<Duration, HandlerError>> + Send;

    /// Ends `formation` if the chain still has it; says whether it did.
    fn form_again(&self, formation: u64, reason: String) -> impl Future<Output = Result<bool, HandlerError>> + Send;

    /// Sets what is injected into the downstream link from the next message on.
    fn set_conditioning(&self, conditioning: Conditioning) -> impl Future<Output = Result<(), HandlerError>> + Send;
}

/// The gRPC service of one stage.
#[derive(Debug)]
pub struct ControlService<H> {
    hub: StatusHub,
    handler: Arc<H>,
}

impl<H: ControlHandler> ControlService<H> {
    /// Serves the status in `hub` and forwards orders to `handler`.
    #[must_use]
    pub const fn new(hub: StatusHub, handler: Arc<H>) -> Self {
        Self { hub, handler }
    }

    /// Wraps the service for a tonic server.
    #[must_use]
    pub fn into_server(self) -> StageControlServer<Self> {
        StageControlServer::new(self)
    }
}

/// Serves `service` on `listener`, with client certificates required if `tls` is given, until `shutdown` resolves. Status
/// streams are then ended after a last message, and calls that run are finished.
///
/// # Errors
/// [`ServeError`] when the transport fails.
pub async fn serve<H: ControlHandler>(
    listener: TcpListener,
    service: ControlService<H>,
    tls: Option<TlsStore>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let hub = service.hub.clone();
    let router = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(20)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_service(service.into_server());
    let shutdown = async move {
        shutdown.await;
        hub.close();
    };
    let served = match tls {
        Some(tls) => router.serve_with_incoming_shutdown(incoming(listener, tls), shutdown).await,
        None => router.serve_with_incoming_shutdown(TcpListenerStream::new(listener), shutdown).await,
    };
    served.map_err(ServeError::Transport)
}

#[tonic::async_trait]
impl<H: ControlHandler> StageControl for ControlService<H> {
    type WatchStatusStream = Pin<Box<dyn Stream<Item = Result<StageStatus, Status>> + Send>>;

    async fn watch_status(
        &self,
        request: Request<WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        let interval = match request.into_inner().min_interval_ms {
            0 => DEFAULT_INTERVAL_MS,
            ms => ms,
        };
        let interval = Duration::from_millis(interval.into());
        let mut watcher = self.hub.watch();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let next = tokio::select! {
                    next = watcher.next() => next,
                    () = sender.closed() => return,
                };
                let Some(status) = next else { return };
                if sender.send(Ok(status)).await.is_err() {
                    return;
                }
                watcher.pause(interval).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<StageStatus>, Status> {
        Ok(Response::new(self.hub.snapshot()))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        self.handler.drain(request.into_inner().grace_ms.map(Duration::from_millis)).await?;
        Ok(Response::new(DrainResponse {}))
    }

    async fn probe_chain(&self, _: Request<ProbeChainRequest>) -> Result<Response<ProbeChainResponse>, Status> {
        let round_trip = self.handler.probe().await?;
        let round_trip_us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
        Ok(Response::new(ProbeChainResponse { round_trip_us }))
    }

    async fn form_again(&self, request: Request<FormAgainRequest>) -> Result<Response<FormAgainResponse>, Status> {
        let FormAgainRequest { formation, reason } = request.into_inner();
        let ended = self.handler.form_again(formation, reason).await?;
        Ok(Response::new(FormAgainResponse { ended }))
    }

    async fn set_wire_conditioning(
        &self,
        request: Request<SetWireConditioningRequest>,
    ) -> Result<Response<SetWireConditioningResponse>, Status> {
        let SetWireConditioningRequest { delay_us, bytes_per_second } = request.into_inner();
        let conditioning = Conditioning { delay: Duration::from_micros(delay_us.into()), bytes_per_second };
        self.handler.set_conditioning(conditioning).await?;
        Ok(Response::new(SetWireConditioningResponse {}))
    }
}
