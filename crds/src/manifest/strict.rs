//! Reads a type from a value and says exactly which field is wrong.
//!
//! In: a value. Out: the object, or the path of the first field that has the wrong type or that the
//! type does not know. Works for any type that writes what it reads, the API server's included.
//!
//! Where: a field with the wrong type is the one without which the complaint is another. Unknown: a
//! field that is not there when the object is written again; an explicit null counts as left out.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::tree::below;

/// Why a value does not fit its type.
#[derive(Debug)]
pub(super) enum Fault {
    /// A value of the wrong type, or a missing field: path and complaint.
    Type(String, String),
    /// A field that the type does not know: path.
    Unknown(String),
}

/// Reads an object of type `T`.
pub(super) fn read<T: DeserializeOwned + Serialize>(value: &Value) -> Result<T, Fault> {
    let object = T::deserialize(value).map_err(|error| {
        Fault::Type(wrong_field::<T>(value).unwrap_or_default(), error.to_string())
    })?;
    let written = serde_json::to_value(&object).expect("objects have text as keys");
    match lost(value, &written, "") {
        Some(path) => Err(Fault::Unknown(path)),
        None => Ok(object),
    }
}

/// Path of the field of the wrong type, if an object of type `T` cannot be read from a value.
pub(crate) fn wrong_field<T: DeserializeOwned>(value: &Value) -> Option<String> {
    let complaint = |value: &Value| T::deserialize(value).err().map(|it| it.to_string());
    let error = complaint(value)?;
    Some(culprit(value, &error, &complaint))
}

/// Descends into the part without which the complaint is another.
fn culprit(value: &Value, error: &str, complaint: &dyn Fn(&Value) -> Option<String>) -> String {
    let mut whole = value.clone();
    // The path as a JSON pointer and as people write it.
    let (mut pointer, mut path) = (String::new(), String::new());
    'deeper: loop {
        let part = whole.pointer(&pointer).expect("the path was walked").clone();
        for (step, name, without) in parts(&part, &path) {
            *whole.pointer_mut(&pointer).expect("the path was walked") = without;
            let guilty = complaint(&whole).as_deref() != Some(error);
            *whole.pointer_mut(&pointer).expect("the path was walked") = part.clone();
            if guilty {
                pointer.push_str(&step);
                path = name;
                continue 'deeper;
            }
        }
        return path;
    }
}

/// The parts of a value: step of the pointer, path, and the value without the part.
fn parts(value: &Value, path: &str) -> Vec<(String, String, Value)> {
    match value {
        Value::Object(map) => {
            let part = |key: &String| {
                let mut without = map.clone();
                without.remove(key);
                let step = format!("/{}", key.replace('~', "~0").replace('/', "~1"));
                (step, below(path, key), Value::Object(without))
            };
            map.keys().map(part).collect()
        }
        Value::Array(list) => {
            let part = |at: usize| {
                let mut without = list.clone();
                without.remove(at);
                (format!("/{at}"), format!("{path}[{at}]"), Value::Array(without))
            };
            (0..list.len()).map(part).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    }
}

/// First field of `given` that `written` does not have.
fn lost(given: &Value, written: &Value, path: &str) -> Option<String> {
    match (given, written) {
        (Value::Object(given), Value::Object(written)) => {
            given.iter().filter(|(_, value)| !value.is_null()).find_map(|(key, value)| {
                let path = below(path, key);
                match written.get(key) {
                    Some(written) => lost(value, written, &path),
                    None => Some(path),
                }
            })
        }
        (Value::Array(given), Value::Array(written)) => (given.iter().zip(written).enumerate())
            .find_map(|(at, (given, written))| lost(given, written, &format!("{path}[{at}]"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodSpec;
    use serde_json::json;

    use super::*;

    #[test]
    fn wrong_parts_of_pod_specs_are_found() {
        let good = json!({"containers": [{"name": "a", "ports": [{"containerPort": 1}]}]});
        read::<PodSpec>(&good).unwrap();
        let spec =
            json!({"containers": [{"name": "a"}, {"name": "b", "ports": [{"hostPort": "x"}]}]});
        match read::<PodSpec>(&spec) {
            Err(Fault::Type(path, _)) => assert_eq!(path, "containers[1].ports[0].hostPort"),
            other => panic!("{other:?}"),
        }
        let spec = json!({"containers": [{"name": "a", "ports": [{"port": 1}]}], "volumes": null});
        match read::<PodSpec>(&spec) {
            Err(Fault::Unknown(path)) => assert_eq!(path, "containers[0].ports[0].port"),
            other => panic!("{other:?}"),
        }
    }
}
