//! The definition, and that the file in the repository is the generated one.
#![cfg(test)]

use serde_json::Value;
use splitmodel_api::{SplitModel, crd, crd_yaml};

fn root(path: &str) -> std::path::PathBuf {
    // At run time: two checkouts that share a target folder share test binaries.
    std::path::PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../..").join(path)
}

#[test]
fn the_file_in_the_repository_is_generated() {
    let kept = std::fs::read_to_string(root("crds/splitmodel.yaml")).unwrap();
    assert!(kept == crd_yaml().unwrap(), "crds/splitmodel.yaml is stale; run: make crds");
}

#[test]
fn it_stays_small() {
    assert!(crd_yaml().unwrap().len() < 64 * 1024, "{}", crd_yaml().unwrap().len());
}

#[test]
fn names_columns_and_subresources() {
    let crd = crd();
    assert_eq!(crd.metadata.name.as_deref(), Some("splitmodels.splitmodel.dev"));
    assert_eq!((crd.spec.group.as_str(), crd.spec.scope.as_str()), ("splitmodel.dev", "Namespaced"));
    assert_eq!(crd.spec.names.short_names, Some(vec!["sm".to_owned()]));
    let version = &crd.spec.versions[0];
    assert_eq!(version.name, "v1alpha1");
    let columns: Vec<_> = version.additional_printer_columns.iter().flatten().map(|c| c.name.to_uppercase()).collect();
    assert_eq!(columns, ["READY", "PHASE", "LAYERS", "URL", "AGE"]);
    let subresources = version.subresources.as_ref().unwrap();
    assert!(subresources.status.is_some());
    let scale = subresources.scale.as_ref().unwrap();
    assert_eq!(
        (scale.spec_replicas_path.as_str(), scale.status_replicas_path.as_str(), scale.label_selector_path.as_deref()),
        (".spec.replicas", ".status.replicas", Some(".status.selector"))
    );
}

/// What Kubernetes calls structural: every schema has a type, and combinators, references and closed objects do not occur.
#[test]
fn the_schema_is_structural() {
    fn walk(schema: &Value, path: &str) {
        let map = schema.as_object().unwrap_or_else(|| panic!("{path} is no schema: {schema}"));
        for word in ["$ref", "oneOf", "anyOf", "allOf", "not", "definitions", "nullable", "uniqueItems", "const"] {
            assert!(!map.contains_key(word), "{path} has {word}");
        }
        assert_ne!(map.get("additionalProperties"), Some(&Value::Bool(false)), "{path} is closed");
        assert!(map["type"].is_string(), "{path} has the type {}", map["type"]);
        if let Some(format) = map.get("format") {
            assert!(["int32", "int64", "date-time"].contains(&format.as_str().unwrap()), "{path}: {format}");
        }
        for (name, property) in map.get("properties").and_then(Value::as_object).into_iter().flatten() {
            walk(property, &format!("{path}.{name}"));
        }
        match map["type"].as_str().unwrap() {
            "array" => walk(&map["items"], &format!("{path}[]")),
            "object" if map.contains_key("additionalProperties") => {
                walk(&map["additionalProperties"], &format!("{path}{{}}"))
            }
            "object" => assert!(map.contains_key("properties"), "{path} says nothing of its fields"),
            _ => {}
        }
    }
    let value = serde_json::to_value(crd()).unwrap();
    let schema = value.pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap();
    walk(schema, "");
}

#[test]
fn only_the_source_is_required() {
    let value = serde_json::to_value(crd()).unwrap();
    let schema = value.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec").unwrap();
    assert_eq!(schema["required"], serde_json::json!(["model"]));
    assert_eq!(schema["properties"]["model"]["required"], serde_json::json!(["source"]));
}

#[test]
fn the_sample_is_short_and_valid() {
    let text = std::fs::read_to_string(root("examples/smollm2.yaml")).unwrap();
    assert!(text.lines().count() <= 12);
    let model = SplitModel::from_yaml(&text).unwrap();
    assert_eq!((model.spec.stage_count(), model.spec.context_length, model.spec.parallel), (Some(3), 2048, 4));
    let path = model.source().unwrap().local_path(std::path::Path::new("/somewhere/examples")).unwrap();
    assert_eq!(path.to_str(), Some("/somewhere/examples/models/SmolLM2-135M-Instruct.Q4_1.gguf"));
}
