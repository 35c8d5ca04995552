//! Reads objects that this build cannot read whole.
//!
//! In: an object as the API server has it. Out: a [`Readable`]: all of it, or what is left without the part that cannot
//! be read, and a [`Refusal`] that names that part.
//!
//! The API server knows the types of all fields but those of pod templates, which pass through: so it stores a
//! template with `env: [{name: X, value: 1}]`. Such an object still has a status to tell that in, servers to drain and an end.
//! Nothing may be made from its spec.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{Metadata, Resource};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::manifest::wrong_field;
use crate::validate::Refusal;
use crate::{AttentionPool, TrainingJob};

/// An object, as far as it can be read.
#[derive(Clone, Debug)]
pub struct Readable<K> {
    /// The object, without the part that cannot be read.
    pub object: K,
    /// The part that cannot be read, and why.
    pub unreadable: Option<Refusal>,
}

/// A kind whose spec may be left out.
pub trait Bare: DeserializeOwned {
    /// Class of the operator that looks after the object.
    fn class(&self) -> Option<&str>;

    /// A spec without anything that has a default.
    fn bare_spec() -> Value;
}

impl Bare for AttentionPool {
    fn class(&self) -> Option<&str> {
        self.spec.class.as_deref()
    }

    fn bare_spec() -> Value {
        json!({})
    }
}

impl Bare for TrainingJob {
    fn class(&self) -> Option<&str> {
        self.spec.class.as_deref()
    }

    fn bare_spec() -> Value {
        json!({"attention": {"poolRef": {"name": ""}}, "template": {}})
    }
}

impl<'de, K: Bare> Deserialize<'de> for Readable<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        let error = match K::deserialize(&value) {
            Ok(object) => return Ok(Self { object, unreadable: None }),
            Err(error) => error,
        };
        let unreadable = Some(Refusal {
            field: wrong_field::<K>(&value).unwrap_or_else(|| "spec".to_owned()),
            problem: format!("cannot be read: {error}"),
            remedy: "correct it".to_owned(),
        });
        // Less and less of it: mostly the template alone is wrong.
        let less =
            [("/spec/template", json!({})), ("/spec", K::bare_spec()), ("/status", json!(null))];
        for (part, instead) in less {
            let class = value.pointer("/spec/class").filter(|it| it.is_string()).cloned();
            let Some(found) = value.pointer_mut(part) else { continue };
            *found = instead;
            // Whose object it is counts all the same.
            if let (Some(class), Some(spec)) = (class, value.get_mut("spec")) {
                spec["class"] = class;
            }
            if let Ok(object) = K::deserialize(&value) {
                return Ok(Self { object, unreadable });
            }
        }
        Err(D::Error::custom(error))
    }
}

impl<K: Resource> Resource for Readable<K> {
    const API_VERSION: &'static str = K::API_VERSION;
    const GROUP: &'static str = K::GROUP;
    const KIND: &'static str = K::KIND;
    const VERSION: &'static str = K::VERSION;
    const URL_PATH_SEGMENT: &'static str = K::URL_PATH_SEGMENT;
    type Scope = K::Scope;
}

impl<K: Metadata<Ty = ObjectMeta>> Metadata for Readable<K> {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        self.object.metadata()
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        self.object.metadata_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(change: impl Fn(&mut Value)) -> (AttentionPool, String) {
        let mut value = json!({
            "metadata": {"name": "p", "finalizers": ["cadre.dev/drain"]},
            "spec": {
                "replicas": 3,
                "drain": {"timeoutSeconds": 7},
                "template": {"spec": {"containers": [{"name": "server", "env": []}]}},
            },
            "status": {"desired": 3},
        });
        change(&mut value);
        let read: Readable<AttentionPool> = serde_json::from_value(value).expect("always readable");
        assert_eq!(read.metadata().name.as_deref(), Some("p"));
        (read.object, read.unreadable.map(|it| it.to_string()).unwrap_or_default())
    }

    #[test]
    fn what_cannot_be_read_is_named_and_the_rest_is_there() {
        let (whole, said) = pool(|_| {});
        assert_eq!((whole.spec.template.is_some(), said.as_str()), (true, ""));

        let variable = json!([{"name": "X", "value": 1}]);
        let (rest, said) =
            pool(|it| it["spec"]["template"]["spec"]["containers"][0]["env"] = variable.clone());
        assert_eq!(
            said,
            "spec.template.spec.containers[0].env[0].value cannot be read: invalid type: integer \
             `1`, expected a string; correct it"
        );
        let left = (rest.spec.replicas, rest.spec.drain.timeout_seconds);
        assert_eq!((left, rest.status.map(|it| it.desired)), ((3, 7), Some(3)));

        let (rest, said) = pool(|it| it["spec"]["template"] = json!({"spec": 1}));
        assert!(said.starts_with("spec.template.spec cannot be read"), "{said}");
        assert_eq!(rest.spec.replicas, 3);

        // Of another build: nothing of the spec counts.
        let (rest, said) = pool(|it| {
            it["spec"]["replicas"] = json!("many");
            it["spec"]["class"] = json!("trial");
        });
        assert_eq!(rest.class(), Some("trial"));
        assert!(said.starts_with("spec.replicas cannot be read"), "{said}");
        assert_eq!((rest.spec.replicas, rest.status.map(|it| it.desired)), (0, Some(3)));

        let (rest, said) = pool(|it| it["status"]["desired"] = json!(-1));
        assert!(said.starts_with("status.desired cannot be read"), "{said}");
        assert_eq!(rest.status, None);
    }

    #[test]
    fn a_job_without_a_readable_template_keeps_its_pool() {
        let value = json!({
            "metadata": {"name": "j"},
            "spec": {"attention": {"poolRef": {"name": "p"}}, "template": "none"},
        });
        let read: Readable<TrainingJob> = serde_json::from_value(value).expect("always readable");
        assert_eq!(read.object.spec.attention.pool_ref.name, "p");
        let said = read.unreadable.map(|it| it.field);
        assert_eq!(said.as_deref(), Some("spec.template"));
    }
}
