//! What all pods have in common.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use splitmodel_api::{ModelSource, SplitModelSpec, StageSpec};

use crate::settings::Settings;

/// User and group of all containers.
const USER: i64 = 65532;
/// Key of a private authority's bundle in its ConfigMap.
const AUTHORITIES: &str = "ca.crt";
/// A pod on a node that does not answer is given up after this many seconds.
pub const UNREACHABLE_SECONDS: i64 = 60;

/// The only container of a pod.
pub(super) struct Container {
    pub(super) name: &'static str,
    pub(super) image: String,
    pub(super) args: Vec<String>,
    pub(super) resources: Value,
    pub(super) mounts: Vec<Value>,
    /// Further fields.
    pub(super) more: Value,
}

/// What a pod is made from.
pub(super) struct Template<'a> {
    pub(super) spec: &'a SplitModelSpec,
    pub(super) stage: &'a StageSpec,
    pub(super) settings: &'a Settings,
    pub(super) container: Container,
    pub(super) volumes: Vec<Value>,
    /// Further fields of the pod's spec.
    pub(super) more: Value,
}

impl Template<'_> {
    pub(super) fn pod_spec(self) -> Value {
        let pods = &self.spec.pods;
        let mut volumes = self.volumes;
        volumes.push(json!({"name": "tmp", "emptyDir": {}}));
        let container = self.container;
        let mut mounts = container.mounts;
        mounts.push(json!({"name": "tmp", "mountPath": "/tmp"}));
        let mut env: Vec<Value> = pods.env.iter().map(|e| json!({"name": e.name, "value": e.value})).collect();
        if let Some(map) = &self.spec.model.ca_config_map {
            volumes.push(
                json!({"name": "ca", "configMap": {"name": map, "items": [{"key": AUTHORITIES, "path": AUTHORITIES}]}}),
            );
            mounts.push(json!({"name": "ca", "mountPath": "/ca", "readOnly": true}));
            if pods.env.iter().all(|e| e.name != "SSL_CERT_FILE") {
                env.push(json!({"name": "SSL_CERT_FILE", "value": format!("/ca/{AUTHORITIES}")}));
            }
        }
        let mut main = json!({
            "name": container.name,
            "image": container.image,
            "args": container.args,
            "resources": container.resources,
            "volumeMounts": mounts,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            },
        });
        if !env.is_empty() {
            main["env"] = env.into();
        }
        if let Some(policy) = &self.settings.image_pull_policy {
            main["imagePullPolicy"] = policy.clone().into();
        }
        merge(&mut main, container.more);
        let mut spec = json!({
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [main],
            "volumes": volumes,
            "tolerations": tolerations(self.stage),
        });
        if !pods.image_pull_secrets.is_empty() {
            spec["imagePullSecrets"] = pods.image_pull_secrets.iter().map(|name| json!({"name": name})).collect();
        }
        if let Some(class) = &pods.priority_class_name {
            spec["priorityClassName"] = class.clone().into();
        }
        if let Some(class) = &self.stage.runtime_class_name {
            spec["runtimeClassName"] = class.clone().into();
        }
        merge(&mut spec, self.more);
        spec
    }
}

/// The user's tolerations, and how long a silent node is waited for where the user does not say.
fn tolerations(stage: &StageSpec) -> Vec<Value> {
    let mut all: Vec<Value> = stage.tolerations.iter().filter_map(|t| serde_json::to_value(t).ok()).collect();
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let own = |t: &Value| t.get("key").and_then(Value::as_str).is_none_or(|k| k == key);
        if !all.iter().any(|t| own(t) && t.get("effect").and_then(Value::as_str) != Some("NoSchedule")) {
            all.push(json!({
                "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREACHABLE_SECONDS,
            }));
        }
    }
    all
}

fn merge(into: &mut Value, more: Value) {
    if let (Some(into), Value::Object(more)) = (into.as_object_mut(), more) {
        into.extend(more);
    }
}

/// How a pod finds the model.
pub(super) struct Model {
    /// The source as the stage reads it.
    pub(super) source: String,
    /// Directory of the credentials.
    pub(super) credentials: Option<String>,
    pub(super) mounts: Vec<Value>,
    pub(super) volumes: Vec<Value>,
}

/// How pods find the model of `source`: claims and images are mounted, the rest is fetched.
pub(super) fn model(source: &ModelSource, secret: Option<&str>) -> Model {
    let mounted = |path: &str, volume: Value| {
        let mut volume = volume;
        volume["name"] = "model".into();
        (
            format!("file:///model/{}", path.trim_start_matches('/')),
            vec![json!({"name": "model", "mountPath": "/model", "readOnly": true})],
            vec![volume],
        )
    };
    let (source, mut mounts, mut volumes) = match source {
        ModelSource::Pvc { claim, path } => {
            mounted(path, json!({"persistentVolumeClaim": {"claimName": claim, "readOnly": true}}))
        }
        ModelSource::Oci { image, digest, path } => {
            mounted(path, json!({"image": {"reference": format!("{image}@{digest}"), "pullPolicy": "IfNotPresent"}}))
        }
        other => (other.to_string(), Vec::new(), Vec::new()),
    };
    let credentials = secret.map(|name| {
        mounts.push(json!({"name": "credentials", "mountPath": "/credentials", "readOnly": true}));
        volumes.push(json!({"name": "credentials", "secret": {"secretName": name, "defaultMode": 0o440}}));
        "/credentials".to_owned()
    });
    Model { source, credentials, mounts, volumes }
}

/// Labels and annotations of a pod: the user's, under the operator's own.
pub(super) fn metadata(spec: &SplitModelSpec, own: BTreeMap<String, String>) -> Value {
    let mut labels = spec.pods.labels.clone();
    labels.extend(own);
    let mut metadata = json!({"labels": labels});
    if !spec.pods.annotations.is_empty() {
        metadata["annotations"] = json!(spec.pods.annotations);
    }
    metadata
}
