//! An API server that keeps what is applied and writes down every call. What it was not told to answer fails the test.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::client::Body;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use splitmodel_api::{SplitModel, SplitModelStatus};
use splitmodel_control::StageStatus;
use splitmodel_operator::children::Kind;
use splitmodel_operator::observed::{Observed, place};
use splitmodel_operator::reconcile::{Context, look};
use splitmodel_operator::settings::Cli;

const HEAD: &str = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\n";

#[derive(Default)]
struct Server {
    /// Objects by path.
    objects: BTreeMap<String, Value>,
    calls: Vec<String>,
    events: Vec<Value>,
    /// Answers instead of the usual: code and message, by method and path.
    refusals: BTreeMap<String, (u16, String)>,
}

/// One SplitModel, the cluster around it, and the operator's memory.
pub struct Scene {
    pub model: SplitModel,
    pub nodes: Vec<Node>,
    pub pods: BTreeMap<String, Value>,
    pub reported: BTreeMap<String, StageStatus>,
    pub now: Timestamp,
    context: Context,
    server: Arc<Mutex<Server>>,
}

impl Scene {
    /// A SplitModel that was just created, in a cluster of two nodes with two GPUs each.
    pub fn new(spec: &str) -> Self {
        let server = Arc::<Mutex<Server>>::default();
        let shared = server.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = shared.clone();
            async move {
                let (parts, body) = request.into_parts();
                let bytes = body.collect_bytes().await.unwrap();
                let path = parts.uri.path().to_owned();
                let query = parts.uri.query().unwrap_or_default().to_owned();
                let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
                let (code, answer) = server.lock().unwrap().answer(parts.method.as_str(), &path, &query, body);
                let response =
                    Response::builder().status(code).body(Body::from(answer.to_string().into_bytes())).unwrap();
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        use clap::Parser as _;
        let settings = Cli::parse_from(["operator", "--stage-image", "stage:1"]).settings;
        let context = Context::new(Client::new(service, "ns"), settings);
        let nodes = ["a", "b"].map(|name| {
            serde_json::from_value(json!({
                "metadata": {"name": name},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "allocatable": {"memory": "8Gi", "nvidia.com/gpu": "2"},
                },
            }))
            .unwrap()
        });
        let mut scene = Self {
            model: SplitModel::from_yaml(&format!("{HEAD}metadata: {{name: m}}\nspec:\n{spec}")).unwrap(),
            nodes: nodes.into(),
            pods: BTreeMap::new(),
            reported: BTreeMap::new(),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            context,
            server,
        };
        scene.model.metadata.namespace = Some("ns".into());
        scene.model.metadata.uid = Some("uid-m".into());
        scene.model.metadata.generation = Some(1);
        scene
    }

    /// Another spec, as by `kubectl apply`.
    pub fn change(&mut self, spec: &str) {
        self.model.spec = SplitModel::from_yaml(&format!("{HEAD}metadata: {{name: m}}\nspec:\n{spec}")).unwrap().spec;
        *self.model.metadata.generation.as_mut().unwrap() += 1;
    }

    /// One look, two seconds after the last; returns the calls that it made, without events.
    pub async fn look(&mut self) -> Vec<String> {
        self.now += SignedDuration::from_secs(2);
        let observed = self.observed();
        self.server.lock().unwrap().calls.clear();
        let again = look(&self.model, &observed, &self.context).await.unwrap();
        assert!(again >= Duration::from_millis(100), "a hot loop");
        let calls = std::mem::take(&mut self.server.lock().unwrap().calls);
        let status = self.object("/apis/splitmodel.dev/v1alpha1/namespaces/ns/splitmodels/m/status");
        if let Some(status) = status {
            self.model.status = Some(serde_json::from_value(status["status"].clone()).unwrap());
        }
        calls
    }

    /// Looks until nothing is written; returns all calls.
    pub async fn settle(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        for _ in 0..10 {
            let calls = self.look().await;
            if calls.iter().all(|c| c.starts_with("GET ")) {
                return all;
            }
            all.extend(calls);
        }
        panic!("it does not come to rest: {all:#?}");
    }

    fn observed(&self) -> Observed {
        let server = self.server.lock().unwrap();
        let mut observed = Observed { now: self.now, reported: self.reported.clone(), ..Observed::default() };
        for (path, object) in &server.objects {
            let kind = Kind::ALL.into_iter().find(|k| {
                object["kind"] == k.resource().kind.as_str() && path.contains(&format!("/{}/", k.resource().plural))
            });
            match kind {
                Some(Kind::Pod) => {
                    let mut pod = object.clone();
                    if let Some(status) = self.pods.get("m-inspect") {
                        pod["status"] = status["status"].clone();
                    }
                    observed.inspect = Some(Arc::new(serde_json::from_value(pod).unwrap()));
                }
                Some(kind) => {
                    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
                    observed.children.insert((kind, name), Arc::new(serde_json::from_value(object.clone()).unwrap()));
                }
                None => {}
            }
        }
        let pods = self.pods.values().map(|pod| serde_json::from_value::<Pod>(pod.clone()).unwrap());
        observed.pods = pods.filter(|p| place(p.labels()).is_some()).map(Arc::new).collect();
        observed.nodes = Some(self.nodes.iter().cloned().map(Arc::new).collect());
        observed
    }

    /// What the StatefulSet controller and the kubelets do: a pod for every set that wants one, of the set's revision. Pods
    /// that are there stay as they are.
    pub fn make_pods(&mut self) {
        let sets: Vec<Value> = self.objects("StatefulSet");
        let wanted: Vec<String> = sets
            .iter()
            .filter(|s| s["spec"]["replicas"] == 1)
            .map(|s| format!("{}-0", s["metadata"]["name"].as_str().unwrap()))
            .collect();
        self.pods.retain(|name, _| wanted.contains(name));
        for set in sets.iter().filter(|s| s["spec"]["replicas"] == 1) {
            let name = format!("{}-0", set["metadata"]["name"].as_str().unwrap());
            let template = &set["spec"]["template"]["metadata"];
            let same = self.pods.get(&name).is_some_and(|p| p["metadata"]["labels"] == template["labels"]);
            if !same {
                let pod = json!({
                    "metadata": {
                        "name": name, "namespace": "ns", "uid": format!("{name}-{}", self.now), "labels": template["labels"],
                        "creationTimestamp": self.now.to_string(),
                    },
                    "spec": {"nodeName": "a", "containers": []},
                    "status": {"phase": "Running", "containerStatuses": [{
                        "name": "stage", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                        "state": {"running": {}},
                    }]},
                });
                self.pods.insert(name, pod);
            }
        }
    }

    /// A token crosses every chain.
    pub fn ready(&mut self, ready: bool) {
        let status = if ready { "True" } else { "False" };
        for pod in self.pods.values_mut().filter(|p| p["spec"]["nodeName"] == "a") {
            pod["status"]["conditions"] = json!([{"type": "Ready", "status": status}]);
        }
    }

    /// The header was read.
    pub fn inspected(&mut self, code: i32, message: &str) {
        let finished = self.now.to_string();
        let ended = json!({"exitCode": code, "message": message, "finishedAt": finished});
        let status = json!({"status": {"containerStatuses": [{
            "name": "inspect", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": ended},
        }]}});
        self.pods.insert("m-inspect".into(), status);
    }

    /// All the way to serving.
    pub async fn serving(spec: &str, facts: &str) -> Self {
        let mut scene = Self::new(spec);
        scene.settle().await;
        scene.inspected(0, facts);
        scene.settle().await;
        scene.pods.clear();
        scene.make_pods();
        scene.ready(true);
        scene.settle().await;
        assert_eq!(scene.condition("Ready"), ("True".into(), "Serving".into()), "{:#?}", scene.status());
        scene
    }

    pub fn status(&self) -> SplitModelStatus {
        self.model.status.clone().unwrap_or_default()
    }

    /// Status and reason of a condition.
    pub fn condition(&self, type_: &str) -> (String, String) {
        let status = self.status();
        let found = status.conditions.iter().find(|c| c.type_ == type_).unwrap_or_else(|| panic!("no {type_}"));
        (found.status.clone(), found.reason.clone())
    }

    pub fn message(&self, type_: &str) -> String {
        let status = self.status();
        status.conditions.iter().find(|c| c.type_ == type_).map(|c| c.message.clone()).unwrap_or_default()
    }

    pub fn object(&self, path: &str) -> Option<Value> {
        self.server.lock().unwrap().objects.get(path).cloned()
    }

    pub fn objects(&self, kind: &str) -> Vec<Value> {
        self.server.lock().unwrap().objects.values().filter(|o| o["kind"] == kind).cloned().collect()
    }

    pub fn names(&self, kind: &str) -> Vec<String> {
        self.objects(kind).iter().map(|o| o["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    }

    pub fn put(&mut self, path: &str, object: Value) {
        self.server.lock().unwrap().objects.insert(path.into(), object);
    }

    /// What the cluster says about its objects, as events.
    pub fn warn(&mut self, message: &str) {
        let event = json!({
            "metadata": {"name": "e", "namespace": "ns", "creationTimestamp": self.now.to_string()},
            "involvedObject": {}, "message": message, "type": "Warning",
        });
        self.server.lock().unwrap().events = vec![event];
    }

    pub fn refuse(&mut self, call: &str, code: u16, message: &str) {
        self.server.lock().unwrap().refusals.insert(call.into(), (code, message.into()));
    }

    pub fn annotate(&mut self, key: &str, value: &str) {
        self.model.annotations_mut().insert(key.into(), value.into());
    }
}

impl Server {
    fn answer(&mut self, method: &str, path: &str, query: &str, body: Value) -> (u16, Value) {
        if path.starts_with("/apis/events.k8s.io/") && method == "POST" {
            return (201, body);
        }
        let call = format!("{method} {}", path.split("/namespaces/ns/").nth(1).unwrap_or(path));
        self.calls.push(call.clone());
        let failure = |code: u16, message: &str| {
            let reason = if code == 404 { "NotFound" } else { "Forbidden" };
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code});
            (code, status)
        };
        if let Some((code, message)) = self.refusals.get(&call) {
            return failure(*code, message);
        }
        match method {
            "GET" if path == "/api/v1/namespaces/ns/events" => {
                (200, json!({"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": self.events}))
            }
            "GET" => self.objects.get(path).map_or_else(|| failure(404, "not found"), |object| (200, object.clone())),
            "PATCH" => {
                assert!(query.contains("fieldManager=splitmodel-operator"), "{query}");
                let mut object = body;
                object["metadata"]["uid"] = format!("uid-{path}").into();
                object["metadata"]["creationTimestamp"] = "2027-01-15T08:00:00Z".into();
                if object["kind"] == "SplitModel" {
                    object["spec"] = json!({"model": {"source": "hf://a/b/c.gguf"}});
                }
                self.objects.insert(path.to_owned(), object.clone());
                (200, object)
            }
            "POST" => {
                let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
                self.objects.insert(path, body.clone());
                (201, body)
            }
            "DELETE" => match self.objects.remove(path) {
                Some(object) => (200, object),
                None => failure(404, "not found"),
            },
            other => panic!("{other} {path} is not expected"),
        }
    }
}
