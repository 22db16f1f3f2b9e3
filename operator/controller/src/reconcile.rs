//! One look at a SplitModel: what is there, what should be, the writes between them, and the status.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Event as CoreEvent;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use splitmodel_api::{ChainStatus, Phase, PlanStatus, SplitModel, SplitModelSpec, SplitModelStatus};

use crate::apply::{Applier, ApplyError};
use crate::certificates::Certificates;
use crate::children::{self, Kind, Owner, Recipe};
use crate::metrics::Metrics;
use crate::names;
use crate::observed::{self, Observed};
use crate::planning::{self, Valid};
use crate::reason::{NotReady, Reason};
use crate::report;
use crate::rollout::{Act, ChainView, decide, is_drained};
use crate::settings::Settings;
use crate::status::{Situation, status};

/// Even where nothing happens: Secrets are not watched.
const RESYNC: Duration = Duration::from_secs(600);
/// Pause before a header that could not be read is tried again.
const INSPECT_AGAIN: SignedDuration = SignedDuration::from_secs(30);
/// Exit code of an inspection that a new try does not help.
const INCURABLE: i32 = 3;
/// A pod whose grace is over is taken for gone after this long if its node is lost.
const LOST_NODE: SignedDuration = SignedDuration::from_secs(30);
/// And after this long if its node is there: something on it holds the pod.
const STUCK: SignedDuration = SignedDuration::from_secs(300);
/// Warnings about an object are asked for this often at most.
const WARNINGS: SignedDuration = SignedDuration::from_secs(10);
/// So long a StatefulSet or a container may take before somebody asks why.
const USUAL: SignedDuration = SignedDuration::from_secs(5);
/// Time of a status write to the next.
const STATUS_INTERVAL: SignedDuration = SignedDuration::from_secs(1);

/// A look that failed; it is repeated.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// The API server.
    #[error(transparent)]
    Kube(#[from] kube::Error),
}

/// What looks share.
pub struct Context {
    /// The API.
    pub client: Client,
    /// The operator's settings.
    pub settings: Settings,
    /// Its metrics.
    pub metrics: Metrics,
    /// Certificates that were seen.
    pub certificates: Certificates,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    /// Last status write, by the uid of the SplitModel.
    written: HashMap<String, Timestamp>,
    /// Last warning, by namespace and name, and when it was asked for.
    warned: HashMap<(String, String), (Timestamp, Option<String>)>,
}

impl Context {
    /// A context without memories.
    #[must_use]
    pub fn new(client: Client, settings: Settings) -> Self {
        Self {
            client,
            settings,
            metrics: Metrics::default(),
            certificates: Certificates::default(),
            memory: Mutex::default(),
        }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Forgets all SplitModels but these.
    pub fn keep(&self, uids: &std::collections::HashSet<String>) {
        let gone: Vec<String> = self.memory().written.keys().filter(|uid| !uids.contains(*uid)).cloned().collect();
        gone.iter().for_each(|uid| self.forget(uid));
    }

    /// Forgets a SplitModel that is gone.
    pub fn forget(&self, uid: &str) {
        self.certificates.forget(uid);
        self.metrics.forget(uid);
        self.memory().written.remove(uid);
    }
}

/// Looks at `model` once; returns when to look again though nothing happened.
///
/// # Errors
/// [`ReconcileError`].
pub async fn look(model: &SplitModel, observed: &Observed, context: &Context) -> Result<Duration, ReconcileError> {
    let Some(owner) = Owner::of(model) else { return Ok(RESYNC) };
    if model.metadata.deletion_timestamp.is_some() {
        // Its children carry owner references: the cluster removes them.
        context.forget(&owner.uid);
        return Ok(RESYNC);
    }
    let applier = Applier { client: &context.client, owner: &owner, metrics: &context.metrics };
    let mut look = Look { model, owner: &owner, observed, context, applier, troubles: Vec::new(), again: RESYNC };
    look.run().await
}

struct Look<'a> {
    model: &'a SplitModel,
    owner: &'a Owner,
    observed: &'a Observed,
    context: &'a Context,
    applier: Applier<'a>,
    troubles: Vec<NotReady>,
    again: Duration,
}

impl Look<'_> {
    async fn run(&mut self) -> Result<Duration, ReconcileError> {
        let spec = &self.model.spec;
        let before = self.model.status.as_ref().and_then(|s| s.plan.clone());
        let valid = planning::validate(self.model);
        let (plan, unplanned) = match &valid {
            Ok(valid) => match self.plan(valid, before.as_ref()).await? {
                Ok(plan) => (Some(plan), None),
                Err(why) => (before, Some(why)),
            },
            Err(why) => (before, Some(why.clone())),
        };
        let mut indices = self.observed.chains(self.owner);
        if unplanned.is_none() {
            indices.extend(0..spec.replicas);
        }
        let views: Vec<ChainView> =
            indices.iter().map(|index| ChainView::new(self.observed, self.owner, *index)).collect();
        let acts = match (&plan, &unplanned) {
            (Some(plan), None) => decide(&views, spec.replicas, &plan.revision),
            // Without a plan for this spec the chains stay as they are.
            _ => {
                views.iter().map(|v| (v.index, if v.index < spec.replicas { Act::Keep } else { Act::Remove })).collect()
            }
        };
        if let Ok(valid) = &valid {
            self.ensure(children::api_service(self.owner, &spec.api)).await?;
            self.ensure(children::network_policy(self.owner)).await?;
            if let (Some(plan), None) = (&plan, &unplanned) {
                self.apply(valid, plan, &acts).await?;
            }
        }
        self.prune(plan.as_ref(), &acts).await?;
        self.take_away_stuck_pods().await?;
        let warnings = self.warnings(&views).await?;
        let chains: Vec<(ChainView, Act)> = views.into_iter().zip(acts.into_iter().map(|(_, act)| act)).collect();
        let situation = Situation {
            model: self.model,
            owner: self.owner,
            observed: self.observed,
            plan: plan.as_ref(),
            unplanned: unplanned.as_ref(),
            troubles: &self.troubles,
            chains: &chains,
            warnings: &warnings,
            domain: &self.context.settings.cluster_domain,
        };
        let now = status(&situation);
        self.report(now).await?;
        Ok(self.again)
    }

    fn again_in(&mut self, time: Duration) {
        self.again = self.again.min(time.max(Duration::from_millis(100)));
    }

    /// Notes what somebody has to do; passes on what is to be tried again.
    fn note(&mut self, result: Result<(), ApplyError>) -> Result<(), ReconcileError> {
        match result {
            Ok(()) => Ok(()),
            Err(ApplyError::NotReady(why)) => {
                self.again_in(Duration::from_secs(10));
                if !self.troubles.contains(&why) {
                    self.troubles.push(why);
                }
                Ok(())
            }
            Err(ApplyError::Kube(error)) => Err(error.into()),
        }
    }

    async fn ensure(&mut self, child: children::Child) -> Result<(), ReconcileError> {
        let result = self.applier.ensure(&child, self.observed).await.map(|_| ());
        self.note(result)
    }

    /// The plan for this spec: the one that status pins, or a new one once the header is read.
    async fn plan(
        &mut self,
        valid: &Valid,
        before: Option<&PlanStatus>,
    ) -> Result<Result<PlanStatus, NotReady>, ReconcileError> {
        let same_spec = before.filter(|plan| plan.spec_hash == valid.spec_hash);
        if let Some(pinned) = same_spec.filter(|plan| plan.retry == names::retry(self.model)) {
            self.end_inspection().await?;
            return Ok(Ok(pinned.clone()));
        }
        let facts = match self.facts(valid).await? {
            Ok(facts) => facts,
            Err(why) => return Ok(Err(why)),
        };
        let image = same_spec.map_or(&self.context.settings.stage_image, |plan| &plan.image);
        let machines = self.observed.machines();
        let plan = planning::make(self.model, valid, &facts, machines.as_ref(), image);
        self.end_inspection().await?;
        Ok(plan)
    }

    /// What the model's header says: kept in a ConfigMap, or read by a pod.
    async fn facts(&mut self, valid: &Valid) -> Result<Result<String, NotReady>, ReconcileError> {
        let key = &valid.inspect_key;
        let kept = self.observed.child(self.owner, Kind::ConfigMap, &names::facts(&self.owner.name));
        if let Some(facts) = kept.and_then(|map| children::read_facts(map, key)) {
            return Ok(Ok(facts.to_owned()));
        }
        let reading = || NotReady::new(Reason::Inspecting, "the model's header is being read");
        let Some(pod) = self.observed.inspect.clone() else {
            let spec: &SplitModelSpec = &self.model.spec;
            let pod = children::inspect_pod(self.owner, spec, &valid.source, &self.context.settings, key);
            self.ensure(pod).await?;
            return Ok(Err(self.troubles.last().cloned().unwrap_or_else(reading)));
        };
        if pod.annotations().get(names::HASH) != Some(key) {
            self.end_inspection().await?;
            return Ok(Err(reading()));
        }
        match children::ended(&pod) {
            Some((0, facts)) => {
                self.ensure(children::facts(self.owner, key, &facts)).await?;
                Ok(Ok(facts))
            }
            Some((code, message)) => {
                let words = if message.trim().is_empty() { format!("exit code {code}") } else { message };
                if code != INCURABLE {
                    self.inspect_again(&pod).await?;
                }
                let message = format!("the model's header cannot be read from {}: {}", valid.source, words.trim());
                Ok(Err(NotReady::new(Reason::InspectFailed, message)))
            }
            None => self.waiting_for(&pod).await.map(Err),
        }
    }

    /// Why the pod that reads the header has not ended.
    async fn waiting_for(&mut self, pod: &k8s_openapi::api::core::v1::Pod) -> Result<NotReady, ReconcileError> {
        let status = pod.status.clone().unwrap_or_default();
        if status.phase.as_deref() == Some("Failed") {
            let why = status.message.or(status.reason).unwrap_or_else(|| "its pod failed".to_owned());
            self.inspect_again(pod).await?;
            return Ok(NotReady::new(Reason::InspectFailed, format!("the model's header was not read: {why}")));
        }
        let unscheduled =
            status.conditions.into_iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "False");
        let state = status.container_statuses.unwrap_or_default().into_iter().next().and_then(|c| c.state);
        let waiting = state.and_then(|s| s.waiting);
        let message = if let Some(condition) = unscheduled {
            format!("the pod that reads the model's header waits for a node: {}", condition.message.unwrap_or_default())
        } else if let Some(waiting) = waiting.as_ref().filter(|w| w.reason.as_deref() != Some("ContainerCreating")) {
            let (reason, message) = (waiting.reason.clone(), waiting.message.clone());
            let (reason, message) = (reason.unwrap_or_default(), message.unwrap_or_default());
            format!("the pod that reads the model's header does not start: {reason}: {message}")
        } else if let Some(warning) = self.warning(&pod.name_any(), pod.creation_timestamp().map(|t| t.0)).await? {
            format!("the pod that reads the model's header does not start: {warning}")
        } else {
            "the model's header is being read".to_owned()
        };
        Ok(NotReady::new(Reason::Inspecting, message))
    }

    /// Removes a pod that could not read the header, so that another tries.
    async fn inspect_again(&mut self, pod: &k8s_openapi::api::core::v1::Pod) -> Result<(), ReconcileError> {
        let statuses = pod.status.as_ref().and_then(|s| s.container_statuses.as_ref());
        let ended = statuses.and_then(|s| s.first()?.state.as_ref()?.terminated.as_ref()?.finished_at.clone());
        let ended = ended.map(|t| t.0).or_else(|| pod.creation_timestamp().map(|t| t.0));
        let waited = ended.map_or(INSPECT_AGAIN, |ended| self.observed.now.duration_since(ended));
        if waited < INSPECT_AGAIN {
            self.again_in((INSPECT_AGAIN - waited).unsigned_abs());
            return Ok(());
        }
        self.end_inspection().await
    }

    async fn end_inspection(&mut self) -> Result<(), ReconcileError> {
        let Some(pod) = &self.observed.inspect else { return Ok(()) };
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let result = self.applier.force_delete_pod(&pod.name_any(), pod.uid()).await;
        self.note(result)
    }

    /// Applies the chains whose turn it is.
    async fn apply(&mut self, valid: &Valid, plan: &PlanStatus, acts: &[(u32, Act)]) -> Result<(), ReconcileError> {
        let turn: Vec<u32> = acts.iter().filter(|(_, act)| *act == Act::Apply).map(|(index, _)| *index).collect();
        if self.model.spec.mtls {
            let stages: Vec<(u32, usize)> =
                turn.iter().flat_map(|chain| (0..plan.stages.len()).map(|stage| (*chain, stage))).collect();
            let (client, metrics) = (&self.context.client, &self.context.metrics);
            let result =
                self.context.certificates.ensure((client, metrics), self.owner, &stages, self.observed.now).await;
            self.note(result)?;
        }
        let recipe = Recipe { owner: self.owner, wanted: &valid.wanted, plan, settings: &self.context.settings };
        for chain in turn {
            let stopped = self.given_up(chain, &plan.revision);
            // Stage 0 first: what it has begun it finishes with the others.
            let drained = is_drained(self.observed, chain, Some(&plan.revision));
            match children::chain(recipe, &valid.source, chain, &stopped) {
                Ok(children) => {
                    for child in children.into_iter().filter(|c| drained || !c.is_later_stage()) {
                        self.ensure(child).await?;
                    }
                }
                Err(error) => self.troubles.push(NotReady::new(Reason::InvalidSpec, error.to_string())),
            }
        }
        Ok(())
    }

    /// Stages of a chain that failed too often, until the user wants another try.
    fn given_up(&self, chain: u32, revision: &str) -> BTreeSet<usize> {
        let retry = names::retry(self.model).unwrap_or_default();
        let chains = self.model.status.as_ref().map(|s| s.chains.as_slice()).unwrap_or_default();
        let same = |c: &&ChainStatus| c.index == chain as i32 && c.revision.as_deref() == Some(revision);
        let stages = chains.iter().find(same).map(|c| c.stages.as_slice()).unwrap_or_default();
        let failed = |s: &splitmodel_api::StageStatus| {
            s.failure.as_ref().is_some_and(|f| f.given_up.as_deref() == Some(retry.as_str()))
        };
        (0..).zip(stages).filter(|(_, s)| failed(s)).map(|(stage, _)| stage).collect()
    }

    /// Removes what no chain needs any more: first what makes pods, the rest when they are gone.
    async fn prune(&mut self, plan: Option<&PlanStatus>, acts: &[(u32, Act)]) -> Result<(), ReconcileError> {
        let acts: BTreeMap<u32, Act> = acts.iter().copied().collect();
        let observed = self.observed;
        for (kind, child) in observed.own(self.owner) {
            let labels = child.labels();
            let Some(chain) = labels.get(names::CHAIN).and_then(|c| c.parse::<u32>().ok()) else { continue };
            let stage = observed::place(labels).map(|(_, stage)| stage);
            let act = acts.get(&chain).copied().unwrap_or(Act::Keep);
            let count = plan.map_or(0, |p| p.stages.len());
            let drained = match act {
                Act::Remove => is_drained(observed, chain, None),
                _ => is_drained(observed, chain, plan.map(|p| p.revision.as_str())),
            };
            let superfluous = act == Act::Apply && stage.is_some_and(|s| s >= count);
            let old_config = act == Act::Apply
                && kind == Kind::ConfigMap
                && plan
                    .is_some_and(|p| !child.name_any().ends_with(&p.revision) && self.has_turned(chain, &p.revision));
            let pods = match stage {
                Some(stage) if act != Act::Remove => !observed.pods_of(chain, stage).is_empty(),
                _ => observed.has_pods(chain),
            };
            let goes = act == Act::Remove || superfluous;
            let first = stage == Some(0) || drained;
            if !(old_config || goes && (kind == Kind::StatefulSet && first || !pods)) {
                continue;
            }
            let result = self.applier.delete(kind, child).await;
            self.note(result)?;
            if let (Kind::Service, Some(stage)) = (kind, stage) {
                let secret = names::tls(&self.owner.name, chain, stage);
                let removed = self.context.certificates.remove(&self.context.client, self.owner, &secret).await;
                self.note(removed)?;
            }
        }
        Ok(())
    }

    /// Whether nothing of a chain follows another revision.
    fn has_turned(&self, chain: u32, revision: &str) -> bool {
        let view = ChainView::new(self.observed, self.owner, chain);
        let of_chain = |p: &&std::sync::Arc<k8s_openapi::api::core::v1::Pod>| {
            observed::place(p.labels()).is_some_and(|(c, _)| c == chain)
        };
        !view.sets.is_empty()
            && view.sets.iter().all(|(_, r)| r == revision)
            && self
                .observed
                .pods
                .iter()
                .filter(of_chain)
                .all(|p| p.labels().get(names::REVISION).is_some_and(|r| r == revision))
    }

    /// Pods that should be gone and are not keep their replacements away.
    async fn take_away_stuck_pods(&mut self) -> Result<(), ReconcileError> {
        for pod in &self.observed.pods {
            let Some(deadline) = pod.metadata.deletion_timestamp.as_ref() else { continue };
            self.again_in(Duration::from_secs(5));
            let late = self.observed.now.duration_since(deadline.0);
            let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref());
            let lost = self.observed.nodes.is_some()
                && node.is_some_and(|n| !self.observed.node(n).is_some_and(crate::devices::is_ready));
            let patience = if lost { LOST_NODE } else { STUCK };
            if late > patience {
                let result = self.applier.force_delete_pod(&pod.name_any(), pod.uid()).await;
                self.note(result)?;
            } else if late > LOST_NODE {
                let message = format!(
                    "pod {} on node {} does not end; it is taken for gone {} s from now",
                    pod.name_any(),
                    node.unwrap_or("?"),
                    (patience - late).as_secs()
                );
                self.troubles.push(NotReady::new(Reason::Terminating, message));
            }
        }
        Ok(())
    }

    /// What the cluster says about StatefulSets without a pod and about containers that do not start.
    async fn warnings(&mut self, views: &[ChainView]) -> Result<BTreeMap<String, String>, ReconcileError> {
        let mut warnings = BTreeMap::new();
        for view in views {
            for (stage, _) in &view.sets {
                let set = names::stage(&self.owner.name, view.index, *stage);
                let pods = self.observed.pods_of(view.index, *stage);
                if let Some(pod) = pods.first().filter(|p| !is_scheduled(p) && self.model.spec.cache_volume.persistent)
                {
                    // The scheduler says only that a claim is not bound.
                    let claim = names::cache(&self.owner.name, view.index, *stage);
                    if let Some(warning) = self.warning(&claim, pod.creation_timestamp().map(|t| t.0)).await? {
                        warnings.insert(pod.name_any(), format!("claim {claim}: {warning}"));
                    }
                    continue;
                }
                let (name, since) = match pods.first() {
                    None => {
                        let live = self.observed.child(self.owner, Kind::StatefulSet, &set);
                        let wanted = live.and_then(|s| s.data["spec"]["replicas"].as_i64()).unwrap_or(1);
                        if wanted == 0 {
                            continue;
                        }
                        (set, live.and_then(|s| s.creation_timestamp()).map(|t| t.0))
                    }
                    Some(pod) if is_creating(pod) => (pod.name_any(), pod.creation_timestamp().map(|t| t.0)),
                    Some(_) => continue,
                };
                if let Some(warning) = self.warning(&name, since).await? {
                    // Secrets are not watched; the kubelet says which one is not there.
                    if warning.contains("-tls\" not found") {
                        self.context.certificates.look_again(&self.owner.uid);
                        self.again_in(Duration::from_secs(5));
                    }
                    warnings.insert(name, warning);
                }
            }
        }
        Ok(warnings)
    }

    /// The last warning about an object that should be further by now.
    async fn warning(&mut self, name: &str, since: Option<Timestamp>) -> Result<Option<String>, ReconcileError> {
        let now = self.observed.now;
        if since.is_none_or(|since| now.duration_since(since) < USUAL) {
            self.again_in(Duration::from_secs(3));
            return Ok(None);
        }
        self.again_in(Duration::from_secs(10));
        let key = (self.owner.namespace.clone(), name.to_owned());
        if let Some((at, warning)) = self.context.memory().warned.get(&key)
            && now.duration_since(*at) < WARNINGS
        {
            return Ok(warning.clone());
        }
        let api: Api<CoreEvent> = Api::namespaced(self.context.client.clone(), &self.owner.namespace);
        let fields = format!("involvedObject.name={name},type=Warning");
        let events = match api.list(&ListParams::default().fields(&fields).limit(50)).await {
            Ok(events) => events.items,
            // It may not be allowed; then there is less to say.
            Err(kube::Error::Api(status)) if status.code == 403 => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let time = |e: &CoreEvent| {
            let last = e.last_timestamp.as_ref().map(|t| t.0).or_else(|| e.event_time.as_ref().map(|t| t.0));
            last.or_else(|| e.creation_timestamp().map(|t| t.0))
        };
        let warning = events.into_iter().max_by_key(time).and_then(|e| e.message);
        let mut memory = self.context.memory();
        memory.warned.retain(|_, (at, _)| now.duration_since(*at) < SignedDuration::from_mins(10));
        memory.warned.insert(key, (now, warning.clone()));
        Ok(warning)
    }

    /// Writes the status if it has changed, once a second at most.
    async fn report(&mut self, now: SplitModelStatus) -> Result<(), ReconcileError> {
        let context = self.context;
        context.metrics.phase(&self.owner.uid, now.phase.unwrap_or(Phase::Pending), self.observed.now);
        if self.model.status.as_ref() == Some(&now) {
            return Ok(());
        }
        let written = context.memory().written.get(&self.owner.uid).copied();
        let waited = written.map_or(STATUS_INTERVAL, |at| self.observed.now.duration_since(at));
        if waited < STATUS_INTERVAL {
            self.again_in((STATUS_INTERVAL - waited).unsigned_abs());
            return Ok(());
        }
        report::write(&context.client, self.model, &now, &context.metrics).await?;
        context.memory().written.insert(self.owner.uid.clone(), self.observed.now);
        report::events(&context.client, &context.settings, self.model, &now).await;
        Ok(())
    }
}

fn is_scheduled(pod: &k8s_openapi::api::core::v1::Pod) -> bool {
    pod.spec.as_ref().is_some_and(|s| s.node_name.is_some())
}

fn is_creating(pod: &k8s_openapi::api::core::v1::Pod) -> bool {
    let status = pod.status.as_ref();
    let first = status.and_then(|s| s.container_statuses.as_ref()?.first());
    let waiting = first.and_then(|c| c.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
    is_scheduled(pod) && (first.is_none() || waiting == Some("ContainerCreating"))
}
