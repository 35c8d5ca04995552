//! Reads the manifests of a run: YAML files with one or more documents.
//!
//! In: files, or their texts. Out: [`Manifests`], exactly one pool and one job that pass
//! [`crate::validate`]. Each object is read by the rules of the API server, with strict fields: a
//! field that nobody knows is an error, inside pod templates too.
//!
//! It does not look at files that a manifest names, and knows no cluster. Every error is one line
//! that names the file, the object, the field and the remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::contract::API_VERSION;
use crate::fields;
use crate::nearest::nearest;
use crate::validate::{self, Refusal};
use crate::{
    AttentionPool, AttentionPoolSpec, AttentionPoolStatus, TrainingJob, TrainingJobSpec,
    TrainingJobStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// What a run is described by.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifests {
    /// The pool.
    pub pool: AttentionPool,
    /// The job.
    pub job: TrainingJob,
    /// Fields that only a cluster can honour, such as `TrainingJob bible: …containers[0].image`.
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
    let mut job: Option<(Place, TrainingJob)> = None;
    let mut cluster_only = Vec::new();
    for source in sources {
        for document in documents(&source.text) {
            let file = &source.file;
            let Some((place, tree)) = identify(file, &document)? else { continue };
            if place.kind == AttentionPool::KIND {
                let object: Document<AttentionPoolSpec, AttentionPoolStatus> =
                    typed(&place, &document, &tree)?;
                let object = AttentionPool {
                    metadata: object.metadata,
                    spec: object.spec,
                    status: object.status,
                };
                validate::pool(&object).map_err(|refusal| place.invalid(refusal))?;
                put(&mut pool, place.clone(), object)?;
            } else {
                let object: Document<TrainingJobSpec, TrainingJobStatus> =
                    typed(&place, &document, &tree)?;
                let object = TrainingJob {
                    metadata: object.metadata,
                    spec: object.spec,
                    status: object.status,
                };
                validate::job(&object).map_err(|refusal| place.invalid(refusal))?;
                put(&mut job, place.clone(), object)?;
            }
            cluster_only.extend(
                only_in_a_cluster(&tree)
                    .into_iter()
                    .map(|field| format!("{} {}: {field}", place.kind, place.name)),
            );
        }
    }
    let files = || sources.iter().map(|it| it.file.display().to_string()).collect::<Vec<_>>();
    let missing = |kind| Error::Missing { kind, files: files().join(", ") };
    let (_, pool) = pool.ok_or_else(|| missing(AttentionPool::KIND))?;
    let (place, job) = job.ok_or_else(|| missing(TrainingJob::KIND))?;
    validate::together(&pool, &job).map_err(|refusal| place.invalid(refusal))?;
    Ok(Manifests { pool, job, cluster_only })
}

fn put<T>(slot: &mut Option<(Place, T)>, place: Place, object: T) -> Result<(), Error> {
    match slot {
        Some((first, _)) => Err(Error::Second { place, first: first.to_string() }),
        None => {
            *slot = Some((place, object));
            Ok(())
        }
    }
}

/// One object as it stands in a file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", bound = "Spec: Deserialize<'de>, Status: Deserialize<'de>")]
struct Document<Spec, Status> {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    metadata: ObjectMeta,
    spec: Spec,
    #[serde(default)]
    status: Option<Status>,
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
fn identify(file: &Path, document: &str) -> Result<Option<(Place, Value)>, Error> {
    let tree: Value = serde_saphyr::from_str_with_options(document, options())
        .map_err(|error| Error::Yaml { file: file.to_path_buf(), problem: one_line(&error) })?;
    if tree.is_null() {
        return Ok(None);
    }
    let line = document.lines().position(|line| !line.trim().is_empty()).map_or(1, |at| at + 1);
    let text = |path: &str| tree.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let (version, kind, name) = (text("/apiVersion"), text("/kind"), text("/metadata/name"));
    let place =
        Place { file: file.to_path_buf(), line, kind: kind.to_owned(), name: name.to_owned() };
    if !tree.is_object() {
        return Err(Error::NotAnObject { file: file.to_path_buf(), line });
    }
    if kind != AttentionPool::KIND && kind != TrainingJob::KIND {
        return Err(Error::Kind { file: file.to_path_buf(), line, kind: kind.to_owned() });
    }
    if version != API_VERSION {
        return Err(Error::Version { place, version: version.to_owned() });
    }
    if name.is_empty() {
        let problem = "is missing".to_owned();
        let remedy = "give the object a name".to_owned();
        return Err(place.invalid(Refusal { field: "metadata.name".into(), problem, remedy }));
    }
    Ok(Some((place, tree)))
}

/// Reads a document as a type and refuses what the type does not know.
fn typed<T: DeserializeOwned>(place: &Place, document: &str, tree: &Value) -> Result<T, Error> {
    if let Some(field) = number_for_text(tree) {
        let problem = "is a number or a boolean where text belongs".to_owned();
        let remedy = "put it in quotes".to_owned();
        return Err(place.invalid(Refusal { field, problem, remedy }));
    }
    let mut unknown = Vec::new();
    let mut wrong = String::new();
    let object = serde_saphyr::with_deserializer_from_str_with_options(document, options(), |de| {
        let mut track = serde_path_to_error::Track::new();
        let tracked = serde_path_to_error::Deserializer::new(de, &mut track);
        let object = serde_ignored::deserialize(tracked, |path| unknown.push(field_of(&path)));
        if object.is_err() {
            wrong = track.path().to_string();
        }
        object
    });
    if let Some(field) = unknown.into_iter().next() {
        return Err(place.unknown(document, field));
    }
    object.map_err(|error: serde_saphyr::Error| {
        let field = if wrong == "." { "object".to_owned() } else { wrong };
        Error::Type { place: place.clone(), field, problem: one_line(&error) }
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
    for key in ["claimName", "hostPath"] {
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

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! { with_snippet: false, strict_booleans: true }
}

fn one_line(error: &serde_saphyr::Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `spec.rules[1].exitCodes` of a path; serde shows list positions as names.
fn field_of(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path as P;
    match path {
        P::Root => String::new(),
        P::Seq { parent, index } => format!("{}[{index}]", field_of(parent)),
        P::Map { parent, key } => match field_of(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        P::Some { parent } | P::NewtypeStruct { parent } | P::NewtypeVariant { parent } => {
            field_of(parent)
        }
    }
}

/// Where an object stands.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// Line of its first word, from 1.
    pub line: usize,
    /// Its kind.
    pub kind: String,
    /// Its name; may be empty.
    pub name: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.kind)?;
        if self.name.is_empty() { Ok(()) } else { write!(f, " {}", self.name.escape_debug()) }
    }
}

impl Place {
    fn invalid(&self, refusal: Refusal) -> Error {
        Error::Invalid { place: self.clone(), refusal }
    }

    fn unknown(&self, document: &str, field: String) -> Error {
        let (parent, key) = field.rsplit_once('.').unwrap_or(("", &field));
        let parent: String =
            parent.split('[').map(|it| it.split_once(']').map_or(it, |it| it.1)).collect();
        let remedy = match nearest(key, fields::known(&self.kind, &parent).iter().copied()) {
            Some(name) => format!("did you mean `{name}`?"),
            None => "remove it or correct its name".to_owned(),
        };
        let named = |line: &str| {
            line.trim_start().trim_start_matches("- ").split(':').next().is_some_and(|it| it == key)
        };
        let mut lines = document.lines().enumerate().filter(|(_, line)| named(line));
        let line = match (lines.next(), lines.next()) {
            (Some((at, _)), None) => at + 1,
            _ => self.line,
        };
        Error::Unknown { place: Self { line, ..self.clone() }, field, remedy }
    }
}

/// Why manifests are refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read, or is not text.
    #[error("{}: {source}; name a readable YAML file", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not YAML.
    #[error("{}: not valid YAML: {problem}; correct that line", file.display())]
    Yaml {
        /// The file.
        file: PathBuf,
        /// What the parser said, with line and column.
        problem: String,
    },
    /// A document is a list or a word.
    #[error("{}:{line}: not an object; write apiVersion, kind, metadata and spec", file.display())]
    NotAnObject {
        /// The file.
        file: PathBuf,
        /// Its line.
        line: usize,
    },
    /// An object of a kind that is not ours.
    #[error(
        "{}:{line}: kind is `{kind}`; write AttentionPool or TrainingJob, one object a document",
        file.display()
    )]
    Kind {
        /// The file.
        file: PathBuf,
        /// Its line.
        line: usize,
        /// The kind, may be empty.
        kind: String,
    },
    /// An object of another group or version.
    #[error("{place}: apiVersion is `{version}`; write `{API_VERSION}`")]
    Version {
        /// The object.
        place: Place,
        /// What it says.
        version: String,
    },
    /// A value has the wrong type, or a field is missing.
    #[error("{place}: {field}: {problem}; correct the value")]
    Type {
        /// The object.
        place: Place,
        /// The field.
        field: String,
        /// What the reader said, with line and column.
        problem: String,
    },
    /// A field that no type knows.
    #[error("{place}: {field} is not a field of this object; {remedy}")]
    Unknown {
        /// The object, with the field's line where it is clear.
        place: Place,
        /// Path of the field.
        field: String,
        /// What was probably meant.
        remedy: String,
    },
    /// A field's value, or how it goes with others.
    #[error("{place}: {refusal}")]
    Invalid {
        /// The object.
        place: Place,
        /// The field, the problem and the remedy.
        refusal: Refusal,
    },
    /// A second pool or job.
    #[error("{place}: a second {}, the first is at {first}; keep one, more come later", place.kind)]
    Second {
        /// The object.
        place: Place,
        /// Where the first one is.
        first: String,
    },
    /// No pool or no job.
    #[error("{files}: no {kind}; add one to the files or name its file with another -f")]
    Missing {
        /// What is missing.
        kind: &'static str,
        /// What was read.
        files: String,
    },
}
