//! The stage configuration file and the gRPC control service, shared by stages, the command line and the operator.
//!
//! - [`config`]: the one file that tells a stage what it is.
//! - [`StatusHub`]: where a stage writes its status, from any thread.
//! - [`ControlService`]: streams that status and forwards orders to a [`ControlHandler`].
//! - [`client`]: the other side.
//! - [`health`]: the standard gRPC health service for the kubelet.
pub mod client;
pub mod config;
pub mod health;
mod service;
mod status;
mod tls;

/// Messages and stubs generated from `proto/stage_control.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated")]
pub mod proto {
    tonic::include_proto!("splitmodel.control.v1");
}

pub use client::{ClientError, ControlClient};
pub use config::{ConfigError, StageConfig};
pub use proto::{Memory, Phase, StageStatus};
pub use service::{Conditioning, ControlHandler, ControlService, HandlerError, serve};
pub use status::StatusHub;
pub use tls::{ServeError, TlsError};
