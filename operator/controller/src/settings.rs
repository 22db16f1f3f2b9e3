//! What the operator is told at its start.

use std::net::SocketAddr;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// The splitmodel operator.
#[derive(Debug, Parser)]
#[command(version, about)]
pub struct Cli {
    /// What to do; absent: run.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// How to run.
    #[command(flatten)]
    pub settings: Settings,
}

/// What else the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the CustomResourceDefinition.
    Crd,
}

/// Settings of a run.
#[derive(Clone, Debug, Args)]
pub struct Settings {
    /// Image of stages whose SplitModel names none.
    #[arg(long, env = "SPLITMODEL_STAGE_IMAGE", default_value = "splitmodel-stage:latest")]
    pub stage_image: String,
    /// Pull policy of stage images: Always, IfNotPresent or Never. Absent: the cluster's default.
    #[arg(long, env = "SPLITMODEL_IMAGE_PULL_POLICY")]
    pub image_pull_policy: Option<String>,
    /// Namespaces to work in, repeated or with commas. Absent: all.
    #[arg(long = "namespace", env = "SPLITMODEL_NAMESPACES", value_delimiter = ',')]
    pub namespaces: Vec<String>,
    /// Name of the Lease that makes one replica the leader.
    #[arg(long, env = "SPLITMODEL_LEASE_NAME", default_value = "splitmodel-operator")]
    pub lease_name: String,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    pub lease_namespace: String,
    /// Name of this replica.
    #[arg(long, env = "POD_NAME", default_value = "splitmodel-operator")]
    pub identity: String,
    /// Where /metrics, /healthz and /readyz are served.
    #[arg(long, env = "SPLITMODEL_BIND", default_value = "0.0.0.0:8080")]
    pub bind: SocketAddr,
    /// Domain of the cluster's names.
    #[arg(long, env = "SPLITMODEL_CLUSTER_DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Shape of log lines.
    #[arg(long, env = "SPLITMODEL_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// error, warn, info, debug, trace, or a filter such as info,kube=debug.
    #[arg(long, env = "SPLITMODEL_LOG_LEVEL", default_value = "info")]
    pub log_level: String,
}

/// Shape of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

impl Settings {
    /// The namespaces; empty for all. A variable that is set to nothing is none.
    #[must_use]
    pub fn namespaces(&self) -> Vec<String> {
        self.namespaces.iter().map(|n| n.trim().to_owned()).filter(|n| !n.is_empty()).collect()
    }

    /// Whether nodes may be read: not where the operator has rights in single namespaces only.
    #[must_use]
    pub fn cluster_wide(&self) -> bool {
        self.namespaces().is_empty()
    }
}
