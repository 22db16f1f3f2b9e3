//! The pod that reads a model's header, and where its answer is kept.

use k8s_openapi::api::core::v1::Pod;
use kube::core::DynamicObject;
use serde_json::json;
use splitmodel_api::{ModelSource, SplitModelSpec};

use super::pod::{Container, Template};
use super::{Child, Kind, Owner, pod};
use crate::names;
use crate::settings::Settings;

/// The pod that reads the header of `source` and writes what it says into its termination message. `key` names what is read.
#[must_use]
pub fn inspect_pod(
    owner: &Owner,
    spec: &SplitModelSpec,
    source: &ModelSource,
    settings: &Settings,
    key: &str,
) -> Child {
    let model = pod::model(source, spec.model.credentials_secret.as_deref());
    let mut args = vec!["inspect".to_owned(), "--source".to_owned(), model.source.clone()];
    if let Some(credentials) = &model.credentials {
        args.extend(["--credentials".to_owned(), credentials.clone()]);
    }
    args.extend(["--output".to_owned(), "/dev/termination-log".to_owned()]);
    let defaults = spec.stage(0);
    let container = Container {
        name: "inspect",
        image: spec.image.clone().unwrap_or_else(|| settings.stage_image.clone()),
        args,
        resources: json!({"requests": {"cpu": "50m", "memory": "128Mi"}}),
        mounts: model.mounts,
        more: json!({}),
    };
    let template = Template {
        spec,
        stage: &spec.stage_defaults.clone().unwrap_or_default(),
        settings,
        container,
        volumes: model.volumes,
        more: json!({
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "activeDeadlineSeconds": spec.deadlines.progress_seconds,
            "nodeSelector": defaults.node_selector.iter().filter(|_| spec.stage_list.is_none())
                .collect::<std::collections::BTreeMap<_, _>>(),
        }),
    };
    let mut labels = names::labels(&owner.name);
    labels.insert("splitmodel.dev/inspect".to_owned(), key.to_owned());
    let mut all = spec.pods.labels.clone();
    all.extend(labels);
    let content = json!({"spec": template.pod_spec()});
    Child::new(Kind::Pod, owner, names::inspect(&owner.name), all, content).pinned(key.to_owned())
}

/// The ConfigMap that keeps what the header says.
#[must_use]
pub fn facts(owner: &Owner, key: &str, facts: &str) -> Child {
    let content = json!({"data": {names::FACTS: facts, names::FACTS_KEY: key}});
    Child::new(Kind::ConfigMap, owner, names::facts(&owner.name), names::labels(&owner.name), content)
}

/// What the ConfigMap keeps of the model that `key` names.
#[must_use]
pub fn read_facts<'a>(map: &'a DynamicObject, key: &str) -> Option<&'a str> {
    let data = map.data.get("data")?;
    (data.get(names::FACTS_KEY)?.as_str()? == key).then(|| data.get(names::FACTS)?.as_str()).flatten()
}

/// The termination message of a pod's only container, and its exit code.
#[must_use]
pub fn ended(pod: &Pod) -> Option<(i32, String)> {
    let status = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let terminated = status.state.as_ref()?.terminated.as_ref()?;
    Some((terminated.exit_code, terminated.message.clone().unwrap_or_default()))
}
