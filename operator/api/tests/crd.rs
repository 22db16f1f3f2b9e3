//! The definition, and that the file in the repository is the generated one.
#![cfg(test)]

use serde_json::Value;
use splitmodel_api::{SplitModel, crd, crd_reference, crd_template, crd_yaml};

fn root(path: &str) -> std::path::PathBuf {
    // At run time: two checkouts that share a target folder share test binaries.
    std::path::PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../..").join(path)
}

#[test]
fn the_files_in_the_repository_are_generated() {
    for (path, generated) in [
        ("crds/splitmodel.yaml", crd_yaml().unwrap()),
        ("charts/splitmodel-crds/templates/splitmodel.yaml", crd_template().unwrap()),
        ("docs/crd.md", crd_reference()),
    ] {
        let kept = std::fs::read_to_string(root(path)).unwrap_or_default();
        assert!(kept == generated, "{path} is stale; run: make crds");
    }
}

/// helm renders it to the same definition, upgrades it, and keeps it when the chart goes.
#[test]
fn the_charts_definition_is_kept() {
    let mut chart: Value = serde_saphyr::from_str(&crd_template().unwrap()).unwrap();
    assert_eq!(chart["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    for more in ["annotations", "labels"] {
        chart["metadata"].as_object_mut().unwrap().remove(more);
    }
    assert_eq!(chart, serde_saphyr::from_str::<Value>(&crd_yaml().unwrap()).unwrap());
}

/// Every field is in the reference, with words.
#[test]
fn the_reference_names_every_field() {
    fn fields(schema: &Value, found: &mut Vec<String>) {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            found.push(name.clone());
            fields(field, found);
            fields(&field["items"], found);
        }
    }
    let value = serde_json::to_value(crd()).unwrap();
    let schema = value.pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap();
    let (reference, mut found) = (crd_reference(), Vec::new());
    fields(schema, &mut found);
    assert!(found.len() > 100, "{}", found.len());
    for name in found {
        assert!(["spec", "status"].contains(&&*name) || reference.contains(&format!("| `{name}` |")), "{name}");
    }
    for line in reference.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.split(" | ").collect();
        assert!(cells.len() == 5 && cells[4].len() > 3, "no words in: {line}");
    }
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

#[test]
fn every_example_is_valid() {
    let mut seen = 0;
    for entry in std::fs::read_dir(root("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "yaml") {
            SplitModel::from_yaml(&std::fs::read_to_string(&path).unwrap()).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            seen += 1;
        }
    }
    assert!(seen >= 7, "{seen}");
}

/// The SplitModels in the documentation and in what helm prints can be applied as they stand.
#[test]
fn manifests_in_texts_are_valid() {
    let mut files =
        vec![root("README.md"), root("charts/splitmodel/README.md"), root("charts/splitmodel/templates/NOTES.txt")];
    files.extend(std::fs::read_dir(root("docs")).unwrap().map(|e| e.unwrap().path()));
    let mut seen = 0;
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        for (at, _) in text.match_indices("apiVersion: splitmodel.dev/") {
            let indent = at - text[..at].rfind('\n').map_or(0, |n| n + 1);
            let lines = text[at - indent..].lines();
            let ends = |l: &&str| !(l.starts_with("```") || l.trim() == "EOF" || l.trim() == "---");
            let manifest: Vec<&str> = lines.take_while(ends).map(|l| l.get(indent..).unwrap_or_default()).collect();
            SplitModel::from_yaml(&manifest.join("\n")).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            seen += 1;
        }
    }
    assert!(seen >= 3, "{seen}");
}
