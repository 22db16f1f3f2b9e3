//! Listens to what stages say of themselves: one stream per pod, from when it has an address until it is gone.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use splitmodel_api::SplitModel;
use splitmodel_control::client::PemIdentity;
use splitmodel_control::{ClientError, ControlClient, StageStatus};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::certificates::ClientIdentity;
use crate::ghosts::{Divided, Due, Found, Watch, find};
use crate::names::CONTROL_PORT;
use crate::observed::Observed;

/// Least time between two statuses of a stage.
const INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for a stage's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after a stage could not be reached.
const PAUSE: Duration = Duration::from_secs(1);

/// Where and how a stage is listened to.
#[derive(Clone)]
pub struct Station {
    /// Its SplitModel, which is looked at when it says something new.
    pub model: ObjectRef<SplitModel>,
    /// DNS name in its certificate.
    pub dns: String,
    /// The operator's certificate; absent without mTLS.
    pub identity: Option<ClientIdentity>,
}

struct Listener {
    task: JoinHandle<()>,
    model: ObjectRef<SplitModel>,
    address: String,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// See the module.
pub struct Stages {
    listeners: Mutex<HashMap<String, Listener>>,
    reported: Arc<Mutex<HashMap<String, StageStatus>>>,
    changed: mpsc::Sender<ObjectRef<SplitModel>>,
    ghosts: Mutex<Watch>,
}

impl Stages {
    /// A listener that tells `changed` which SplitModels to look at.
    #[must_use]
    pub fn new(changed: mpsc::Sender<ObjectRef<SplitModel>>) -> Self {
        Self { listeners: Mutex::default(), reported: Arc::default(), changed, ghosts: Mutex::default() }
    }

    /// Listens to `pods`, all there are of the SplitModel of `model`, and to no others of it.
    pub fn follow(&self, model: &ObjectRef<SplitModel>, pods: &[(Arc<Pod>, Station)]) {
        let mut listeners = lock(&self.listeners);
        let mut wanted = HashSet::new();
        for (pod, station) in pods {
            let (Some(uid), Some(address)) = (pod.uid(), running_at(pod)) else { continue };
            wanted.insert(uid.clone());
            if listeners.get(&uid).is_some_and(|l| l.address == address && !l.task.is_finished()) {
                continue;
            }
            let task =
                listen(uid.clone(), address.clone(), station.clone(), self.reported.clone(), self.changed.clone());
            let listener = Listener { task: tokio::spawn(task), model: model.clone(), address };
            listeners.insert(uid, listener);
        }
        listeners.retain(|uid, listener| {
            let keep = &listener.model != model || wanted.contains(uid);
            if !keep {
                lock(&self.reported).remove(uid);
            }
            keep
        });
    }

    /// Listens no more to pods that are gone; `there` are the uids of all pods of stages.
    pub fn keep(&self, there: &HashSet<String>) {
        lock(&self.listeners).retain(|uid, _| there.contains(uid));
        lock(&self.reported).retain(|uid, _| there.contains(uid));
        lock(&self.ghosts).keep(there);
    }

    /// Has stage 0 form `chain` anew if it serves with a stage that was replaced; returns when to look again, if so.
    pub fn unite(&self, observed: &Observed, chain: u32, stations: &[(Arc<Pod>, Station)]) -> Option<Duration> {
        let first = observed.pods_of(chain, 0).first().and_then(|pod| pod.uid())?;
        let found = match find(observed, chain) {
            Found::Divided(found) => found,
            Found::Whole => {
                lock(&self.ghosts).whole(&first);
                return None;
            }
            Found::Unformed => return None,
        };
        let again = match lock(&self.ghosts).see(&found, Instant::now()) {
            Due::In(time) => return Some(time),
            Due::Now => Some(PATIENCE),
        };
        let (pod, station) = stations.iter().find(|(pod, _)| pod.uid().as_ref() == Some(&found.first))?;
        let address = running_at(pod)?;
        tokio::spawn(tell(address, station.clone(), found));
        again
    }

    /// What the stages of these pods said last, by uid.
    #[must_use]
    pub fn reported<'a>(&self, pods: impl Iterator<Item = &'a Pod>) -> BTreeMap<String, StageStatus> {
        let reported = lock(&self.reported);
        pods.filter_map(|p| p.uid()).filter_map(|uid| Some((uid.clone(), reported.get(&uid)?.clone()))).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The address of a pod whose container runs.
fn running_at(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let running = status.container_statuses.as_ref()?.first()?.state.as_ref()?.running.is_some();
    let ip = status.pod_ip.as_ref().filter(|_| running)?;
    Some(if ip.contains(':') { format!("[{ip}]:{CONTROL_PORT}") } else { format!("{ip}:{CONTROL_PORT}") })
}

async fn listen(
    uid: String,
    address: String,
    station: Station,
    reported: Arc<Mutex<HashMap<String, StageStatus>>>,
    changed: mpsc::Sender<ObjectRef<SplitModel>>,
) {
    loop {
        let watched = async { connect(&address, &station).await?.watch(INTERVAL).await };
        match watched.await {
            Ok(mut stream) => {
                while let Ok(Some(status)) = stream.next().await {
                    let before = lock(&reported).insert(uid.clone(), status.clone());
                    let matters = before.as_ref().map(shown) != Some(shown(&status));
                    if matters && changed.send(station.model.clone()).await.is_err() {
                        return;
                    }
                }
            }
            Err(error) => tracing::debug!(address, %error, "the stage is not listened to yet"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// What of a stage's status reaches the SplitModel's.
fn shown(status: &StageStatus) -> (i32, u64, u64, &str, &str) {
    (status.phase, status.fetched_bytes, status.total_bytes, &status.last_error, &status.activations)
}

/// Tells stage 0 that one of the others is another by now.
async fn tell(address: String, station: Station, found: Divided) {
    let reason = format!("stage {} was replaced, and its former process still answers", found.stage);
    let told = async { connect(&address, &station).await?.form_again(found.formation, &reason).await };
    match told.await {
        Ok(ended) => tracing::info!(address, ended, reason, "stage 0 was told to form the chain anew"),
        Err(error) => tracing::warn!(address, %error, reason, "stage 0 cannot be told to form the chain anew"),
    }
}

async fn connect(address: &str, station: &Station) -> Result<ControlClient, ClientError> {
    match &station.identity {
        Some(identity) => {
            let pem = PemIdentity { ca: &identity.ca, cert: &identity.cert, key: &identity.key };
            ControlClient::connect_pem(address, &station.dns, pem, PATIENCE).await
        }
        None => ControlClient::connect(address, PATIENCE).await,
    }
}
