//! Reads a directory of files: every file is one document.
//!
//! In: a path. Out: a [`Corpus`], its documents in the order of their paths. Sub-directories and
//! symbolic links are followed; names that start with a dot, and empty files, are left out. Bytes are
//! taken as they are: any file is good.
//!
//! Does not cut documents; that is the loader's.
//!
//! Invariant: the same files under the same names give the same corpus and digest on every machine.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

/// Documents of a training run.
#[derive(Clone, Debug)]
pub struct Corpus {
    documents: Vec<Document>,
    bytes: u64,
    digest: u64,
}

/// One file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Document {
    /// Path below the corpus' directory.
    pub path: PathBuf,
    /// What it holds; not empty.
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
        documents.sort_by(|a, b| a.path.as_os_str().cmp(b.path.as_os_str()));
        // Of a single byte nothing can be predicted.
        if documents.iter().all(|it| it.bytes.len() < 2) {
            return Err(CorpusError::Empty { path: root.to_path_buf() });
        }
        Ok(Self::from_documents(documents))
    }

    /// A corpus of documents that are at hand.
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

    /// Mean surprise, in nats a byte, of who knows only how frequent each byte is. A model that has
    /// learnt anything from context is below it.
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
    documents: &mut Vec<Document>,
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
            let bytes = fs::read(&path).map_err(unreadable(&path))?;
            if !bytes.is_empty() {
                let path = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
                documents.push(Document { path, bytes });
            }
        } else {
            return Err(CorpusError::Special { path });
        }
    }
    Ok(())
}

/// Why a directory is no corpus.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}; check that it exists and its permissions", path.display())]
    Unreadable {
        /// What was read.
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
    /// There is nothing to train on.
    #[error("{} holds no file of two bytes or more; put one file per document there", path.display())]
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
        check(|root| fs::create_dir(root).unwrap(), "holds no file");
        let empty = |root: &Path| {
            fs::create_dir(root).unwrap();
            fs::write(root.join("a"), "").unwrap();
        };
        check(empty, "holds no file");
        let short = |root: &Path| {
            fs::create_dir(root).unwrap();
            fs::write(root.join("a"), "a").unwrap();
            fs::write(root.join("b"), "b").unwrap();
        };
        check(short, "holds no file of two bytes");
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
