//! The command line: every flag with its meaning and default.
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::link::{parse_bandwidth, parse_delay};

/// Serve one model too big for one machine's GPU as a chain of stages.
#[derive(Debug, Parser)]
#[command(name = "splitmodel", version, max_term_width = 110, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a whole chain on this machine, one process per stage, until Ctrl-C.
    Up(UpArgs),
    /// Show which layers, bytes and memory each stage would get. Starts nothing.
    Plan(PlanArgs),
    /// Write slices of a GGUF file as GGUF files.
    Slice(SliceArgs),
    /// Chat with a running model. Reads one message per line when the input is no terminal.
    Chat(ChatArgs),
    /// Show the stages of running chains.
    Status(StatusArgs),
    /// Make the links of a running chain slower, for tests and planning.
    Link(LinkArgs),
    /// The same for a Kubernetes cluster, where `kubectl splitmodel` is short for it.
    Cluster(ClusterArgs),
}

/// A cluster, and what to do with it.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// Which cluster; before the command or behind it, as with kubectl.
    #[command(flatten)]
    pub target: Target,
    /// What to do.
    #[command(subcommand)]
    pub command: ClusterCommand,
}

/// SplitModels of a Kubernetes cluster: their chains, plans for its nodes, and a conversation.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-splitmodel",
    bin_name = "kubectl splitmodel",
    version,
    max_term_width = 110,
    arg_required_else_help = true
)]
pub struct Plugin {
    /// Where, and what.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// What `kubectl splitmodel` can do.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Draw the chains of a SplitModel: phases, pods, layers, bytes, restarts, tokens per second.
    Status(ClusterStatusArgs),
    /// Show which layers and bytes each node would get, or what is missing. Changes nothing.
    Plan(ClusterPlanArgs),
    /// Chat with a SplitModel, through a port of this machine that leads to its first stage.
    Chat(ClusterChatArgs),
}

/// Which cluster.
#[derive(Clone, Debug, Default, Args)]
pub struct Target {
    /// Namespace [default: that of the context].
    #[arg(short, long, global = true, value_name = "NAMESPACE", value_parser = namespace)]
    pub namespace: Option<String>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// The kubeconfig [default: those of $KUBECONFIG, else ~/.kube/config].
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// `kubectl splitmodel status`.
#[derive(Debug, Args)]
pub struct ClusterStatusArgs {
    /// The SplitModel [default: all of the namespace].
    #[arg(value_parser = object_name)]
    pub name: Option<String>,
    /// All SplitModels of all namespaces, whichever --namespace names.
    #[arg(short = 'A', long, conflicts_with = "name")]
    pub all_namespaces: bool,
    /// Draw again every two seconds, until Ctrl-C.
    #[arg(short, long)]
    pub watch: bool,
}

/// `kubectl splitmodel plan`.
#[derive(Debug, Args)]
pub struct ClusterPlanArgs {
    /// The SplitModel manifest (YAML).
    #[arg(short, long = "filename", value_name = "FILE")]
    pub file: PathBuf,
    /// The model's GGUF file, or what `splitmodel-stage inspect` wrote of it [default: a source that is a file of this machine,
    /// else what the operator read of the SplitModel of that name].
    #[arg(long, value_name = "FILE")]
    pub facts: Option<PathBuf>,
    /// Number of stages, instead of what the manifest says.
    #[arg(long, value_name = "N")]
    pub stages: Option<u32>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `kubectl splitmodel chat`.
#[derive(Debug, Args)]
pub struct ClusterChatArgs {
    /// The SplitModel.
    #[arg(value_parser = object_name)]
    pub name: String,
    /// How to talk.
    #[command(flatten)]
    pub chat: ChatOptions,
}

/// A namespace: a label of DNS, safe in a path.
fn namespace(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if text.is_empty() || text.len() > 63 || !text.chars().all(fits) || text.starts_with('-') {
        return Err("namespaces have lower-case letters, digits and '-' only".to_owned());
    }
    Ok(text.to_owned())
}

/// A name of an object, safe in a path.
fn object_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if text.is_empty() || text.len() > 253 || !text.chars().all(fits) || text.starts_with(['.', '-']) {
        return Err("names have lower-case letters, digits, '-' and '.' only".to_owned());
    }
    Ok(text.to_owned())
}

/// Shape of the stages' log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatArg {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// `splitmodel up`.
#[derive(Debug, Args)]
pub struct UpArgs {
    /// The SplitModel manifest (YAML), the same as for a cluster.
    pub file: PathBuf,
    /// Port of the API.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Address of the API. Anything but a loopback address opens it to the network.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Number of stages, instead of what the manifest says.
    #[arg(long, value_name = "N")]
    pub stages: Option<u32>,
    /// Threads of each stage [default: as in the manifest, else (cores − 1) ÷ stages, at least 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Directory of slices, logs and the list of running chains [default: $XDG_STATE_HOME/splitmodel or
    /// ~/.local/state/splitmodel].
    #[arg(long, value_name = "DIR", env = "SPLITMODEL_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Format of the stages' logs.
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormatArg,
    /// Level of the stages' logs: error, warn, info, debug, trace, or a filter such as `info,splitmodel_link=debug`.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
    /// The stage program [default: splitmodel-stage beside this program, else in PATH].
    #[arg(long, value_name = "PATH", env = "SPLITMODEL_STAGE")]
    pub stage_binary: Option<PathBuf>,
    /// Write what each stage computed into this directory, one file per stage, for replay.
    #[arg(long, value_name = "DIR")]
    pub schedule_log: Option<PathBuf>,
    /// A ggml-RPC server (host:port) that the stages may use as a device. May be given several times.
    #[arg(long, value_name = "HOST:PORT")]
    pub rpc: Vec<String>,
    /// Failures in a row, without serving in between, after which a stage is given up.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub restart_limit: u32,
    /// Seconds in which three checks in a row of a stage's health service must fail for it to be taken as hung, killed and
    /// started again; 0: never.
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u32).range(..=86_400))]
    pub hang_deadline: u32,
    /// Seconds that running requests get to finish after Ctrl-C; a second Ctrl-C ends at once [default:
    /// spec.deadlines.drainSeconds].
    #[arg(long, value_name = "SECONDS")]
    pub grace: Option<u32>,
    /// File with the keys that clients of the API must present, one per line.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
}

/// `splitmodel plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The SplitModel manifest (YAML).
    pub file: PathBuf,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Number of stages, instead of what the manifest says.
    #[arg(long, value_name = "N")]
    pub stages: Option<u32>,
    /// A device and its memory, such as `gpu0=24Gi`; one stage each, in order. May be given several times.
    #[arg(long, value_name = "NAME=MEMORY")]
    pub device: Vec<String>,
}

/// `splitmodel slice`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["layers", "stages"])))]
pub struct SliceArgs {
    /// The GGUF file; for a sharded model, its first file.
    pub model: PathBuf,
    /// Layers `a..b`: a and up to, but not with, b.
    #[arg(long, value_name = "A..B", requires = "out")]
    pub layers: Option<String>,
    /// File to write.
    #[arg(long, value_name = "FILE", requires = "layers")]
    pub out: Option<PathBuf>,
    /// Write this many slices, cut as `plan` would.
    #[arg(long, value_name = "N", requires = "out_dir")]
    pub stages: Option<u32>,
    /// Directory for the slices of `--stages`.
    #[arg(long, value_name = "DIR", requires = "stages")]
    pub out_dir: Option<PathBuf>,
}

/// `splitmodel chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Address of the API.
    #[arg(long, default_value = "http://127.0.0.1:8000", env = "SPLITMODEL_URL")]
    pub url: String,
    /// How to talk.
    #[command(flatten)]
    pub chat: ChatOptions,
}

/// How to talk with a model.
#[derive(Debug, Args)]
pub struct ChatOptions {
    /// Model to ask for [default: the first that the server lists].
    #[arg(long)]
    pub model: Option<String>,
    /// Key of the API.
    #[arg(long, value_name = "KEY", env = "SPLITMODEL_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// System message.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens of an answer [default: the server's].
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Sampling temperature [default: the server's].
    #[arg(long)]
    pub temperature: Option<f32>,
}

/// `splitmodel status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Directory of the running chains, as given to `up`.
    #[arg(long, value_name = "DIR", env = "SPLITMODEL_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Ask this control service (host:port) instead. May be given several times.
    #[arg(long, value_name = "HOST:PORT")]
    pub control: Vec<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `splitmodel link`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true).args(["delay", "bandwidth", "clear"])))]
#[command(group(clap::ArgGroup::new("which").required(true).args(["stage", "all", "control"])))]
pub struct LinkArgs {
    /// Delay of every message, such as 25ms, 500us or 1s; left out: none.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub delay: Option<Duration>,
    /// Bits or bytes a second, such as 1Gbit, 100Mbit or 10MB; left out: as many as go through.
    #[arg(long, value_name = "SPEED", value_parser = parse_bandwidth)]
    pub bandwidth: Option<u64>,
    /// Take delay and limit away.
    #[arg(long, conflicts_with_all = ["delay", "bandwidth"])]
    pub clear: bool,
    /// The link on which this stage sends: to the next one, or from the last one to stage 0. May be given several times.
    #[arg(long, value_name = "N")]
    pub stage: Vec<u32>,
    /// The links of all stages.
    #[arg(long)]
    pub all: bool,
    /// The stage with this control service (host:port). May be given several times.
    #[arg(long, value_name = "HOST:PORT")]
    pub control: Vec<String>,
    /// Name of the chain, where several run.
    #[arg(long, value_name = "NAME", conflicts_with = "control")]
    pub chain: Option<String>,
    /// Directory of the running chains, as given to `up`.
    #[arg(long, value_name = "DIR", env = "SPLITMODEL_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
}
