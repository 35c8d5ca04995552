//! An API server that refuses some of what a job needs, beside all else that happens.

use cadre_desired::{Action, Object};

use super::cluster::World;

/// What the API server may refuse, as [`words`] call it.
pub(crate) const REFUSALS: [&str; 4] = ["create Service", "create Job", "delete Job", "note"];

pub(crate) fn words(action: &Action) -> &'static str {
    match action {
        Action::Create(Object::Service(_)) => REFUSALS[0],
        Action::Create(_) => REFUSALS[1],
        Action::Delete(_) => REFUSALS[2],
        Action::Note { .. } => REFUSALS[3],
        Action::Apply(_)
        | Action::Drain { .. }
        | Action::Scale { .. }
        | Action::DeleteSelf
        | Action::Guard
        | Action::Release => "",
    }
}

/// What is refused is told at once, by the words of who refuses it; where the pool is missing, that is told first. A job of
/// which nothing is refused runs, or says itself why not.
pub(crate) fn are_told(world: &mut World) {
    for _ in 0..12 {
        // Longer than pods, conductors and pauses are waited for.
        world.clock.second += 30;
        world.calm();
        world.reconcile(usize::MAX);
        let degraded = world.condition("Degraded").expect("it is always said");
        if let Some(failure) = &world.failure {
            assert_eq!(degraded.status, "True", "{failure:?}");
            let is_told = world.pool.is_none() || degraded.message == failure.message;
            assert!(is_told, "{degraded:?}");
        }
    }
    let ends = ["Complete", "Failed", "Suspended", "Running", "Stalled"];
    let is_told = world.failure.is_some() || ends.iter().any(|it| world.is_true(it));
    assert!(is_told, "{:?} is refused, and nobody says so", world.refused);
}
