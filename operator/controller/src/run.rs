//! The operator at work: from the lease to the last look.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use jiff::Timestamp;
use kube::api::{Api, ListParams};
use kube::runtime::controller::{Action, Controller};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use kube_lease_manager::LeaseManagerBuilder;
use splitmodel_api::SplitModel;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::children::Owner;
use crate::names;
use crate::observed::place;
use crate::reconcile::{Context, ReconcileError, look};
use crate::settings::Settings;
use crate::stages::{Stages, Station};
use crate::world::{self, Machinery, World};

/// Seconds that a lease holds without being renewed.
const LEASE_SECONDS: u64 = 15;
/// It is renewed when this much of it is left.
const RENEW_SECONDS: u64 = 10;
/// Pause before the CRD is looked for again.
const CRD_PAUSE: Duration = Duration::from_secs(3);
/// What is gone is forgotten this often.
const TIDY: Duration = Duration::from_secs(15);
/// Looks at once.
const CONCURRENCY: u16 = 8;

/// Why the operator ends.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No API server.
    #[error("the API server: {0}")]
    Kube(#[from] kube::Error),
    /// The lease.
    #[error("the lease {name}: {message}")]
    Lease {
        /// Its name.
        name: String,
        /// Why.
        message: String,
    },
    /// Another replica leads now.
    #[error("the lease is lost; another replica goes on")]
    Lost,
}

/// Where the operator is, for its probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The definition of SplitModels is not served.
    NoCrd,
    /// Another replica leads.
    Standby,
    /// What there is is being listed.
    Listing,
    /// At work.
    Leading,
}

/// Works until `stop`; first waits for the definition of SplitModels and for the lease.
///
/// # Errors
/// [`RunError`].
pub async fn run(
    context: Arc<Context>,
    state: watch::Sender<State>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), RunError> {
    let stopped = async |stop: &mut watch::Receiver<bool>| {
        let _ = stop.wait_for(|s| *s).await; // its sender lives as long as the process
    };
    tokio::select! {
        () = wait_for_crd(&context.client, &context.settings) => {}
        () = stopped(&mut stop) => return Ok(()),
    }
    state.send_replace(State::Standby);
    let Settings { lease_name, lease_namespace, identity, .. } = &context.settings;
    let failed = |e: kube_lease_manager::LeaseManagerError| RunError::Lease {
        name: format!("{lease_namespace}/{lease_name}"),
        message: e.to_string(),
    };
    let manager = LeaseManagerBuilder::new(context.client.clone(), lease_name)
        .with_namespace(lease_namespace)
        .with_identity(identity)
        .with_duration(LEASE_SECONDS)
        .with_grace(RENEW_SECONDS)
        .build()
        .await
        .map_err(failed)?;
    let (mut leads, task) = manager.watch().await;
    tracing::info!(lease = lease_name, identity, "waiting for the lease");
    tokio::select! {
        led = leads.wait_for(|leads| *leads) => {
            if led.is_err() {
                return Err(RunError::Lost);
            }
        }
        () = stopped(&mut stop) => {}
    }
    let result = if *leads.borrow() {
        tracing::info!("this replica leads");
        context.metrics.set_leader(true);
        tokio::select! {
            () = work(context.clone(), &state, stop.clone()) => Ok(()),
            // What it wrote last may meet what the next leader writes: server-side apply of the same content.
            _ = leads.wait_for(|leads| !*leads) => Err(RunError::Lost),
        }
    } else {
        Ok(())
    };
    context.metrics.set_leader(false);
    // The lease is given back, so that the next replica need not wait for its end.
    drop(leads);
    let _ = tokio::time::timeout(Duration::from_secs(5), task).await;
    result
}

/// Resolves when SplitModels can be listed.
async fn wait_for_crd(client: &Client, settings: &Settings) {
    let namespaces = settings.namespaces();
    let api: Api<SplitModel> = world::api(client, namespaces.first().map(String::as_str));
    let mut told = false;
    loop {
        match api.list(&ListParams::default().limit(1)).await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if status.code == 404 => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(
                        "SplitModels are not served here; waiting for their definition: install the chart splitmodel-crds"
                    );
                }
            }
            Err(error) => tracing::warn!(%error, "SplitModels cannot be listed; trying again"),
        }
        tokio::time::sleep(CRD_PAUSE).await;
    }
}

/// Watches and looks until `stop`.
async fn work(context: Arc<Context>, state: &watch::Sender<State>, stop: watch::Receiver<bool>) {
    state.send_replace(State::Listing);
    let namespaces = context.settings.namespaces();
    let scopes: Vec<Option<String>> =
        if namespaces.is_empty() { vec![None] } else { namespaces.into_iter().map(Some).collect() };
    let slices = context.settings.cluster_wide() && world::has_slices(&context.client).await;
    let mut tasks = JoinSet::new();
    let mut controllers = Vec::new();
    for scope in &scopes {
        let (wake, woken) = mpsc::channel(1024);
        let (changed, nodes) = mpsc::channel(1);
        let changed = context.settings.cluster_wide().then_some(Machinery { changed, slices });
        let world = World::start(&context.client, scope.as_deref(), &wake, changed, &mut tasks);
        let scope = Arc::new(Scope {
            context: context.clone(),
            world,
            stages: Stages::new(wake.clone()),
            failures: Mutex::default(),
        });
        controllers.push((scope, (wake, woken), nodes));
    }
    for (scope, ..) in &controllers {
        scope.world.ready().await;
    }
    state.send_replace(State::Leading);
    let mut running = JoinSet::new();
    for (at, (scope, (wake, woken), mut nodes)) in scopes.iter().zip(controllers) {
        let api: Api<SplitModel> = world::api(&context.client, at.as_deref());
        let controller = Controller::new(api, watcher::Config::default())
            .with_config(kube::runtime::controller::Config::default().concurrency(CONCURRENCY));
        let models = controller.store();
        tasks.spawn(tidy(scope.clone(), models.clone()));
        tasks.spawn(async move {
            while nodes.recv().await.is_some() {
                for model in world::all(&models) {
                    let _ = wake.send(model).await; // the receiver ends with the process
                }
            }
        });
        let mut stop = stop.clone();
        let run = controller
            .reconcile_on(ReceiverStream::new(woken))
            .graceful_shutdown_on(async move {
                let _ = stop.wait_for(|s| *s).await;
            })
            .run(reconcile, again, scope)
            .for_each(|_| std::future::ready(()));
        running.spawn(run);
    }
    while running.join_next().await.is_some() {}
}

/// Forgets from time to time what is gone.
async fn tidy(scope: Arc<Scope>, models: kube::runtime::reflector::Store<SplitModel>) {
    // Not `models.wait_until_ready()`: the controller waits for it, and of two that wait only one is woken. What is forgotten too early
    // is only learnt again.
    let mut interval = tokio::time::interval_at(tokio::time::Instant::now() + TIDY, TIDY);
    loop {
        interval.tick().await;
        scope.stages.keep(&scope.world.pods());
        if scope.context.settings.namespaces().len() < 2 {
            // With one scope its SplitModels are all there are.
            scope.context.keep(&models.state().iter().filter_map(|m| m.uid()).collect());
        }
    }
}

/// One namespace, or all.
struct Scope {
    context: Arc<Context>,
    world: World,
    stages: Stages,
    /// Failed looks in a row.
    failures: Mutex<HashMap<ObjectRef<SplitModel>, u32>>,
}

impl Scope {
    fn failures(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectRef<SplitModel>, u32>> {
        self.failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

async fn reconcile(model: Arc<SplitModel>, scope: Arc<Scope>) -> Result<Action, ReconcileError> {
    let begun = Instant::now();
    let context = &scope.context;
    let mut observed = scope.world.observe(&model, Timestamp::now());
    let reference = ObjectRef::from_obj(model.as_ref());
    let mut divided = None;
    if let Some(owner) = Owner::of(&model) {
        let identity = model.spec.mtls.then(|| context.certificates.client(&owner, observed.now)).flatten();
        let listen = !model.spec.mtls || identity.is_some();
        let stations: Vec<_> = observed
            .pods
            .iter()
            .filter(|_| listen && model.metadata.deletion_timestamp.is_none())
            .filter_map(|pod| {
                let (chain, stage) = place(pod.labels())?;
                let dns = names::dns(&owner.name, &owner.namespace, chain, stage);
                Some((pod.clone(), Station { model: reference.clone(), dns, identity: identity.clone() }))
            })
            .collect();
        scope.stages.follow(&reference, &stations);
        observed.reported = scope.stages.reported(observed.pods.iter().map(AsRef::as_ref));
        let chains = 0..model.spec.replicas;
        divided = chains.filter_map(|chain| scope.stages.unite(&observed, chain, &stations)).min();
    }
    let result = look(&model, &observed, context).await;
    context.metrics.reconciled(begun.elapsed(), result.is_err());
    let again = result?;
    scope.failures().remove(&reference);
    Ok(Action::requeue(divided.map_or(again, |time| again.min(time))))
}

/// Exponential pauses, up to a minute.
fn again(model: Arc<SplitModel>, error: &ReconcileError, scope: Arc<Scope>) -> Action {
    let mut failures = scope.failures();
    let failed = failures.entry(ObjectRef::from_obj(model.as_ref())).or_default();
    *failed += 1;
    let pause = Duration::from_millis(500) * 2_u32.saturating_pow((*failed).min(7));
    tracing::warn!(%error, model = model.name_any(), ?pause, "a look failed");
    Action::requeue(pause.min(Duration::from_secs(60)))
}
