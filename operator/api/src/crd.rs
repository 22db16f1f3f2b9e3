//! The CustomResourceDefinition.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde_json::{Value, json};

use crate::SplitModel;

/// Formats that the API server knows; it warns about others.
const FORMATS: [&str; 4] = ["int32", "int64", "date-time", "double"];

/// The definition as the API server takes it without a warning.
#[must_use]
pub fn crd() -> CustomResourceDefinition {
    let derived = SplitModel::crd();
    serde_json::from_value(crd_value(&derived)).unwrap_or(derived)
}

fn crd_value(derived: &CustomResourceDefinition) -> Value {
    let mut value = serde_json::to_value(derived).unwrap_or_default();
    clean(&mut value);
    value
}

fn clean(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let known = |format: &Value| format.as_str().is_some_and(|f| FORMATS.contains(&f));
            // A property may be called "format"; then it is an object.
            if map.get("format").is_some_and(|f| f.is_string() && !known(f)) {
                map.remove("format");
            }
            // Without it the API server drops nulls, so `has()` in rules means what it says.
            if map.get("nullable").is_some_and(Value::is_boolean) {
                map.remove("nullable");
            }
            map.values_mut().for_each(clean);
        }
        Value::Array(list) => list.iter_mut().for_each(clean),
        Value::Number(number) => {
            // Bounds are whole numbers; `1.0` is valid, but `1` is what people read.
            if let Some(whole) = number.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 1e15) {
                *value = (whole as i64).into();
            }
        }
        _ => {}
    }
}

/// [`crd`] as YAML, the content of crds/splitmodel.yaml: keys in order of the alphabet, whatever features other crates give
/// `serde_json`.
///
/// # Errors
/// The serialiser's words.
pub fn crd_yaml() -> Result<String, String> {
    let mut value = crd_value(&SplitModel::crd());
    sort(&mut value);
    serde_saphyr::to_string(&value).map_err(|e| e.to_string())
}

/// [`crd_yaml`] as the template of the chart splitmodel-crds: helm upgrades it with the chart and keeps it when that goes.
///
/// # Errors
/// The serialiser's words.
pub fn crd_template() -> Result<String, String> {
    let mut value = crd_value(&SplitModel::crd());
    value["metadata"]["annotations"] = json!({"helm.sh/resource-policy": "keep"});
    value["metadata"]["labels"] =
        json!({"app.kubernetes.io/name": "splitmodel-crds", "app.kubernetes.io/part-of": "splitmodel"});
    sort(&mut value);
    let text = serde_saphyr::to_string(&value).map_err(|e| e.to_string())?;
    // Braces of a template could stand in a description or a rule.
    Ok(if text.contains("{{") { text.replace("{{", "{{ `{{` }}") } else { text })
}

fn sort(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(sort),
        Value::Object(map) => {
            let mut entries: Vec<(String, Value)> = std::mem::take(map).into_iter().collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            entries.iter_mut().for_each(|(_, v)| sort(v));
            map.extend(entries);
        }
        _ => {}
    }
}
