//! A port of this machine that leads into a pod, through the API server.
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use splitmodel_topology::names;
use tokio::io::{copy, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::ClusterError;
use super::connect::Connection;
use crate::error::CliError;

/// What forwarding needs; newer API servers want `create` of it, older ones `get`.
const RIGHT: &str = "get and create pods/portforward";
/// Between two looks for a pod that is ready.
const AGAIN: Duration = Duration::from_secs(1);
/// Time that a chain has to come back.
const PATIENCE: Duration = Duration::from_secs(120);

/// Says which pod a new connection goes to.
type Find = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<String, ClusterError>> + Send>> + Send + Sync>;
/// Is told why a connection ended.
type Say = Arc<dyn Fn(&ClusterError) + Send + Sync>;

/// A local port; it closes when this is dropped.
pub struct Forward {
    /// Where it is.
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Forward {
    /// Every connection to the local port goes to `port` of the pod that `find` names at that time; `say` is told what goes
    /// wrong.
    ///
    /// # Errors
    /// [`CliError::System`] when no local port is to be had.
    pub async fn open(connection: &Connection, port: u16, find: Find, say: Say) -> Result<Self, CliError> {
        let failed = |source| CliError::System { action: "listen on a port of 127.0.0.1", source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let connection = connection.clone();
        let task = tokio::spawn(async move {
            // The connections end with the listener.
            let mut tunnels = tokio::task::JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let Ok((socket, _)) = accepted else { continue };
                        let (connection, find, say) = (connection.clone(), find.clone(), say.clone());
                        tunnels.spawn(async move {
                            let mut socket = socket;
                            let done = async { tunnel(&connection, &mut socket, &find().await?, port).await }.await;
                            // Told before the client sees the end of its connection.
                            if let Err(error) = done {
                                say(&error);
                            }
                        });
                    }
                    Some(_) = tunnels.join_next() => {}
                }
            }
        });
        Ok(Self { address, task })
    }
}

/// Whether a connection to `port` of `pod` is allowed and possible.
///
/// # Errors
/// [`ClusterError`].
pub async fn check(connection: &Connection, pod: &str, port: u16) -> Result<(), ClusterError> {
    let pods: Api<Pod> = Api::namespaced(connection.client.clone(), &connection.namespace);
    connection.ask(RIGHT, pods.portforward(pod, &[port])).await.map(|forwarder| forwarder.abort())
}

/// Carries one connection until either side ends it.
async fn tunnel(connection: &Connection, socket: &mut TcpStream, pod: &str, port: u16) -> Result<(), ClusterError> {
    let pods: Api<Pod> = Api::namespaced(connection.client.clone(), &connection.namespace);
    let mut forwarder = connection.ask(RIGHT, pods.portforward(pod, &[port])).await?;
    let failed = |message: String| ClusterError::Forward { pod: pod.to_owned(), port, message };
    let (stream, error) = (forwarder.take_stream(port), forwarder.take_error(port));
    let (Some(stream), Some(error)) = (stream, error) else {
        return Err(failed("the API server opened no stream".to_owned()));
    };
    let (mut from_pod, mut to_pod) = split(stream);
    let (mut from_here, mut to_here) = socket.split();
    // Clients of HTTP do not half-close: when one side is done, both are.
    let result = tokio::select! {
        biased;
        Some(message) = error => Err(failed(message.trim().to_owned())),
        _ = copy(&mut from_pod, &mut to_here) => Ok(()),
        _ = copy(&mut from_here, &mut to_pod) => Ok(()),
    };
    forwarder.abort();
    result
}

/// Pods of the first stages of a SplitModel that are ready, by name.
///
/// # Errors
/// [`ClusterError`].
pub async fn ready_pods(connection: &Connection, model: &str) -> Result<Vec<String>, ClusterError> {
    let pods: Api<Pod> = Api::namespaced(connection.client.clone(), &connection.namespace);
    let labels = format!("{}={model},{}=0", names::MODEL, names::STAGE);
    let right = format!("list pods in namespace {}", connection.namespace);
    let listed = connection.ask(&right, pods.list(&ListParams::default().labels(&labels))).await?;
    let mut ready: Vec<String> = listed.iter().filter(|p| is_ready(p)).map(ResourceExt::name_any).collect();
    ready.sort();
    Ok(ready)
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    ready && pod.metadata.deletion_timestamp.is_none()
}

/// A ready pod of the first stage of `model`: the one that is asked first stays the choice while it is ready. While there is
/// none it waits, for some time; `note` is told so.
pub fn to_ready_pod(connection: &Connection, model: &str, note: fn(&str)) -> Find {
    let (connection, model) = (connection.clone(), model.to_owned());
    let last = Arc::new(tokio::sync::Mutex::new(String::new()));
    Arc::new(move || {
        let (connection, model, last) = (connection.clone(), model.clone(), last.clone());
        Box::pin(async move {
            let mut last = last.lock().await;
            let started = tokio::time::Instant::now();
            let mut told = false;
            loop {
                let ready = ready_pods(&connection, &model).await?;
                if let Some(pod) = ready.iter().find(|p| **p == *last).or(ready.first()) {
                    last.clone_from(pod);
                    return Ok(pod.clone());
                }
                if started.elapsed() > PATIENCE {
                    let why = format!("no pod of its stage 0 was ready for {} s", PATIENCE.as_secs());
                    return Err(ClusterError::NotServing { name: model, why });
                }
                if !std::mem::replace(&mut told, true) {
                    note(&format!("waiting for a pod of stage 0 of {model} to be ready"));
                }
                tokio::time::sleep(AGAIN).await;
            }
        })
    })
}

/// Always the same pod.
pub fn to_pod(pod: &str) -> Find {
    let pod = pod.to_owned();
    Arc::new(move || {
        let pod = pod.clone();
        Box::pin(async move { Ok(pod) })
    })
}
