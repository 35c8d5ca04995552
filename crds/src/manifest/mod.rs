//! Reads the manifests of a run: YAML files with one or more documents.
//!
//! In: files, or their texts. Out: [`Manifests`], exactly one pool and one job that pass
//! [`crate::validate`]. Each object is read by the rules of the API server, with strict fields: a
//! field that nobody knows is an error, inside pod templates too.
//!
//! It does not look at files that a manifest names, and knows no cluster. Every error is one line
//! that names the file, the object, the field and the remedy.

mod error;
mod strict;
mod tree;

use std::path::{Path, PathBuf};

pub use error::{Error, Place};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
pub(crate) use strict::wrong_field;

use crate::contract::API_VERSION;
use crate::validate::{self, Refusal};
use crate::{AttentionPool, TrainingJob};
use strict::Fault;
use tree::Tree;

/// What a run is described by.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifests {
    /// The pool.
    pub pool: AttentionPool,
    /// The job.
    pub job: TrainingJob,
    /// Fields that only a cluster can honour, an entry an object: `TrainingJob bible: spec.scaling, …`.
    pub cluster_only: Vec<String>,
}

/// The text of one file.
#[derive(Clone, Debug)]
pub struct Source {
    /// How errors call it.
    pub file: PathBuf,
    /// YAML, documents parted by `---`.
    pub text: String,
}

/// Reads and checks files.
///
/// # Errors
///
/// The first thing that is wrong; see [`Error`].
pub fn load(files: &[PathBuf]) -> Result<Manifests, Error> {
    let read = |file: &PathBuf| {
        let text = std::fs::read(file)
            .and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other))
            .map_err(|source| Error::Unreadable { file: file.clone(), source })?;
        Ok(Source { file: file.clone(), text })
    };
    parse(&files.iter().map(read).collect::<Result<Vec<_>, _>>()?)
}

/// Checks texts.
///
/// # Errors
///
/// The first thing that is wrong; see [`Error`].
pub fn parse(sources: &[Source]) -> Result<Manifests, Error> {
    let mut pool: Option<(Place, AttentionPool)> = None;
    let mut job: Option<(Place, Tree, TrainingJob)> = None;
    let mut cluster_only = Vec::new();
    for source in sources {
        for document in documents(&source.text) {
            let Some((place, tree)) = identify(&source.file, &document)? else { continue };
            if place.kind == AttentionPool::KIND {
                let object = typed(&place, &tree)?;
                validate::pool(&object).map_err(|refusal| place.invalid(&tree, refusal))?;
                if let Some((first, _)) = pool.replace((place.clone(), object)) {
                    return Err(place.second(&first));
                }
            } else {
                let object = typed(&place, &tree)?;
                validate::job(&object).map_err(|refusal| place.invalid(&tree, refusal))?;
                if let Some((first, ..)) = job.replace((place.clone(), tree.clone(), object)) {
                    return Err(place.second(&first));
                }
            }
            let fields = only_in_a_cluster(&tree.value);
            if !fields.is_empty() {
                let (kind, name) = (&place.kind, &place.name);
                cluster_only.push(format!("{kind} {name}: {}", fields.join(", ")));
            }
        }
    }
    let files = || sources.iter().map(|it| it.file.display().to_string()).collect::<Vec<_>>();
    let missing = |kind| Error::Missing { kind, files: files().join(", ") };
    let (_, pool) = pool.ok_or_else(|| missing(AttentionPool::KIND))?;
    let (place, tree, job) = job.ok_or_else(|| missing(TrainingJob::KIND))?;
    validate::together(&pool, &job).map_err(|refusal| place.invalid(&tree, refusal))?;
    Ok(Manifests { pool, job, cluster_only })
}

/// Cuts a text at its `---` lines. What precedes a document becomes empty lines, so that positions
/// in it are positions in the file.
fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for (at, line) in text.lines().enumerate() {
        let current = documents.last_mut().expect("starts with one and never loses one");
        match line.strip_prefix("---") {
            Some(rest) if rest.trim().is_empty() || rest.trim_start().starts_with('#') => {
                documents.push("\n".repeat(at + 1));
            }
            _ => {
                current.push_str(line);
                current.push('\n');
            }
        }
    }
    documents
}

/// Says what object a document is; `None` for one without content.
fn identify(file: &Path, document: &str) -> Result<Option<(Place, Tree)>, Error> {
    let tree = Tree::read(document).map_err(|error| Error::Yaml {
        file: file.to_path_buf(),
        problem: error.to_string().split_whitespace().collect::<Vec<_>>().join(" "),
    })?;
    if tree.value.is_null() {
        return Ok(None);
    }
    let line = document.lines().position(|line| !line.trim().is_empty()).map_or(1, |at| at + 1);
    if !tree.value.is_object() {
        return Err(Error::NotAnObject { file: file.to_path_buf(), line });
    }
    let text = |path: &str| tree.value.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let (version, kind, name) = (text("/apiVersion"), text("/kind"), text("/metadata/name"));
    let line = tree.line("kind").unwrap_or(line);
    if kind != AttentionPool::KIND && kind != TrainingJob::KIND {
        return Err(Error::Kind { file: file.to_path_buf(), line, kind: kind.to_owned() });
    }
    let place =
        Place { file: file.to_path_buf(), line, kind: kind.to_owned(), name: name.to_owned() };
    if version != API_VERSION {
        return Err(Error::Version { version: version.to_owned(), place: Box::new(place) });
    }
    if name.is_empty() {
        let problem = "is missing".to_owned();
        let remedy = "give the object a name".to_owned();
        let refusal = Refusal { field: "metadata.name".into(), problem, remedy };
        return Err(place.invalid(&tree, refusal));
    }
    Ok(Some((place, tree)))
}

/// Reads a document as an object and refuses what the object does not know.
fn typed<T: DeserializeOwned + Serialize>(place: &Place, tree: &Tree) -> Result<T, Error> {
    let mut value = tree.value.clone();
    if let Some(field) = number_for_text(&value) {
        let problem = "is a number or a boolean where text belongs".to_owned();
        let remedy = "put it in quotes".to_owned();
        return Err(place.invalid(tree, Refusal { field, problem, remedy }));
    }
    if let Some(object) = value.as_object_mut() {
        object.remove("apiVersion");
        object.remove("kind");
    }
    strict::read(&value).map_err(|fault| match fault {
        Fault::Type(field, problem) => place.wrong_type(tree, field, &problem),
        Fault::Unknown(field) => place.unknown(tree, field),
    })
}

/// First place where the API server wants text and YAML made something else of it.
fn number_for_text(tree: &Value) -> Option<String> {
    let containers = "spec.template.spec.containers";
    let list = tree.pointer("/spec/template/spec/containers")?.as_array()?;
    for (at, container) in list.iter().enumerate() {
        let not_text = |value: &Value| value.is_number() || value.is_boolean();
        for key in ["command", "args"] {
            let values = container.get(key).and_then(Value::as_array);
            if let Some(word) = values.and_then(|it| it.iter().position(not_text)) {
                return Some(format!("{containers}[{at}].{key}[{word}]"));
            }
        }
        let env = container.get("env").and_then(Value::as_array);
        let value = |variable: &Value| variable.get("value").is_some_and(not_text);
        if let Some(variable) = env.and_then(|it| it.iter().position(value)) {
            return Some(format!("{containers}[{at}].env[{variable}].value"));
        }
    }
    None
}

/// Fields of a document that a run without a cluster passes over.
fn only_in_a_cluster(tree: &Value) -> Vec<String> {
    const SPEC: &[&str] = &[
        "access",
        "activeDeadlineSeconds",
        "class",
        "fabric",
        "managedBy",
        "placement",
        "scaling",
        "ttlSecondsAfterFinished",
    ];
    const CONTAINER: &[&str] = &["args", "command", "env", "name", "workingDir"];
    let keys = |value: Option<&Value>| -> Vec<String> {
        value.and_then(Value::as_object).map(|it| it.keys().cloned().collect()).unwrap_or_default()
    };
    let spec = tree.get("spec");
    let mut fields: Vec<String> = keys(spec)
        .into_iter()
        .filter(|key| SPEC.contains(&key.as_str()))
        .map(|key| format!("spec.{key}"))
        .collect();
    for key in ["claimName", "hostPath", "resumeFrom"] {
        if spec.and_then(|it| it.get("checkpoint")).and_then(|it| it.get(key)).is_some() {
            fields.push(format!("spec.checkpoint.{key}"));
        }
    }
    let template = spec.and_then(|it| it.get("template"));
    if template.and_then(|it| it.get("metadata")).is_some() {
        fields.push("spec.template.metadata".into());
    }
    let pod = template.and_then(|it| it.get("spec"));
    for key in keys(pod).into_iter().filter(|key| key != "containers") {
        fields.push(format!("spec.template.spec.{key}"));
    }
    for key in keys(pod.and_then(|it| it.pointer("/containers/0"))) {
        if !CONTAINER.contains(&key.as_str()) {
            fields.push(format!("spec.template.spec.containers[0].{key}"));
        }
    }
    fields
}
