//! Reads a directory of files: every file is one document, every line of a `.jsonl` file is one.
//!
//! In: a path. Out: a [`Corpus`], its documents in the order of their paths, lines in the order of their file.
//! Sub-directories and symbolic links are followed; names that start with a dot, empty files and empty lines are
//! left out. The tokens of a file are its bytes, as they are: any file is good, but for lines of `.jsonl` that hold neither text
//! nor tokens.
//!
//! Does not cut documents; that is the loader's.
//!
//! Invariant: the same files under the same names give the same corpus and digest on every machine.

mod error;
mod held;
mod lines;
mod tokens;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

pub use self::error::CorpusError;
pub(crate) use self::held::Piece;
pub use self::held::{HeldOut, HeldOutError};
pub use self::tokens::Tokens;

/// Size of the vocabulary whose tokens are the bytes.
pub(crate) const BYTE_TOKENS: usize = 256;

/// Documents of a training run.
#[derive(Clone, Debug)]
pub struct Corpus {
    documents: Vec<Document>,
    tokens: u64,
    digest: u64,
}

/// A document: a file, or a line of one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Document {
    /// Path below the corpus' directory; of a line, `:` and its number, from 1, behind it.
    pub path: PathBuf,
    /// At least one.
    pub tokens: Tokens,
    /// Its tokens are bytes of a text, which only the vocabulary of the bytes has.
    pub is_text: bool,
}

impl Document {
    /// A text.
    pub fn text(path: impl Into<PathBuf>, bytes: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), tokens: bytes.into().into(), is_text: true }
    }
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
        // Training predicts the next token, so a document needs two.
        if documents.iter().all(|it| it.tokens.count() < 2) {
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
        let mut tokens = 0;
        for document in &documents {
            assert!(document.tokens.count() > 0, "{} is empty", document.path.display());
            let path = document.path.as_os_str().as_bytes();
            digest.update(&(path.len() as u64).to_le_bytes());
            digest.update(path);
            document.tokens.add_to(&mut digest);
            tokens += document.tokens.count() as u64;
        }
        Self { documents, tokens, digest: digest.digest() }
    }

    /// All documents; at least one.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Tokens of all documents together.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Looks whether a model of so many tokens knows all of them. Text is for the vocabulary of the bytes alone.
    ///
    /// # Errors
    ///
    /// [`CorpusError::Text`] and [`CorpusError::Unknown`] name the first document that does not fit.
    pub fn fits(&self, vocabulary: usize) -> Result<(), CorpusError> {
        for Document { path, tokens, is_text } in &self.documents {
            if *is_text && vocabulary != BYTE_TOKENS {
                return Err(CorpusError::Text { path: path.clone(), vocabulary });
            }
            let unknown = |&(_, id): &(usize, u32)| id as usize >= vocabulary;
            if let Some((at, id)) = tokens.iter().enumerate().find(unknown) {
                return Err(CorpusError::Unknown { path: path.clone(), at, id, vocabulary });
            }
        }
        Ok(())
    }

    /// Names the corpus: its paths and tokens.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Entropy of single tokens, in nats a token: the loss of a model that knows only how frequent
    /// each token is. A model that uses the context at all is below it.
    pub fn unigram_entropy(&self) -> f64 {
        // In the order of the ids, so that the sum has the same bits everywhere.
        let mut counts = BTreeMap::<u32, u64>::new();
        let mut narrow = [0_u64; BYTE_TOKENS];
        for id in self.documents.iter().flat_map(|it| it.tokens.iter()) {
            match narrow.get_mut(id as usize) {
                Some(count) => *count += 1,
                None => *counts.entry(id).or_default() += 1,
            }
        }
        let total = self.tokens as f64;
        let used = narrow.into_iter().filter(|&it| it > 0).chain(counts.into_values());
        let used = used.map(|it| it as f64 / total);
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
        let lines = lines::read(path, &below, &bytes)?;
        documents.extend(lines.into_iter().map(|it| (below.clone(), it)));
    } else if !bytes.is_empty() {
        documents.push((below.clone(), Document::text(below, bytes)));
    }
    Ok(())
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
        assert_eq!(corpus.tokens(), 7);
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
            .map(|it| (it.path.to_str().unwrap(), it.tokens.clone(), it.is_text))
            .collect();
        let text = |path, bytes: &[u8]| (path, Tokens::from(bytes.to_vec()), true);
        assert_eq!(documents.len(), 14);
        assert_eq!(documents[0], text("a", b"a"));
        assert_eq!(documents[1], ("m.jsonl:1", Tokens::from(vec![0_u32, 255, 1]), false));
        assert_eq!(documents[2], text("m.jsonl:2", "é 2".as_bytes()));
        assert_eq!(documents[12].0, "m.jsonl:12");
        assert_eq!(documents[13], text("m.jsonl.txt", b"{"));
    }

    #[test]
    fn entropy_of_two_equally_frequent_bytes_is_ln_2() {
        let numbers =
            |ids: Vec<u32>| Document { path: "b".into(), tokens: ids.into(), is_text: false };
        let few = Document::text("a", *b"abab");
        for document in [few, numbers(vec![7, 300, 300, 7]), numbers(vec![900, 300])] {
            let entropy = Corpus::from_documents(vec![document]).unigram_entropy();
            assert!((entropy - std::f64::consts::LN_2).abs() < 1e-12);
        }
    }

    #[test]
    fn ids_are_the_same_however_they_came_and_must_be_in_the_vocabulary() {
        let numbers =
            |ids: Vec<u32>| Document { path: "b".into(), tokens: ids.into(), is_text: false };
        let of = |document: Document| Corpus::from_documents(vec![document]);
        let (text, same) = (of(Document::text("b", *b"ab")), of(numbers(vec![97, 98])));
        assert_eq!(text.digest(), same.digest());
        assert_eq!(text.documents()[0].tokens, same.documents()[0].tokens);
        assert_ne!(of(numbers(vec![97, 354])).digest(), same.digest());

        let refused =
            |corpus: &Corpus, vocabulary| corpus.fits(vocabulary).unwrap_err().to_string();
        text.fits(256).unwrap();
        assert!(refused(&text, 257).starts_with("b is text"), "{}", refused(&text, 257));
        same.fits(99).unwrap();
        let unknown = refused(&same, 98);
        assert!(unknown.contains("b: token 1 (from 0) is 98"), "{unknown}");
        assert!(unknown.ends_with("give --vocab-size 99 or more"), "{unknown}");
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
        check(short, "holds no document of two tokens");
        let line = |text: &'static str| {
            move |root: &Path| {
                fs::create_dir(root).unwrap();
                fs::write(root.join("a.jsonl"), text).unwrap();
            }
        };
        check(line("{\"text\": \"ab\"}\nnothing\n"), "data/a.jsonl, line 2: ");
        check(line("{\"text\": \"a\"}\n"), "holds no document of two tokens");
        check(line("[1, 2]"), "line 1: it is no object");
        check(line("{\"txt\": \"ab\"}"), "line 1: it has neither text nor tokens");
        check(line("{\"text\": 7}"), "line 1: its text is no string");
        check(line("{\"tokens\": \"ab\"}"), "line 1: its tokens are no list");
        check(line("{\"tokens\": [1, 4294967296]}"), "line 1: its token 4294967296 is no id");
        check(line("{\"tokens\": [1, -1]}"), "line 1: its token -1 is no id");
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
