//! Manifests that are taken and refused, by the API server's rules (CEL and schema) and by [`SplitModel::from_yaml`] alike.
#![cfg(test)]

use kube::core::cel::{CompiledSchema, Validator, apply_defaults, compile_schema, estimate_rule_cost};
use proptest::prelude::*;
use serde_json::{Value, json};
use splitmodel_api::{ManifestError, ModelSource, SourceError, SplitModel, SplitModelSpec, StageSpec, crd};

mod cases;

use cases::{DIGEST, against_rules, against_schema, good, manifest, with};

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

/// JSON is YAML.
fn read(manifest: &Value) -> Result<SplitModel, ManifestError> {
    SplitModel::from_yaml(&manifest.to_string())
}

/// The object as the API server holds it, defaults filled in.
fn stored(manifest: &Value) -> Value {
    serde_json::to_value(serde_json::from_value::<SplitModel>(manifest.clone()).unwrap()).unwrap()
}

#[test]
fn good_manifests_are_taken() {
    for manifest in good() {
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
    for (path, manifest) in against_schema() {
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
    fn labels_and_rules_agree(key in "(splitmodel.dev/|app.kubernetes.io/|[a-zA-Z0-9.-]{0,2}/)?(name|[a-zA-Z0-9_. /-]{0,4})", value in "[a-zA-Z0-9_. -]{0,3}") {
        let object = with(json!({"pods": {"labels": {key.clone(): value}, "annotations": {key: "x"}}}));
        let refused = cel(&object, None);
        prop_assert_eq!(read(&object).is_ok(), refused.is_empty(), "{} {:?}", object, refused);
    }

    #[test]
    fn quantities_and_rules_agree(text in "[0-9]{0,3}[.]?[0-9]{0,2}(k|M|Gi|Pi|K|E|m| )?") {
        let object = with(json!({"stageDefaults": {"memory": text}}));
        let refused = cel(&object, None);
        prop_assert_eq!(read(&object).is_ok(), refused.is_empty(), "{:?} {:?}", text, refused);
    }
}
