//! What is watched: SplitModels' children, pods and nodes, kept in memory.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::pin::pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::ListParams;
use kube::core::DynamicObject;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use splitmodel_api::SplitModel;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::children::Kind;
use crate::names;
use crate::observed::{Observed, place};

/// SplitModels to look at.
pub type Wake = mpsc::Sender<ObjectRef<SplitModel>>;

/// Watches of one scope: a namespace, or all.
pub struct World {
    children: Vec<(Kind, Store<DynamicObject>)>,
    pods: Store<Pod>,
    nodes: Option<Store<Node>>,
    slices: Option<Store<ResourceSlice>>,
}

/// What is watched beyond namespaces.
pub struct Machinery {
    /// Gets a word when plans may be others.
    pub changed: mpsc::Sender<()>,
    /// Whether the cluster has slices and they may be read.
    pub slices: bool,
}

/// Whether drivers can publish devices here, and the operator may read them.
pub async fn has_slices(client: &Client) -> bool {
    match Api::<ResourceSlice>::all(client.clone()).list(&ListParams::default().limit(1)).await {
        Ok(_) => true,
        Err(error) => {
            tracing::info!(%error, "ResourceSlices are not read: the memory of GPUs is known by labels and by what is declared");
            false
        }
    }
}

/// The API of `K` in a namespace, or in all.
pub fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = kube::core::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

impl World {
    /// Begins to watch; `wake` gets the SplitModel of every child that changes, `machinery` says
    /// whether nodes and their devices are, too. The tasks end with `tasks`.
    #[must_use]
    pub fn start(
        client: &Client,
        namespace: Option<&str>,
        wake: &Wake,
        machinery: Option<Machinery>,
        tasks: &mut JoinSet<()>,
    ) -> Self {
        let config = watcher::Config::default().labels(&names::selector());
        let mut children = Vec::new();
        for kind in Kind::ALL.into_iter().filter(|k| *k != Kind::Pod) {
            let resource = kind.resource();
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
                None => Api::all_with(client.clone(), &resource),
            };
            let writer = reflector::store::Writer::new(resource);
            children.push((kind, writer.as_reader()));
            tasks.spawn(watch_children(watcher(api, config.clone()), writer, wake.clone()));
        }
        let writer = reflector::store::Writer::default();
        let pods = writer.as_reader();
        let api: Api<Pod> = api(client, namespace);
        tasks.spawn(watch_children(watcher(api, config), writer, wake.clone()));
        let (mut nodes, mut slices) = (None, None);
        if let Some(Machinery { changed, slices: has_slices }) = machinery {
            if has_slices {
                slices = Some(watch_machines(client, changed.clone(), mark_slice, tasks));
            }
            nodes = Some(watch_machines(client, changed, mark_node, tasks));
        }
        Self { children, pods, nodes, slices }
    }

    /// Resolves when everything there is has been seen.
    pub async fn ready(&self) {
        // A store whose writer is gone never gets ready; then the process is ending.
        for (_, store) in &self.children {
            let _ = store.wait_until_ready().await;
        }
        let _ = self.pods.wait_until_ready().await;
        if let Some(nodes) = &self.nodes {
            let _ = nodes.wait_until_ready().await;
        }
        if let Some(slices) = &self.slices {
            let _ = slices.wait_until_ready().await;
        }
    }

    /// What there is of `model`, but for what its stages say.
    #[must_use]
    pub fn observe(&self, model: &SplitModel, now: Timestamp) -> Observed {
        let (name, namespace) = (model.name_any(), model.namespace());
        let its = |labels: &std::collections::BTreeMap<String, String>, in_namespace: &Option<String>| {
            *in_namespace == namespace && labels.get(names::MODEL) == Some(&name)
        };
        let mut observed = Observed { now, ..Observed::default() };
        for (kind, store) in &self.children {
            for child in store.state_filter(|c| its(c.labels(), &c.metadata.namespace)) {
                observed.children.insert((*kind, child.name_any()), child);
            }
        }
        for pod in self.pods.state_filter(|p| its(p.labels(), &p.metadata.namespace)) {
            if place(pod.labels()).is_some() {
                observed.pods.push(pod);
            } else if pod.name_any() == names::inspect(&name) {
                observed.inspect = Some(pod);
            }
        }
        observed.nodes = self.nodes.as_ref().map(|nodes| {
            let mut nodes = nodes.state();
            nodes.sort_by_key(|n| n.name_any());
            nodes
        });
        observed.slices = self.slices.as_ref().map(Store::state).unwrap_or_default();
        observed
    }
}

fn forget_managers<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// Keeps what is watched in memory, and wakes the SplitModel of every child that changes.
async fn watch_children<K>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
    writer: reflector::store::Writer<K>,
    wake: Wake,
) where
    K: Resource + Clone + Send + Sync + 'static,
    K::DynamicType: Eq + std::hash::Hash + Clone,
{
    let mut stream = pin!(events.default_backoff().modify(forget_managers).reflect(writer).touched_objects());
    while let Some(event) = stream.next().await {
        wake_for(&wake, event).await;
    }
}

/// Wakes the SplitModel that a child belongs to.
async fn wake_for<K: Resource>(wake: &Wake, event: Result<K, watcher::Error>) {
    match event {
        Ok(child) => {
            let model = child.labels().get(names::MODEL);
            if let (Some(model), Some(namespace)) = (model, child.namespace()) {
                // The receiver ends with the process.
                let _ = wake.send(ObjectRef::new(model).within(&namespace)).await;
            }
        }
        Err(error) => tracing::warn!(%error, "a watch is interrupted"),
    }
}

/// Watches all objects of a kind, and tells when something of one changes that plans depend on; kubelets write their nodes all the
/// time.
fn watch_machines<K>(
    client: &Client,
    changed: mpsc::Sender<()>,
    mark: fn(&K) -> u64,
    tasks: &mut JoinSet<()>,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
{
    let writer = reflector::store::Writer::default();
    let store = writer.as_reader();
    let events = watcher(Api::<K>::all(client.clone()), watcher::Config::default());
    tasks.spawn(async move {
        let mut known = std::collections::HashMap::new();
        let mut stream = pin!(events.default_backoff().modify(forget_managers).reflect(writer));
        while let Some(event) = stream.next().await {
            let news = match event {
                Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                    let mark = mark(&object);
                    known.insert(object.name_any(), mark) != Some(mark)
                }
                Ok(watcher::Event::Delete(object)) => known.remove(&object.name_any()).is_some(),
                Ok(watcher::Event::Init | watcher::Event::InitDone) => false,
                Err(error) => {
                    tracing::warn!(%error, kind = %K::kind(&()), "a watch is interrupted");
                    false
                }
            };
            if news {
                // One word that waits is as good as many.
                let _ = changed.try_send(());
            }
        }
    });
    store
}

fn mark_node(node: &Node) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{:?}", node.metadata.labels).hash(&mut hasher);
    format!("{:?}", node.spec.as_ref().map(|s| (s.unschedulable, &s.taints))).hash(&mut hasher);
    format!("{:?}", node.status.as_ref().and_then(|s| s.allocatable.as_ref())).hash(&mut hasher);
    crate::devices::is_ready(node).hash(&mut hasher);
    hasher.finish()
}

fn mark_slice(slice: &ResourceSlice) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{:?}", slice.spec).hash(&mut hasher);
    hasher.finish()
}

impl World {
    /// Uids of all pods.
    #[must_use]
    pub fn pods(&self) -> std::collections::HashSet<String> {
        self.pods.state().iter().filter_map(|p| p.uid()).collect()
    }
}

/// The SplitModels of a store.
#[must_use]
pub fn all(models: &Store<SplitModel>) -> Vec<ObjectRef<SplitModel>> {
    models.state().iter().map(|m: &Arc<SplitModel>| ObjectRef::from_obj(m.as_ref())).collect()
}
