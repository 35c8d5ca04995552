//! Reads a directory of files: every file is one document, every line of a `.jsonl` file is one.
//!
//! In: a path. Out: a [`Corpus`], its documents in the order of their paths, lines in the order of their file.
//! Sub-directories and symbolic links are followed; names that start with a dot, empty files and empty lines are
//! left out. Bytes are taken as they are: any file is good, but for lines of `.jsonl` that hold neither text nor tokens.
//!
//! Does not cut documents; that is the loader's.
//!
//! Invariant: the same files under the same names give the same corpus and digest on every machine.

mod held;
mod lines;

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

pub(crate) use self::held::Piece;
pub use self::held::{HeldOut, HeldOutError};

/// Documents of a training run.
#[derive(Clone, Debug)]
pub struct Corpus {
    documents: Vec<Document>,
    bytes: u64,
    digest: u64,
}

/// A document: a file, or a line of one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Document {
    /// Path below the corpus' directory; of a line, `:` and its number, from 1, behind it.
    pub path: PathBuf,
    /// Its bytes, at least one.
    pub bytes: Vec<u8>,
}

impl Corpus {
    /// Reads every file below `root`.
    ///
    /// # Errors
    ///
    /// See [`CorpusError`]; nothing is left out silently but hidden and empty files.
    pub fn read(root: &Path) -> Result<Self, CorpusError> {
        let unreadable = |source| CorpusError::Unreadable { path: root.to_path_buf(), source };
        let status = fs::metadata(root).map_err(unreadable)?;
        if !status.is_dir() {
            return Err(CorpusError::NotDirectory { path: root.to_path_buf() });
        }
        let mut documents = Vec::new();
        walk(root, root, &mut vec![(status.dev(), status.ino())], &mut documents)?;
        Self::sorted(root, documents)
    }

    /// Reads one file, or every file below a folder.
    fn read_any(path: &Path) -> Result<Self, CorpusError> {
        if !fs::metadata(path).is_ok_and(|it| it.is_file()) {
            return Self::read(path);
        }
        let mut documents = Vec::new();
        let name = path.file_name().map_or_else(|| path.to_path_buf(), PathBuf::from);
        read_file(path, name, &mut documents)?;
        Self::sorted(path, documents)
    }

    fn sorted(root: &Path, mut documents: Vec<(PathBuf, Document)>) -> Result<Self, CorpusError> {
        // Lines of a file come in their order: it is a stable sort by the file's own path.
        documents.sort_by(|a, b| a.0.as_os_str().cmp(b.0.as_os_str()));
        let documents: Vec<_> = documents.into_iter().map(|it| it.1).collect();
        // Training predicts the next byte, so a document needs two.
        if documents.iter().all(|it| it.bytes.len() < 2) {
            return Err(CorpusError::Empty { path: root.to_path_buf() });
        }
        Ok(Self::from_documents(documents))
    }

    /// A corpus of documents that are in memory.
    ///
    /// # Panics
    ///
    /// When there is none, or one is empty.
    pub fn from_documents(documents: Vec<Document>) -> Self {
        assert!(!documents.is_empty(), "a corpus without documents");
        let mut digest = Xxh3::new();
        let mut bytes = 0;
        for document in &documents {
            assert!(!document.bytes.is_empty(), "{} is empty", document.path.display());
            let path = document.path.as_os_str().as_bytes();
            digest.update(&(path.len() as u64).to_le_bytes());
            digest.update(path);
            digest.update(&(document.bytes.len() as u64).to_le_bytes());
            digest.update(&document.bytes);
            bytes += document.bytes.len() as u64;
        }
        Self { documents, bytes, digest: digest.digest() }
    }

    /// All documents; at least one.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Bytes of all documents together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Names the corpus: its paths and bytes.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Entropy of single bytes, in nats a byte: the loss of a model that knows only how frequent
    /// each byte is. A model that uses the context at all is below it.
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = [0_u64; 256];
        for byte in self.documents.iter().flat_map(|it| &it.bytes) {
            counts[usize::from(*byte)] += 1;
        }
        let total = self.bytes as f64;
        let used = counts.iter().filter(|&&it| it > 0).map(|&it| it as f64 / total);
        -used.map(|share| share * share.ln()).sum::<f64>()
    }
}

/// Adds the files below `folder`; `above` are the folders on the way there.
fn walk(
    root: &Path,
    folder: &Path,
    above: &mut Vec<(u64, u64)>,
    documents: &mut Vec<(PathBuf, Document)>,
) -> Result<(), CorpusError> {
    let unreadable = |path: &Path| {
        let path = path.to_path_buf();
        move |source| CorpusError::Unreadable { path, source }
    };
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let entry = entry.map_err(unreadable(folder))?;
        if entry.file_name().as_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let status = fs::metadata(&path).map_err(|source| match source.raw_os_error() {
            Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => {
                CorpusError::Loop { path: path.clone() }
            }
            _ => CorpusError::Unreadable { path: path.clone(), source },
        })?;
        if status.is_dir() {
            let identity = (status.dev(), status.ino());
            if above.contains(&identity) {
                return Err(CorpusError::Loop { path });
            }
            above.push(identity);
            walk(root, &path, above, documents)?;
            above.pop();
        } else if status.is_file() {
            let below = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
            read_file(&path, below, documents)?;
        } else {
            return Err(CorpusError::Special { path });
        }
    }
    Ok(())
}

/// Adds a file, which is called `below`.
fn read_file(
    path: &Path,
    below: PathBuf,
    documents: &mut Vec<(PathBuf, Document)>,
) -> Result<(), CorpusError> {
    let unreadable = |source| CorpusError::Unreadable { path: path.to_path_buf(), source };
    let bytes = fs::read(path).map_err(unreadable)?;
    if path.extension().is_some_and(|it| it == "jsonl") {
        for (number, bytes) in lines::read(path, &bytes)? {
            let line = format!("{}:{number}", below.display()).into();
            documents.push((below.clone(), Document { path: line, bytes }));
        }
    } else if !bytes.is_empty() {
        documents.push((below.clone(), Document { path: below, bytes }));
    }
    Ok(())
}

/// Why a directory is no corpus.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}; check that it exists and its permissions", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path is a file.
    #[error("{} is not a directory; name the directory that holds the documents", path.display())]
    NotDirectory {
        /// The path.
        path: PathBuf,
    },
    /// A line of a `.jsonl` file is no document.
    #[error("{}, line {line}: {why}; write one JSON object a line, with \"text\": a string, or \"tokens\": a list of bytes, 0 to 255", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with the line.
        why: String,
    },
    /// There is nothing to train on.
    #[error("{} holds no document of two bytes or more; put one file per document there, or .jsonl files", path.display())]
    Empty {
        /// The directory.
        path: PathBuf,
    },
    /// A symbolic link leads to a folder that holds it, or to itself.
    #[error("{} leads back to a directory that holds it; remove the link", path.display())]
    Loop {
        /// The link.
        path: PathBuf,
    },
    /// A pipe, socket or device.
    #[error("{} is neither a file nor a directory; remove it", path.display())]
    Special {
        /// The path.
        path: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn files_come_in_the_order_of_their_paths_whatever_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir(root.join("b")).unwrap();
        fs::write(root.join("b/z"), [0xff, 0, 0xfe]).unwrap();
        fs::write(root.join("c"), "cc").unwrap();
        fs::write(root.join("empty"), "").unwrap();
        fs::write(root.join(".hidden"), "x").unwrap();
        symlink(root.join("c"), root.join("a")).unwrap();
        let corpus = Corpus::read(root).unwrap();
        let paths: Vec<_> = corpus.documents().iter().map(|it| it.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["a", "b/z", "c"]);
        assert_eq!(corpus.bytes(), 7);
        assert_eq!(corpus.digest(), Corpus::read(root).unwrap().digest());
        fs::write(root.join("c"), "cd").unwrap();
        assert_ne!(corpus.digest(), Corpus::read(root).unwrap().digest());
    }

    #[test]
    fn lines_of_jsonl_are_documents_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let line = |number: usize| match number % 2 {
            0 => format!("{{\"text\": \"é {number}\", \"meta\": {{\"tokens\": 3}}}}"),
            _ => format!("{{\"tokens\": [0, 255, {number}]}}"),
        };
        let text: Vec<_> = (1..=12).map(line).collect();
        // Empty lines and texts, and the end of the last line, do not matter.
        let text = text.join("\n") + "\r\n\n{\"text\": \"\"}";
        fs::write(root.join("m.jsonl"), text).unwrap();
        fs::write(root.join("m.jsonl.txt"), "{").unwrap();
        fs::write(root.join("a"), "a").unwrap();
        let corpus = Corpus::read(root).unwrap();
        let documents: Vec<_> = corpus
            .documents()
            .iter()
            .map(|it| (it.path.to_str().unwrap(), &it.bytes[..]))
            .collect();
        assert_eq!(documents.len(), 14);
        assert_eq!(documents[0], ("a", &b"a"[..]));
        assert_eq!(documents[1], ("m.jsonl:1", &[0, 255, 1][..]));
        assert_eq!(documents[2], ("m.jsonl:2", "é 2".as_bytes()));
        assert_eq!(documents[12].0, "m.jsonl:12");
        assert_eq!(documents[13], ("m.jsonl.txt", &b"{"[..]));
    }

    #[test]
    fn entropy_of_two_equally_frequent_bytes_is_ln_2() {
        let document = Document { path: "a".into(), bytes: b"abab".to_vec() };
        let entropy = Corpus::from_documents(vec![document]).unigram_entropy();
        assert!((entropy - std::f64::consts::LN_2).abs() < 1e-12);
    }

    #[test]
    fn what_is_no_corpus_is_refused_by_name() {
        fn check(prepare: impl Fn(&Path), expected: &str) {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path().join("data");
            prepare(&root);
            let error = Corpus::read(&root).unwrap_err().to_string();
            let place = folder.path().display().to_string();
            assert!(error.contains(&place) && error.contains(expected), "{error}");
        }
        check(|_| {}, "cannot read");
        check(|root| fs::write(root, "x").unwrap(), "is not a directory");
        check(|root| fs::create_dir(root).unwrap(), "holds no document");
        let empty = |root: &Path| {
            fs::create_dir(root).unwrap();
            fs::write(root.join("a"), "").unwrap();
        };
        check(empty, "holds no document");
        let short = |root: &Path| {
            fs::create_dir(root).unwrap();
            fs::write(root.join("a"), "a").unwrap();
            fs::write(root.join("b"), "b").unwrap();
        };
        check(short, "holds no document of two bytes");
        let line = |text: &'static str| {
            move |root: &Path| {
                fs::create_dir(root).unwrap();
                fs::write(root.join("a.jsonl"), text).unwrap();
            }
        };
        check(line("{\"text\": \"ab\"}\nnothing\n"), "data/a.jsonl, line 2: ");
        check(line("{\"text\": \"a\"}\n"), "holds no document of two bytes");
        check(line("[1, 2]"), "line 1: it is no object");
        check(line("{\"txt\": \"ab\"}"), "line 1: it has neither text nor tokens");
        check(line("{\"text\": 7}"), "line 1: its text is no string");
        check(line("{\"tokens\": \"ab\"}"), "line 1: its tokens are no list");
        check(line("{\"tokens\": [1, 256]}"), "line 1: its token 256 is not one of the 256 bytes");
        check(line("{\"tokens\": [1, -1]}"), "line 1: its token -1 is not one of the 256 bytes");
        check(
            line("{\"text\": \"ab\", \"tokens\": [1, 2]}"),
            "line 1: it has both text and tokens",
        );
        let up = |root: &Path| {
            fs::create_dir_all(root.join("a/b")).unwrap();
            symlink(root.join("a"), root.join("a/b/up")).unwrap();
        };
        check(up, "data/a/b/up leads back");
        let itself = |root: &Path| {
            fs::create_dir(root).unwrap();
            symlink(root.join("self"), root.join("self")).unwrap();
        };
        check(itself, "data/self leads back");
        let dangling = |root: &Path| {
            fs::create_dir(root).unwrap();
            symlink(root.join("none"), root.join("link")).unwrap();
        };
        check(dangling, "data/link");
        let socket = |root: &Path| {
            fs::create_dir(root).unwrap();
            UnixListener::bind(root.join("socket")).unwrap();
        };
        check(socket, "data/socket is neither");
    }
}
