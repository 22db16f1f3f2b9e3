//! `splitmodel cluster`, and the same as `kubectl splitmodel`: SplitModels of a Kubernetes cluster.

mod chat;
mod connect;
mod draw;
mod error;
mod forward;
mod meter;
mod plan;
mod status;

pub use draw::{Rates, draw};
pub use error::ClusterError;

use crate::args::{ClusterArgs, ClusterCommand};
use crate::error::CliError;

/// Does what the command says.
///
/// # Errors
/// [`CliError`].
pub async fn run(cluster: ClusterArgs) -> Result<(), CliError> {
    let target = cluster.target;
    match cluster.command {
        ClusterCommand::Status(args) => status::run(&target, args).await,
        ClusterCommand::Plan(args) => plan::run(&target, args).await,
        ClusterCommand::Chat(args) => chat::run(&target, args).await,
    }
}
