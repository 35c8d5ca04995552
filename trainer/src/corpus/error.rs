//! What is wrong with a corpus, in words that name the file and the remedy.

use std::io;
use std::path::PathBuf;

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
    #[error("{}, line {line}: {why}; write one JSON object a line, with \"text\": a string, or \"tokens\": a list of ids of tokens", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with the line.
        why: String,
    },
    /// Bytes for a model that has other tokens.
    #[error("{} is text, whose tokens are the 256 bytes, and --vocab-size is {vocabulary}; give lines of .jsonl with \"tokens\", or leave --vocab-size out", path.display())]
    Text {
        /// The document.
        path: PathBuf,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// A token that the model does not have.
    #[error("{}: token {at} (from 0) is {id}, and the model has {vocabulary} tokens, 0 to {}; give --vocab-size {} or more", path.display(), vocabulary - 1, u64::from(*id) + 1)]
    Unknown {
        /// The document.
        path: PathBuf,
        /// Its place in the document.
        at: usize,
        /// The token.
        id: u32,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// There is nothing to train on.
    #[error("{} holds no document of two tokens or more; put one file per document there, or .jsonl files", path.display())]
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
