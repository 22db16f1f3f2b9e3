//! Manifests that are taken and refused, by the API server's rules (CEL and schema) and by [`SplitModel::from_yaml`] alike.
#![cfg(test)]

use kube::core::cel::{CompiledSchema, Validator, apply_defaults, compile_schema, estimate_rule_cost};
use proptest::prelude::*;
use serde_json::{Value, json};
use splitmodel_api::{ManifestError, ModelSource, SourceError, SplitModel, SplitModelSpec, StageSpec, crd};

fn schema() -> Value {
    serde_json::to_value(crd()).unwrap().pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap().clone()
}

thread_local! {
    static RULES: CompiledSchema = compile_schema(&schema());
}

/// Messages of the rules that the API server would run.
fn cel(object: &Value, old: Option<&Value>) -> Vec<String> {
    let errors = RULES.with(|rules| Validator::new().validate_compiled(rules, object, old));
    match errors {
        Ok(()) => vec![],
        Err(errors) => errors.to_string().lines().map(str::to_owned).collect(),
    }
}

fn manifest(spec: Value) -> Value {
    named("m", spec)
}

fn named(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "splitmodel.dev/v1alpha1", "kind": "SplitModel", "metadata": {"name": name}, "spec": spec})
}

/// A spec with `more` beside a good source.
fn with(more: Value) -> Value {
    let mut spec = json!({"model": {"source": "pvc://models/a.gguf"}});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    manifest(spec)
}

/// JSON is YAML.
fn read(manifest: &Value) -> Result<SplitModel, ManifestError> {
    SplitModel::from_yaml(&manifest.to_string())
}

/// The object as the API server holds it, defaults filled in.
fn stored(manifest: &Value) -> Value {
    serde_json::to_value(serde_json::from_value::<SplitModel>(manifest.clone()).unwrap()).unwrap()
}

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn good_manifests_are_taken() {
    let good = [
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
            json!({"mtls": false, "wireType": "f16", "kvCache": {"enabled": false}, "deadlines": {"drainSeconds": 0}}),
        ),
        with(json!({"stages": null, "modelName": null})),
        named(&"a".repeat(40), json!({"model": {"source": "file://a"}})),
        named("a-1", json!({"model": {"source": "https://example.org/a.gguf?x=1", "credentialsSecret": "hf-token"}})),
    ];
    for manifest in good {
        let model = read(&manifest).unwrap_or_else(|e| panic!("{manifest}: {e}"));
        assert_eq!(model.validate(), [], "{manifest}");
        let mut sent = manifest.clone();
        sent["spec"].as_object_mut().unwrap().retain(|_, v| !v.is_null());
        assert_eq!(cel(&sent, None), [""; 0], "{manifest}");
        let stored = serde_json::to_value(&model).unwrap();
        assert_eq!(cel(&stored, Some(&stored)), [""; 0], "{stored}");
        assert_eq!(serde_json::from_value::<SplitModel>(stored).unwrap(), model);
    }
}

/// The field that is named, and the manifest. These break rules (CEL); ranges and types come below.
fn against_rules() -> Vec<(&'static str, Value)> {
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
        ("spec.pods.env[0].name", with(json!({"pods": {"env": [{"name": "A-B"}]}}))),
        ("spec.pods.env[0].name", with(json!({"pods": {"env": [{"name": "1A"}]}}))),
    ]
}

#[test]
fn rules_refuse_with_the_fields_path() {
    for (path, manifest) in against_rules() {
        match read(&manifest) {
            Err(ManifestError::Invalid(problems)) => {
                assert!(problems.iter().any(|p| p.path == path), "{manifest}: {problems:?}");
            }
            other => panic!("{manifest}: {other:?}"),
        }
        assert!(!cel(&manifest, None).is_empty(), "the API server would take {manifest}");
    }
}

#[test]
fn the_schema_refuses_with_the_fields_path() {
    let bad = [
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
        ("spec.pods.template", with(json!({"pods": {"template": {}}}))),
        ("spec.pods.env[1].name", with(json!({"pods": {"env": [{"name": "A"}, {"name": "A"}]}}))),
    ];
    for (path, manifest) in bad {
        match read(&manifest) {
            Err(ManifestError::Invalid(problems)) => {
                assert!(problems.iter().any(|p| p.path == path), "{path}: {problems:?}");
            }
            other => panic!("{manifest}: {other:?}"),
        }
    }
}

#[test]
fn errors_say_what_to_do() {
    let text = |m: Value| read(&m).unwrap_err().to_string();
    assert_eq!(
        text(with(json!({"context_length": 1, "parallel": "4"}))),
        "spec.context_length is no known field; did you mean contextLength?\n\
         spec.parallel must be a whole number, not a text (in quotes where it could be a number)"
    );
    assert_eq!(text(with(json!({"parallel": 0}))), "spec.parallel must be 1 to 128, not 0");
    assert_eq!(
        text(with(json!({"stageList": [{"layers": "0-9"}, {"layers": "12-20"}]}))),
        "spec.stageList[1].layers is 12-20, which leaves a gap: it must start at 10"
    );
    let wrong = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}});
    assert_eq!(
        text(wrong),
        "apiVersion must be splitmodel.dev/v1alpha1\nkind must be SplitModel\n\
         metadata.name is required, and must be a text\nspec is required"
    );
    assert!(SplitModel::from_yaml("a: [").unwrap_err().to_string().contains("line 1"));
    assert!(matches!(SplitModel::from_yaml("a: 1\n---\nb: 2\n"), Err(ManifestError::Yaml(_))));
    assert!(matches!(SplitModel::from_yaml("a: 1\na: 2\n"), Err(ManifestError::Yaml(_))));
    assert!(matches!(SplitModel::from_yaml(&" ".repeat(2 << 20)), Err(ManifestError::TooLarge(_))));
    for text in ["", "5", "- a", "null"] {
        assert!(SplitModel::from_yaml(text).is_err(), "{text:?}");
    }
}

#[test]
fn rules_compile_and_are_cheap() {
    fn rules(schema: &Value, found: &mut Vec<(Value, String)>) {
        for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            found.push((schema.clone(), rule["rule"].as_str().unwrap().to_owned()));
        }
        let properties = schema["properties"].as_object().into_iter().flat_map(|p| p.values());
        properties.chain([&schema["items"]]).filter(|s| s.is_object()).for_each(|s| rules(s, found));
    }
    let mut found = Vec::new();
    rules(&schema(), &mut found);
    assert!(found.len() > 20, "{}", found.len());
    for (schema, rule) in found {
        let compiled = compile_schema(&schema);
        assert!(!compiled.has_errors(), "{rule}: {:?}", compiled.compilation_errors());
        let warnings = estimate_rule_cost(&rule, &compiled);
        assert!(warnings.is_empty(), "{rule}: {warnings:?}");
    }
}

/// The defaults that the API server fills in are those of the types.
#[test]
fn defaults_of_schema_and_types_agree() {
    for bare in [
        with(json!({})),
        with(json!({"api": {}, "pods": {}, "stageDefaults": {"gpu": {}}, "kvCache": {"maxEntries": 1}})),
    ] {
        let filled = apply_defaults(&schema(), &bare);
        assert_eq!(serde_json::from_value::<SplitModel>(filled).unwrap(), read(&bare).unwrap());
        assert_eq!(stored(&apply_defaults(&schema(), &bare)), stored(&bare));
    }
}

#[test]
fn the_cache_volume_cannot_change() {
    let old = stored(&with(json!({"cacheVolume": {"persistent": true, "size": "5Gi"}})));
    let mut new = old.clone();
    new["spec"]["stages"] = json!(3);
    assert_eq!(cel(&new, Some(&old)), [""; 0]);
    new["spec"]["cacheVolume"]["size"] = json!("6Gi");
    assert!(cel(&new, Some(&old)).iter().any(|e| e.contains("cannot be changed")));
}

#[test]
fn defaults_are_sane_and_stages_inherit() {
    let bare = read(&with(json!({}))).unwrap();
    assert_eq!(bare.spec, SplitModelSpec::new("pvc://models/a.gguf"));
    assert_eq!((bare.spec.replicas, bare.spec.parallel, bare.spec.mtls), (1, 4, true));
    assert_eq!((bare.spec.stage_count(), bare.spec.layers()), (None, None));
    assert_eq!(bare.model_name(), "m");
    let spec = read(&with(json!({
        "modelName": "big",
        "stageDefaults": {"gpu": {}, "cpu": "4", "engine": {"nGpuLayers": 99, "threads": 2}, "nodeSelector": {"zone": "a"}},
        "stageList": [
            {"layers": "0-9", "gpu": {"resource": "amd.com/gpu"}, "engine": {"threads": 8}},
            {"layers": "10-11"}
        ]
    })))
    .unwrap();
    assert_eq!(spec.model_name(), "big");
    assert_eq!(spec.spec.layers(), Some(vec![0..10, 10..12]));
    let first = spec.spec.stage(0);
    assert_eq!(first.gpu.unwrap().resource, "amd.com/gpu");
    let engine = first.engine.unwrap();
    assert_eq!((engine.n_gpu_layers, engine.threads, first.cpu.as_deref()), (Some(99), Some(8), Some("4")));
    let second = spec.spec.stage(1);
    assert_eq!((second.gpu.unwrap().resource.as_str(), second.engine.unwrap().threads), ("nvidia.com/gpu", Some(2)));
    assert_eq!(spec.spec.stage(7).layers, None);
}

#[test]
fn sources_parse() {
    let hf: ModelSource = "hf://bartowski/Llama-3.gguf/Q4/model.gguf".parse().unwrap();
    assert_eq!(hf.url().unwrap(), "https://huggingface.co/bartowski/Llama-3.gguf/resolve/main/Q4/model.gguf");
    let pinned: ModelSource = "hf://o/r@v1.0/m.gguf".parse().unwrap();
    assert_eq!(pinned.url().unwrap(), "https://huggingface.co/o/r/resolve/v1.0/m.gguf");
    let oci: ModelSource = format!("oci://ghcr.io/o/m:1@{DIGEST}#models/m.gguf").parse().unwrap();
    let ModelSource::Oci { image, digest, path } = &oci else { panic!("{oci:?}") };
    assert_eq!((image.as_str(), digest.as_str(), path.as_str()), ("ghcr.io/o/m:1", DIGEST, "models/m.gguf"));
    let file: ModelSource = "file:///srv/m.gguf".parse().unwrap();
    assert_eq!(file.local_path("/x".as_ref()).unwrap().to_str(), Some("/srv/m.gguf"));
    assert_eq!(file.url(), None);
    for (text, wanted) in [
        ("s3://a/b", SourceError::UnknownScheme("s3".into())),
        ("/a/b", SourceError::NoScheme),
        ("pvc://c/../x", SourceError::Parent),
        ("file://a\tb", SourceError::Characters),
        ("", SourceError::Length(0)),
    ] {
        assert_eq!(text.parse::<ModelSource>().unwrap_err(), wanted, "{text}");
    }
    let error = "https://me:pw@host/a".parse::<ModelSource>().unwrap_err().to_string();
    assert!(error.contains("credentialsSecret"), "{error}");
    assert!(!error.contains("pw"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The parser and the rules in the CRD agree on every source.
    #[test]
    fn sources_and_rules_agree(
        scheme in "(hf|https|pvc|oci|file|s3|HF|)", mark in "(://|:/|)",
        rest in "([a-zA-Z0-9./_@:#~ -]|//|\\.\\.|@sha256:[0-9a-f]{64}#){0,12}",
    ) {
        let text = format!("{scheme}{mark}{rest}");
        let parsed = text.parse::<ModelSource>();
        if !text.is_empty() {
            let refused = cel(&manifest(json!({"model": {"source": text}})), None);
            prop_assert_eq!(parsed.is_ok(), refused.is_empty(), "{}: {:?} but {:?}", text, parsed, refused);
        }
        if let Ok(source) = parsed {
            prop_assert_eq!(source.to_string(), text);
        }
    }

    /// Rust's and the CRD's rules agree on every list of layers.
    #[test]
    fn layers_and_rules_agree(list in prop::collection::vec(prop::option::of((0u32..4, 0u32..4)), 1..5), chained in any::<bool>()) {
        let mut next = 0;
        let stages: Vec<StageSpec> = list.into_iter().map(|range| {
            let layers = range.map(|(first, len)| {
                let (first, last) = if chained { (next, next + len) } else { (first, first.wrapping_add(len)) };
                next = last + 1;
                splitmodel_api::LayerRange(format!("{first}-{last}"))
            });
            StageSpec { layers, ..StageSpec::default() }
        }).collect();
        let spec = SplitModelSpec { stage_list: Some(stages), ..SplitModelSpec::new("file://a") };
        let object = SplitModel::new("m", spec);
        let refused = cel(&serde_json::to_value(&object).unwrap(), None);
        prop_assert_eq!(object.validate().is_empty(), refused.is_empty(), "{:?} {:?}", object.spec.stage_list, refused);
    }

    /// Whatever is in a file, reading it ends with a manifest or an error.
    #[test]
    fn any_text_is_answered(text in "([a-z]{1,4}|spec|model|: |\n|  |- |\\[|\\{|\\}|&a|\\*a|!!int|\\||\"|'|[0-9]|#|%|\t){0,40}") {
        drop(SplitModel::from_yaml(&text));
    }

    #[test]
    fn quantities_and_rules_agree(text in "[0-9]{0,3}[.]?[0-9]{0,2}(k|M|Gi|Pi|K|E|m| )?") {
        let object = with(json!({"stageDefaults": {"memory": text}}));
        let refused = cel(&object, None);
        prop_assert_eq!(read(&object).is_ok(), refused.is_empty(), "{:?} {:?}", text, refused);
    }
}
