//! The page about our objects, from the same types as the definitions.
//!
//! In: a [`CustomResourceDefinition`]. Out: Markdown, one table for each object inside it, in the
//! order in which a reader meets them: path, type, default, bounds and meaning of each field.
//!
//! It explains nothing that the types do not say. The same definitions give the same page.

use std::fmt::Write as _;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// Longest line of text, in characters; tables and headings may be longer.
const MAX_COLUMNS: usize = 100;

const INTRODUCTION: &str = "\
# The objects `cadre.dev/v1alpha1`

Generated from the types of `crds/` by its test `schema`; change it there. Durations and sizes name
their unit, percentages are whole numbers, and no field is a float. A field without a default may be
left out unless it is required.
";

/// The page about all definitions.
///
/// # Panics
///
/// Never for what [`super::definitions`] returns: writing to text cannot fail.
pub fn markdown(definitions: &[CustomResourceDefinition]) -> String {
    let mut page = INTRODUCTION.to_owned();
    for definition in definitions {
        let names = &definition.spec.names;
        let short = names.short_names.iter().flatten().cloned().collect::<Vec<_>>().join(", ");
        write!(page, "\n## {}\n\n`kubectl get {}`, short `{short}`.", names.kind, names.plural)
            .expect("text takes everything");
        for version in &definition.spec.versions {
            let schema = version.schema.as_ref().and_then(|it| it.open_api_v3_schema.as_ref());
            let schema = serde_json::to_value(schema).expect("a schema is plain data");
            if let Some(text) = schema["description"].as_str() {
                write!(page, " {text}").expect("text takes everything");
            }
            page.push('\n');
            rules(&mut page, &schema);
            for part in ["spec", "status"] {
                section(&mut page, part, &schema["properties"][part]);
            }
        }
    }
    wrapped(&page)
}

/// Breaks lines of text at [`MAX_COLUMNS`]. Continued lines of a list are indented.
fn wrapped(page: &str) -> String {
    let mut text = String::new();
    for line in page.lines() {
        let indent = if line.starts_with("* ") { "  " } else { "" };
        let most = if line.starts_with(['|', '#']) { usize::MAX } else { MAX_COLUMNS };
        let mut column = 0;
        for (at, word) in line.split(' ').enumerate() {
            let length = word.chars().count();
            if at > 0 && column + 1 + length > most {
                text.push('\n');
                text.push_str(indent);
                column = indent.len();
            } else if at > 0 {
                text.push(' ');
                column += 1;
            }
            text.push_str(word);
            column += length;
        }
        text.push('\n');
    }
    text
}

/// A table of the fields of an object, then one for each object in it.
fn section(page: &mut String, path: &str, schema: &Value) {
    let Some(fields) = schema["properties"].as_object() else { return };
    write!(page, "\n### `{path}`\n\n").expect("text takes everything");
    if let Some(text) = schema["description"].as_str() {
        write!(page, "{text}\n\n").expect("text takes everything");
    }
    page.push_str("| field | type | default | meaning |\n|---|---|---|---|\n");
    let required =
        |name: &str| schema["required"].as_array().is_some_and(|it| it.iter().any(|it| it == name));
    for (name, field) in fields {
        let default = match &field["default"] {
            Value::Null if required(name) => "required".to_owned(),
            Value::Null => String::new(),
            // The parts have defaults of their own, in their own table.
            Value::Object(_) | Value::Array(_) => "see below".to_owned(),
            value @ (Value::Bool(_) | Value::Number(_) | Value::String(_)) => format!("`{value}`"),
        };
        let default =
            if field["items"].is_null() { default } else { default.replace("see below", "empty") };
        let meaning = field["description"].as_str().unwrap_or_default().replace('|', "\\|");
        writeln!(page, "| `{name}` | {} | {default} | {meaning} |", kind(field))
            .expect("text takes everything");
    }
    rules(page, schema);
    for (name, field) in fields {
        if is_template(field) {
            continue;
        }
        section(page, &format!("{path}.{name}"), field);
        section(page, &format!("{path}.{name}[]"), &field["items"]);
    }
}

/// What is refused although every field is right by itself.
fn rules(page: &mut String, schema: &Value) {
    let Some(rules) = schema["x-kubernetes-validations"].as_array() else { return };
    page.push_str("\nRefused:\n\n");
    for rule in rules {
        let message = rule["message"].as_str().unwrap_or_default();
        writeln!(page, "* {message}.").expect("text takes everything");
    }
}

fn is_template(field: &Value) -> bool {
    field["x-kubernetes-preserve-unknown-fields"] == true
}

/// Type and bounds in words.
fn kind(field: &Value) -> String {
    if is_template(field) {
        return "pod template".to_owned();
    }
    if let Some(values) = field["enum"].as_array() {
        let words = values.iter().filter_map(Value::as_str).map(|it| format!("`{it}`"));
        return words.collect::<Vec<_>>().join(", ");
    }
    let whole = |name: &str| field[name].as_f64().map(|it| format!("{it:.0}"));
    match field["type"].as_str().unwrap_or_default() {
        "array" => {
            let most = field["maxItems"].as_u64();
            let most = most.map_or(String::new(), |it| format!(", at most {it}"));
            let once = if field["x-kubernetes-list-type"] == "set" { ", each once" } else { "" };
            format!("list of {}{most}{once}", kind(&field["items"]))
        }
        "integer" => match (whole("minimum"), whole("maximum")) {
            (Some(least), Some(most)) => format!("integer, {least} to {most}"),
            (Some(least), None) => format!("integer, {least} or more"),
            (None, Some(most)) => format!("integer, {most} at most"),
            (None, None) => "integer".to_owned(),
        },
        "string" if field["format"] == "date-time" => "time".to_owned(),
        "string" => match field["maxLength"].as_u64() {
            Some(most) => format!("text, at most {most} characters"),
            None => "text".to_owned(),
        },
        other => other.to_owned(),
    }
}
