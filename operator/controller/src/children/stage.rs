//! A chain: its configuration, and a StatefulSet, a Service and perhaps a claim per stage.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde_json::{Map, Value, json};
use splitmodel_api::{LayerRange, ModelSource, PlannedStage, StageSpec};
use splitmodel_control::ConfigError;
use splitmodel_control::config::{CacheConfig, LogConfig, ModelConfig, TlsConfig};
use splitmodel_topology::{Cut, Place, Site, stage_configs};

use super::pod::{self, Container, Template};
use super::{Child, Kind, Recipe};
use crate::names::{self, API_PORT, CONTROL_PORT, HEALTH_PORT, LINK_PORT, METRICS_PORT};

const MIB: i64 = 1 << 20;
/// Host memory of a process beside what the plan counts.
const PROCESS_BYTES: i64 = 256 * MIB;
/// Room on disk beside the tensors: tokenizer and headers.
const DISK_BYTES: i64 = 64 * MIB;
/// Seconds in which endpoints forget a pod of stage 0 before it stops taking requests.
const FORGET_SECONDS: u32 = 5;
/// Seconds beyond the drain in which a pod must have ended.
const END_SECONDS: u32 = 15;

/// Everything of chain `index`. Stages in `stopped` get no pod: they were given up.
///
/// # Errors
/// [`ConfigError`] when the SplitModel asks for what no stage can do.
pub fn chain(
    recipe: Recipe<'_>,
    source: &ModelSource,
    index: u32,
    stopped: &BTreeSet<usize>,
) -> Result<Vec<Child>, ConfigError> {
    let chain = Chain { recipe, source, index };
    let name = &recipe.owner.name;
    let mut children = vec![chain.config()?, chain.disruption_budget()];
    for (stage, plan) in recipe.plan.stages.iter().enumerate() {
        let spec = recipe.wanted.spec.stage(stage);
        children.push(chain.service(stage));
        if recipe.wanted.spec.cache_volume.persistent {
            children.push(chain.claim(stage, plan));
        }
        children.push(chain.workload(stage, plan, &spec, u8::from(!stopped.contains(&stage))));
    }
    tracing::trace!(chain = names::chain(name, index), children = children.len(), "built");
    Ok(children)
}

struct Chain<'a> {
    recipe: Recipe<'a>,
    source: &'a ModelSource,
    index: u32,
}

impl Chain<'_> {
    fn config_name(&self) -> String {
        let owner = self.recipe.owner;
        format!("{}-{}", names::chain(&owner.name, self.index), self.recipe.plan.revision)
    }

    fn config(&self) -> Result<Child, ConfigError> {
        let Recipe { owner, wanted, plan, .. } = self.recipe;
        let stages = plan.stages.len();
        let dns = |stage| names::dns(&owner.name, &owner.namespace, self.index, stage);
        let layers: Vec<[u32; 2]> =
            plan.stages.iter().filter_map(|s| LayerRange(s.layers.clone()).range()).map(|r| [r.start, r.end]).collect();
        let n_layers = layers.last().map_or(0, |l| l[1]);
        let model = pod::model(self.source, wanted.spec.model.credentials_secret.as_deref());
        let tls = wanted.spec.mtls.then(|| TlsConfig {
            ca: "/tls/ca.crt".into(),
            cert: "/tls/tls.crt".into(),
            key: "/tls/tls.key".into(),
            names: (0..stages).map(dns).collect(),
        });
        let site = Site {
            chain: names::chain(&owner.name, self.index),
            model: ModelConfig {
                source: model.source,
                digest: Some(plan.model_digest.clone()),
                credentials: model.credentials.map(Into::into),
            },
            cache: CacheConfig { dir: "/cache".into(), max_bytes: 0 },
            api: everywhere(API_PORT),
            api_key_file: wanted.spec.api.key_secret.as_ref().map(|_| "/keys".into()),
            insecure: tls.is_none(),
            tls,
            log: LogConfig::default(),
            places: (0..stages)
                .map(|stage| Place {
                    link: everywhere(LINK_PORT),
                    address: format!("{}:{LINK_PORT}", dns(stage)),
                    control: everywhere(CONTROL_PORT),
                    health: everywhere(HEALTH_PORT),
                    metrics: everywhere(METRICS_PORT),
                })
                .collect(),
        };
        let mut configs = stage_configs(wanted, Cut { stages: &layers, n_layers }, &site)?;
        for config in configs.iter_mut().skip(1) {
            // Where the whole chain ends, stage 0 has been drained before. A later stage that ends alone is waited for: the
            // sooner its successor comes, the shorter the pause.
            config.scheduling.drain_grace_s = 0;
        }
        let mut data = Map::new();
        for config in &configs {
            data.insert(format!("stage-{}.json", config.stage), config.to_json()?.into());
        }
        let labels = names::chain_labels(&owner.name, self.index);
        let content = json!({"data": data, "immutable": true});
        let child = Child::new(Kind::ConfigMap, owner, self.config_name(), labels, content);
        Ok(child.pinned(plan.revision.clone()))
    }

    fn disruption_budget(&self) -> Child {
        let owner = self.recipe.owner;
        let content = json!({"spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {names::MODEL: owner.name, names::CHAIN: self.index.to_string()},
                "matchExpressions": [{"key": names::STAGE, "operator": "Exists"}],
            },
        }});
        let labels = names::chain_labels(&owner.name, self.index);
        Child::new(Kind::PodDisruptionBudget, owner, names::chain(&owner.name, self.index), labels, content)
    }

    /// A stable address for the stage, also before it is ready.
    fn service(&self, stage: usize) -> Child {
        let owner = self.recipe.owner;
        let port = |name: &str, port: u16| json!({"name": name, "port": port, "targetPort": port, "protocol": "TCP"});
        let content = json!({"spec": {
            "type": "ClusterIP",
            "publishNotReadyAddresses": true,
            "selector": {
                names::MODEL: owner.name, names::CHAIN: self.index.to_string(), names::STAGE: stage.to_string(),
            },
            "ports": [port("link", LINK_PORT), port("control", CONTROL_PORT), port("metrics", METRICS_PORT)],
        }});
        let labels = names::stage_labels(&owner.name, self.index, stage);
        Child::new(Kind::Service, owner, names::stage(&owner.name, self.index, stage), labels, content)
    }

    fn claim(&self, stage: usize, plan: &PlannedStage) -> Child {
        let owner = self.recipe.owner;
        let volume = &self.recipe.wanted.spec.cache_volume;
        let size = volume
            .size
            .as_ref()
            .map_or_else(|| mib(disk(plan) + disk(plan) / 4 + self.prefix_files()), |q| q.0.clone());
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        });
        if let Some(class) = &volume.storage_class_name {
            spec["storageClassName"] = class.clone().into();
        }
        let labels = names::stage_labels(&owner.name, self.index, stage);
        let name = names::cache(&owner.name, self.index, stage);
        // What a claim asks for cannot be changed.
        Child::new(Kind::PersistentVolumeClaim, owner, name, labels, json!({"spec": spec})).pinned("claim".to_owned())
    }

    fn workload(&self, stage: usize, plan: &PlannedStage, spec: &StageSpec, replicas: u8) -> Child {
        let Recipe { owner, plan: whole, .. } = self.recipe;
        let name = names::stage(&owner.name, self.index, stage);
        let mut labels = names::stage_labels(&owner.name, self.index, stage);
        let selector = json!({"matchLabels": {
            names::MODEL: owner.name, names::CHAIN: self.index.to_string(), names::STAGE: stage.to_string(),
        }});
        labels.insert(names::REVISION.to_owned(), whole.revision.clone());
        let content = json!({"spec": {
            "replicas": replicas,
            "serviceName": name,
            "selector": selector,
            // With the other policy a pod that never gets ready could not be replaced by a better one.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "revisionHistoryLimit": 2,
            "template": {
                "metadata": pod::metadata(&self.recipe.wanted.spec, labels.clone()),
                "spec": self.pod_spec(stage, plan, spec),
            },
        }});
        let hash = format!("{}-{replicas}", whole.revision);
        Child::new(Kind::StatefulSet, owner, name, labels, content).pinned(hash)
    }

    fn pod_spec(&self, stage: usize, plan: &PlannedStage, stage_spec: &StageSpec) -> Value {
        let Recipe { owner, wanted, plan: whole, settings } = self.recipe;
        let spec = &wanted.spec;
        let model = pod::model(self.source, spec.model.credentials_secret.as_deref());
        let (mut mounts, mut volumes) = (model.mounts, model.volumes);
        let mut mount = |name: &str, path: &str, mut volume: Value| {
            let writable = name == "cache";
            mounts.push(json!({"name": name, "mountPath": path, "readOnly": !writable}));
            volume["name"] = name.into();
            volumes.push(volume);
        };
        mount("config", "/etc/splitmodel", json!({"configMap": {"name": self.config_name()}}));
        let cache = if spec.cache_volume.persistent {
            json!({"persistentVolumeClaim": {"claimName": names::cache(&owner.name, self.index, stage)}})
        } else {
            let limit = spec.cache_volume.size.as_ref().map(|size| size.0.clone());
            json!({"emptyDir": limit.map_or_else(|| json!({}), |size| json!({"sizeLimit": size}))})
        };
        mount("cache", "/cache", cache);
        if spec.mtls {
            let secret = names::tls(&owner.name, self.index, stage);
            mount("tls", "/tls", json!({"secret": {"secretName": secret, "defaultMode": 0o440}}));
        }
        if let Some(secret) = spec.api.key_secret.as_ref().filter(|_| stage == 0) {
            mount("keys", "/keys", json!({"secret": {"secretName": secret, "defaultMode": 0o440}}));
        }
        let container = Container {
            name: "stage",
            image: stage_spec.image.clone().unwrap_or_else(|| whole.image.clone()),
            args: vec![
                "serve".into(),
                "--config".into(),
                format!("/etc/splitmodel/stage-{stage}.json"),
                "--termination-log".into(),
                "/dev/termination-log".into(),
            ],
            resources: self.resources(stage, plan, stage_spec),
            mounts,
            more: container(stage),
        };
        let drain = if stage == 0 { spec.deadlines.drain_seconds + FORGET_SECONDS } else { 0 };
        let grace = drain + END_SECONDS;
        let mut more = json!({"terminationGracePeriodSeconds": grace, "nodeSelector": stage_spec.node_selector});
        if let Some(mib) = plan.gpu_mib {
            let enough = json!({"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [(mib - 1).to_string()]});
            more["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [enough]}],
            }}});
        }
        if stage_spec.gpu.is_none() {
            // Stages that compute on the same cores slow each other.
            let chain = json!({names::MODEL: owner.name, names::CHAIN: self.index.to_string()});
            more["topologySpreadConstraints"] = json!([{
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": chain},
            }]);
        }
        Template { spec, stage: stage_spec, settings, container, volumes, more }.pod_spec()
    }

    /// Host memory that kept prefixes take at most: as many as are kept, each as long as a session can be; and on stage 0 of several
    /// what is kept of activations.
    fn prefix_bytes(&self, stage: usize, plan: &PlannedStage) -> i64 {
        let cache = self.recipe.wanted.kv_cache();
        if !cache.enabled || cache.max_entries == 0 {
            return 0;
        }
        let session = plan.kv_bytes / i64::from(self.recipe.wanted.spec.parallel.max(1));
        let bytes = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let kept = session.saturating_mul(cache.max_entries.into()).min(bytes(cache.max_bytes));
        let first = stage == 0 && self.recipe.plan.stages.len() > 1;
        kept.saturating_add(if first { bytes(cache.activation_bytes) } else { 0 })
    }

    /// Bytes of the cache volume for kept prefixes, with some that are put aside.
    fn prefix_files(&self) -> i64 {
        let bytes = self.recipe.wanted.kv_cache().disk_bytes;
        i64::try_from(bytes.saturating_add(bytes / 4)).unwrap_or(i64::MAX)
    }

    fn resources(&self, stage: usize, plan: &PlannedStage, spec: &StageSpec) -> Value {
        let on_host = (plan.embedding_bytes + PROCESS_BYTES).saturating_add(self.prefix_bytes(stage, plan));
        let slice = plan.weight_bytes + plan.kv_bytes + plan.compute_bytes;
        let memory = if spec.gpu.is_some() { on_host } else { on_host.saturating_add(slice) };
        let (mut requests, mut limits) = (Map::new(), Map::new());
        let default = if spec.gpu.is_some() { "250m" } else { "500m" };
        requests.insert("cpu".into(), spec.cpu.clone().unwrap_or_else(|| default.to_owned()).into());
        match &spec.memory {
            Some(memory) => {
                requests.insert("memory".into(), memory.0.clone().into());
                limits.insert("memory".into(), memory.0.clone().into());
            }
            None => {
                requests.insert("memory".into(), mib(memory).into());
            }
        }
        if !self.recipe.wanted.spec.cache_volume.persistent {
            requests.insert("ephemeral-storage".into(), mib(disk(plan) + self.prefix_files()).into());
        }
        if let Some(gpu) = &spec.gpu {
            limits.insert(gpu.resource.clone(), gpu.count.to_string().into());
        }
        json!({"requests": requests, "limits": limits})
    }
}

/// Ports and probes of a stage's container.
fn container(stage: usize) -> Value {
    let mut ports =
        vec![("link", LINK_PORT), ("control", CONTROL_PORT), ("health", HEALTH_PORT), ("metrics", METRICS_PORT)];
    if stage == 0 {
        ports.insert(0, ("http", API_PORT));
    }
    let probe = |service: &str| json!({"port": HEALTH_PORT, "service": service});
    let mut more = json!({
        "ports": ports.iter()
            .map(|(name, port)| json!({"name": name, "containerPort": port, "protocol": "TCP"}))
            .collect::<Vec<_>>(),
        "startupProbe": {"grpc": probe("startup"), "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 120},
        // A process that does not answer will not end in order either.
        "livenessProbe": {
            "grpc": probe("liveness"), "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 4,
            "terminationGracePeriodSeconds": 5,
        },
        "readinessProbe": {"grpc": probe("readiness"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 1},
    });
    if stage == 0 {
        more["lifecycle"] = json!({"preStop": {"sleep": {"seconds": FORGET_SECONDS}}});
    }
    more
}

fn everywhere(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)
}

/// Bytes of a stage's slices on disk.
fn disk(plan: &PlannedStage) -> i64 {
    plan.weight_bytes + plan.embedding_bytes + DISK_BYTES
}

fn mib(bytes: i64) -> String {
    format!("{}Mi", bytes.max(1).div_euclid(MIB) + i64::from(bytes.rem_euclid(MIB) > 0))
}
