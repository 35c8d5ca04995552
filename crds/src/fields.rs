//! The field names that each part of a manifest knows.
//!
//! In: a kind and the path of a part, list positions left out. Out: the names that are right there,
//! taken from the types themselves, so that there is no second list to keep.
//!
//! Only the parts that people write often are covered; elsewhere the answer is empty.

use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::value::Error;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;

use crate::{
    Access, Attention, AttentionPool, AttentionPoolSpec, Checkpoint, Drain, Fabric, FailurePolicy,
    FailureRule, Health, Placement, PoolRef, RollingUpdate, Scaling, TrainingJobSpec,
    UpdateStrategy,
};

/// Names that are right at `path` of a `kind`, such as `spec.template.spec.containers`.
pub(crate) fn known(kind: &str, path: &str) -> &'static [&'static str] {
    match path {
        "" => return &["apiVersion", "kind", "metadata", "spec", "status"],
        "metadata" | "spec.template.metadata" => return of::<ObjectMeta>(),
        "spec.template" => return of::<PodTemplateSpec>(),
        "spec.template.spec" => return of::<PodSpec>(),
        "spec.template.spec.containers" => return of::<Container>(),
        _ => {}
    }
    if kind == AttentionPool::KIND {
        match path {
            "spec" => of::<AttentionPoolSpec>(),
            "spec.updateStrategy" => of::<UpdateStrategy>(),
            "spec.updateStrategy.rollingUpdate" => of::<RollingUpdate>(),
            "spec.scaling" => of::<Scaling>(),
            "spec.placement" => of::<Placement>(),
            "spec.fabric" => of::<Fabric>(),
            "spec.drain" => of::<Drain>(),
            "spec.health" => of::<Health>(),
            "spec.access" => of::<Access>(),
            _ => &[],
        }
    } else {
        match path {
            "spec" => of::<TrainingJobSpec>(),
            "spec.attention" => of::<Attention>(),
            "spec.attention.poolRef" => of::<PoolRef>(),
            "spec.failurePolicy" => of::<FailurePolicy>(),
            "spec.failurePolicy.rules" => of::<FailureRule>(),
            "spec.checkpoint" => of::<Checkpoint>(),
            _ => &[],
        }
    }
}

fn of<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    let mut names = &[][..];
    // Always fails: the reader takes the names of the fields and returns no value.
    drop(T::deserialize(NameReader { names: &mut names }));
    names
}

/// Takes the names that a struct asks for and ends there.
struct NameReader<'a> {
    names: &'a mut &'static [&'static str],
}

impl<'de> Deserializer<'de> for NameReader<'_> {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Error> {
        *self.names = fields;
        Err(Error::custom("only the names were wanted"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(Error::custom("not a struct"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainingJob;

    #[test]
    fn names_come_from_the_types() {
        assert!(known(AttentionPool::KIND, "spec").contains(&"inPlace"));
        assert!(known(TrainingJob::KIND, "spec.attention").contains(&"poolRef"));
        assert!(known(TrainingJob::KIND, "spec.template.spec.containers").contains(&"image"));
        assert!(known(TrainingJob::KIND, "spec.nowhere").is_empty());
    }
}
