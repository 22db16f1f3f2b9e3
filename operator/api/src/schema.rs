//! Checks a manifest against the CRD's own schema, as the API server does with strict field validation.

use std::sync::LazyLock;

use serde_json::Value;

use crate::{Problem, crd::crd};

static DEFINITION: LazyLock<Value> = LazyLock::new(|| serde_json::to_value(crd()).unwrap_or_default());

/// Everything in `manifest` that the schema does not allow.
pub(crate) fn check(manifest: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(schema) = DEFINITION.pointer("/spec/versions/0/schema/openAPIV3Schema") {
        walk(schema, manifest, "", &mut problems);
    }
    problems
}

/// Drops fields without a value, as the API server does.
pub(crate) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn walk(schema: &Value, value: &Value, path: &str, problems: &mut Vec<Problem>) {
    if let Some(wanted) = schema["type"].as_str()
        && !has_type(value, wanted)
    {
        problems.push(Problem::new(path, format!("must be {}, not {}", a(wanted), a(type_of(value)))));
        return;
    }
    match value {
        Value::Object(map) => {
            bounds(schema, "Properties", map.len() as f64, "entries", path, problems);
            let known = schema["properties"].as_object();
            for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !map.contains_key(name) {
                    problems.push(Problem::new(&join(path, name), "is required"));
                }
            }
            for (name, value) in map {
                let here = join(path, name);
                match known.map(|k| k.get(name)) {
                    Some(Some(schema)) => walk(schema, value, &here, problems),
                    Some(None) if path.is_empty() && ["apiVersion", "kind", "metadata"].contains(&name.as_str()) => {}
                    Some(None) => problems.push(unknown(&here, name, known)),
                    None => walk(&schema["additionalProperties"], value, &here, problems),
                }
            }
        }
        Value::Array(list) => {
            bounds(schema, "Items", list.len() as f64, "entries", path, problems);
            for (i, value) in list.iter().enumerate() {
                walk(&schema["items"], value, &format!("{path}[{i}]"), problems);
            }
        }
        Value::String(text) => {
            bounds(schema, "Length", text.chars().count() as f64, "characters", path, problems);
            if let Some(allowed) = schema["enum"].as_array()
                && !allowed.contains(value)
            {
                let names: Vec<_> = allowed.iter().filter_map(Value::as_str).collect();
                problems.push(Problem::new(path, format!("is {text:?}; allowed are {}", names.join(", "))));
            }
        }
        Value::Number(number) => {
            bounds(schema, "imum", number.as_f64().unwrap_or(f64::NAN), "", path, problems);
        }
        Value::Bool(_) | Value::Null => {}
    }
}

/// `minProperties` and `maxProperties`, `minItems` and `maxItems`, `minLength` and `maxLength`, `minimum` and `maximum`.
fn bounds(schema: &Value, name: &str, value: f64, unit: &str, path: &str, problems: &mut Vec<Problem>) {
    let limit = |side: &str| schema[format!("{side}{name}")].as_f64();
    let (min, max) = (limit("min"), limit("max"));
    if min.is_some_and(|min| value < min) || max.is_some_and(|max| value > max) {
        let (verb, gap) = if unit.is_empty() { ("must be", "") } else { ("must have", " ") };
        let range = match (min, max) {
            (Some(min), Some(max)) => format!("{min} to {max}"),
            (Some(min), None) => format!("at least {min}"),
            (_, max) => format!("at most {}", max.unwrap_or(f64::MAX)),
        };
        problems.push(Problem::new(path, format!("{verb} {range}{gap}{unit}, not {value}")));
    }
}

fn unknown(path: &str, name: &str, known: Option<&serde_json::Map<String, Value>>) -> Problem {
    let known: Vec<&str> = known.map(|k| k.keys().map(String::as_str).collect()).unwrap_or_default();
    let plain = |s: &str| s.to_lowercase().replace(['_', '-'], "");
    let close = known.iter().find(|k| plain(k) == plain(name) || plain(k).trim_end_matches('s') == plain(name));
    match close {
        Some(close) => Problem::new(path, format!("is no known field; did you mean {close}?")),
        None => Problem::new(path, format!("is no known field; known are {}", known.join(", "))),
    }
}

fn has_type(value: &Value, wanted: &str) -> bool {
    match wanted {
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        other => type_of(value) == other,
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn a(kind: &str) -> &'static str {
    match kind {
        "boolean" => "true or false",
        "integer" => "a whole number",
        "number" => "a number",
        "string" => "a text (in quotes where it could be a number)",
        "array" => "a list",
        "object" => "a mapping",
        _ => "nothing",
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
