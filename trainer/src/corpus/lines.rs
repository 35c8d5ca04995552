//! Reads the lines of a `.jsonl` file: each is a document.
//!
//! In: bytes of the file. Out: numbers of lines, from 1, and what they hold: `text` as UTF-8, or `tokens`, numbers
//! of bytes, since the reference model's vocabulary are the bytes. Other fields are passed over; so are lines that
//! hold nothing.
//!
//! Does not know other vocabularies: a token that is no byte is refused, never cut.

use std::path::Path;

use serde_json::Value;

use super::CorpusError;

/// The documents of a file.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Vec<(usize, Vec<u8>)>, CorpusError> {
    let mut documents = Vec::new();
    for (line, text) in (1..).zip(bytes.split(|&it| it == b'\n')) {
        if text.trim_ascii().is_empty() {
            continue;
        }
        let refuse = |why| CorpusError::Line { path: path.to_path_buf(), line, why };
        let document = document(text).map_err(refuse)?;
        if !document.is_empty() {
            documents.push((line, document));
        }
    }
    Ok(documents)
}

fn document(line: &[u8]) -> Result<Vec<u8>, String> {
    let value: Value = serde_json::from_slice(line).map_err(|it| it.to_string())?;
    let Value::Object(fields) = value else { return Err("it is no object".into()) };
    match (fields.get("text"), fields.get("tokens")) {
        (Some(Value::String(text)), None) => Ok(text.clone().into_bytes()),
        (Some(_), None) => Err("its text is no string".into()),
        (None, Some(Value::Array(tokens))) => tokens.iter().map(byte).collect(),
        (None, Some(_)) => Err("its tokens are no list".into()),
        (Some(_), Some(_)) => Err("it has both text and tokens".into()),
        (None, None) => Err("it has neither text nor tokens".into()),
    }
}

fn byte(token: &Value) -> Result<u8, String> {
    let byte = token.as_u64().and_then(|it| u8::try_from(it).ok());
    byte.ok_or_else(|| format!("its token {token} is not one of the 256 bytes"))
}
