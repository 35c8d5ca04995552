//! Writes of `spec.replicas` of a pool, as the API server takes them.

#[path = "fields.rs"]
mod fields;

use cadre_crds::AttentionPool;
use cadre_desired::SCALER;
pub(crate) use fields::Way;

/// Writes a number as this manager, or a manifest without one. Out: whether the API server has taken it.
pub(crate) fn write(
    pool: &mut AttentionPool,
    manager: &str,
    way: Way,
    number: Option<u32>,
) -> bool {
    let mut object = serde_json::to_value(&*pool).expect("plain data");
    let is_taken = fields::write(&mut object, manager, way, number.map(u64::from));
    *pool = serde_json::from_value(object).expect("what it was");
    is_taken
}

/// Carries out what the operator wants written.
pub(crate) fn scale(pool: &mut AttentionPool, replicas: u32) {
    assert!(write(pool, SCALER, Way::Apply { is_forced: true }, Some(replicas)), "it is forced");
}
