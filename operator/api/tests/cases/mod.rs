//! Manifests that must be taken and refused: by [`splitmodel_api::SplitModel::from_yaml`], by the rules as the API server runs
//! them, and by a real API server (`examples/manifests.rs` prints them for it).

use serde_json::{Map, Value, json};

/// A digest.
pub const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A manifest with this spec.
pub fn manifest(spec: Value) -> Value {
    named("m", spec)
}

fn named(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "splitmodel.dev/v1alpha1", "kind": "SplitModel", "metadata": {"name": name}, "spec": spec})
}

/// A spec with `more` beside a good source.
pub fn with(more: Value) -> Value {
    let mut spec: Map<String, Value> =
        [("model".to_owned(), json!({"source": "pvc://models/a.gguf"}))].into_iter().collect();
    if let Value::Object(more) = more {
        spec.extend(more);
    }
    manifest(spec.into())
}

/// `count` labels.
fn many(count: usize) -> Value {
    (0..count).map(|i| (format!("l{i}"), json!("x"))).collect::<Map<_, _>>().into()
}

/// Manifests that are taken.
pub fn good() -> Vec<Value> {
    vec![
        with(json!({})),
        with(json!({"stages": 1})),
        with(json!({"stages": 64, "replicas": 0})),
        with(json!({"stageList": [{}]})),
        with(json!({"stages": 2, "stageList": [{"layers": "0-9"}, {"layers": "10-29"}]})),
        with(json!({"stageList": [{"layers": "0-0"}, {"layers": "1-1"}, {"layers": "2-400"}]})),
        with(json!({"stageList": [{"gpu": {}}, {"gpu": {"resource": "amd.com/gpu", "count": 2, "memory": "192Gi"}}]})),
        with(
            json!({"stageDefaults": {"gpu": {"count": 1}, "cpu": "500m", "memory": "1.5Gi", "engine": {"nGpuLayers": 0}}}),
        ),
        with(
            json!({"stageDefaults": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}),
        ),
        with(json!({"stageDefaults": {"engine": {"cacheTypeK": "q8_0", "cacheTypeV": "q8_0", "flashAttn": "on"}}})),
        with(json!({"stageDefaults": {"engine": {"nBatch": 512, "nUbatch": 512, "threads": 4, "devices": ["CUDA0"]}}})),
        with(json!({"contextLength": 131072, "parallel": 128, "modelName": "llama", "modelAliases": ["a", "b"]})),
        with(json!({"cacheVolume": {"persistent": true, "size": "50Gi", "storageClassName": "fast"}})),
        with(
            json!({"pods": {"env": [{"name": "HTTPS_PROXY", "value": "x"}], "labels": {"a": "b"}, "imagePullSecrets": ["s"]}}),
        ),
        with(
            json!({"api": {"keySecret": "keys", "serviceType": "LoadBalancer", "port": 80, "sessionAffinity": "ClientIP"}}),
        ),
        with(
            json!({"mtls": false, "wireType": "f16", "kvCache": {"enabled": false, "maxBytes": "512Mi", "diskBytes": "20Gi", "activationBytes": "1Gi"}, "deadlines": {"drainSeconds": 0}}),
        ),
        with(json!({"stages": null, "modelName": null})),
        with(
            json!({"image": "registry.local:5000/team/splitmodel-stage@sha256:0a", "stageDefaults": {"runtimeClassName": "nvidia"}}),
        ),
        with(json!({"pods": {
            "labels": {"example.org/team": "a_b.C", "app": "", "app.kubernetes.io/part-of": "chat"},
            "annotations": {"example.org/note": "any text: it may be long, and have lines\n"},
            "priorityClassName": "high"
        }})),
        manifest(json!({"model": {"source": "https://models.local/a.gguf", "caConfigMap": "private-ca"}})),
        named(&"a".repeat(40), json!({"model": {"source": "file://a"}})),
        named("a-1", json!({"model": {"source": "https://example.org/a.gguf?x=1", "credentialsSecret": "hf-token"}})),
    ]
}

/// The field that is named, and the manifest. These break rules (CEL).
pub fn against_rules() -> Vec<(&'static str, Value)> {
    let source = |s: &str| manifest(json!({"model": {"source": s}}));
    vec![
        ("metadata.name", named(&"a".repeat(41), json!({"model": {"source": "file://a"}}))),
        ("metadata.name", named(&"a".repeat(63), json!({"model": {"source": "file://a"}}))),
        ("metadata.name", named("1a", json!({"model": {"source": "file://a"}}))),
        ("metadata.name", named("a.b", json!({"model": {"source": "file://a"}}))),
        ("metadata.name", named("a-", json!({"model": {"source": "file://a"}}))),
        ("metadata.name", named("A", json!({"model": {"source": "file://a"}}))),
        ("spec.model.source", source("ftp://host/a")),
        ("spec.model.source", source("model.gguf")),
        ("spec.model.source", source("hf://owner/a.gguf")),
        ("spec.model.source", source("hf://owner/repo/")),
        ("spec.model.source", source("hf://owner/repo/../a.gguf")),
        ("spec.model.source", source("https://user:secret@host/a.gguf")),
        ("spec.model.source", source("https://host")),
        ("spec.model.source", source("pvc://Claim/a.gguf")),
        ("spec.model.source", source("pvc://claim")),
        ("spec.model.source", source("pvc://claim/../a.gguf")),
        ("spec.model.source", source("oci://image:tag#a.gguf")),
        ("spec.model.source", source(&format!("oci://image@{DIGEST}"))),
        ("spec.model.source", source("file://~/a.gguf")),
        ("spec.model.source", source("file:///")),
        ("spec.model.source", source("file://a b")),
        (
            "spec.model.credentialsSecret",
            manifest(json!({"model": {"source": "file://a", "credentialsSecret": "other/token"}})),
        ),
        ("spec.api.keySecret", with(json!({"api": {"keySecret": "Keys"}}))),
        ("spec.stages", with(json!({"stages": 3, "stageList": [{}, {}]}))),
        ("spec.stageList[1].layers", with(json!({"stageList": [{"layers": "0-9"}, {}]}))),
        ("spec.stageList[0].layers", with(json!({"stageList": [{"layers": "1-9"}]}))),
        ("spec.stageList[1].layers", with(json!({"stageList": [{"layers": "0-9"}, {"layers": "11-20"}]}))),
        ("spec.stageList[1].layers", with(json!({"stageList": [{"layers": "0-9"}, {"layers": "9-20"}]}))),
        ("spec.stageList[0].layers", with(json!({"stageList": [{"layers": "10-20"}, {"layers": "0-9"}]}))),
        ("spec.stageList[1].layers", with(json!({"stageList": [{"layers": "0-9"}, {"layers": "0-9"}]}))),
        ("spec.stageList[1].layers", with(json!({"stageList": [{"layers": "0-9"}, {"layers": "10-5"}]}))),
        ("spec.stageList[0].layers", with(json!({"stageList": [{"layers": "0-09"}]}))),
        ("spec.stageList[0].layers", with(json!({"stageList": [{"layers": "-1-9"}]}))),
        ("spec.stageList[0].layers", with(json!({"stageList": [{"layers": "0..9"}]}))),
        ("spec.stageDefaults.layers", with(json!({"stageDefaults": {"layers": "0-9"}}))),
        ("spec.stageDefaults.memory", with(json!({"stageDefaults": {"memory": "80 Gi"}}))),
        ("spec.stageDefaults.memory", with(json!({"stageDefaults": {"memory": "0Gi"}}))),
        ("spec.stageDefaults.gpu.memory", with(json!({"stageDefaults": {"gpu": {"memory": "-1Gi"}}}))),
        ("spec.stageDefaults.gpu.resource", with(json!({"stageDefaults": {"gpu": {"resource": "gpu"}}}))),
        ("spec.stageDefaults.cpu", with(json!({"stageDefaults": {"cpu": "two"}}))),
        (
            "spec.stageDefaults.engine.cacheTypeV",
            with(json!({"stageDefaults": {"engine": {"cacheTypeV": "q4_0", "flashAttn": "off"}}})),
        ),
        (
            "spec.stageDefaults.engine.nUbatch",
            with(json!({"stageDefaults": {"engine": {"nBatch": 64, "nUbatch": 128}}})),
        ),
        ("spec.cacheVolume.storageClassName", with(json!({"cacheVolume": {"storageClassName": "fast"}}))),
        ("spec.cacheVolume.size", with(json!({"cacheVolume": {"size": "big"}}))),
        ("spec.kvCache.maxBytes", with(json!({"kvCache": {"maxBytes": "0"}}))),
        ("spec.kvCache.diskBytes", with(json!({"kvCache": {"diskBytes": "much"}}))),
        ("spec.kvCache.activationBytes", with(json!({"kvCache": {"activationBytes": "0"}}))),
        ("spec.pods.env[0].name", with(json!({"pods": {"env": [{"name": "A-B"}]}}))),
        ("spec.pods.env[0].name", with(json!({"pods": {"env": [{"name": "1A"}]}}))),
        ("spec.model.caConfigMap", manifest(json!({"model": {"source": "https://a/b", "caConfigMap": "Bundle"}}))),
        ("spec.image", with(json!({"image": "registry/name: tag"}))),
        ("spec.stageList[0].image", with(json!({"stageList": [{"image": "-x"}]}))),
        ("spec.pods.labels", with(json!({"pods": {"labels": {"splitmodel.dev/model": "x"}}}))),
        ("spec.pods.labels", with(json!({"pods": {"labels": {"app.kubernetes.io/managed-by": "me"}}}))),
        ("spec.pods.labels", with(json!({"pods": {"labels": {"a b": "c"}}}))),
        ("spec.pods.labels", with(json!({"pods": {"labels": {"/a": "c"}}}))),
        ("spec.pods.labels", with(json!({"pods": {"labels": {"a": "-c"}}}))),
        ("spec.pods.annotations", with(json!({"pods": {"annotations": {"splitmodel.dev/revision": "x"}}}))),
        ("spec.pods.annotations", with(json!({"pods": {"annotations": {"a/b/c": "x"}}}))),
        ("spec.pods.imagePullSecrets", with(json!({"pods": {"imagePullSecrets": ["pull", "Pull"]}}))),
        ("spec.pods.priorityClassName", with(json!({"pods": {"priorityClassName": "a b"}}))),
        ("spec.stageDefaults.nodeSelector", with(json!({"stageDefaults": {"nodeSelector": {"pool": "a b"}}}))),
        ("spec.stageDefaults.nodeSelector", with(json!({"stageDefaults": {"nodeSelector": {"": "a"}}}))),
        ("spec.modelName", with(json!({"modelName": "a\nb"}))),
        ("spec.modelAliases", with(json!({"modelAliases": ["a", "b\tc"]}))),
        ("spec.stageDefaults.runtimeClassName", with(json!({"stageDefaults": {"runtimeClassName": "nvidia/x"}}))),
        (
            "spec.cacheVolume.storageClassName",
            with(json!({"cacheVolume": {"persistent": true, "storageClassName": "Fast"}})),
        ),
    ]
}

/// The field that is named, and the manifest. These break the schema: types, ranges, names of fields.
pub fn against_schema() -> Vec<(&'static str, Value)> {
    vec![
        ("spec.model", manifest(json!({}))),
        ("spec.model.source", manifest(json!({"model": {}}))),
        ("spec.model.source", manifest(json!({"model": {"source": null}}))),
        ("spec.model.source", manifest(json!({"model": {"source": ""}}))),
        ("spec.model.source", manifest(json!({"model": {"source": "x".repeat(2049)}}))),
        ("spec.model.sources", manifest(json!({"model": {"source": "file://a", "sources": 1}}))),
        ("spec.stages", with(json!({"stages": 0}))),
        ("spec.stages", with(json!({"stages": -3}))),
        ("spec.stages", with(json!({"stages": 65}))),
        ("spec.stages", with(json!({"stages": 2.5}))),
        ("spec.stages", with(json!({"stages": "3"}))),
        ("spec.stages", with(json!({"stages": [{"layers": "0-9"}]}))),
        ("spec.stageList", with(json!({"stageList": []}))),
        ("spec.stageList", with(json!({"stageList": vec![json!({}); 65]}))),
        ("spec.stageList[0]", with(json!({"stageList": [null]}))),
        ("spec.stageList[1].layer", with(json!({"stageList": [{}, {"layer": "0-9"}]}))),
        ("spec.contextLength", with(json!({"contextLength": 0}))),
        ("spec.context_length", with(json!({"context_length": 512}))),
        ("spec.parallel", with(json!({"parallel": 129}))),
        ("spec.replicas", with(json!({"replicas": -1}))),
        ("spec.modelName", with(json!({"modelName": 5}))),
        ("spec.modelAliases[0]", with(json!({"modelAliases": [""]}))),
        ("spec.wireType", with(json!({"wireType": "int8"}))),
        ("spec.mtls", with(json!({"mtls": "yes"}))),
        ("spec.api.port", with(json!({"api": {"port": 70000}}))),
        ("spec.api.serviceType", with(json!({"api": {"serviceType": "ExternalName"}}))),
        ("spec.stageDefaults.engine.cacheTypeK", with(json!({"stageDefaults": {"engine": {"cacheTypeK": "q3"}}}))),
        ("spec.stageDefaults.gpu.count", with(json!({"stageDefaults": {"gpu": {"count": 0}}}))),
        ("spec.deadlines.progressSeconds", with(json!({"deadlines": {"progressSeconds": 1}}))),
        ("spec.pods.labels", with(json!({"pods": {"labels": many(33)}}))),
        ("spec.pods.labels.a", with(json!({"pods": {"labels": {"a": "x".repeat(64)}}}))),
        ("spec.stageDefaults.nodeSelector", with(json!({"stageDefaults": {"nodeSelector": many(17)}}))),
        ("spec.pods.template", with(json!({"pods": {"template": {}}}))),
        ("spec.pods.env[1].name", with(json!({"pods": {"env": [{"name": "A"}, {"name": "A"}]}}))),
    ]
}
