//! What is said when a manifest is refused.
//!
//! In: what is wrong and where. Out: [`Error`], one line with file, object, field and remedy.
//! Nothing is decided here but which line and which spelling an unknown field was meant to have.

use std::fmt;
use std::path::PathBuf;

use crate::contract::API_VERSION;
use crate::fields;
use crate::nearest::nearest;
use crate::validate::Refusal;

use super::tree::Tree;

/// Position of an object in a file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// Line of the field in question, otherwise that of `kind`; counted from 1.
    pub line: usize,
    /// Kind of the object.
    pub kind: String,
    /// Name of the object; may be empty.
    pub name: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.kind)?;
        if self.name.is_empty() { Ok(()) } else { write!(f, " {}", self.name.escape_debug()) }
    }
}

impl Place {
    pub(super) fn invalid(&self, tree: &Tree, refusal: Refusal) -> Error {
        Error::Invalid {
            place: Box::new(self.at(tree, &refusal.field)),
            refusal: Box::new(refusal),
        }
    }

    pub(super) fn second(&self, first: &Self) -> Error {
        Error::Second { place: Box::new(self.clone()), first: first.to_string() }
    }

    pub(super) fn wrong_type(&self, tree: &Tree, field: String, problem: &str) -> Error {
        let problem = problem.replace("expected u32", "expected a whole number, 0 or more");
        let place = Box::new(self.at(tree, &field));
        let field = if field.is_empty() { "object".to_owned() } else { field };
        Error::Type { place, field, problem }
    }

    pub(super) fn unknown(&self, tree: &Tree, field: String) -> Error {
        let (parent, key) = field.rsplit_once('.').unwrap_or(("", &field));
        let parts = parent.split('[').map(|it| it.split_once(']').map_or(it, |it| it.1));
        let known = fields::known(&self.kind, &parts.collect::<String>());
        let remedy = match nearest(key, known.iter().copied()) {
            Some(name) => format!("did you mean `{name}`?"),
            None => "remove it or correct its name".to_owned(),
        };
        Error::Unknown { place: Box::new(self.at(tree, &field)), field, remedy }
    }

    /// The position of a field of the same object.
    fn at(&self, tree: &Tree, field: &str) -> Self {
        Self { line: tree.line(field).unwrap_or(self.line), ..self.clone() }
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
        /// Line of the file.
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
        /// Line of the file.
        line: usize,
        /// The kind, may be empty.
        kind: String,
    },
    /// An object of another group or version.
    #[error("{place}: apiVersion is `{version}`; write `{API_VERSION}`")]
    Version {
        /// The object.
        place: Box<Place>,
        /// The `apiVersion` that was found.
        version: String,
    },
    /// A value has the wrong type, or a field is missing.
    #[error("{place}: {field}: {problem}; correct the value")]
    Type {
        /// The object.
        place: Box<Place>,
        /// The field.
        field: String,
        /// What the reader said.
        problem: String,
    },
    /// A field that no type knows.
    #[error("{place}: {field} is not a field of this object; {remedy}")]
    Unknown {
        /// The object.
        place: Box<Place>,
        /// Path of the field.
        field: String,
        /// The field that was probably meant.
        remedy: String,
    },
    /// A field's value, or how it goes with others.
    #[error("{place}: {refusal}")]
    Invalid {
        /// The object.
        place: Box<Place>,
        /// The field, the problem and the remedy.
        refusal: Box<Refusal>,
    },
    /// A second pool or job.
    #[error("{place}: a second {}, the first is at {first}; keep one, more come later", place.kind)]
    Second {
        /// The object.
        place: Box<Place>,
        /// Where the first one is.
        first: String,
    },
    /// No pool or no job.
    #[error("{files}: no {kind}; add one to the files or name its file with another -f")]
    Missing {
        /// The missing kind.
        kind: &'static str,
        /// The files that were read.
        files: String,
    },
}
