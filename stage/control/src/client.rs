//! Client of a stage's control service.
use std::time::Duration;

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Streaming};

use crate::config::TlsConfig;
use crate::proto::stage_control_client::StageControlClient;
use crate::proto::{
    DrainRequest, FormAgainRequest, GetStatusRequest, ProbeChainRequest, SetWireConditioningRequest, StageStatus,
    WatchStatusRequest,
};
use crate::service::Conditioning;
use crate::tls::{TlsError, client_tls};

/// Why a control service could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is not `host:port`.
    #[error("`{address}` is not the address of a control service; write host:port")]
    Address {
        /// As given.
        address: String,
    },
    /// A certificate file cannot be read.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Nobody answers there, or not with this protocol.
    #[error("no control service at {address}: {message}; is the stage running?")]
    Connect {
        /// As given.
        address: String,
        /// The cause.
        message: String,
    },
    /// It took too long.
    #[error("the stage at {address} did not answer {method} within {} ms", timeout.as_millis())]
    Timeout {
        /// As given.
        address: String,
        /// `connect`, or the call.
        method: &'static str,
        /// The time it had.
        timeout: Duration,
    },
    /// The stage refused.
    #[error("the stage at {address} refused {method}: {message}")]
    Refused {
        /// As given.
        address: String,
        /// The call.
        method: &'static str,
        /// gRPC's class of the error.
        code: Code,
        /// The stage's words.
        message: String,
    },
}

/// `error` and what caused it, on one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = error.source();
    }
    text
}

/// Certificates of a client, PEM.
#[derive(Clone, Copy)]
pub struct PemIdentity<'a> {
    /// Authorities that sign the server's certificate.
    pub ca: &'a str,
    /// Certificate chain of the client.
    pub cert: &'a str,
    /// Private key of `cert`.
    pub key: &'a str,
}

impl PemIdentity<'_> {
    fn client_tls(self, name: &str) -> ClientTlsConfig {
        let identity = Identity::from_pem(self.cert, self.key);
        ClientTlsConfig::new().identity(identity).ca_certificate(Certificate::from_pem(self.ca)).domain_name(name)
    }
}

/// A connection to one stage's control service. Clones share the connection.
#[derive(Clone, Debug)]
pub struct ControlClient {
    address: String,
    timeout: Duration,
    inner: StageControlClient<Channel>,
}

impl ControlClient {
    /// Connects to `address` (`host:port`) in plain text, as on loopback. `timeout` bounds the connection and then every call.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn connect(address: &str, timeout: Duration) -> Result<Self, ClientError> {
        let endpoint = endpoint(address, "http")?;
        Self::dial(address, endpoint, timeout).await
    }

    /// Connects to `address` (`host:port`) with certificates; the server's must carry `name`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn connect_tls(
        address: &str,
        name: &str,
        tls: &TlsConfig,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let endpoint = endpoint(address, "https")?
            .tls_config(client_tls(tls, name)?)
            .map_err(|e| ClientError::Connect { address: address.to_owned(), message: with_causes(&e) })?;
        Self::dial(address, endpoint, timeout).await
    }

    /// As [`ControlClient::connect_tls`], with certificates that are in memory.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn connect_pem(
        address: &str,
        name: &str,
        identity: PemIdentity<'_>,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let endpoint = endpoint(address, "https")?
            .tls_config(identity.client_tls(name))
            .map_err(|e| ClientError::Connect { address: address.to_owned(), message: with_causes(&e) })?;
        Self::dial(address, endpoint, timeout).await
    }

    async fn dial(address: &str, endpoint: Endpoint, timeout: Duration) -> Result<Self, ClientError> {
        let address = address.to_owned();
        match tokio::time::timeout(timeout, endpoint.connect()).await {
            Ok(Ok(channel)) => Ok(Self { address, timeout, inner: StageControlClient::new(channel) }),
            Ok(Err(e)) => Err(ClientError::Connect { address, message: with_causes(&e) }),
            Err(_) => Err(ClientError::Timeout { address, method: "connect", timeout }),
        }
    }

    /// The status now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn status(&mut self) -> Result<StageStatus, ClientError> {
        let call = self.inner.get_status(GetStatusRequest {});
        finish(&self.address, "GetStatus", self.timeout, call).await
    }

    /// The status now, then every change, `interval` apart at least.
    ///
    /// # Errors
    /// [`ClientError`], here or from the stream.
    pub async fn watch(&mut self, interval: Duration) -> Result<StatusStream, ClientError> {
        let min_interval_ms = u32::try_from(interval.as_millis()).unwrap_or(u32::MAX);
        let call = self.inner.watch_status(WatchStatusRequest { min_interval_ms });
        let stream = finish(&self.address, "WatchStatus", self.timeout, call).await?;
        Ok(StatusStream { address: self.address.clone(), stream })
    }

    /// Tells the stage to finish what runs within `grace` (`None`: as configured) and to end.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn drain(&mut self, grace: Option<Duration>) -> Result<(), ClientError> {
        let grace_ms = grace.map(|g| u64::try_from(g.as_millis()).unwrap_or(u64::MAX));
        let call = self.inner.drain(DrainRequest { grace_ms });
        finish(&self.address, "Drain", self.timeout, call).await.map(|_| ())
    }

    /// Sends a probe through the chain (stage 0 only) and returns its round trip.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn probe(&mut self) -> Result<Duration, ClientError> {
        let call = self.inner.probe_chain(ProbeChainRequest {});
        let answer = finish(&self.address, "ProbeChain", self.timeout, call).await?;
        Ok(Duration::from_micros(answer.round_trip_us))
    }

    /// Ends `formation` (stage 0 only), so that the chain forms anew; says whether the chain still had it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn form_again(&mut self, formation: u64, reason: &str) -> Result<bool, ClientError> {
        let call = self.inner.form_again(FormAgainRequest { formation, reason: reason.to_owned() });
        Ok(finish(&self.address, "FormAgain", self.timeout, call).await?.ended)
    }

    /// Sets what is injected into the stage's downstream link. A delay above 2³² µs counts as that.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_conditioning(&mut self, conditioning: Conditioning) -> Result<(), ClientError> {
        let delay_us = u32::try_from(conditioning.delay.as_micros()).unwrap_or(u32::MAX);
        let request = SetWireConditioningRequest { delay_us, bytes_per_second: conditioning.bytes_per_second };
        let call = self.inner.set_wire_conditioning(request);
        finish(&self.address, "SetWireConditioning", self.timeout, call).await.map(|_| ())
    }
}

/// Statuses of one stage.
#[derive(Debug)]
pub struct StatusStream {
    address: String,
    stream: Streaming<StageStatus>,
}

impl StatusStream {
    /// The next status; `None` when the stage has ended the stream in order.
    ///
    /// # Errors
    /// [`ClientError::Refused`] when the connection was lost.
    pub async fn next(&mut self) -> Result<Option<StageStatus>, ClientError> {
        self.stream.message().await.map_err(|status| refused(&self.address, "WatchStatus", &status))
    }
}

pub(crate) fn endpoint(address: &str, scheme: &str) -> Result<Endpoint, ClientError> {
    let bad = || ClientError::Address { address: address.to_owned() };
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(bad());
    }
    Endpoint::from_shared(format!("{scheme}://{address}")).map_err(|_| bad())
}

fn refused(address: &str, method: &'static str, status: &tonic::Status) -> ClientError {
    let message = if status.message().is_empty() { status.code().to_string() } else { status.message().to_owned() };
    ClientError::Refused { address: address.to_owned(), method, code: status.code(), message }
}

pub(crate) async fn finish<T>(
    address: &str,
    method: &'static str,
    timeout: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, ClientError> {
    match tokio::time::timeout(timeout, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(refused(address, method, &status)),
        Err(_) => Err(ClientError::Timeout { address: address.to_owned(), method, timeout }),
    }
}
