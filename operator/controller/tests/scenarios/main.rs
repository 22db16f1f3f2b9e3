//! Looks at SplitModels in all their situations, against an API server that writes down every call.
#![cfg(test)]

mod fake;

use fake::Scene;
use serde_json::{Value, json};
use splitmodel_api::Phase;
use splitmodel_control::{Phase as At, StageStatus};
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

const SPEC: &str = "  model: {source: 'pvc://models/tiny.gguf'}\n  stages: 3\n  contextLength: 256\n";
const GPUS: &str = "  stageDefaults: {gpu: {count: 1}}\n";

fn facts() -> String {
    let dir = std::env::temp_dir().join(format!(
        "splitmodel-scenarios-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("tiny.gguf");
    Tiny::new(Arch::Llama).write(file.clone()).unwrap();
    let facts = Model::open(&file).unwrap().facts().unwrap().to_compact().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    facts
}

fn writes(calls: &[String]) -> Vec<&str> {
    calls.iter().map(String::as_str).filter(|c| !c.starts_with("GET ")).collect()
}

#[tokio::test]
async fn a_new_model_is_inspected_planned_and_built() {
    let mut scene = Scene::new(SPEC);
    let calls = scene.look().await;
    assert_eq!(
        calls,
        [
            "GET pods/m-inspect",
            "PATCH pods/m-inspect",
            "GET services/m",
            "PATCH services/m",
            "GET networkpolicies/m",
            "PATCH networkpolicies/m",
            "PATCH splitmodels/m/status",
        ]
    );
    assert_eq!(scene.condition("Planned"), ("False".into(), "Inspecting".into()));
    assert_eq!(scene.status().phase, Some(Phase::Pending));
    assert_eq!(scene.look().await, Vec::<String>::new(), "it waits");

    scene.inspected(0, &facts());
    let calls = scene.settle().await;
    let mut expected =
        vec!["PATCH configmaps/m-facts".to_owned(), "DELETE pods/m-inspect".into(), "POST secrets".into()];
    expected.extend((0..3).map(|s| format!("PATCH secrets/m-0-{s}-tls")));
    let plan = scene.status().plan.unwrap();
    expected.push(format!("PATCH configmaps/m-0-{}", plan.revision));
    expected.push("PATCH poddisruptionbudgets/m-0".into());
    for s in 0..3 {
        expected.push(format!("PATCH services/m-0-{s}"));
        expected.push(format!("PATCH statefulsets/m-0-{s}"));
    }
    let status = |call: &&str| *call != "PATCH splitmodels/m/status";
    assert_eq!(writes(&calls).into_iter().filter(status).collect::<Vec<_>>(), expected);
    assert_eq!(scene.condition("Planned"), ("True".into(), "Planned".into()));
    assert_eq!((plan.image.as_str(), plan.stages.len()), ("stage:1", 3));
    assert_eq!(scene.status().layers.as_deref(), Some("3/3/2"));

    scene.pods.clear();
    scene.make_pods();
    for (pod, at) in [("m-0-0-0", At::Fetching), ("m-0-1-0", At::Loading), ("m-0-2-0", At::Linked)] {
        let uid = scene.pods[pod]["metadata"]["uid"].as_str().unwrap().to_owned();
        let status = StageStatus { phase: at.into(), fetched_bytes: 5, total_bytes: 9, ..StageStatus::default() };
        scene.reported.insert(uid, status);
    }
    assert_eq!(scene.settle().await, ["PATCH splitmodels/m/status"]);
    let stages = &scene.status().chains[0].stages;
    assert_eq!(stages.iter().map(|s| s.phase).collect::<Vec<_>>(), [Phase::Fetching, Phase::Loading, Phase::Linked]);
    assert_eq!((stages[0].fetched_bytes, stages[0].total_bytes), (Some(5), Some(9)));
    assert_eq!(scene.status().phase, Some(Phase::Fetching));
    assert_eq!(scene.condition("Ready"), ("False".into(), "Fetching".into()));

    scene.ready(true);
    assert_eq!(scene.settle().await, ["PATCH splitmodels/m/status"]);
    assert_eq!(scene.condition("Ready"), ("True".into(), "Serving".into()));
    assert_eq!((scene.status().ready.as_deref(), scene.status().replicas), (Some("3/3"), 1));
    assert_eq!(scene.look().await, Vec::<String>::new(), "a steady state writes nothing");
}

/// Whoever reads the source trusts the authority: the inspect pod and the stages.
#[tokio::test]
async fn a_private_authority_reaches_every_pod() {
    let spec =
        "  model: {source: 'https://models.local/tiny.gguf', caConfigMap: own}\n  stages: 2\n  contextLength: 256\n";
    let mut scene = Scene::new(spec);
    scene.look().await;
    let mut pods = vec![scene.object("/api/v1/namespaces/ns/pods/m-inspect").unwrap()["spec"].clone()];
    scene.inspected(0, &facts());
    scene.settle().await;
    pods.extend(scene.objects("StatefulSet").iter().map(|s| s["spec"]["template"]["spec"].clone()));
    assert_eq!(pods.len(), 3);
    for pod in pods {
        let container = &pod["containers"][0];
        assert_eq!(container["env"], json!([{"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}]));
        let volume =
            json!({"name": "ca", "configMap": {"name": "own", "items": [{"key": "ca.crt", "path": "ca.crt"}]}});
        assert!(pod["volumes"].as_array().unwrap().contains(&volume), "{pod}");
        let mount = json!({"name": "ca", "mountPath": "/ca", "readOnly": true});
        assert!(container["volumeMounts"].as_array().unwrap().contains(&mount), "{pod}");
    }
}

#[tokio::test]
async fn the_first_stage_asks_for_the_memory_of_activations() {
    let requests = async |more: &str| {
        let mut scene = Scene::new(&format!("{SPEC}  kvCache: {{maxEntries: 4{more}}}\n"));
        scene.settle().await;
        scene.inspected(0, &facts());
        scene.settle().await;
        let memory = |stage: Value| {
            let pod = &stage["spec"]["template"]["spec"];
            let memory = pod["containers"][0]["resources"]["requests"]["memory"].as_str().unwrap().to_owned();
            memory.strip_suffix("Mi").unwrap().parse::<i64>().unwrap()
        };
        scene.objects("StatefulSet").into_iter().map(memory).collect::<Vec<_>>()
    };
    let (without, with) = (requests("").await, requests(", activationBytes: 100Mi").await);
    assert_eq!(with, [without[0] + 100, without[1], without[2]]);
}

#[tokio::test]
async fn what_does_not_fit_takes_nothing() {
    let mut scene = Scene::new(&format!("{SPEC}  stageDefaults: {{gpu: {{count: 4}}}}\n"));
    scene.settle().await;
    scene.inspected(0, &facts());
    scene.settle().await;
    assert_eq!(scene.condition("Planned"), ("False".into(), "NoNode".into()));
    let message = scene.message("Planned");
    assert!(message.contains("a has only 2 nvidia.com/gpu, and a stage asks for 4; b has only 2"), "{message}");
    assert_eq!(scene.status().phase, Some(Phase::Pending));
    assert_eq!(scene.condition("Degraded"), ("True".into(), "NoNode".into()));
    assert_eq!(scene.names("StatefulSet"), Vec::<String>::new());
    assert_eq!(scene.object("/api/v1/namespaces/ns/pods/m-inspect"), None, "what it said is kept");
    let nodes: Vec<_> = scene
        .nodes
        .iter()
        .cloned()
        .map(|n| {
            let mut node = serde_json::to_value(n).unwrap();
            node["status"]["allocatable"]["nvidia.com/gpu"] = "16".into();
            serde_json::from_value(node).unwrap()
        })
        .collect();
    scene.nodes = nodes;
    scene.settle().await;
    assert_eq!(scene.condition("Planned").0, "True", "new nodes are enough");
    assert_eq!(scene.names("StatefulSet").len(), 3);
}

#[tokio::test]
async fn a_header_that_cannot_be_read_is_tried_again_or_not() {
    let mut scene = Scene::new(SPEC);
    scene.settle().await;
    scene.inspected(1, "connection refused");
    assert_eq!(scene.settle().await, ["PATCH splitmodels/m/status"]);
    assert_eq!(scene.condition("Planned"), ("False".into(), "InspectFailed".into()));
    assert!(scene.message("Planned").contains("connection refused"));
    scene.now += jiff::SignedDuration::from_secs(31);
    assert_eq!(writes(&scene.look().await), ["DELETE pods/m-inspect"]);
    scene.pods.clear();
    assert_eq!(writes(&scene.settle().await), ["PATCH pods/m-inspect", "PATCH splitmodels/m/status"]);

    scene.inspected(3, "no GGUF");
    scene.settle().await;
    scene.now += jiff::SignedDuration::from_secs(3600);
    assert_eq!(scene.settle().await, Vec::<String>::new(), "it will not get better by itself");
    scene.annotate("splitmodel.dev/retry", "1");
    assert_eq!(writes(&scene.look().await)[..1], ["DELETE pods/m-inspect"]);
}

#[tokio::test]
async fn a_pod_that_is_gone_changes_nothing_but_the_status() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    let gone = scene.pods.remove("m-0-1-0").unwrap();
    assert_eq!(
        scene.settle().await.iter().filter(|c| !c.starts_with("GET events")).collect::<Vec<_>>(),
        ["PATCH splitmodels/m/status"]
    );
    assert_eq!(scene.condition("Ready").0, "False");
    assert_eq!(scene.status().phase, Some(Phase::Degraded));
    scene.pods.insert("m-0-1-0".into(), gone);
    assert_eq!(scene.settle().await, ["PATCH splitmodels/m/status"]);
    assert_eq!(scene.condition("Ready").0, "True");
}

#[tokio::test]
async fn one_chain_rolls_at_a_time() {
    let mut scene = Scene::serving(&format!("{SPEC}  replicas: 2\n"), &facts()).await;
    let before = scene.status().plan.unwrap().revision;
    scene.change(&format!("{SPEC}  replicas: 2\n  parallel: 2\n"));
    let calls = scene.settle().await;
    let sets = |calls: &[String]| {
        writes(calls).into_iter().filter(|c| c.contains("statefulsets")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(sets(&calls), ["PATCH statefulsets/m-0-0"], "it is drained before the others go");
    scene.make_pods();
    assert_eq!(sets(&scene.settle().await), ["PATCH statefulsets/m-0-1", "PATCH statefulsets/m-0-2"]);
    assert_eq!(scene.condition("Progressing"), ("True".into(), "RollingOut".into()));
    let after = scene.status().plan.unwrap().revision;
    assert_ne!(before, after);
    let revisions =
        |scene: &Scene| scene.status().chains.iter().map(|c| c.revision.clone().unwrap()).collect::<Vec<_>>();
    assert_eq!(revisions(&scene), [after.clone(), before]);
    scene.make_pods();
    assert!(sets(&scene.settle().await).is_empty(), "the first does not serve yet");
    scene.ready(true);
    assert_eq!(sets(&scene.settle().await), ["PATCH statefulsets/m-1-0"]);
    scene.make_pods();
    assert_eq!(sets(&scene.settle().await), ["PATCH statefulsets/m-1-1", "PATCH statefulsets/m-1-2"]);
    scene.make_pods();
    scene.ready(true);
    scene.settle().await;
    assert_eq!(revisions(&scene), [after.clone(), after.clone()]);
    let mut expected = vec![format!("m-0-{after}"), format!("m-1-{after}"), "m-facts".to_owned()];
    expected.sort();
    assert_eq!(scene.names("ConfigMap"), expected, "the old configurations are gone");
    assert_eq!(scene.condition("Progressing"), ("False".into(), "Settled".into()));
}

#[tokio::test]
async fn fewer_stages_leave_nothing_behind() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    scene.change(&SPEC.replace("stages: 3", "stages: 2"));
    scene.settle().await;
    assert_eq!(scene.names("StatefulSet").len(), 3, "stage 0 is drained first");
    scene.make_pods();
    let calls = scene.settle().await;
    assert!(writes(&calls).contains(&"DELETE statefulsets/m-0-2"), "{calls:?}");
    assert!(!writes(&calls).contains(&"DELETE services/m-0-2"), "its pod still runs");
    scene.make_pods();
    scene.ready(true);
    let calls = scene.settle().await;
    for gone in ["DELETE services/m-0-2", "DELETE secrets/m-0-2-tls"] {
        assert!(writes(&calls).contains(&gone), "{gone}: {calls:?}");
    }
    assert_eq!(scene.names("StatefulSet"), ["m-0-0", "m-0-1"]);
    assert_eq!(scene.status().ready.as_deref(), Some("2/2"));
}

#[tokio::test]
async fn chains_come_and_go() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    let revision = scene.status().plan.unwrap().revision;
    scene.change(&format!("{SPEC}  replicas: 2\n"));
    let calls = scene.settle().await;
    assert!(
        writes(&calls).iter().all(|c| c.contains("m-1") || c.ends_with("status")),
        "chain 0 is left alone: {calls:?}"
    );
    assert_eq!(scene.status().plan.unwrap().revision, revision);
    scene.make_pods();
    scene.ready(true);
    scene.settle().await;
    assert_eq!(scene.status().replicas, 2);
    scene.change(SPEC);
    let calls = scene.settle().await;
    let deleted = |calls: &[String]| writes(calls).iter().filter(|c| c.starts_with("DELETE")).count();
    assert_eq!(
        writes(&calls).iter().filter(|c| c.starts_with("DELETE")).collect::<Vec<_>>(),
        [&"DELETE statefulsets/m-1-0"]
    );
    scene.make_pods();
    assert_eq!(deleted(&scene.settle().await), 2, "the other StatefulSets");
    scene.make_pods();
    assert_eq!(deleted(&scene.settle().await), 3 + 3 + 2, "services, certificates, budget, configuration");
    scene.change(&format!("{SPEC}  replicas: 0\n"));
    scene.settle().await;
    scene.make_pods();
    scene.settle().await;
    assert_eq!(scene.condition("Ready"), ("False".into(), "ScaledToZero".into()));
    assert_eq!(scene.names("StatefulSet"), Vec::<String>::new());
}

#[tokio::test]
async fn the_operator_takes_nothing_that_is_not_its_own() {
    let mut scene = Scene::new(SPEC);
    let foreign =
        json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": "m", "namespace": "ns", "uid": "x"}});
    scene.put("/api/v1/namespaces/ns/services/m", foreign.clone());
    let calls = scene.settle().await;
    assert!(!calls.contains(&"PATCH services/m".to_owned()), "{calls:?}");
    assert_eq!(scene.condition("Degraded"), ("True".into(), "NameTaken".into()));
    assert_eq!(scene.object("/api/v1/namespaces/ns/services/m"), Some(foreign));
}

#[tokio::test]
async fn a_stage_that_fails_again_and_again_is_given_up_alone() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    scene.ready(false);
    let fail = |scene: &mut Scene, restarts: i32, words: &str| {
        let ended = json!({"exitCode": 3, "message": format!("error: {words}\nsecond line")});
        let pod = scene.pods.get_mut("m-0-1-0").unwrap();
        pod["status"]["containerStatuses"][0] = json!({
            "name": "stage", "image": "", "imageID": "", "ready": false, "restartCount": restarts,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended},
        });
    };
    fail(&mut scene, 0, "tensor is damaged");
    assert_eq!(scene.settle().await, ["PATCH splitmodels/m/status"]);
    assert_eq!(scene.condition("Degraded"), ("True".into(), "CrashLoop".into()));
    fail(&mut scene, 1, "another word");
    scene.settle().await;
    let failure = scene.status().chains[0].stages[1].failure.clone().unwrap();
    assert_eq!((failure.count, failure.exit_code), (2, 3));
    assert_eq!(failure.lines, ["error: tensor is damaged", "second line"], "the first words stay");
    fail(&mut scene, 2, "yet another");
    let calls = scene.settle().await;
    assert_eq!(
        writes(&calls).into_iter().filter(|c| !c.ends_with("status")).collect::<Vec<_>>(),
        ["PATCH statefulsets/m-0-1"]
    );
    scene.make_pods();
    scene.settle().await;
    assert_eq!(scene.condition("Degraded"), ("True".into(), "StageFailed".into()));
    assert_eq!(scene.status().phase, Some(Phase::Failed));
    assert!(scene.message("Ready").contains("tensor is damaged"), "{}", scene.message("Ready"));
    assert!(scene.message("Ready").contains("splitmodel.dev/retry"));
    assert_eq!(scene.look().await, Vec::<String>::new(), "it stays given up");
    scene.annotate("splitmodel.dev/retry", "now");
    let calls = scene.settle().await;
    assert!(writes(&calls).contains(&"PATCH pods/m-inspect"), "the model may be another: {calls:?}");
    scene.inspected(0, &facts());
    let calls = scene.settle().await;
    let sets: Vec<_> = writes(&calls).into_iter().filter(|c| c.contains("statefulsets")).collect();
    assert_eq!(sets, ["PATCH statefulsets/m-0-1"], "the others were never touched");
    scene.make_pods();
    scene.ready(true);
    scene.settle().await;
    assert_eq!(scene.condition("Ready").0, "True");
    assert_eq!(scene.status().chains[0].stages[1].failure, None);
}

#[tokio::test]
async fn what_keeps_a_pod_away_is_told() {
    let mut scene = Scene::new(&format!("{SPEC}{GPUS}"));
    scene.settle().await;
    scene.inspected(0, &facts());
    scene.settle().await;
    scene.pods.clear();
    scene.warn("create Pod m-0-0-0 failed: exceeded quota: small");
    scene.now += jiff::SignedDuration::from_secs(20);
    scene.look().await;
    assert_eq!(scene.condition("Degraded"), ("True".into(), "PodRefused".into()));
    assert!(scene.message("Degraded").contains("exceeded quota: small"));

    scene.make_pods();
    for pod in scene.pods.values_mut() {
        pod["spec"] = json!({"containers": []});
        pod["status"] = json!({"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes: Insufficient nvidia.com/gpu"}]});
    }
    scene.settle().await;
    assert_eq!(scene.condition("Ready"), ("False".into(), "Unschedulable".into()));
    assert!(scene.message("Ready").contains("Insufficient nvidia.com/gpu"));
    assert_eq!(scene.condition("Degraded").0, "False", "others use the GPUs: nothing is wrong");

    scene.refuse("PATCH statefulsets/m-0-0", 403, "denied by policy");
    scene.change(&format!("{SPEC}{GPUS}  parallel: 2\n"));
    scene.look().await;
    scene.look().await;
    assert_eq!(scene.condition("Degraded"), ("True".into(), "Refused".into()));
    assert!(scene.message("Degraded").contains("denied by policy"));
}

#[tokio::test]
async fn a_pod_that_does_not_end_is_taken_away_at_last() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    let deadline = scene.now.to_string();
    scene.pods.get_mut("m-0-1-0").unwrap()["metadata"]["deletionTimestamp"] = deadline.into();
    scene.now += jiff::SignedDuration::from_secs(40);
    let calls = scene.look().await;
    assert!(!calls.contains(&"DELETE pods/m-0-1-0".to_owned()), "its node is alive: {calls:?}");
    assert!(scene.message("Ready").contains("does not end"), "{}", scene.message("Ready"));
    scene.nodes.remove(0);
    let calls = scene.look().await;
    assert!(calls.contains(&"DELETE pods/m-0-1-0".to_owned()), "its node is gone: {calls:?}");
}

#[tokio::test]
async fn a_spec_that_cannot_be_leaves_what_serves_alone() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    scene.change(&SPEC.replace("pvc://models/tiny.gguf", "file:///tiny.gguf"));
    assert_eq!(scene.settle().await, ["PATCH splitmodels/m/status"]);
    assert_eq!(scene.condition("Planned"), ("False".into(), "InvalidSpec".into()));
    assert_eq!(scene.condition("Ready").0, "True");
    assert_eq!(scene.names("StatefulSet").len(), 3);
}

#[tokio::test]
async fn a_model_that_is_being_deleted_gets_nothing() {
    let mut scene = Scene::new(SPEC);
    scene.model.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(scene.now));
    assert_eq!(scene.look().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_new_version_of_the_operator_restarts_nothing() {
    let mut scene = Scene::serving(SPEC, &facts()).await;
    // What an older version would have written.
    for set in scene.objects("StatefulSet") {
        let name = set["metadata"]["name"].as_str().unwrap().to_owned();
        let mut older = set.clone();
        older["spec"]["template"]["spec"]["containers"][0]["env"] = json!([{"name": "OLD", "value": "1"}]);
        scene.put(&format!("/apis/apps/v1/namespaces/ns/statefulsets/{name}"), older);
    }
    assert_eq!(scene.settle().await, Vec::<String>::new());
    // A Service makes no pod restart, and is put right.
    let path = "/api/v1/namespaces/ns/services/m-0-0";
    let mut service = scene.object(path).unwrap();
    service["spec"]["publishNotReadyAddresses"] = false.into();
    scene.put(path, service);
    assert_eq!(scene.settle().await, ["PATCH services/m-0-0"]);
}
