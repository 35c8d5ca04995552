//! Reads the lines of a `.jsonl` file: each is a document.
//!
//! In: bytes of the file. Out: a document of each line, named by the file and the line's number, from 1. It holds `text`, whose
//! tokens are the bytes of its UTF-8, or `tokens`, ids of any vocabulary. Other fields are passed over; so are lines that hold
//! nothing.
//!
//! Does not know the model's vocabulary; [`Corpus::fits`](super::Corpus::fits) looks whether the ids are in it.

use std::path::Path;

use serde_json::Value;

use super::{CorpusError, Document, Tokens};

/// The documents of a file, which is called `below` in the corpus.
pub(super) fn read(path: &Path, below: &Path, bytes: &[u8]) -> Result<Vec<Document>, CorpusError> {
    let mut documents = Vec::new();
    for (line, text) in (1..).zip(bytes.split(|&it| it == b'\n')) {
        if text.trim_ascii().is_empty() {
            continue;
        }
        let refuse = |why| CorpusError::Line { path: path.to_path_buf(), line, why };
        let (tokens, is_text) = document(text).map_err(refuse)?;
        if tokens.count() > 0 {
            let path = format!("{}:{line}", below.display()).into();
            documents.push(Document { path, tokens, is_text });
        }
    }
    Ok(documents)
}

/// The tokens of a line, and whether it is text.
fn document(line: &[u8]) -> Result<(Tokens, bool), String> {
    let value: Value = serde_json::from_slice(line).map_err(|it| it.to_string())?;
    let Value::Object(fields) = value else { return Err("it is no object".into()) };
    match (fields.get("text"), fields.get("tokens")) {
        (Some(Value::String(text)), None) => Ok((text.clone().into_bytes().into(), true)),
        (Some(_), None) => Err("its text is no string".into()),
        (None, Some(Value::Array(tokens))) => {
            let ids = tokens.iter().map(id).collect::<Result<Vec<_>, _>>()?;
            Ok((ids.into(), false))
        }
        (None, Some(_)) => Err("its tokens are no list".into()),
        (Some(_), Some(_)) => Err("it has both text and tokens".into()),
        (None, None) => Err("it has neither text nor tokens".into()),
    }
}

fn id(token: &Value) -> Result<u32, String> {
    let id = token.as_u64().and_then(|it| u32::try_from(it).ok());
    id.ok_or_else(|| format!("its token {token} is no id, a whole number from 0 on"))
}
