//! The reference of the resource, docs/crd.md, from the definition.

use std::fmt::Write as _;

use kube::CustomResourceExt as _;
use serde_json::Value;

use crate::{GROUP, SplitModel, VERSION, crd};

const HEAD: &str = "\
Generated from the types by `make crds`; a test fails when this file is stale. How the fields play together, and what a local run
does with them, is in [configuration.md](configuration.md). The API server refuses what breaks a bound or a rule; so do
`splitmodel up` and `splitmodel plan`, without a cluster.

A default of *required* must be given; *none* means that the field may be absent.
";

/// Every field of the resource as Markdown: type, default, bounds, meaning and rules.
#[must_use]
pub fn crd_reference() -> String {
    let value = serde_json::to_value(crd()).unwrap_or_default();
    let mut out = String::new();
    let kind = value["spec"]["names"]["kind"].as_str().unwrap_or("SplitModel");
    let _ = write!(out, "# {kind}, {GROUP}/{VERSION}\n\n{HEAD}");
    columns(&value["spec"]["versions"][0], &mut out);
    let Some(schema) = value.pointer("/spec/versions/0/schema/openAPIV3Schema") else { return out };
    rules(schema, "\nRules of the whole object:\n\n", &mut out);
    let mut done = Vec::new();
    for part in ["spec", "status"] {
        section(part, &schema["properties"][part], &mut done, &mut out);
    }
    out
}

/// What `kubectl get` prints, short names and subresources.
fn columns(version: &Value, out: &mut String) {
    let names = SplitModel::crd().spec.names.short_names.unwrap_or_default();
    let listed: Vec<String> = version["additionalPrinterColumns"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|c| {
            let (name, path) = (c["name"].as_str().unwrap_or_default(), c["jsonPath"].as_str().unwrap_or_default());
            format!("{} (`{path}`)", name.to_uppercase())
        })
        .collect();
    let _ = writeln!(
        out,
        "\nShort name: `{}`. Subresources: `status`, `scale`. `kubectl get` prints {}.",
        names.join("`, `"),
        listed.join(", ")
    );
}

/// The fields of an object under its path; then those of the objects in it. `done` holds what was written, by content.
fn section<'a>(path: &str, schema: &'a Value, done: &mut Vec<(String, &'a Value)>, out: &mut String) {
    let _ = write!(out, "\n## {path}\n\n");
    if let Some(text) = schema["description"].as_str() {
        let _ = write!(out, "{}\n\n", cell(text));
    }
    if let Some((same, _)) = done.iter().find(|(_, s)| s["properties"] == schema["properties"]) {
        let _ = writeln!(out, "The fields of [{same}](#{}).", anchor(same));
        rules(schema, "\nRules:\n\n", out);
        return;
    }
    done.push((path.to_owned(), schema));
    let _ = write!(out, "| field | type | default | bounds | meaning |\n|---|---|---|---|---|\n");
    let fields = || schema["properties"].as_object().into_iter().flatten();
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in fields() {
        let default = match &field["default"] {
            _ if required.contains(&name.as_str()) => "*required*".to_owned(),
            Value::Null => "none".to_owned(),
            Value::Object(_) => "see its fields".to_owned(),
            given => format!("`{given}`"),
        };
        let mut meaning = cell(field["description"].as_str().unwrap_or_default());
        if object(field).is_none() {
            for text in messages(field) {
                let _ = write!(meaning, "<br>Rule: {}", cell(text));
            }
        }
        let _ = writeln!(
            out,
            "| `{name}` | {} | {default} | {} | {meaning} |",
            kind(&join(path, name), field),
            bounds(field)
        );
    }
    rules(schema, "\nRules:\n\n", out);
    for (name, field) in fields() {
        if let Some((suffix, inner)) = object(field) {
            if !suffix.is_empty() {
                // Rules of the list itself have no section of their own.
                rules(field, &format!("\nRules of `{name}`:\n\n"), out);
            }
            section(&format!("{}{suffix}", join(path, name)), inner, done, out);
        }
    }
}

fn join(path: &str, name: &str) -> String {
    format!("{path}.{name}")
}

/// The schema of an object with named fields, directly or as the entry of a list.
fn object(field: &Value) -> Option<(&'static str, &Value)> {
    match field["type"].as_str() {
        Some("object") if field["properties"].is_object() => Some(("", field)),
        Some("array") if field["items"]["properties"].is_object() => Some(("[]", &field["items"])),
        _ => None,
    }
}

fn kind(path: &str, field: &Value) -> String {
    if let Some(allowed) = field["enum"].as_array() {
        let names: Vec<String> = allowed.iter().map(|v| format!("`{}`", v.as_str().unwrap_or_default())).collect();
        return names.join(", ");
    }
    let name = |schema: &Value| match schema["type"].as_str() {
        Some("string") => "text",
        Some("integer") => "whole number",
        Some("boolean") => "`true`, `false`",
        Some(other) => match other {
            "array" => "list",
            "object" => "mapping",
            _ => "number",
        },
        None => "any",
    };
    match object(field) {
        Some(("", _)) => format!("[fields](#{})", anchor(path)),
        Some((suffix, _)) => format!("[list](#{})", anchor(&format!("{path}{suffix}"))),
        None if field["type"] == "array" => format!("list of {}", name(&field["items"])),
        None if field["additionalProperties"].is_object() => {
            format!("mapping to {}", name(&field["additionalProperties"]))
        }
        None => name(field).to_owned(),
    }
}

fn bounds(field: &Value) -> String {
    let mut found = Vec::new();
    let mut add = |schema: &Value, of: &str| {
        for (word, unit) in [("imum", ""), ("Length", " characters"), ("Items", " entries"), ("Properties", " entries")]
        {
            let limit = |side: &str| schema[format!("{side}{word}")].as_f64();
            match (limit("min"), limit("max")) {
                (Some(min), Some(max)) => found.push(format!("{of}{min} to {max}{unit}")),
                (Some(min), None) => found.push(format!("{of}at least {min}{unit}")),
                (None, Some(max)) => found.push(format!("{of}at most {max}{unit}")),
                (None, None) => {}
            }
        }
    };
    add(field, "");
    add(&field["items"], "each ");
    add(&field["additionalProperties"], "each ");
    found.join("; ")
}

fn messages(schema: &Value) -> impl Iterator<Item = &str> {
    let rules = schema["x-kubernetes-validations"].as_array();
    rules.into_iter().flatten().map(|rule| rule["message"].as_str().or(rule["rule"].as_str()).unwrap_or_default())
}

fn rules(schema: &Value, head: &str, out: &mut String) {
    let mut texts = messages(schema).peekable();
    if texts.peek().is_some() {
        out.push_str(head);
    }
    for text in texts {
        let _ = writeln!(out, "- {}", cell(text));
    }
}

/// Text for a cell of a table.
fn cell(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").replace('|', "\\|").replace('<', "&lt;")
}

/// The anchor that Markdown gives a heading.
fn anchor(heading: &str) -> String {
    heading.to_lowercase().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
}
