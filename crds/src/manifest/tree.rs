//! A YAML document as plain values that remember their lines.
//!
//! In: text. Out: a [`Tree`]: its JSON value, and the line of every field by its path.
//!
//! It knows nothing of our objects. Reading types from the value instead of from YAML compiles the
//! readers of pod templates once, which is most of what this crate costs to build.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;

/// A document.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    /// The document's content.
    pub(super) value: Value,
    lines: BTreeMap<String, usize>,
}

impl Tree {
    /// Reads one document. Refuses keys that appear twice, and takes `yes` and `no` as text.
    pub(super) fn read(document: &str) -> Result<Self, serde_saphyr::Error> {
        let options = serde_saphyr::options! { with_snippet: false, strict_booleans: true };
        let node: Node = serde_saphyr::from_str_with_options(document, options)?;
        let mut lines = BTreeMap::new();
        let value = node.flatten("", &mut lines);
        Ok(Self { value, lines })
    }

    /// Line of a field such as `spec.rules[1].action`, or of the nearest part around it.
    pub(super) fn line(&self, field: &str) -> Option<usize> {
        let mut field = field;
        loop {
            if let Some(&line) = self.lines.get(field) {
                return Some(line);
            }
            field = &field[..field.rfind(['.', '['])?];
        }
    }
}

/// Path of a field below another.
pub(super) fn below(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

enum Node {
    Word(Value),
    List(Vec<Spanned<Node>>),
    Map(Vec<(Spanned<String>, Node)>),
}

impl Node {
    fn flatten(self, path: &str, lines: &mut BTreeMap<String, usize>) -> Value {
        match self {
            Self::Word(value) => value,
            Self::List(nodes) => {
                let flat = |(at, node): (usize, Spanned<Self>)| {
                    let path = format!("{path}[{at}]");
                    lines.insert(path.clone(), node.referenced.line() as usize);
                    node.value.flatten(&path, lines)
                };
                nodes.into_iter().enumerate().map(flat).collect()
            }
            Self::Map(entries) => {
                let mut map = Map::new();
                for (key, node) in entries {
                    let path = below(path, &key.value);
                    lines.insert(path.clone(), key.referenced.line() as usize);
                    map.insert(key.value, node.flatten(&path, lines));
                }
                Value::Object(map)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text, a number, a list or a mapping")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Word(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Word(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Word(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        let number = Number::from_f64(value).map(Value::Number);
        Ok(Node::Word(number.unwrap_or_else(|| value.to_string().into())))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Word(value.into()))
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Word(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Word(Value::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = list.next_element()? {
            nodes.push(node);
        }
        Ok(Node::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key()? {
            entries.push((key, map.next_value()?));
        }
        Ok(Node::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_know_their_lines() {
        let tree = Tree::read("a: 1\nb:\n  c: [x,\n    {d: yes}]\n").unwrap();
        assert_eq!(tree.value, serde_json::json!({"a": 1, "b": {"c": ["x", {"d": "yes"}]}}));
        let line = |field| tree.line(field);
        assert_eq!([line("a"), line("b"), line("b.c")], [Some(1), Some(2), Some(3)]);
        assert_eq!([line("b.c[1].d"), line("b.c[1].e[0]"), line("z")], [Some(4), Some(4), None]);
    }
}
